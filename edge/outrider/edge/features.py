"""Features of a text that an edge reports to its coordinator: kinds of prompt and link, and counts of hits.

With them other edges begin with the drafter that does well in such texts. What leaves the edge:

    with a lease's request      two small numbers: the prompt's class (`PromptClass`) and the link's (`link_class`);
                                beside them, for placement, keyed hashes of its beginnings (`outrider.edge.prefixes`)
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
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from enum import IntEnum
from typing import Self

from outrider.proto.drafter_format import published_name
from outrider.proto.policy import Measurements
from outrider.proto.session import DrafterCounts
from outrider.proto.types import MAX_REPORTED_DRAFTERS, DrafterHits

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

    Args:
        counts: counts of the text by name of the drafter.
        versions: versions of the drafters by name; a drafter without one is left out.
        measured: measurements of the text, of which the time to draft a token is reported.
    """
    reported = [
        DrafterHits(
            published_name(name), versions[name], each.hits, each.compared, measured.of(name).drafting_s.value or 0.0
        )
        for name, each in counts.items()
        if name in versions and each.compared >= MIN_COMPARED
    ]
    return tuple(sorted(reported, key=lambda hits: -hits.compared)[:MAX_REPORTED_DRAFTERS])
