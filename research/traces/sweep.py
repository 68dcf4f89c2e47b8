"""Replays of every drafter with every window over every link, and their tables."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from statistics import fmean, median
from typing import Any

from pydantic.dataclasses import dataclass as record_dataclass
from rich.console import Group

from outrider.bench.bench_metrics import grouped, pooled
from outrider.bench.bench_settings import WARM_UP_TOKENS
from outrider.bench.links import BenchLink, LinkRecord, link_name
from outrider.bench.record import RECORD, Count, Metric
from outrider.bench.table import UNKNOWN, Block, Grid, draw, number
from outrider.proto.errors import ConfigError
from outrider.proto.policy import Measurements, Window
from outrider.proto.types import Goal
from research.traces.recordings import Recording
from research.traces.traced import Policy, ReplayOutcome, replay, synchronous, tokens_per_second

ADAPTIVE, SYNCHRONOUS = "adaptive", "sync"
BEST = "*"
HEADINGS = ("link", "drafter", "window", "tok/s", "", "/ cloud", "steps", "accept", "up B", "down B", "mean")
WORDS = 3  # columns of words
LEGEND = (
    "all is computed from recorded hits on a virtual clock. tok/s: tokens a second, from requests to last tokens; "
    "* the most over its link; / cloud: to cloud streaming's; steps: of the target, a token; accept: chance that a "
    "draft is right, given those before it; up B, down B: bytes a token; mean: unverified tokens that the window "
    "policy asked for"
)


@record_dataclass(frozen=True, slots=True, config=RECORD)
class WindowResult:
    """One drafter with one window over one link; both are None for cloud streaming.

    Attributes:
        seconds: time from the requests to the last tokens, summed.
        ratio: speed over that of cloud streaming over the same link.
        acceptance: chance that a draft is right, given those before it in its chain; None: none was verified.
        first_token_ms: median time to the first token.
        window_mean: mean of the unverified tokens that the policy asked for.
    """

    link: LinkRecord
    drafter: str | None
    window: str | None
    tokens: Count
    seconds: Metric
    tokens_per_second: Metric
    ratio: Metric
    steps_per_token: Metric
    acceptance: Metric | None
    first_token_ms: Metric
    uplink_bytes_per_token: Metric
    downlink_bytes_per_token: Metric
    window_mean: Metric | None = None


@record_dataclass(frozen=True, slots=True, config=RECORD)
class Replayed:
    """All results of a sweep, link by link: of cloud streaming, then of every drafter with every window."""

    command: str
    goal: str
    min_step_ms: Metric
    seed: int
    costs: Mapping[str, Any]
    results: tuple[WindowResult, ...]


@dataclass(frozen=True, slots=True)
class NotedWindow(Window):
    """A window that notes how many unverified tokens it asks for."""

    asked: list[int] = field(default_factory=list)

    def more(self, measured: Measurements, goal: Goal, most: int, *, in_flight: int, **view: Any) -> int:
        count = Window.more(self, measured, goal, sys.maxsize, in_flight=in_flight, **view)
        self.asked.append(in_flight + count)
        return min(most, count)

    @property
    def mean(self) -> float:
        """Mean of the unverified tokens that the window asked for; 0 before its first decision."""
        return fmean(self.asked) if self.asked else 0.0


def policy_of(name: str) -> Policy:
    """Return the policy of both sides: `adaptive`, a fixed window of `N` tokens, or rounds of `syncN`."""
    if name == ADAPTIVE:
        return Policy(window=Window())
    length = name.removeprefix(SYNCHRONOUS)
    if not (length.isascii() and length.isdecimal() and int(length) > 0):
        known = f"{ADAPTIVE}, N and {SYNCHRONOUS}N with N from 1 on"
        raise ConfigError(f"{name!r} is none of {known}", field="window")
    return Policy(window=Window(int(length))) if length == name else synchronous(int(length))


@dataclass(frozen=True, slots=True)
class Sweep:
    """Combinations of drafters, links and window policies to replay; `seed` is that of the jitter."""

    recording: Recording
    links: Sequence[BenchLink]
    windows: Sequence[str]
    goal: Goal = Goal.LATENCY
    min_step_s: float = 0.0
    seed: int = 0

    def results(self) -> Iterator[WindowResult]:
        """Yield the results link by link: of cloud streaming, then of every drafter with every window."""
        drafters = self.recording.traces
        for link in self.links:
            cloud = self._replay(next(iter(drafters)), link, Policy(drafting=False))  # here only the texts count
            yield self._result(link, cloud, cloud)
            for drafter in drafters:
                for window in self.windows:
                    policy = policy_of(window)
                    watched = NotedWindow(**asdict(policy.window or Window()))
                    outcomes = self._replay(drafter, link, replace(policy, window=watched, goal=self.goal))
                    yield self._result(link, outcomes, cloud, drafter, window, watched.mean)

    def _replay(self, drafter: str, link: BenchLink, policy: Policy) -> list[ReplayOutcome]:
        traces, costs = self.recording.traces[drafter], self.recording.costs.of(drafter, min_step_s=self.min_step_s)
        return replay(traces, link.shape_at, costs, policy, warm_up_tokens=WARM_UP_TOKENS, seed=self.seed)

    def _result(
        self,
        link: BenchLink,
        outcomes: Sequence[ReplayOutcome],
        cloud: Sequence[ReplayOutcome],
        drafter: str | None = None,
        window: str | None = None,
        window_mean: float | None = None,
    ) -> WindowResult:
        tokens = sum(len(outcome.arrivals) for outcome in outcomes)
        return WindowResult(
            link.record,
            drafter,
            window,
            **pooled(outcomes),
            ratio=tokens_per_second(outcomes) / tokens_per_second(cloud),
            first_token_ms=1e3 * median(outcome.arrivals[0] for outcome in outcomes),
            uplink_bytes_per_token=sum(outcome.uplink_bytes for outcome in outcomes) / tokens,
            downlink_bytes_per_token=sum(outcome.downlink_bytes for outcome in outcomes) / tokens,
            window_mean=window_mean,
        )


def sweep_tables(replayed: Replayed) -> Group:
    """Return every result, a block for each link."""
    by_link = grouped(replayed.results, lambda result: result.link)
    blocks = [_block(link, results) for link, results in by_link.items()]
    return draw([Grid(f"Replayed for {replayed.goal}{paced(replayed.min_step_ms)}", HEADINGS, WORDS, blocks)], LEGEND)


def _block(link: LinkRecord, results: Sequence[WindowResult]) -> Block:
    best = max(results, key=lambda result: result.tokens_per_second)
    return [
        (
            link_name(link) if result is results[0] else "",
            result.drafter or "(cloud)",
            result.window or UNKNOWN,
            f"{result.tokens_per_second:.1f}",
            BEST if result is best else "",
            f"{result.ratio:.2f}",
            f"{result.steps_per_token:.3f}",
            number(result.acceptance, 3),
            f"{result.uplink_bytes_per_token:.1f}",
            f"{result.downlink_bytes_per_token:.1f}",
            number(result.window_mean, 1),
        )
        for result in results
    ]


def paced(min_step_ms: float) -> str:
    """Return what a title says of the shortest target step; empty where there is none."""
    return f", a target step at least {min_step_ms:g} ms" if min_step_ms else ""
