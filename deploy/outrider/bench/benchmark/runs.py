"""Runs from observed texts, and the costs and hit traces that a replay needs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from statistics import fmean, median
from typing import Any

from outrider.bench.benchmark.library import LibraryText
from outrider.bench.benchmark.measure import Measured
from outrider.bench.benchmark.record import BenchmarkRun, Span
from outrider.bench.links import LinkRecord
from outrider.bench.metrics import bytes_per_token, latencies, pooled, work_per_token
from outrider.bench.replay.crowd import Load
from outrider.bench.replay.record import HitRecorder
from outrider.bench.replay.traced import ReplayOutcome
from outrider.bench.replay.traces import HitTrace
from outrider.bench.simulator.clock import Costs
from outrider.cloud.step_timing import StepTiming
from outrider.cloud.text_writer import TextRequest
from outrider.drafters.protocol import Drafter
from outrider.edge import Client, Sampling
from outrider.proto.policy import Line
from outrider.proto.types import FinishReason

TIMELINE_S = 1.5

Bytes = tuple[int, int]  # TCP payload up and down


def run_of(
    mode: str, link: LinkRecord, texts: Sequence[Measured], carried: Bytes | None, **fields: Any
) -> BenchmarkRun:
    """Return a run of texts that were decoded over a link.

    Args:
        mode: mode of the run.
        link: link between edge and verifier.
        texts: texts decoded in the run.
        carried: bytes that the link carried; None: there was no link.
        fields: other fields of `BenchmarkRun`.
    """
    alone = fields.get("sessions", 1) == 1  # one after the other, with texts of other modes in between
    began_s, ended_s = min(text.began_s for text in texts), max(text.began_s + text.seconds for text in texts)
    together = pooled(texts, None if alone else ended_s - began_s)
    steered = sum(text.statistics.steered_jobs for text in texts)
    longest = max(texts, key=lambda text: len(text.tokens))  # the same one in every mode: the texts are equal
    return BenchmarkRun(
        mode,
        link,
        **together,
        **work_per_token(texts),
        **latencies(texts),
        uplink_bytes_per_token=carried[0] / together["tokens"] if carried else None,
        downlink_bytes_per_token=carried[1] / together["tokens"] if carried else None,
        session_tokens_per_second=tuple(len(text.tokens) / text.seconds for text in texts),
        window_mean=_window_mean(texts),
        vector_age_mean=sum(text.statistics.vector_age for text in texts) / steered if steered else None,
        arrivals_s=tuple(round(at, 4) for at in longest.arrivals) if alone and link.trace else None,
        **fields,
    )


def step_fields(steps: Sequence[StepTiming], sessions: int) -> dict[str, float]:
    """Return where the time of usual steps went: those of at least half of the sessions, prompts left out."""
    usual = _usual(steps, sessions)
    if not usual:
        return {}
    return {
        f"{part}_ms_p50": 1e3 * median(getattr(step, f"{part}_s") for step in usual)
        for part in ("forward", "sample", "overhead")
    }


def costs_together(costs: Costs, steps: Sequence[StepTiming], sessions: int) -> Costs:
    """Return the costs with those of usual steps of many sessions, by their rows; without any, unchanged."""
    usual = _usual(steps, sessions)
    if not usual:
        return costs
    cost = Line(fade=1.0)
    for step in usual:
        cost.add(step.rows, step.forward_s + step.sample_s)
    return replace(costs, step_s=cost.base, row_s=cost.slope, commit_s=median(step.overhead_s for step in usual))


def _usual(steps: Sequence[StepTiming], sessions: int) -> list[StepTiming]:
    """Return the steps of at least half of the sessions that read no prompt."""
    return [step for step in steps if 2 * step.sessions >= sessions and step.rows <= 17 * step.sessions]


def replayed_run(mode: str, link: LinkRecord, outcomes: Sequence[ReplayOutcome], **fields: Any) -> BenchmarkRun:
    """Return a run that was computed from recorded hits."""
    metrics = pooled(outcomes) | work_per_token(outcomes) | latencies(outcomes) | bytes_per_token(outcomes)
    return BenchmarkRun(mode, link, replayed=True, **metrics, **fields)


def load_run(mode: str, link: LinkRecord, load: Load, **fields: Any) -> BenchmarkRun:
    """Return a run of sessions that went on with text after text, computed from recorded hits."""
    return BenchmarkRun(
        mode,
        link,
        replayed=True,
        tokens_per_second=sum(load.of_sessions),
        session_tokens_per_second=load.of_sessions,
        steps_per_token=load.steps_per_token,
        rows_per_token=load.rows_per_token,
        cloud_drafting_ms_per_token=1e3 * load.cloud_drafting_s,
        edge_drafting_ms_per_token=1e3 * load.edge_drafting_s,
        **fields,
    )


def library_run(mode: str, texts: Sequence[LibraryText], **fields: Any) -> BenchmarkRun:
    """Return a run of transformers itself."""
    return BenchmarkRun(mode, LinkRecord(0.0), **pooled(texts), **latencies(texts), **fields)


def timeline_of(text: Measured, one_way_s: float) -> tuple[Span, ...]:
    """Return what the parts did in the first moments of a text; the verifier's steps are shifted by the link."""
    began = text.began_s
    spans = [Span("draft", start - began, end - began) for start, end, _ in text.jobs]
    spans += [Span("up", at - began, at + one_way_s - began) for _, at in text.drafts]
    spans += [Span("down", max(0.0, at - one_way_s - began), at - began) for _, at in text.commits]
    steps = []
    for commit, at in text.commits:
        ended = at - one_way_s - began
        start = max(0.0, ended - commit.timing.verify_s)
        steps.append((start, max(start, ended)))
    spans += [Span("verify", start, end) for start, end in steps]
    spans += [Span("idle", a, b) for (_, a), (b, _) in itertools.pairwise(steps) if b > a]
    return tuple(sorted((s for s in spans if s.start_s < TIMELINE_S), key=lambda s: (s.start_s, s.lane)))


def _window_mean(texts: Sequence[Measured]) -> float | None:
    """Return the mean of unverified tokens in flight when a message of drafts has gone out."""
    windows: list[int] = []
    for text in texts:
        for draft, at in text.drafts:
            committed = max((c.start + len(c.tokens) for c, when in text.commits if when <= at), default=0)
            if committed:
                windows.append(draft.start + len(draft.tokens) - committed)
    return fmean(windows) if windows else None


def costs_of(
    texts: Sequence[Measured], steps: Sequence[StepTiming], *, min_step_s: float, round_trip_s: float
) -> Costs:
    """Return the costs that drafted texts show.

    Args:
        texts: texts decoded with drafts, over a link with almost no round trip.
        steps: the verifier's steps of these texts.
        min_step_s: shortest step of the verifier.
        round_trip_s: round trip measured on that link, which gRPC and event loops take, half on either side.
    """
    step = Line(fade=1.0)
    drafting = []
    for text in texts:
        for commit, _ in text.commits[1:]:  # the first step reads the prompt
            step.add(commit.verified + 1, commit.timing.verify_s)
        drafting += [(ended - began) / tokens for began, ended, tokens in text.jobs if tokens > 1]
    first_commits = [text.commits[0][0] for text in texts]  # each begins where its prompt ends
    prefill = median(max(0.0, c.timing.verify_s - step.base) / max(1, c.start) for c in first_commits)
    return Costs(
        step_s=step.base,
        row_s=step.slope,
        min_step_s=min_step_s,
        prefill_row_s=prefill,
        drafting_s=median(drafting) if drafting else Costs().drafting_s,
        edge_event_s=round_trip_s / 2,
        cloud_event_s=round_trip_s / 2,
        commit_s=median(step.overhead_s for step in steps),
    )


def traces_of(texts: Sequence[Measured], client: Client, drafter: Drafter, sampling: Sampling) -> list[HitTrace]:
    """Record where `drafter` hits in texts that the target wrote."""
    prompts = [text.prompt for text in texts]
    requests = [TextRequest(client.encode(prompt.text), sampling, prompt.id, prompt.domain) for prompt in prompts]
    with closing(HitRecorder({drafter.name: drafter}, requests)) as recorder:
        return [
            trace
            for text, request in zip(texts, requests, strict=True)
            for trace in recorder.record(request, text.tokens, ended=text.commits[-1][0].finish is FinishReason.EOS)
        ]
