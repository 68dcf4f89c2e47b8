"""The hit rate of each drafter over the texts of all edges, by drafter version, kind of prompt and kind of link.

Only sums are kept, without session or edge, and they fade. Priors change the speed of a text and never the text, so a
false report can only slow others down for a while: it weighs at most `REPORT_COMPARED` tokens, in a cell that holds the
weight of some `HALF_LIFE / ln 2` tokens once it is full.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from functools import reduce

from outrider.proto.cluster_status import ClassAcceptance
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
MAX_KEYS = 32  # whose hits are known apart; the one that was longest not reported goes
MAX_DRAFTERS = 64  # of a key, over all models; the one least recently reported goes
MAX_UNSERVED = 8  # drafters of one model that are not in the catalogue; the one with fewest trials goes
MAX_SHOWN = 256

Drafter = tuple[str, str]  # name, version
_Identity = tuple[str, str, str]  # model, name, version
_Class = tuple[int, int]  # kinds of prompt and of link
CellRow = tuple[str, str, str, int, int, float, float, str]  # identity, class, hits, trials, hash of the key or empty


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


_Cells = dict[_Class, Hits]  # hits of one drafter


def _shared(of_keys: Mapping[str, Hits]) -> Hits:
    """Return the sum of the hits of all keys, none of which weighs more than the largest other one and one text."""
    weights = sorted((hits.trials for key, hits in of_keys.items() if key), reverse=True)
    most = REPORT_COMPARED + sum(weights[1:2])
    return Hits.total(hits.limited(most) if key else hits for key, hits in of_keys.items())


class FleetAcceptance:
    """The hits of all drafters in the texts of all API keys, each of which has a bounded share of every answer.

    The hits of each key are kept apart, by a hash of its name, and brought together when they are asked for.
    """

    def __init__(self) -> None:
        # By key and by drafter the most recently reported last.
        self._of_keys: OrderedDict[str, OrderedDict[_Identity, _Cells]] = OrderedDict()

    def add(self, report: SessionReport, served: Collection[Drafter], key: str = "") -> None:
        """Count a checked report that came with a key; only a few drafters are kept beside those `served`."""
        drafters = self._of_keys.setdefault(key, OrderedDict())
        self._of_keys.move_to_end(key)
        if len(self._of_keys) > MAX_KEYS:
            self._of_keys.popitem(last=False)
        which = (report.prompt_class, report.link_class)
        for (name, version), hits in _by_drafter(report.drafter_hits).items():
            identity = (report.model, name, version)
            if identity not in drafters and (name, version) not in served:
                _make_room(drafters, report.model, served)
            cells = drafters.setdefault(identity, {})
            drafters.move_to_end(identity)
            fade = 0.5 ** (hits.trials / HALF_LIFE)
            cells[which] = cells.get(which, Hits()).times(fade).plus(hits)
        while len(drafters) > MAX_DRAFTERS:
            drafters.popitem(last=False)

    def inherit(self, name: str, version: str, parent: str) -> None:
        """Let a version begin with its parent's hits at half their weight, unless it has hits of its own."""
        for drafters in self._of_keys.values():
            for model, *_ in [identity for identity in drafters if identity[1:] == (name, parent)]:
                if (model, name, version) not in drafters:
                    parents = drafters[model, name, parent].items()
                    drafters[model, name, version] = {which: hits.times(INHERITED) for which, hits in parents}

    def forget(self, name: str, version: str) -> None:
        """Drop the hits of a version that is offered no more."""
        for drafters in self._of_keys.values():
            for identity in [identity for identity in drafters if identity[1:] == (name, version)]:
                del drafters[identity]

    def total(self, name: str, version: str) -> Hits:
        """Return the hits of a version in all texts for all models."""
        return _shared(
            {
                key: Hits.total(
                    hits
                    for identity, cells in drafters.items()
                    if identity[1:] == (name, version)
                    for hits in cells.values()
                )
                for key, drafters in self._of_keys.items()
            }
        )

    def prior(self, model: str, prompt_class: int, link_class: int) -> tuple[DrafterPrior, ...]:
        """Return the expected hit rates of the drafters of `model`, most trials first; class 0: any.

        What other links and other kinds of prompt say counts as `BROADER_TRIALS` trials at most.
        """
        of: defaultdict[Drafter, dict[str, Hits]] = defaultdict(dict)
        for key, drafters in self._of_keys.items():
            for identity, cells in drafters.items():
                if identity[0] == model:
                    of[identity[1:]][key] = _answer(cells, prompt_class, link_class)
        both = ((drafter, _shared(of_keys)) for drafter, of_keys in of.items())
        priors = (DrafterPrior(*drafter, hits.rate, hits.trials) for drafter, hits in both)
        return tuple(sorted(priors, key=lambda prior: -prior.trials)[:MAX_REPORTED_DRAFTERS])

    @property
    def shown(self) -> tuple[ClassAcceptance, ...]:
        """Hits by drafter and class, most trials first."""
        found: defaultdict[tuple[str, str, str, int, int], dict[str, Hits]] = defaultdict(dict)
        for row in self.rows():
            found[row[:5]][row[7]] = Hits(row[5], row[6])
        cells = [
            ClassAcceptance(model, prompt_class, link_class, DrafterPrior(name, version, hits.rate, hits.trials))
            for (model, name, version, prompt_class, link_class), of_keys in found.items()
            for hits in (_shared(of_keys),)
        ]
        return tuple(sorted(cells, key=lambda cell: -cell.prior.trials)[:MAX_SHOWN])

    def rows(self) -> list[CellRow]:
        """Return all hits as rows to save."""
        return [
            (*identity, *which, hits.hits, hits.trials, key)
            for key, drafters in self._of_keys.items()
            for identity, cells in drafters.items()
            for which, hits in cells.items()
        ]

    def take_over(self, rows: Iterable[CellRow]) -> None:
        """Begin with saved rows; raises `ValueError` or `TypeError` if they are malformed."""
        of_keys: OrderedDict[str, OrderedDict[_Identity, _Cells]] = OrderedDict()
        for model, name, version, prompt_class, link_class, hits, trials, key in rows:
            if not (0 <= prompt_class < PROMPT_CLASSES and 0 <= link_class < LINK_CLASSES and 0 <= hits <= trials):
                raise ValueError(f"no such cell: {(prompt_class, link_class, hits, trials)}")
            drafters = of_keys.setdefault(str(key), OrderedDict())
            cells = drafters.setdefault((str(model), str(name), str(version)), {})
            cells[int(prompt_class), int(link_class)] = Hits(float(hits), float(trials))
        self._of_keys = OrderedDict(
            (key, OrderedDict(list(drafters.items())[-MAX_DRAFTERS:]))
            for key, drafters in list(of_keys.items())[-MAX_KEYS:]
        )


def _make_room(drafters: dict[_Identity, _Cells], model: str, served: Collection[Drafter]) -> None:
    """Drop an unserved drafter if there are too many, so that invented ones push out each other."""
    unserved = [one for one in drafters if one[0] == model and one[1:] not in served]
    if len(unserved) >= MAX_UNSERVED:
        del drafters[min(unserved, key=lambda identity: Hits.total(drafters[identity].values()).trials)]


def _by_drafter(reported: Iterable[DrafterHits]) -> dict[Drafter, Hits]:
    """Return the hits of each drafter in one text, even if the report names it twice."""
    found: defaultdict[Drafter, Hits] = defaultdict(Hits)
    for each in reported:
        drafter = (each.drafter, each.drafter_version)
        found[drafter] = found[drafter].plus(Hits(each.hits, each.compared))
    return {drafter: hits.limited(REPORT_COMPARED) for drafter, hits in found.items() if hits.trials}


def _answer(cells: _Cells, prompt_class: int, link_class: int) -> Hits:
    """Return the hits of a class, backed by those of other links, which other prompts back."""
    found = Hits.total(cells.values())
    if prompt_class:
        found = Hits.total(hits for (prompt, _), hits in cells.items() if prompt == prompt_class).backed_by(found)
        if link_class:
            found = cells.get((prompt_class, link_class), Hits()).backed_by(found)
    elif link_class:
        found = Hits.total(hits for (_, link), hits in cells.items() if link == link_class).backed_by(found)
    return found
