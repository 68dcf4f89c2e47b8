"""The runs of one way of choosing on the texts of one row, added up."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from outrider.bench.comparison.bootstrap import Bootstrap
from outrider.bench.traces.pool_figures import Cell, Change
from outrider.bench.traces.rows import Passage
from outrider.bench.traces.stages import Course

SETTLED_TOKENS = 64  # after a change of domain
BEFORE, AFTER = 32, 96  # tokens around one that are drawn


@dataclass(slots=True)
class Tally:
    """Of one column.

    Attributes:
        drafters: K.
        prompts: indices of the row's prompts.
        positions: [g] tokens since the beginning of a run at which regret is noted.
        seconds: [prompts] that the texts took.
        regret_s: [g] summed over runs.
        settled_s: of this column and of the oracle, behind changes of domain.
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

    def add(self, passages: Sequence[Passage], courses: Sequence[Course], best: Sequence[Course]) -> None:
        """One run, and what the oracle made of the same texts."""
        self.runs += 1
        for passage, course, oracle in zip(passages, courses, best, strict=True):
            self.seconds[self.prompts[passage.prompt]] += course.seconds
            self.best_s += oracle.seconds
            self.tokens += len(course.choices)
            self.switches += int(np.count_nonzero(np.diff(course.choices)))
            self.chosen += np.bincount(course.choices, minlength=self.drafters)
            for change, domain in zip(passage.text.changes, passage.domains[1:], strict=True):
                self._add_change(change, domain, course, oracle)
        places = self.positions - 1
        self.regret_s += _in_a_row(courses)[places] - _in_a_row(best)[places]

    def _add_change(self, change: int, domain: str, course: Course, oracle: Course) -> None:
        settled = change + SETTLED_TOKENS
        if settled < len(course.at_s):
            self.settled_s += [at_s[-1] - at_s[settled - 1] for at_s in (course.at_s, oracle.at_s)]
        counts = self.around.setdefault(domain, np.zeros((BEFORE + AFTER, self.drafters)))
        first = max(0, change - BEFORE)
        shown = course.choices[first : change + AFTER]
        counts[np.arange(len(shown)) + first - (change - BEFORE), shown] += 1

    def cell(self, kind: str, name: str, cloud_s: np.ndarray, resampled: Bootstrap) -> Cell:
        """What came of it, against seconds [prompts] of cloud streaming."""
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
        """Who drafted around them, by the domain that begins."""
        return [
            Change(kind, name, domain, tuple(tuple(row) for row in _shares(counts).tolist()))
            for domain, counts in self.around.items()
        ]


def _in_a_row(courses: Sequence[Course]) -> np.ndarray:
    """[tokens of all] seconds up to and with each token of texts that come one after the other."""
    begins = np.cumsum([0.0, *(course.seconds for course in courses[:-1])])
    return np.concatenate([begin + course.at_s for begin, course in zip(begins, courses, strict=True)])


def _shares(counts: np.ndarray) -> np.ndarray:
    """[positions, K] of each position's texts; none where it has none."""
    return counts / np.maximum(1, counts.sum(axis=1, keepdims=True))
