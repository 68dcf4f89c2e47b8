"""Results of a benchmark, run by run; an unknown metric is None."""

from __future__ import annotations

from typing import Annotated

from pydantic import AfterValidator, ValidationInfo, field_validator
from pydantic.dataclasses import dataclass

from outrider.bench.bench_settings import GOALS, MODES
from outrider.bench.environment import Environment
from outrider.bench.links import LinkRecord
from outrider.bench.record import RECORD, Count, Metric, one_of, rising

LANES = ("draft", "up", "verify", "down", "idle")
QUANTILES = 101  # 0, 1, … 100 %


def _quantiles(values: tuple[float, ...]) -> tuple[float, ...]:
    if len(values) != QUANTILES:
        raise ValueError(f"holds {len(values)} quantiles, not {QUANTILES}")
    return values


@dataclass(frozen=True, slots=True, config=RECORD)
class Span:
    """Work from `start_s` to `end_s` of a session, in one of `LANES`."""

    lane: Annotated[str, one_of(*LANES)]
    start_s: Metric
    end_s: Metric

    @field_validator("end_s")
    @classmethod
    def _ends_after_its_start(cls, end_s: float, info: ValidationInfo) -> float:
        if end_s < info.data.get("start_s", 0.0):
            raise ValueError(f"{end_s} is before start_s {info.data['start_s']}")
        return end_s


@dataclass(frozen=True, slots=True, config=RECORD)
class BenchmarkRun:
    """One way of decoding the same prompts, over one link, under one load.

    Attributes:
        mode: one of `MODES`.
        link: link between edge and verifier.
        min_step_ms: shortest time of a target step, in place of a larger target; 0: the target's own time.
        sessions: number of sessions that decoded at the same time.
        domain: domain of the prompts; "": all.
        goal: goal of the policies, one of `GOALS`; None: the mode has no such choice.
        sync_length: draft tokens a round of synchronous speculation.
        drafts_here: drafts that the verifier's own drafter made before every step, in co-located drafting.
        tokens: tokens committed by all sessions together.
        seconds: time in which they were committed.
        tokens_per_second: rate of all sessions together.
        steps_per_token: target steps a committed token.
        rows_per_token: rows of these steps a committed token, those of prompts left out.
        cloud_drafting_ms_per_token: time of the verifier's own drafter a committed token.
        edge_drafting_ms_per_token: time of the edge's drafters a committed token, catching up included.
        acceptance: chance that a draft is right, given that those before it in its chain were.
        ttft_ms_p50: median time to a session's first token.
        token_gap_ms_p50, token_gap_ms_p99: quantiles of the time between tokens that reach the user.
        uplink_bytes_per_token, downlink_bytes_per_token: bytes sent and received by the edge.
        identical_to_cloud: whether every text was that of cloud streaming.
        window_mean: unverified tokens in flight, on average.
        vector_age_mean: positions between a steering vector and the token before the drafts made with it, on average
            over steered drafting jobs; None: there were none.
        token_gaps_ms: [101] 0, 1, … 100 % quantiles of the gaps; None: those of a domain, which no plot shows.
        session_tokens_per_second: [sessions] rate of each text or session, in order.
        forward_ms_p50, sample_ms_p50: median times of the model's forward pass in a target step, and of sampling.
        overhead_ms_p50: median time of all else between two steps but waiting: events, planning, commits, threads.
        timeline: work of the parts in the first second or two of one session.
        arrivals_s: [n] seconds from the request to each token of the longest text; None: the link did not change, or
            the text did not meet its trace from the beginning.
    """

    mode: Annotated[str, one_of(*MODES)]
    link: LinkRecord
    min_step_ms: Metric = 0.0
    temperature: Metric = 0.0
    sessions: Count = 1
    domain: str = ""
    goal: Annotated[str, one_of(*GOALS)] | None = None
    sync_length: Count | None = None
    drafts_here: Count | None = None
    tokens: Count | None = None
    seconds: Metric | None = None
    tokens_per_second: Metric | None = None
    steps_per_token: Metric | None = None
    rows_per_token: Metric | None = None
    cloud_drafting_ms_per_token: Metric | None = None
    edge_drafting_ms_per_token: Metric | None = None
    acceptance: Metric | None = None
    ttft_ms_p50: Metric | None = None
    token_gap_ms_p50: Metric | None = None
    token_gap_ms_p99: Metric | None = None
    uplink_bytes_per_token: Metric | None = None
    downlink_bytes_per_token: Metric | None = None
    identical_to_cloud: bool | None = None
    window_mean: Metric | None = None
    vector_age_mean: Metric | None = None
    token_gaps_ms: Annotated[tuple[Metric, ...], AfterValidator(_quantiles), rising("quantiles")] | None = None
    session_tokens_per_second: tuple[Metric, ...] | None = None
    forward_ms_p50: Metric | None = None
    sample_ms_p50: Metric | None = None
    overhead_ms_p50: Metric | None = None
    timeline: tuple[Span, ...] | None = None
    arrivals_s: Annotated[tuple[Metric, ...], rising("times")] | None = None


@dataclass(frozen=True, slots=True, config=RECORD)
class Benchmark:
    """An environment and the runs in it."""

    environment: Environment
    runs: tuple[BenchmarkRun, ...] = ()
