"""`outrider traces overhead`: the time that an edge's rules take beside its drafting, within replays."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
from typing import Any

import numpy as np
from pydantic.dataclasses import dataclass as record_dataclass
from rich.console import Console, Group

from outrider.bench.commands import OverheadSettings, check_once
from outrider.bench.environment import command_line
from outrider.bench.links import BenchLink, LinkRecord, link_name, links_of
from outrider.bench.outputs import check_file
from outrider.bench.record import RECORD, Count, Metric, save
from outrider.bench.recording import Recording, load_recording
from outrider.bench.replay.traced import DrafterArm, replay
from outrider.bench.table import Grid, draw, paced
from outrider.bench.traces.sweep import ADAPTIVE, WARM_UP_TOKENS, policy_of
from outrider.deploy.arguments import Given
from outrider.edge.policies.selection import selector_named
from outrider.proto.session import EdgeSession, Selection
from outrider.proto.session.drafting import Drafting
from outrider.proto.session.measuring import Meter

ALONE = "(one drafter)"
FIRST_LAPS = 2  # before any session, and the warm-up
CALLS, TRIALS = 2_000, 10  # of a function that does nothing, which show the stopwatch's own time

LENGTH, SELECTOR, CALIBRATION, SESSION = "length rule", "selector", "calibration", "session"
PARTS: Mapping[str, Sequence[tuple[type, str]]] = {
    LENGTH: ((Drafting, "allowance"),),
    SELECTOR: (
        (Meter, "arms"),
        (Meter, "round_costs"),
        *((Selection, name) for name in ("choose", "learn", "note", "note_prompt", "next_catch_up")),
    ),
    CALIBRATION: ((Meter, "compare"),),
    SESSION: ((EdgeSession, "handle"),),
}
"""Methods of each part; a part's time is without that of the parts within it."""

LEGEND = (
    "time on this machine in µs a drafted token, the least of the runs for each text: length rule and selector, with "
    "their views and counts; calibration of every drafter by its hits; session: the rest of the edge's machine. both: "
    "length rule and selector, and their share of the first drafter's recorded time for a token; of all: their share "
    "of the time that all drafters work, catching up included"
)


@record_dataclass(frozen=True, slots=True, config=RECORD)
class OverheadRow:
    """Time of the edge's rules with one way of drafting over one link.

    Attributes:
        selector: name of the selector; None: the first drafter alone.
        drafted: drafted tokens.
        part_us: microseconds of each part a drafted token.
        share: length rule and selector together over the first drafter's time for a token.
        share_of_work: the same over the time that all drafters work in the replay, drafting and catching up.
    """

    link: LinkRecord
    selector: str | None
    drafted: Count
    part_us: Mapping[str, Metric]
    share: Metric
    share_of_work: Metric


@record_dataclass(frozen=True, slots=True, config=RECORD)
class Overheads:
    """All rows.

    Attributes:
        drafters: drafters of the pool.
        drafting_us: recorded microseconds of a token of the first of them.
    """

    command: str
    min_step_ms: Metric
    drafters: tuple[str, ...]
    drafting_us: Metric
    rows: tuple[OverheadRow, ...]


def overhead(given: Given) -> int:
    """Run `outrider traces overhead`."""
    options = given(OverheadSettings)
    recording, links = load_recording(options.traces).only(options.drafter), links_of(options)
    check_once(options.selector, "selector")
    if options.json:
        check_file(options.json, "json")
    ways = (None, *options.selector) if len(recording.traces) > 1 else (None,)
    made = Overheads(
        command=command_line(),
        min_step_ms=options.min_step,
        drafters=tuple(recording.traces),
        drafting_us=1e6 * _drafting_s(recording),
        rows=tuple(_row(recording, link, way, options) for link in links for way in ways),
    )
    Console(width=100, highlight=False).print(overhead_tables(made))
    if options.json:
        save(made, options.json)
    return 0


def overhead_tables(overheads: Overheads) -> Group:
    """Return one table, a block a link."""
    headings = ("link", "selector", *PARTS, "both", "share", "of all")
    blocks: dict[LinkRecord, list[tuple[str, ...]]] = {}
    for row in overheads.rows:
        block = blocks.setdefault(row.link, [])
        both = row.part_us[LENGTH] + row.part_us[SELECTOR]
        parts = (f"{row.part_us[part]:.1f}" for part in PARTS)
        link = "" if block else link_name(row.link)
        block.append(
            (link, row.selector or ALONE, *parts, f"{both:.1f}", f"{row.share:.1%}", f"{row.share_of_work:.1%}")
        )
    title = f"Rules beside drafting, {overheads.drafting_us:.0f} µs a token{paced(overheads.min_step_ms)}"
    return draw([Grid(title, headings, 2, list(blocks.values()))], LEGEND)


def _row(recording: Recording, link: BenchLink, selector: str | None, options: OverheadSettings) -> OverheadRow:
    """Replay the texts some times, and keep the least time of each part in each of them."""
    runs: list[list[dict[str, float]]] = []
    for _ in range(options.runs):
        stopwatch = Stopwatch()
        with stopwatch.attached():
            drafted, work_s = _replay(recording, link, selector, options.min_step / 1e3)
        runs.append(stopwatch.seconds()[FIRST_LAPS:])
    least_s = {part: sum(min(lap[part] for lap in laps) for laps in zip(*runs, strict=True)) for part in PARTS}
    part_us = {part: max(0.0, 1e6 * least_s[part] / max(1, drafted)) for part in PARTS}
    both_s = (part_us[LENGTH] + part_us[SELECTOR]) / 1e6
    share_of_work = both_s * drafted / work_s if work_s else 0.0
    return OverheadRow(link.record, selector, drafted, part_us, both_s / _drafting_s(recording), share_of_work)


def _drafting_s(recording: Recording) -> float:
    """Return the first drafter's time for a token, in seconds."""
    return recording.costs.drafters[next(iter(recording.traces))].drafting_s


def _replay(recording: Recording, link: BenchLink, selector: str | None, min_step_s: float) -> tuple[int, float]:
    """Replay all texts with drafts that run ahead; return the number of drafted tokens, and the drafters' seconds."""
    names = list(recording.traces)
    costs = [recording.costs.of(name, min_step_s=min_step_s) for name in names]
    rng = np.random.default_rng(0)
    pooled = selector is not None
    outcomes = replay(
        [text.traces[0] for text in recording.texts],
        link.shape_at,
        costs[0],
        policy_of(ADAPTIVE),
        warm_up_tokens=WARM_UP_TOKENS,
        others=[list(map(DrafterArm, text.traces[1:], costs[1:])) for text in recording.texts] if pooled else (),
        selector=(lambda: selector_named(selector)(len(names), rng)) if selector is not None else None,
    )
    statistics = [outcome.statistics for outcome in outcomes]
    return sum(each.drafted for each in statistics), sum(each.drafting_s + each.reading_s for each in statistics)


@dataclass(slots=True)
class Lap:
    """Time of the parts in one text, in seconds, with the stopwatch's own.

    Attributes:
        spent_s: seconds by part, without those of the parts within it.
        calls: timed calls by part.
        inner: calls of the parts within it, by part.
    """

    spent_s: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PARTS, 0.0))
    calls: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))
    inner: dict[str, int] = field(default_factory=lambda: dict.fromkeys(PARTS, 0))


class Stopwatch:
    """Time of the parts, lap by lap.

    Attributes:
        laps: one for each text, the newest last.
    """

    def __init__(self) -> None:
        self.laps = [Lap()]
        self._running: list[str] = []
        self._since = 0.0

    def timed(self, part: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """Return `function` with its time added to the part."""
        running, clock = self._running, time.perf_counter

        @wraps(function)
        def call(*args: Any, **more: Any) -> Any:
            began, lap = clock(), self.laps[-1]
            if running:
                lap.spent_s[running[-1]] += began - self._since
                lap.inner[running[-1]] += 1
            running.append(part)
            lap.calls[part] += 1
            self._since = clock()
            try:
                return function(*args, **more)
            finally:
                lap.spent_s[part] += clock() - self._since
                running.pop()
                self._since = clock()

        return call

    def _lapped(self, begin: Callable[..., None]) -> Callable[..., None]:
        """Return `begin`, which makes a session, with another lap begun before."""

        @wraps(begin)
        def call(*args: Any, **more: Any) -> None:
            self.laps.append(Lap())
            begin(*args, **more)

        return call

    @contextmanager
    def attached(self) -> Iterator[None]:
        """Time the methods of all parts, in another lap for each session."""
        methods = [
            (owner, name, self.timed(part, getattr(owner, name))) for part, own in PARTS.items() for owner, name in own
        ]
        methods.append((EdgeSession, "__init__", self._lapped(EdgeSession.__init__)))
        before = [getattr(owner, name) for owner, name, _ in methods]
        for owner, name, method in methods:
            setattr(owner, name, method)
        try:
            yield
        finally:
            for (owner, name, _), method in zip(methods, before, strict=True):
                setattr(owner, name, method)

    def seconds(self) -> list[dict[str, float]]:
        """Return seconds by part of each lap, less the time that the stopwatch itself takes on this machine."""
        own_s, around_s = _own_s()
        return [
            {part: lap.spent_s[part] - own_s * lap.calls[part] - around_s * lap.inner[part] for part in PARTS}
            for lap in self.laps
        ]


def _own_s() -> tuple[float, float]:
    """Return what one call adds to its own part, and to the part around it, in seconds: the least of some trials."""

    def trial() -> tuple[float, float]:
        probe = Stopwatch()
        nothing = probe.timed(LENGTH, lambda: None)

        def many() -> None:
            for _ in range(CALLS):
                nothing()

        probe.timed(SESSION, many)()
        return probe.laps[0].spent_s[LENGTH] / CALLS, probe.laps[0].spent_s[SESSION] / CALLS

    trials = [trial() for _ in range(TRIALS)]
    return min(own for own, _ in trials), min(around for _, around in trials)
