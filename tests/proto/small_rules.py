"""Rules of a small world whose every interleaving is tried: its text, its choices, and what stands still."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import checked_simulation
import pytest

from outrider.proto.policy import Measurements, likely_branches, measurements
from outrider.proto.policy.selector import Selector
from outrider.proto.session import EdgeSession, both_ends, measuring
from outrider.proto.session.verifier import VerifierRules
from outrider.proto.types import DraftToken

END, LETTERS = 0, (1, 2)  # the end of a text, and the alphabet
PROMPT = (1,)
STEP_S = 0.03
Action = tuple[Any, ...]


class Violation(AssertionError):
    """Something that must never happen."""


@dataclass(frozen=True)
class Rules:
    """Parts of a world, and how often each fault may happen in it.

    Attributes:
        tokens: length of a text.
        drafters: drafters of the edge; 0: it drafts nothing.
        window: unverified drafts of the edge.
        job: most drafts of a job.
        ends: whether drafters also propose the end of a text, which the target never says.
        own: most drafts of a job of the verifiers' own drafter; 0: they have none.
        trees: whether steps verify branches.
        grammar: whether the text is one of a grammar.
        turns: turns after the first.
        early: whether drafts follow an Open before it is answered.
        switches: whether any chain may be another drafter's; otherwise the first makes them all.
        idles: whether there may be no time for idle drafters.
        stalls: whether a drafter may have nothing to say.
        quick: whether a frame is at its verifier as soon as it is sent.
        verifiers: number of them.
        losses: streams that break.
        late: streams whose verifier does not notice at once that they are gone.
        deaths: verifiers that die and come back with nothing.
        drains: verifiers that send their sessions away.
        doubles: frames that come twice.
        swaps: drafts or branches that come after the frame that was sent next.
        jumps: times at which a minute passes.
        stops: times that the user stops the text.
    """

    tokens: int = 4
    drafters: int = 2
    window: int = 2
    job: int = 1
    ends: bool = False
    own: int = 0
    trees: bool = False
    grammar: bool = False
    turns: int = 0
    early: bool = False
    switches: bool = False
    idles: bool = False
    stalls: bool = False
    quick: bool = False
    verifiers: int = 2
    losses: int = 0
    late: int = 0
    deaths: int = 0
    drains: int = 0
    doubles: int = 0
    swaps: int = 0
    jumps: int = 0
    stops: int = 0

    FAULTS: ClassVar = ("losses", "late", "deaths", "drains", "doubles", "swaps", "jumps", "stops")

    @property
    def proposals(self) -> tuple[int, ...]:
        """Tokens that a drafter may propose."""
        return (END, *LETTERS) if self.ends else LETTERS

    def results(self, prefix: tuple[int, ...], count: int) -> Iterator[tuple[int, ...]]:
        """Yield what a drafter may propose after `prefix` when asked for `count` tokens; first the target's own."""
        count = min(count, max(self.job, self.own))
        hits = self.text_after(prefix, count)
        yield hits
        for length in range(0 if self.stalls else 1, count + 1):
            yield from (tokens for tokens in itertools.product(self.proposals, repeat=length) if tokens != hits)

    def text_after(self, prefix: tuple[int, ...], count: int) -> tuple[int, ...]:
        """Return the target's next `count` tokens after a prefix."""
        text = prefix
        for _ in range(count):
            allowed = [False, *(letter != text[-1] for letter in LETTERS)] if self.grammar else None
            text += (target_token(text, allowed),)
        return text[len(prefix) :]


def target_token(prefix: tuple[int, ...], allowed: Sequence[bool] | None) -> int:
    """Return the target's token after `prefix`: that of a fixed, aperiodic text, unless a mask forbids it."""
    wanted = 1 + (len(prefix) * 7 + sum(prefix) * 5 + len(prefix) // 3) % 2
    if allowed is None or allowed[wanted]:
        return wanted
    return next(token for token in (*LETTERS, END) if allowed[token])


def drafts_of(rules: Rules, tokens: Sequence[int]) -> tuple[DraftToken, ...]:
    """Return drafts of these tokens, whose runners-up are all others."""
    return tuple(
        DraftToken(token, runners_up=tuple(other for other in rules.proposals if other != token)) for token in tokens
    )


def terms(rules: Rules, name: str) -> VerifierRules:
    """Return the terms of a verifier."""
    known = {"vocab_size": len(LETTERS) + 1, "context_length": 64, "max_drafts": 8, "max_credit": 8}
    return checked_simulation.rules(name=name, precision="float32", trees=rules.trees, **known)


# --- choices ---


class Choices:
    """Choices that a world leaves open within one action: a script decides, and after its end the first option."""

    def __init__(self) -> None:
        self.script: tuple[int, ...] = ()
        self.options: list[int] = []

    def begin(self, script: tuple[int, ...]) -> None:
        """Decide by `script` from now on."""
        self.script, self.options = script, []

    def of(self, options: int) -> int:
        """Return one of so many options."""
        self.options.append(options)
        return self.made(len(self.options) - 1)

    def made(self, place: int) -> int:
        """Return the choice at a place."""
        return self.script[place] if place < len(self.script) else 0

    def since(self, place: int) -> tuple[tuple[int, int], ...]:
        """Return the options from a place on, and which was chosen."""
        return tuple((options, self.made(place + i)) for i, options in enumerate(self.options[place:]))

    def repeat(self, choices: tuple[tuple[int, int], ...]) -> bool:
        """Take choices as made before, if the script makes them so."""
        place = len(self.options)
        same = all(chosen == self.made(place + i) for i, (_, chosen) in enumerate(choices))
        if same:
            self.options += [options for options, _ in choices]
        return same


CHOICES = Choices()


@dataclass(frozen=True)
class AnyDrafter(Selector):
    """A selector that may choose any of two drafters at any time."""

    def choose(self, view: Any) -> int:
        """Return a drafter."""
        del view
        return CHOICES.of(2)

    def learn(self, outcome: Any) -> None:
        """Learn nothing."""


def job_tokens(_: float) -> int:
    """Return the most tokens of a job, which the world bounds further."""
    return 2


def any_idle_s(_: float) -> float:
    """Return the time that idle drafters have: enough, or none."""
    return 0.0 if CHOICES.of(2) else STEP_S


# --- measurements ---


def ignore(*_: object, **__: object) -> None:
    """Do nothing."""


@pytest.fixture
def still_measurements(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let no measurement change anything, and leave to choices what they decide."""
    smooth = (
        measurements.Smoothed,
        measurements.Acceptance,
        measurements.Calibration,
        measurements.TextCalibration,
        measurements.Line,
    )
    for kind in (*smooth, likely_branches.MissShares, likely_branches.OtherShares, measurements.Pace):
        monkeypatch.setattr(kind, "add", ignore)
    for name in ("believe", "restate"):
        monkeypatch.setattr(measurements.Acceptance, name, ignore)
    for name in ("time_open", "time_draft"):
        monkeypatch.setattr(Measurements, name, ignore)
    monkeypatch.setattr(measuring.SentMessages, "append", ignore)
    monkeypatch.setattr(likely_branches, "_LONGEST", 2)
    monkeypatch.setattr(both_ends.BothEnds, "_is_better_here", lambda ends: getattr(ends, "leads", False))
    monkeypatch.setattr(EdgeSession, "_pays", lambda *_: True)


def known_measurements() -> Measurements:
    """Return the measurements of all worlds: steps take a while, the link takes none, and everything pays."""
    known = Measurements()
    known.step.weight, known.step.y = 1.0, STEP_S
    known.of("b").calibration.acceptance = measurements.Acceptance(0.9, 1.0)  # the other drafter is the better one
    known.pace.seconds = known.pace.tokens = known.pace.commits = 1.0
    return known
