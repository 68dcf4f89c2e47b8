"""`traces trees`: steps with chains, with the leader's trees, and with trees merged of several drafters.

Every step begins where the last one ended and verifies the best tree of so many drafts by what is known then: chances
are calibrated by the hits before, as in a session. Rows cost nothing and no link delays anything, so that the shapes
alone differ. A run of another drafter is its own text after its token. After a miss of the chain it is not known what
the leader would have drafted on its wrong path; its drafts on the text stand for them, in all shapes alike.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from pydantic.dataclasses import dataclass as record_dataclass
from rich.console import Console, RenderableType

from outrider.bench.environment import command_line
from outrider.bench.record import RECORD, Count, Metric, check_file, save
from outrider.bench.table import UNKNOWN, Grid, draw, number
from outrider.deploy.arguments import Given
from outrider.proto.errors import ConfigError
from outrider.proto.policy.likely_branches import RUNNERS_UP, MissShares, OtherShares
from outrider.proto.policy.measures import Calibration, TextCalibration
from outrider.proto.policy.trees import Run, best_tree
from outrider.proto.types import DraftToken
from research.recording import load_recording
from research.replay.hit_traces import HitTrace
from research.replay.pool_texts import PoolText
from research.research_settings import TreesSettings

RUN = 8  # most tokens of a run
ALL = "all"
LEGEND = (
    "tokens a step; / chain: over those of the leader's chain. tree: with the leader's runners-up; + NAME: with runs "
    "of another drafter too. missed: share of tokens that are none of the leader's first three; hits: share of these "
    "that the other proposes; follow: tokens after such a hit that it proposes, too"
)


@record_dataclass(frozen=True, slots=True, config=RECORD)
class ShapeResult:
    """Steps of one shape on the texts of one domain.

    Attributes:
        domain: domain of the prompts; `all`: of all.
        shape: `chain`, `tree`, or `tree + ` and the other drafters.
    """

    domain: str
    shape: str
    tokens: Count
    steps: Count

    @property
    def per_step(self) -> float:
        """Tokens a step."""
        return self.tokens / self.steps


@record_dataclass(frozen=True, slots=True, config=RECORD)
class OtherResult:
    """Hits of another drafter at tokens that are none of the leader's first choices.

    Attributes:
        missed: share of tokens that are none of these.
        hits: share of those that this drafter proposes.
        follow: mean tokens after such a hit that it proposes, too, of `RUN` - 1.
    """

    domain: str
    drafter: str
    missed: Metric
    hits: Metric
    follow: Metric


@record_dataclass(frozen=True, slots=True, config=RECORD)
class TreesResult:
    """All results of a recording."""

    command: str
    leader: str
    temperature: Metric
    max_drafts: Count
    shapes: tuple[ShapeResult, ...]
    others: tuple[OtherResult, ...]


def trees(given: Given) -> int:
    """Run `python -m research traces trees`."""
    options = given(TreesSettings)
    recording = load_recording(options.traces).only(options.drafter)
    if options.json:
        check_file(options.json, "json")
    if not all(trace.choices for text in recording.texts for trace in text.traces):
        raise ConfigError("say nothing of the proposed tokens; record them again", field="traces")
    names = tuple(recording.traces)
    result = TreesResult(
        command_line(),
        names[0],
        recording.texts[0].traces[0].temperature,
        options.max_drafts,
        tuple(shape_results(recording.texts, names, options.max_drafts)),
        tuple(other_results(recording.texts, names)),
    )
    Console(width=100, highlight=False).print(tables(result))
    if options.json:
        save(result, options.json)
    return 0


def shape_results(texts: Sequence[PoolText], names: Sequence[str], max_drafts: int) -> Iterator[ShapeResult]:
    """Yield the steps of every shape, of all texts and by domain."""
    others = range(1, len(names))
    shapes: dict[str, tuple[int, Sequence[int]]] = {"chain": (0, ()), "tree": (RUNNERS_UP, ())}
    shapes |= {f"tree + {names[other]}": (RUNNERS_UP, (other,)) for other in others}
    if len(others) > 1:
        shapes["tree + all"] = RUNNERS_UP, others
    for shape, (runners_up, merged) in shapes.items():
        steps = Stepper(runners_up, merged, max_drafts)
        counted: dict[str, list[int]] = {ALL: [0, 0]}
        for text in texts:
            added = text.tokens, steps.of(text)
            for domain in (ALL, text.prompt[0]):
                counts = counted.setdefault(domain, [0, 0])
                counts[:] = [count + more for count, more in zip(counts, added, strict=True)]
        yield from (ShapeResult(domain, shape, *counts) for domain, counts in counted.items())


def other_results(texts: Sequence[PoolText], names: Sequence[str]) -> Iterator[OtherResult]:
    """Yield the other drafters' hits at tokens that are none of the leader's choices."""
    for domain in (ALL, *dict.fromkeys(text.prompt[0] for text in texts)):
        chosen = [text for text in texts if domain in (ALL, text.prompt[0])]
        missed = [
            (text, place)
            for text in chosen
            for place, token in enumerate(text.traces[0].tokens)
            if token not in text.traces[0].choices[place]
        ]
        for other in range(1, len(names)):
            follow = [_follow(text.traces[other], place) for text, place in missed if text.traces[other].hits[place]]
            yield OtherResult(
                domain,
                names[other],
                len(missed) / sum(text.tokens for text in chosen),
                len(follow) / max(1, len(missed)),
                sum(follow) / max(1, len(follow)),
            )


def _follow(trace: HitTrace, place: int) -> int:
    """Return how many tokens after a hit at `place` the drafter proposes, too, `RUN` - 1 at most."""
    after = trace.hits[place + 1 : place + RUN]
    return after.index(False) if False in after else len(after)


def _lead(trace: HitTrace, place: int) -> float:
    """Return the lead of the drafter's proposal, as sessions calibrate it."""
    perturbed = trace.perturbed_probability[place] if trace.perturbed_probability else math.nan
    return DraftToken(0, trace.confidence[place], perturbed_probability=perturbed).lead


class _Candidate(NamedTuple):
    """A run that a step could verify; `drafter` continues it after `token`, None: nobody."""

    run: Run
    token: int
    drafter: int | None


@dataclass(slots=True)
class Stepper:
    """Counts the steps of texts, one after the other, by what it has learned of the drafters.

    Attributes:
        runners_up: runners-up of the leader that are candidates.
        others: drafters whose runs are candidates.
        max_drafts: most drafts of a step.
    """

    runners_up: int
    others: Sequence[int]
    max_drafts: int
    _common: Calibration = field(default_factory=Calibration)
    _shares: MissShares = field(default_factory=MissShares)
    _of_others: Mapping[int, OtherShares] = field(init=False)

    def __post_init__(self) -> None:
        self._of_others = {other: OtherShares() for other in self.others}

    def of(self, text: PoolText) -> int:
        """Return the number of steps of a text."""
        calibration, at, steps = TextCalibration(self._common), 0, 0
        while at < text.tokens:
            committed = self._step(text, at, calibration)
            for place in range(at, min(at + committed, text.tokens)):
                self._learn(text, place, calibration)
            at += committed
            steps += 1
        return steps

    def _step(self, text: PoolText, at: int, calibration: TextCalibration) -> int:
        """Return the tokens that a step commits from `at` on."""
        leader = text.traces[0]
        chances = []
        for place in range(at, min(at + self.max_drafts, text.tokens)):
            if not leader.choices[place]:
                break
            chances.append(calibration.chance(_lead(leader, place)))
        found = [
            candidate
            for index in range(min(len(chances) + 1, text.tokens - at))
            for candidate in self._candidates(text, at, index, chances[index] if index < len(chances) else 0.0)
        ]
        runs = [candidate.run for candidate in found]
        tree = best_tree(chances, runs, follows=self._common.acceptance.rate, room=self.max_drafts)
        agreed = next((i for i in range(tree.chain) if not leader.hits[at + i]), tree.chain)
        for (run, token, drafter), kept in zip(found, tree.runs, strict=True):
            if kept and run.index == agreed and token == leader.tokens[at + agreed]:
                follow = _follow(text.traces[drafter], at + agreed) if drafter is not None else 0
                return agreed + 1 + min(kept - 1, follow) + 1
        return agreed + 1

    def _candidates(self, text: PoolText, at: int, index: int, chance: float) -> list[_Candidate]:
        """Return the runs that leave the chain before its draft of `index`, which agrees with `chance`."""
        place = at + index
        own = text.traces[0].choices[place]
        found: dict[int, tuple[float, int | None]] = {
            token: ((1 - chance) * self._shares.of(rank), None)
            for rank, token in enumerate(own[1 : 1 + self.runners_up])
        }
        for other in self.others:
            trace = text.traces[other]
            if not trace.choices[place] or trace.choices[place][0] in own[:1]:
                continue
            token = trace.choices[place][0]
            likely = (1 - chance) * self._of_others[other].of(_lead(trace, place))
            before, drafter = found.get(token, (0.0, None))
            both = min(1 - chance, before + likely - before * likely)
            found[token] = both, other if drafter is None or likely > before else drafter
        return [
            _Candidate(Run(index, likely, 1 if drafter is None else RUN), token, drafter)
            for token, (likely, drafter) in found.items()
        ]

    def _learn(self, text: PoolText, place: int, calibration: TextCalibration) -> None:
        leader = text.traces[0]
        token, own = leader.tokens[place], leader.choices[place]
        if own:
            calibration.add(_lead(leader, place), leader.hits[place])
        if leader.hits[place]:
            return
        if len(own) > 1:
            self._shares.add(own[1:], token)
        for other, shares in self._of_others.items():
            trace = text.traces[other]
            if trace.choices[place] and trace.choices[place][0] not in own[:1]:
                shares.add(_lead(trace, place), trace.hits[place])


def tables(result: TreesResult) -> RenderableType:
    """Return the tables of shapes and of others' hits, a column for each domain."""
    domains = tuple(dict.fromkeys(shape.domain for shape in result.shapes))
    per_step = {(shape.shape, shape.domain): shape.per_step for shape in result.shapes}
    names = tuple(dict.fromkeys(shape.shape for shape in result.shapes))

    def cell(shape: str, domain: str) -> str:
        own = per_step[shape, domain]
        return number(own, 2) if shape == names[0] else f"{own:.2f} {own / per_step[names[0], domain]:.3f}"

    rows = [(name, *(cell(name, domain) for domain in domains)) for name in names]
    title = f"Tokens a step of {result.max_drafts} drafts, and / chain: {result.leader}, T = {result.temperature:g}"
    grids = [Grid(title, ("shape", *domains), 1, [rows])]
    by_drafter: dict[str, list[str]] = {}
    for other in result.others:
        found = f"{other.hits:.1%} {other.follow:.1f}" if other.missed else UNKNOWN
        by_drafter.setdefault(other.drafter, []).append(found)
    missed = [f"{other.missed:.1%}" for other in result.others if other.drafter == result.others[0].drafter]
    if missed:
        others = [(name, *cells) for name, cells in by_drafter.items()]
        grids.append(Grid("Hits and follow of others", ("drafter", *domains), 1, [[("missed", *missed)], others]))
    return draw(grids, LEGEND)
