"""Length of the edge's speculation, and the time at which it sends drafts: in one message just in time for a step."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple, Protocol, runtime_checkable

from outrider.proto.errors import InvalidArgument
from outrider.proto.types import DraftToken, Goal

TOKEN_BYTES = 2  # a draft on the wire, for vocabularies below 2^14 and most ids above 127
FIRST_WINDOW = 8  # while nothing has been measured
MESSAGE_BYTES = 45  # a small Draft on the wire: HTTP/2 framing, a window update, gRPC's prefix, the message
_SURELY = 1 + 1e-9  # times a bound: beyond what rounding can make of a chance
_MIN_TOKENS = 0.2  # replayed: 40 % fewer bytes at round trips of 30 to 120 ms for 0.2 % of speed


@dataclass(frozen=True, slots=True)
class EdgeView:
    """Knowledge of the edge when it decides how much further to draft; times are 0 until they are measured.

    Attributes:
        in_flight: drafted tokens that no commit has met.
        survival: chance that all of them agree with the target.
        acceptance: chance that a further one does, given that.
        step_s: duration of the verifier's step beside its rows, in seconds.
        row_s: time of one more draft in a step, in seconds.
        round_trip_s: round-trip time of a small message, in seconds.
        byte_s: time of a byte on the uplink, in seconds.
        token_s: mean time of a committed token, in seconds.
        chances: [in_flight] calibrated chance that each unverified draft agrees, given that those before it do.
        drafts: [in_flight] the drafts with the drafter's confidence; empty: unknown.
        battery: share of charge that is left, 1 on mains.
        covered: next tokens that the verifier has by its own drafts before any of the edge's can come.
        sent: drafts in flight that have left.
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
    covered: int = 0
    sent: int = 0


class WindowPolicy(Protocol):
    """A rule of how many more tokens to draft, within credit and the length of the text."""

    def more(self, view: EdgeView) -> int:
        """Return the tokens to draft now; 0: enough until the next commit."""
        ...


class DraftPrice(NamedTuple):
    """Price of one more draft and what it saves, which change with measurements of link and verifier alone.

    Attributes:
        saved_s: time that it saves where it survives, in seconds; 0: not measured yet.
        unhidden: share of its drafting time that the round trip does not hide.
        fixed_s: price beside its drafting, in seconds.
    """

    saved_s: float
    unhidden: float
    fixed_s: float


UNKNOWN_PRICE = DraftPrice(0.0, 1.0, 0.0)


@runtime_checkable
class PricedRule(WindowPolicy, Protocol):
    """A rule that compares survival with a price, so that a session asks for prices when these may have changed."""

    def price(
        self, *, step_s: float, row_s: float, round_trip_s: float, byte_s: float, token_s: float, goal: Goal
    ) -> DraftPrice:
        """Return the price by the measurements of the same names in `EdgeView`."""
        ...

    def more_at(
        self,
        price: DraftPrice,
        most: int,
        *,
        in_flight: int,
        survival: float,
        acceptance: float,
        drafting_s: float,
        covered: int,
    ) -> int:
        """Return the tokens to draft now at this price, at most `most`; the others are as in `EdgeView`."""
        ...


@runtime_checkable
class LearningRule(WindowPolicy, Protocol):
    """A rule that learns from the fate of its drafts, and so is no pure function of the view."""

    def observe(self, hits: int, missed: bool) -> None:
        """Learn that `hits` drafts agreed with the target's tokens, and then, if `missed`, one did not."""
        ...


@runtime_checkable
class BlockRule(WindowPolicy, Protocol):
    """A rule that also says which drafts travel together; they leave once a block is whole, and no branches do."""

    def is_block(self, sent: int, unsent: int) -> bool:
        """Return whether `unsent` drafts after the `sent` ones in flight are a block."""
        ...


@dataclass(frozen=True, slots=True)
class FixedWindow:
    """Keeps the same number of unverified tokens always; 0 turns drafting off."""

    tokens: int

    def __post_init__(self) -> None:
        if self.tokens < 0:
            raise InvalidArgument("must be 0 or more", field="window")

    def more(self, view: EdgeView) -> int:
        """Return the tokens to draft now."""
        return max(0, self.tokens - view.in_flight)


@dataclass(frozen=True, slots=True)
class SurvivalWindow:
    """Drafts while the next token's chance to survive, times the time that it saves, exceeds its price.

    A token that survives saves a target step, and where the verifier waits for drafts (goal efficiency) the round trip
    that comes with it. On a link shorter than a step drafting and verifying alternate, and there it saves the mean time
    of a token: the reward rate of rounds is highest when the last unit of time brings the average (renewal reward). It
    costs its drafting, its row in a step, its bytes on the uplink, and a share `min_share` of the possible saving,
    which bounds the bytes spent on chains that will hardly be read.

    Tokens that the verifier covers save nothing. They are drafted where those after them are worth all together.

    Attributes:
        max_tokens: most unverified tokens.
        min_share: share of the possible saving that a draft must bring beyond its price.
    """

    max_tokens: int = 64
    min_share: float = 0.015

    def more(self, view: EdgeView) -> int:
        """Return the tokens to draft now."""
        price = self.price(
            step_s=view.step_s,
            row_s=view.row_s,
            round_trip_s=view.round_trip_s,
            byte_s=view.byte_s,
            token_s=view.token_s,
            goal=view.goal,
        )
        return self.more_at(
            price,
            self.max_tokens,
            in_flight=view.in_flight,
            survival=view.survival,
            acceptance=view.acceptance,
            drafting_s=view.drafting_s,
            covered=view.covered,
        )

    def price(
        self, *, step_s: float, row_s: float, round_trip_s: float, byte_s: float, token_s: float, goal: Goal
    ) -> DraftPrice:
        """Return the price by the measurements of the same names in `EdgeView`."""
        saved_s = step_s
        if step_s and goal is Goal.EFFICIENCY:
            saved_s = step_s + round_trip_s
        elif token_s and round_trip_s < step_s:
            saved_s = min(step_s, token_s)
        unhidden = min(1.0, step_s / round_trip_s) if round_trip_s else 1.0
        return DraftPrice(saved_s, unhidden, unhidden * self.min_share * saved_s + row_s + TOKEN_BYTES * byte_s)

    def more_at(
        self,
        price: DraftPrice,
        most: int,
        *,
        in_flight: int,
        survival: float,
        acceptance: float,
        drafting_s: float,
        covered: int,
    ) -> int:
        """Return the tokens to draft now at this price, at most `most`; the others are as in `EdgeView`."""
        saved_s, unhidden, fixed_s = price
        most = min(most, (self.max_tokens if saved_s else min(FIRST_WINDOW, self.max_tokens)) - in_flight)
        if most <= 0 or not saved_s:
            return max(0, most)
        price_s = unhidden * drafting_s + fixed_s
        min_chance = price_s / saved_s
        if covered > in_flight:
            ahead = min(covered, self.max_tokens) - in_flight
            gain_s, chance = -ahead * price_s, survival * acceptance**ahead
            for _ in range(self.max_tokens - in_flight - ahead):
                chance *= acceptance
                if chance <= min_chance:
                    break
                gain_s += chance * saved_s - price_s
                ahead += 1
            return min(most, ahead) if gain_s > 0 else 0
        tokens, chance = 0, survival
        if not in_flight:  # one is made always, else better drafts could never be noticed
            tokens, chance = 1, chance * acceptance
        if chance * acceptance ** (most - tokens) > _SURELY * min_chance:
            return most
        while tokens < most:
            chance *= acceptance
            if chance <= min_chance:
                break
            tokens += 1
        return tokens


def due_to_flush(now: float, *, commit_at: float, round_trip_s: float, step_s: float, next_s: float) -> bool:
    """Return whether drafts must leave now to be in time for the next step that they can reach.

    The step of the last commit ended about round_trip_s / 2 before the commit came, and a verifier that runs ahead
    begins one every step_s; a message is round_trip_s / 2 on its way. So there is a deadline every step_s, at
    commit_at - round_trip_s + j step_s, and drafts may be held while the next look at them comes before it.

    Args:
        now: present time on the edge's clock, in seconds.
        commit_at: arrival of the last commit on that clock, in seconds.
        round_trip_s: round-trip time of a small message, in seconds.
        step_s: duration of the verifier's step, in seconds; 0: unknown, and drafts are always due.
        next_s: time until the next look, in seconds.
    """
    if not step_s:
        return True
    since = now - (commit_at - round_trip_s)
    deadline = math.ceil(since / step_s) * step_s
    return since + next_s > deadline


def worth_a_message(expected_tokens: float, *, step_s: float, byte_s: float) -> bool:
    """Return whether further drafts of a chain already sent are worth a message of their own now.

    Args:
        expected_tokens: expected number of accepted drafts; each saves a step.
        step_s: duration of the verifier's step, in seconds; 0: unknown.
        byte_s: time of a byte on the uplink, in seconds.
    """
    return expected_tokens >= _MIN_TOKENS and expected_tokens * step_s >= MESSAGE_BYTES * byte_s
