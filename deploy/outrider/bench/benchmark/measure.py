"""Decoding of prompts over an emulated link with observations, and the runs that these make."""

from __future__ import annotations

import itertools
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from outrider.bench.bench_metrics import latencies, pooled, work_per_token
from outrider.bench.benchmark.bench_record import BenchmarkRun, Span
from outrider.bench.links import LinkRecord
from outrider.cloud.serving.runner import StepTiming
from outrider.deploy.built_in_prompts import Prompt
from outrider.edge import Client, Sampling, Tokens
from outrider.edge.decoding import Observer
from outrider.proto.session import EdgeStatistics
from outrider.proto.types import CloudFrame, Commit, Draft, EdgeFrame

TIMELINE_S = 1.5

Bytes = tuple[int, int]  # TCP payload up and down


@dataclass(eq=False)
class Measured(Observer):
    """One decoded text, and what its session did when, in seconds of the monotonic clock.

    Attributes:
        prompt: its prompt.
        began_s: time of the request.
        tokens: [n] its tokens.
        arrivals: [n] seconds from the request until each token reached the user.
        statistics: counts of the edge's session.
        jobs: drafting jobs: begin, end, and drafted tokens.
        drafts: drafts, and when they were sent.
        commits: commits, and when they came.
    """

    prompt: Prompt
    began_s: float = field(default_factory=time.monotonic)
    tokens: tuple[int, ...] = ()
    arrivals: tuple[float, ...] = ()
    statistics: EdgeStatistics = field(default_factory=EdgeStatistics)
    jobs: list[tuple[float, float, int]] = field(default_factory=list)
    drafts: list[tuple[Draft, float]] = field(default_factory=list)
    commits: list[tuple[Commit, float]] = field(default_factory=list)

    @property
    def seconds(self) -> float:
        return self.arrivals[-1]

    def drafted(self, began: float, ended: float, tokens: int) -> None:
        self.jobs.append((began, ended, tokens))

    def sent(self, frame: EdgeFrame, at: float) -> None:
        if isinstance(frame, Draft):
            self.drafts.append((frame, at))

    def received(self, frame: CloudFrame, at: float) -> None:
        if isinstance(frame, Commit):
            self.commits.append((frame, at))


async def measure_text(client: Client, prompt: Prompt, sampling: Sampling) -> Measured:
    """Decode one prompt, and return what was observed."""
    text = Measured(prompt)
    async for event in client.generate(prompt.text, sampling, observer=text):
        if isinstance(event, Tokens):
            text.tokens += event.ids
            text.arrivals += (time.monotonic() - text.began_s,) * len(event.ids)
        else:
            text.statistics = event.statistics
    return text


def run_of(
    mode: str, link: LinkRecord, texts: Sequence[Measured], carried: Bytes | None, **fields: Any
) -> BenchmarkRun:
    """Return a run of texts that were decoded over a link, which `carried` so many bytes; None: there was none."""
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
    usual = [step for step in steps if 2 * step.sessions >= sessions and step.rows <= 17 * step.sessions]
    if not usual:
        return {}
    return {
        f"{part}_ms_p50": 1e3 * median(getattr(step, f"{part}_s") for step in usual)
        for part in ("forward", "sample", "overhead")
    }


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
