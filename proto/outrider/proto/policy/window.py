"""How far ahead the edge drafts."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from outrider.proto.errors import InvalidArgument
from outrider.proto.types import DraftToken, Goal

TOKEN_BYTES = 2  # of a draft on the wire, vocabularies below 2^14 and most ids above 127
FIRST_WINDOW = 8  # while nothing has been measured


@dataclass(frozen=True, slots=True)
class EdgeView:
    """What the edge knows when it asks how much further to draft. Seconds; 0: not measured yet.

    Attributes:
        in_flight: drafted tokens that no commit has settled.
        survival: chance that all of them agree with the target.
        acceptance: chance that a further one does, given that.
        drafting_s: to draft one token.
        step_s: of the verifier, beside its rows.
        row_s: of the verifier, for one more draft in a step.
        round_trip_s: of a small message and its answer.
        byte_s: a byte on the uplink.
        token_s: what a committed token has taken, on average.
        goal: of the deployment.
        chances: [in_flight] that each unverified draft agrees given that those before it do, as calibrated.
        drafts: [in_flight] what the drafter says of each; empty: not known.
        temperature: of the text.
        battery: share that is left, 1 on mains.
    """

    in_flight: int
    survival: float
    acceptance: float
    drafting_s: float
    step_s: float
    row_s: float
    round_trip_s: float
    byte_s: float
    token_s: float
    goal: Goal
    chances: tuple[float, ...] = ()
    drafts: tuple[DraftToken, ...] = ()
    temperature: float = 0.0
    battery: float = 1.0


class WindowPolicy(Protocol):
    """How many more tokens to draft; credit and the length of the text bound it besides."""

    def more(self, view: EdgeView) -> int:
        """Tokens to draft now; 0: enough until the next commit."""
        ...


@runtime_checkable
class LearningRule(WindowPolicy, Protocol):
    """One that learns from what becomes of its drafts, and so is no pure function of the view."""

    def settled(self, hits: int, missed: bool) -> None:
        """The target's tokens have met `hits` drafts that agreed, and then, if `missed`, one that did not."""
        ...


@dataclass(frozen=True, slots=True)
class FixedWindow:
    """Always the same number of unverified tokens; 0 turns drafting off."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise InvalidArgument("must be 0 or more", field="window")

    def more(self, view: EdgeView) -> int:
        """Tokens to draft now."""
        return max(0, self.tokens - view.in_flight)


@dataclass(frozen=True, slots=True)
class SurvivalWindow:
    """Draft while the next token's chance to survive, times the time that it saves, exceeds its price.

    A token that survives saves a target step, and where the verifier waits for drafts (goal efficiency) the round
    trip that comes with it. On a link shorter than a step drafting and verifying take turns, and there it saves what a
    token takes on average: of rewards in rounds the best is had where the last unit of time brings as much as all do
    on average (renewal reward). It costs its drafting, its row in a step, its bytes on the uplink, and a share `least`
    of what it can save, which bounds the bytes spent on chains that will hardly be read.
    """

    most: int = 64
    least: float = 0.015

    def more(self, view: EdgeView) -> int:
        """Tokens to draft now."""
        if not view.step_s:
            return max(0, min(FIRST_WINDOW, self.most) - view.in_flight)
        saved_s = _saved_s(view)
        hidden = min(1.0, view.step_s / view.round_trip_s) if view.round_trip_s else 1.0
        price_s = hidden * (view.drafting_s + self.least * saved_s) + view.row_s + TOKEN_BYTES * view.byte_s
        chance, count = view.survival, 0
        while view.in_flight + count < self.most:
            chance *= view.acceptance
            if chance * saved_s <= price_s and view.in_flight + count > 0:
                break
            count += 1
        return count


def _saved_s(view: EdgeView) -> float:
    """By a token that survives."""
    if view.goal is Goal.EFFICIENCY:
        return view.step_s + view.round_trip_s
    if view.token_s and view.round_trip_s < view.step_s:
        return min(view.step_s, view.token_s)
    return view.step_s
