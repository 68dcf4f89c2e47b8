"""Results of the selectors of a pool of drafters, added up run by run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from pydantic.dataclasses import dataclass as record_dataclass

from outrider.bench.links import LinkRecord
from outrider.bench.metrics import Bootstrap, Interval
from outrider.bench.record import RECORD, Count, Metric
from outrider.bench.traces.stages import Segment, Trajectory

DRAFTER, SELECTOR, ORACLE = "drafter", "selector", "oracle"
SETTLED_TOKENS = 64  # after a change of domain
BEFORE, AFTER = 32, 96  # tokens around one that are drawn


@record_dataclass(frozen=True, slots=True, config=RECORD)
class Cell:
    """One way of choosing on the texts of one row.

    Attributes:
        kind: of the column: one `drafter` alone, a `selector`, or the `oracle` in hindsight.
        name: of the drafter or the selector.
        tokens: of the texts, all seeds together.
        seconds: that they took.
        speed_up: seconds of cloud streaming over these.
        interval: of the speed-up, over the prompts; None: a domain has but one.
        of_oracle: seconds of the oracle over these.
        settled: the same from `SETTLED_TOKENS` tokens after a change of domain on; None: there is no such token.
        switches: tokens whose drafter was not the one of the token before, a thousand tokens.
        shares: [K] of the tokens, by drafter.
        regret_s: seconds behind the oracle at each of the row's `positions`, averaged over seeds.
    """

    kind: str
    name: str
    tokens: Count
    seconds: Metric
    speed_up: Metric
    interval: Interval | None
    of_oracle: Metric
    settled: Metric | None
    switches: Metric
    shares: tuple[Metric, ...]
    regret_s: tuple[float, ...]


@record_dataclass(frozen=True, slots=True, config=RECORD)
class Change:
    """Shares of the drafters around changes to one domain.

    Attributes:
        kind: as of a cell.
        name: as of a cell.
        domain: that begins.
        shares: [positions][K] of the texts, from `BEFORE` tokens before the change on, by drafter.
    """

    kind: str
    name: str
    domain: str
    shares: tuple[tuple[Metric, ...], ...]


@record_dataclass(frozen=True, slots=True, config=RECORD)
class Row:
    """The texts of one domain, of all, or such whose domain changes midway, over one link.

    Attributes:
        link: that lay between.
        name: of the domain, `mix` or `midway`.
        prompts: how many.
        positions: tokens since the beginning of a run, at which regret is noted.
        cells: the drafters, the selectors, the oracle.
        changes: of all but the drafters, where domains change.
    """

    link: LinkRecord
    name: str
    prompts: Count
    positions: tuple[Count, ...]
    cells: tuple[Cell, ...]
    changes: tuple[Change, ...]

    def of(self, kind: str, name: str) -> Cell:
        """Return the cell of a column."""
        return next(cell for cell in self.cells if (cell.kind, cell.name) == (kind, name))

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Kind and name of each column."""
        return tuple((cell.kind, cell.name) for cell in self.cells)


@record_dataclass(frozen=True, slots=True, config=RECORD)
class PoolReplayed:
    """All results of a pool.

    Attributes:
        command: that replayed.
        play: how: synchronous rounds, or the session's streams.
        drafts: of a round.
        seeds: runs of each row.
        min_step_ms: a step took at least so long.
        drafters: of the pool, in order.
        costs: of the machines, as they were recorded.
        rows: link by link.
    """

    command: str
    play: str
    drafts: Count
    seeds: Count
    min_step_ms: Metric
    drafters: tuple[str, ...]
    costs: Mapping[str, Any]
    rows: tuple[Row, ...]

    @property
    def links(self) -> tuple[LinkRecord, ...]:
        """Links, in the order of the command."""
        return tuple(dict.fromkeys(row.link for row in self.rows))

    def over(self, link: LinkRecord) -> tuple[Row, ...]:
        """Return the rows of one link."""
        return tuple(row for row in self.rows if row.link == link)


@dataclass(slots=True)
class Accumulator:
    """Adds up the runs of one way of choosing on the texts of one row.

    Attributes:
        drafters: K.
        prompts: indices of the row's prompts.
        positions: [g] tokens since the beginning of a run at which regret is noted.
        seconds: [prompts] that the texts took.
        regret_s: [g] summed over runs.
        settled_s: [2] seconds of this column and of the oracle, after changes of domain have settled.
        chosen: [K] tokens.
        around: [BEFORE + AFTER, K] texts, by the domain that begins.
    """

    drafters: int
    prompts: Mapping[tuple[str, str], int]
    positions: np.ndarray
    tokens: int = 0
    switches: int = 0
    runs: int = 0
    best_s: float = 0.0
    seconds: np.ndarray = field(init=False)
    regret_s: np.ndarray = field(init=False)
    settled_s: np.ndarray = field(init=False)
    chosen: np.ndarray = field(init=False)
    around: dict[str, np.ndarray] = field(init=False, default_factory=dict)

    def __post_init__(self) -> None:
        self.seconds, self.regret_s = np.zeros(len(self.prompts)), np.zeros(len(self.positions))
        self.settled_s, self.chosen = np.zeros(2), np.zeros(self.drafters)

    def add(self, segments: Sequence[Segment], trajectories: Sequence[Trajectory], best: Sequence[Trajectory]) -> None:
        """Add one run; `best`: what the oracle made of the same texts."""
        self.runs += 1
        for segment, trajectory, oracle in zip(segments, trajectories, best, strict=True):
            self.seconds[self.prompts[segment.prompt]] += trajectory.seconds
            self.best_s += oracle.seconds
            self.tokens += len(trajectory.choices)
            self.switches += int(np.count_nonzero(np.diff(trajectory.choices)))
            self.chosen += np.bincount(trajectory.choices, minlength=self.drafters)
            for change, domain in zip(segment.text.changes, segment.domains[1:], strict=True):
                self._add_change(change, domain, trajectory, oracle)
        places = self.positions - 1
        self.regret_s += _in_a_row(trajectories)[places] - _in_a_row(best)[places]

    def _add_change(self, change: int, domain: str, trajectory: Trajectory, oracle: Trajectory) -> None:
        settled = change + SETTLED_TOKENS
        if settled < len(trajectory.at_s):
            self.settled_s += [at_s[-1] - at_s[settled - 1] for at_s in (trajectory.at_s, oracle.at_s)]
        counts = self.around.setdefault(domain, np.zeros((BEFORE + AFTER, self.drafters)))
        first = max(0, change - BEFORE)
        shown = trajectory.choices[first : change + AFTER]
        counts[np.arange(len(shown)) + first - (change - BEFORE), shown] += 1

    def cell(self, kind: str, name: str, cloud_s: np.ndarray, resampled: Bootstrap) -> Cell:
        """Return the result, against seconds [prompts] of cloud streaming."""
        seconds = float(self.seconds.sum())
        mine_s, best_s = self.settled_s.tolist()
        return Cell(
            kind,
            name,
            tokens=self.tokens,
            seconds=seconds,
            speed_up=float(cloud_s.sum()) / seconds,
            interval=resampled.interval(resampled.sums(cloud_s) / resampled.sums(self.seconds)),
            of_oracle=self.best_s / seconds,
            settled=best_s / mine_s if mine_s else None,
            switches=1e3 * self.switches / self.tokens,
            shares=tuple((self.chosen / self.tokens).tolist()),
            regret_s=tuple((self.regret_s / self.runs).tolist()),
        )

    def changes(self, kind: str, name: str) -> list[Change]:
        """Return who drafted around changes of domain, by the domain that begins."""
        return [
            Change(kind, name, domain, tuple(tuple(row) for row in _shares(counts).tolist()))
            for domain, counts in self.around.items()
        ]


def _in_a_row(trajectories: Sequence[Trajectory]) -> np.ndarray:
    """Return [tokens of all] seconds up to and with each token of texts that come one after the other."""
    begins = np.cumsum([0.0, *(trajectory.seconds for trajectory in trajectories[:-1])])
    return np.concatenate([begin + trajectory.at_s for begin, trajectory in zip(begins, trajectories, strict=True)])


def _shares(counts: np.ndarray) -> np.ndarray:
    """Return [positions, K] shares of each position's texts; 0 where it has none."""
    return counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
