"""The hit rate of each drafter over the texts of all edges, by drafter version, kind of prompt and kind of link.

Only sums are kept, without session or edge, and they fade. Priors change the speed of a text and never the text, so a
false report can only slow others down for a while: it weighs at most `REPORT_COMPARED` tokens, in a cell that holds the
weight of some `HALF_LIFE / ln 2` tokens once it is full.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field
from functools import reduce

from outrider.proto.types import (
    LINK_CLASSES,
    MAX_REPORTED_DRAFTERS,
    PROMPT_CLASSES,
    DrafterHits,
    DrafterPrior,
    SessionReport,
)

REPORT_COMPARED = 256  # limit of the tokens of one text that count for one drafter
HALF_LIFE = 8192.0  # compared tokens after which older ones of the same cell weigh half
BROADER_TRIALS = 64.0  # limit of the weight of other links, and of other kinds of prompt, in an answer
INHERITED = 0.5  # weight of the parent's hits where a version begins
MAX_DRAFTERS = 64  # over all models; the one least recently reported goes
MAX_UNSERVED = 8  # drafters of one model that are not in the catalogue; the one with fewest trials goes

Drafter = tuple[str, str]  # name, version
_Identity = tuple[str, str, str]  # model, name, version
_Class = tuple[int, int]  # kinds of prompt and of link
CellRow = tuple[str, str, str, int, int, float, float]  # identity, class, hits, trials


@dataclass(frozen=True, slots=True)
class Hits:
    """Numbers of tokens that were tried and that hit; not whole, since they fade."""

    hits: float = 0.0
    trials: float = 0.0

    @property
    def rate(self) -> float:
        """Share of trials that hit, 0 to 1; 0 without trials."""
        return min(1.0, self.hits / self.trials) if self.trials else 0.0

    def plus(self, other: Hits) -> Hits:
        """Return the sum of both."""
        return Hits(self.hits + other.hits, self.trials + other.trials)

    @classmethod
    def total(cls, many: Iterable[Hits]) -> Hits:
        """Return the sum of many."""
        return reduce(cls.plus, many, cls())

    def times(self, weight: float) -> Hits:
        """Return the hits and trials times `weight`."""
        return Hits(weight * self.hits, weight * self.trials)

    def limited(self, max_trials: float) -> Hits:
        """Return the same rate with at most `max_trials` trials."""
        return self.times(max_trials / self.trials) if self.trials > max_trials else self

    def backed_by(self, broader: Hits) -> Hits:
        """Return the sum with a few trials at the rate of `broader`, which decide while there are few others."""
        weight = min(BROADER_TRIALS, broader.trials)
        return self.plus(Hits(weight * broader.rate, weight))


@dataclass(slots=True)
class _Cells:
    """The hits of one drafter by class."""

    of: dict[_Class, Hits] = field(default_factory=dict)

    def add(self, which: _Class, text: Hits) -> None:
        text = text.limited(REPORT_COMPARED)
        fade = 0.5 ** (text.trials / HALF_LIFE)
        self.of[which] = self.of.get(which, Hits()).times(fade).plus(text)

    @property
    def trials(self) -> float:
        return sum(hits.trials for hits in self.of.values())

    def answer(self, which: _Class) -> Hits:
        """Return the hits of a class, backed by those of other links, which other prompts back."""
        prompt_class, link_class = which
        found = Hits.total(self.of.values())
        if prompt_class:
            found = Hits.total(hits for (prompt, _), hits in self.of.items() if prompt == prompt_class).backed_by(found)
            if link_class:
                found = self.of.get(which, Hits()).backed_by(found)
        elif link_class:
            found = Hits.total(hits for (_, link), hits in self.of.items() if link == link_class).backed_by(found)
        return found


class FleetAcceptance:
    """The hits of all drafters that one coordinator knows."""

    def __init__(self) -> None:
        self._drafters: OrderedDict[_Identity, _Cells] = OrderedDict()  # most recently reported last

    def add(self, report: SessionReport, served: Collection[Drafter]) -> None:
        """Count a checked report; only a few drafters are kept beside those `served` by the catalogue."""
        which = (report.prompt_class, report.link_class)
        for name, version, hits in _by_drafter(report.drafter_hits):
            identity = (report.model, name, version)
            if identity not in self._drafters and (name, version) not in served:
                self._make_room(report.model, served)
            self._drafters.setdefault(identity, _Cells()).add(which, hits)
            self._drafters.move_to_end(identity)
        while len(self._drafters) > MAX_DRAFTERS:
            self._drafters.popitem(last=False)

    def inherit(self, name: str, version: str, parent: str) -> None:
        """Let a version begin with its parent's hits at half their weight, unless it has hits of its own."""
        for model, other_name, other in list(self._drafters):
            if (other_name, other) == (name, parent) and (model, name, version) not in self._drafters:
                halves = {
                    which: hits.times(INHERITED) for which, hits in self._drafters[model, name, parent].of.items()
                }
                self._drafters[model, name, version] = _Cells(halves)

    def forget(self, name: str, version: str) -> None:
        """Drop the hits of a version that is offered no more."""
        for identity in [identity for identity in self._drafters if identity[1:] == (name, version)]:
            del self._drafters[identity]

    def total(self, name: str, version: str) -> Hits:
        """Return the hits of a version in all texts for all models."""
        of_version = [cells for identity, cells in self._drafters.items() if identity[1:] == (name, version)]
        return Hits.total(hits for cells in of_version for hits in cells.of.values())

    def prior(self, model: str, prompt_class: int, link_class: int) -> tuple[DrafterPrior, ...]:
        """Return the expected hit rates of the drafters of `model`, most trials first; class 0: any.

        A class with few trials is backed by other links with the same kind of prompt, and these by all prompts; either
        counts as `BROADER_TRIALS` trials at most.
        """
        answers = (
            _prior_of(identity, cells.answer((prompt_class, link_class)))
            for identity, cells in self._drafters.items()
            if identity[0] == model
        )
        return tuple(sorted(answers, key=lambda prior: -prior.trials)[:MAX_REPORTED_DRAFTERS])

    def rows(self) -> list[CellRow]:
        """Return all hits as rows to save."""
        return [
            (*identity, *which, hits.hits, hits.trials)
            for identity, cells in self._drafters.items()
            for which, hits in cells.of.items()
        ]

    def take_over(self, rows: Iterable[CellRow]) -> None:
        """Begin with saved rows; raises `ValueError` or `TypeError` if they are malformed."""
        drafters: OrderedDict[_Identity, _Cells] = OrderedDict()
        for model, name, version, prompt_class, link_class, hits, trials in rows:
            if not (0 <= prompt_class < PROMPT_CLASSES and 0 <= link_class < LINK_CLASSES and 0 <= hits <= trials):
                raise ValueError(f"no such cell: {(prompt_class, link_class, hits, trials)}")
            cells = drafters.setdefault((str(model), str(name), str(version)), _Cells())
            cells.of[int(prompt_class), int(link_class)] = Hits(float(hits), float(trials))
        self._drafters = OrderedDict(list(drafters.items())[-MAX_DRAFTERS:])

    def _make_room(self, model: str, served: Collection[Drafter]) -> None:
        """Drop an unserved drafter if there are too many, so that invented ones push out each other."""
        unserved = [one for one in self._drafters if one[0] == model and one[1:] not in served]
        if len(unserved) >= MAX_UNSERVED:
            del self._drafters[min(unserved, key=lambda identity: self._drafters[identity].trials)]


def _by_drafter(reported: Iterable[DrafterHits]) -> Iterator[tuple[str, str, Hits]]:
    """Yield one entry for each drafter, even if the report names it twice."""
    found: defaultdict[Drafter, Hits] = defaultdict(Hits)
    for each in reported:
        drafter = (each.drafter, each.drafter_version)
        found[drafter] = found[drafter].plus(Hits(each.hits, each.compared))
    for (name, version), hits in found.items():
        if hits.trials:
            yield name, version, hits


def _prior_of(identity: _Identity, hits: Hits) -> DrafterPrior:
    return DrafterPrior(identity[1], identity[2], hits.rate, hits.trials)
