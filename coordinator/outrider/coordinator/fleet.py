"""How often each drafter hits, over the texts of all edges: by drafter version, kind of prompt and kind of link.

Only sums are kept. What a report adds is told apart neither by session nor by edge, and fades. Priors change how soon a
text appears and never the text, so a liar can make others slower for a while and nothing else; for how long, and by how
much, is bounded here: a report weighs as `REPORT_COMPARED` tokens at most, in a cell that holds the weight of some
`HALF_LIFE / ln 2` tokens once it is full.
"""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass, field

from outrider.proto.types import (
    LINK_CLASSES,
    MOST_DRAFTERS_TOLD,
    PROMPT_CLASSES,
    ClassAcceptance,
    DrafterHits,
    DrafterPrior,
    SessionReport,
)

REPORT_COMPARED = 256  # tokens of one text that count for one drafter, at most
HALF_LIFE = 8192.0  # compared tokens after which older ones of the same cell weigh half
BROADER_TRIALS = 64.0  # that other links, and other kinds of prompt, weigh in an answer at most
MOST_DRAFTERS = 64  # of all models; the one least recently reported goes
MOST_UNSERVED = 8  # of one model, of versions that are not in the catalogue; the one least established goes
MOST_SHOWN = 256

Drafter = tuple[str, str]  # name, version
_Identity = tuple[str, str, str]  # model, name, version
_Class = tuple[int, int]  # of prompt, of link
CellRow = tuple[str, str, str, int, int, float, float]  # identity, class, hits, trials: as it is saved


@dataclass(frozen=True, slots=True)
class Hits:
    """Of compared tokens (`trials`), those that hit; faded, hence not whole numbers."""

    hits: float = 0.0
    trials: float = 0.0

    def plus(self, hits: float, trials: float) -> Hits:
        """With one text more: it counts in part where it is long, and makes older ones count less."""
        weight = min(1.0, REPORT_COMPARED / trials) if trials else 0.0
        fade = 0.5 ** (weight * trials / HALF_LIFE)
        return Hits(fade * self.hits + weight * hits, fade * self.trials + weight * trials)

    @property
    def rate(self) -> float:
        """Between 0 and 1; 0 without trials."""
        return min(1.0, self.hits / self.trials) if self.trials else 0.0

    def backed_by(self, broader: Hits) -> Hits:
        """With what broader counts say of the same, as a few trials: all there is to go by while these are few."""
        weight = min(BROADER_TRIALS, broader.trials)
        return Hits(self.hits + weight * broader.rate, self.trials + weight)


@dataclass(slots=True)
class _Cells:
    """Of one drafter: its counts by class."""

    of: dict[_Class, Hits] = field(default_factory=dict)

    def add(self, which: _Class, hits: Hits) -> None:
        self.of[which] = self.of.get(which, Hits()).plus(hits.hits, hits.trials)

    @property
    def trials(self) -> float:
        return sum(hits.trials for hits in self.of.values())

    def answer(self, which: _Class) -> Hits:
        """What is known for `which`: its own texts, backed by other links', backed by other prompts'."""
        prompt_class, link_class = which
        found = _sum(self.of.values())
        if prompt_class:
            found = _sum(hits for (prompt, _), hits in self.of.items() if prompt == prompt_class).backed_by(found)
            if link_class:
                found = self.of.get(which, Hits()).backed_by(found)
        elif link_class:
            found = _sum(hits for (_, link), hits in self.of.items() if link == link_class).backed_by(found)
        return found


class FleetAcceptance:
    """The sums of one coordinator. Pure but for its state; one event loop."""

    def __init__(self) -> None:
        self._drafters: OrderedDict[_Identity, _Cells] = OrderedDict()  # most recently reported last

    def add(self, report: SessionReport, served: Collection[Drafter]) -> None:
        """Count one text in.

        Args:
            report: of one text, checked before.
            served: the drafters of the catalogue. Others (embedded ones, an edge's own) count as long as there are few.
        """
        which = (report.prompt_class, report.link_class)
        for name, version, hits in _by_drafter(report.drafter_hits):
            identity = (report.model, name, version)
            if identity not in self._drafters and (name, version) not in served:
                self._make_room(report.model, served)
            self._drafters.setdefault(identity, _Cells()).add(which, hits)
            self._drafters.move_to_end(identity)
        while len(self._drafters) > MOST_DRAFTERS:
            self._drafters.popitem(last=False)

    def prior(self, model: str, prompt_class: int, link_class: int) -> tuple[DrafterPrior, ...]:
        """What to expect of the drafters of `model` in such a text, those first of which most is known; 0: any class.

        A cell with few trials of its own is filled up from other links with the same kind of prompt, and these from all
        prompts; what is filled up counts as `BROADER_TRIALS` trials at most.
        """
        answers = (
            _prior_of(identity, cells.answer((prompt_class, link_class)))
            for identity, cells in self._drafters.items()
            if identity[0] == model
        )
        return tuple(sorted(answers, key=lambda prior: -prior.trials)[:MOST_DRAFTERS_TOLD])

    @property
    def shown(self) -> tuple[ClassAcceptance, ...]:
        """The cells themselves, those with most trials first."""
        cells = [
            ClassAcceptance(identity[0], *which, _prior_of(identity, hits))
            for identity, cells in self._drafters.items()
            for which, hits in cells.of.items()
        ]
        return tuple(sorted(cells, key=lambda cell: -cell.of.trials)[:MOST_SHOWN])

    def rows(self) -> list[CellRow]:
        """All there is, to be saved."""
        return [
            (*identity, *which, hits.hits, hits.trials)
            for identity, cells in self._drafters.items()
            for which, hits in cells.of.items()
        ]

    def take_over(self, rows: Iterable[CellRow]) -> None:
        """Begin from what `rows` gave; raises `ValueError` or `TypeError` where it is something else."""
        drafters: OrderedDict[_Identity, _Cells] = OrderedDict()
        for model, name, version, prompt_class, link_class, hits, trials in rows:
            right = 0 <= prompt_class < PROMPT_CLASSES and 0 <= link_class < LINK_CLASSES and 0 <= hits <= trials
            if not right:
                raise ValueError(f"no such cell: {(prompt_class, link_class, hits, trials)}")
            cells = drafters.setdefault((str(model), str(name), str(version)), _Cells())
            cells.of[int(prompt_class), int(link_class)] = Hits(float(hits), float(trials))
        self._drafters = OrderedDict(list(drafters.items())[-MOST_DRAFTERS:])

    def _make_room(self, model: str, served: Collection[Drafter]) -> None:
        """For one more version that is not served: invented ones push out each other, and none that many report."""
        unserved = [one for one in self._drafters if one[0] == model and one[1:] not in served]
        if len(unserved) >= MOST_UNSERVED:
            del self._drafters[min(unserved, key=lambda identity: self._drafters[identity].trials)]


def _by_drafter(told: Iterable[DrafterHits]) -> Iterator[tuple[str, str, Hits]]:
    """One entry a drafter, whatever a report says twice: it is one text."""
    found: defaultdict[Drafter, Hits] = defaultdict(Hits)
    for each in told:
        so_far = found[each.drafter, each.drafter_version]
        found[each.drafter, each.drafter_version] = Hits(so_far.hits + each.hits, so_far.trials + each.compared)
    for (name, version), hits in found.items():
        if hits.trials:
            yield name, version, hits


def _sum(many: Iterable[Hits]) -> Hits:
    hits = trials = 0.0
    for each in many:
        hits, trials = hits + each.hits, trials + each.trials
    return Hits(hits, trials)


def _prior_of(identity: _Identity, hits: Hits) -> DrafterPrior:
    return DrafterPrior(identity[1], identity[2], hits.rate, hits.trials)
