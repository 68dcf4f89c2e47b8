"""Results of `python -m research capacity`."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

from pydantic.dataclasses import dataclass

from outrider.bench.record import RECORD, Count, Metric, one_of
from research.research_settings import CROWD_MODES


@dataclass(frozen=True, slots=True, config=RECORD)
class StepModel:
    """Assumed time of a target step.

    Attributes:
        name: name of the assumption.
        step_ms: time of a step beside its rows.
        row_ms: time of a row.
        min_step_ms: shortest step.
    """

    name: str
    step_ms: Metric
    row_ms: Metric
    min_step_ms: Metric


@dataclass(frozen=True, slots=True, config=RECORD)
class HeldSessions:
    """Most sessions that a verifier holds.

    Attributes:
        mode: one of `CROWD_MODES`.
        steps: name of the step model.
        drafting_ms: time of a drafted token, at either end.
        threads: threads of the verifier that draft; 0: none does.
        rtt_ms: round-trip time of all links; None: it makes no difference.
        sessions: most sessions, the median of several searches; 0: not even one.
        low, high: fewest and most that a search found.
        drafts_here: drafts before every step, in co-located drafting: the number that holds most sessions.
        gap_p95_ms, tokens_per_second, steps_per_token, rows_per_token, cloud_drafting_ms_per_token,
            edge_drafting_ms_per_token: at that number of sessions, of a session or a token; None: not even one.
    """

    mode: Annotated[str, one_of(*CROWD_MODES)]
    steps: str
    drafting_ms: Metric
    threads: Count
    rtt_ms: Metric | None
    sessions: Count = 0
    low: Count = 0
    high: Count = 0
    drafts_here: Count | None = None
    gap_p95_ms: Metric | None = None
    tokens_per_second: Metric | None = None
    steps_per_token: Metric | None = None
    rows_per_token: Metric | None = None
    cloud_drafting_ms_per_token: Metric | None = None
    edge_drafting_ms_per_token: Metric | None = None


@dataclass(frozen=True, slots=True, config=RECORD)
class Capacities:
    """All results of a run of the command.

    Attributes:
        command: the command.
        environment: machine and command of the recorded texts.
        drafter: drafter whose recorded hits were replayed.
        gap_ms: longest 95th percentile of the time between tokens.
        pace_ms: longest mean time a token of a session.
        max_sessions: sessions beyond which none were tried.
        seconds: time that each trial measured, of all sessions together.
        seeds: number of searches of each capacity.
        models: step models.
    """

    command: str
    environment: Mapping[str, str | int | float | Mapping[str, str | None] | None]
    drafter: str
    gap_ms: Metric
    pace_ms: Metric
    max_sessions: Count
    seconds: Metric
    seeds: Count
    models: tuple[StepModel, ...]
    results: tuple[HeldSessions, ...]
