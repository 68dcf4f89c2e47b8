"""Kinds of text, and how well drafters do in each: an edge's own texts, and the fleet's by way of its coordinator.

With them a text begins with the drafter that does well in such texts. What leaves the edge:

    with a lease's request      two small numbers: the prompt's class (`PromptClass`) and the link's (`link_class`);
                                beside them, for placement, keyed hashes of its beginnings (`outrider.edge.link.routes`)
    when the text is done       both again, and for each drafter how many tokens were compared, how many it hit, and
                                how long it takes to draft one

No text and no token leaves it. A class is less than three bits and made of shares of characters and lines alone: it
shows what kind of text a prompt is and not what it says. Counts of fewer than `MIN_COMPARED` tokens stay here, so
that they identify no short text. A coordinator adds reports up and keeps the sums.

What this does not protect: a coordinator sees each report as it comes, beside the session's other statistics, so
whoever runs it can tell that this edge had a text of code just now, how long it was, and how well drafters did.
Against that an edge can decode without a coordinator. (A verifier sees prompt and text in any case.)
"""

from __future__ import annotations

import re
from collections import Counter, OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import IntEnum
from typing import Self

from outrider.proto.drafter_format import published_name
from outrider.proto.policy import Measurements
from outrider.proto.session import DrafterCounts
from outrider.proto.types import MAX_REPORTED_DRAFTERS, DrafterHits, DrafterPrior, Lease, LeaseRequest

MIN_COMPARED = 8
LOOKED_AT = 2048  # last characters of a prompt, which the text resembles most
TOKENS_LOOKED_AT = 512
MIN_CHARACTERS = 24  # other than blanks; with fewer a prompt has no class
OCTAVES_MS = (4, 16, 64, 256)

# Thresholds between kinds of text, each a share. Chosen on four domains with 40 prompts each (Python's sources, its
# documentation, English novels, grade-school arithmetic), of which 144 come out right.
FOREIGN_LETTERS = 0.5  # of letters, those beyond the Latin script
NUMBERS = 0.35  # of characters, those that are digits: tables and lists of numbers
FORMULAS = 0.12  # the same, in text that is not indented
OPERATORS = 0.04  # of characters
WORDY_LINES = 0.6  # of lines, those with four words in a row: comments in code stay below
TICKS = 0.008  # of characters: marked-up text names code in them
MARKS = 0.02  # of characters, operators among them
INDENTED_LINES = 0.5
ARITHMETIC = 0.01  # of characters, those that are digits

MIN_TRIALS = 32.0  # compared tokens; a drafter with fewer counts as unknown
_FADE = 0.95  # of earlier counts with every text of the kind
MAX_KEPT = 256  # kinds of text whose priors are kept
FleetPrior = Mapping[tuple[str, str], DrafterPrior]
"""Hits of drafters in other edges' texts of one kind, by name and version; empty: not known."""

_OPERATORS = frozenset("{}[]()=<>_;\\/*+&|^#@")
_MARKS = _OPERATORS | frozenset(":`~")
_ROLE = re.compile(r"<\|[^|<>\s]{1,32}\|>")  # such as <|user|>, which shows that it is a chat and not its subject
_WORDY = re.compile(r"(?:\w[\w'-]*[,;]? ){3}\w")
_LAST_LATIN = "\u024f"


class PromptClass(IntEnum):
    """Kinds of text. The numbers are on the wire: none may change its meaning."""

    UNKNOWN = 0
    PROSE = 1
    DOCS = 2
    CODE = 3
    MATH = 4
    NUMBERS = 5
    FOREIGN = 6


@dataclass(frozen=True, slots=True)
class TextFeatures:
    """Reported classes of one text; see the module's docstring."""

    prompt_class: int = PromptClass.UNKNOWN
    link_class: int = 0

    @classmethod
    def of(cls, prompt: str, round_trip_s: float) -> Self:
        """Return the features of a prompt, or its end, over a link with this round trip; 0: not measured yet."""
        return cls(prompt_class(prompt), link_class(round_trip_s))


def prompt_class(prompt: str) -> PromptClass:
    """Return the kind of text at the end of `prompt`; takes some 0.2 ms."""
    text = _ROLE.sub("", prompt[-LOOKED_AT:])
    counts = Counter(text)
    characters = sum(count for character, count in counts.items() if not character.isspace())
    if characters < MIN_CHARACTERS:
        return PromptClass.UNKNOWN
    letters = sum(count for character, count in counts.items() if character.isalpha())
    foreign = sum(count for character, count in counts.items() if character.isalpha() and character > _LAST_LATIN)
    if foreign > FOREIGN_LETTERS * letters:
        return PromptClass.FOREIGN
    lines = [line for line in text.split("\n") if line.strip()]
    indented = sum(line[:2].isspace() and len(line) > 1 for line in lines) / len(lines) if len(lines) > 1 else 0.0
    digits = sum(count for character, count in counts.items() if character.isdigit()) / characters
    if digits >= NUMBERS:
        return PromptClass.NUMBERS
    if digits >= FORMULAS and indented < INDENTED_LINES:
        return PromptClass.MATH
    operators = sum(counts[character] for character in _OPERATORS) / characters
    wordy = sum(_WORDY.search(line) is not None for line in lines) / len(lines)
    if operators >= OPERATORS and wordy < WORDY_LINES and counts["`"] < TICKS * characters:
        return PromptClass.CODE
    marks = sum(counts[character] for character in _MARKS) / characters
    if marks >= MARKS or indented >= INDENTED_LINES:
        return PromptClass.DOCS
    return PromptClass.MATH if digits >= ARITHMETIC else PromptClass.PROSE


def class_name(number: int) -> str:
    """Return the name of a prompt's class; its number where a later release sent it."""
    try:
        return PromptClass(number).name.lower()
    except ValueError:
        return str(number)


def link_class(round_trip_s: float) -> int:
    """Return 1 to 5: a round trip below 4, 16, 64, 256 ms, or more; 0: not measured yet."""
    if not round_trip_s > 0:
        return 0
    return 1 + sum(1e3 * round_trip_s >= octave for octave in OCTAVES_MS)


def reported_hits(
    counts: Mapping[str, DrafterCounts], versions: Mapping[str, str], measured: Measurements
) -> tuple[DrafterHits, ...]:
    """Return hits of a text's drafters for a report: the most compared ones, none below `MIN_COMPARED` tokens.

    Counts and versions are by name of the drafter; one without a version is left out.
    """
    reported = [
        DrafterHits(
            published_name(name), versions[name], each.hits, each.compared, measured.of(name).drafting_s.value or 0.0
        )
        for name, each in counts.items()
        if name in versions and each.compared >= MIN_COMPARED
    ]
    return tuple(sorted(reported, key=lambda hits: -hits.compared)[:MAX_REPORTED_DRAFTERS])


class FleetPriors:
    """The newest priors of one coordinator, by model and kind of text."""

    def __init__(self) -> None:
        self._newest: OrderedDict[tuple[str, int, int], FleetPrior] = OrderedDict()

    def learn(self, request: LeaseRequest, lease: Lease) -> None:
        """Keep the prior of a lease; one without any drafter changes nothing."""
        if not lease.prior.drafters:
            return
        key = (lease.model, request.prompt_class, request.link_class)
        self._newest[key] = {(prior.drafter, prior.drafter_version): prior for prior in lease.prior.drafters}
        self._newest.move_to_end(key)
        while len(self._newest) > MAX_KEPT:
            self._newest.popitem(last=False)

    def of(self, model: str, features: TextFeatures) -> FleetPrior:
        """Return the prior for such a text, or else the newest one for the same kind of prompt, or for any."""
        prompt_class, link_class = features.prompt_class, features.link_class
        exact = self._newest.get((model, prompt_class, link_class))
        if exact is not None:
            return exact
        of_model = [(key, prior) for key, prior in reversed(self._newest.items()) if key[0] == model]
        of_prompt = [prior for (_, prompt, _), prior in of_model if prompt == prompt_class]
        of_any = [prior for (_, prompt, _), prior in of_model if prompt == 0]
        return next(iter([*of_prompt, *of_any]), {})


@dataclass(frozen=True, slots=True)
class TextKind:
    """Kind of text; texts of one kind predict each other."""

    prompt_class: int
    greedy: bool


@dataclass(slots=True)
class OwnTexts:
    """Hits of drafters in this edge's own texts, which never leave it; those of the fleet add to them.

    Attributes:
        counts: hits and compared tokens, faded, by kind of text and name of the drafter.
    """

    counts: dict[tuple[TextKind, str], tuple[float, float]] = field(default_factory=dict)

    def learn(self, kind: TextKind, of_drafters: Mapping[str, DrafterCounts]) -> None:
        """Count a text of that kind that has ended."""
        for name, found in of_drafters.items():
            hits, compared = self.counts.get((kind, name), (0.0, 0.0))
            self.counts[kind, name] = _FADE * hits + found.hits, _FADE * compared + found.compared

    def acceptances(self, kind: TextKind, drafters: Sequence[tuple[str, str]], fleet: FleetPrior) -> tuple[float, ...]:
        """Return the acceptance of each (name, version) for a selector's prior; empty where too little is known of all.

        An unknown drafter among known ones counts as their average, so that it is tried.
        """
        found = [self._acceptance(kind, name, fleet.get((published_name(name), version))) for name, version in drafters]
        known = [rate for rate in found if rate is not None]
        if not known:
            return ()
        usual = sum(known) / len(known)
        return tuple(usual if rate is None else rate for rate in found)

    def _acceptance(self, kind: TextKind, name: str, fleet: DrafterPrior | None) -> float | None:
        hits, compared = self.counts.get((kind, name), (0.0, 0.0))
        if fleet is not None:
            hits, compared = hits + fleet.acceptance * fleet.trials, compared + fleet.trials
        return hits / compared if compared >= MIN_TRIALS else None
