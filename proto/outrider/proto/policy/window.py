"""Length of the edge's speculation, and the time at which it sends drafts: in one message just in time for a step."""

from __future__ import annotations

import math
from dataclasses import dataclass

from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.measurements import Measurements
from outrider.proto.types import Goal

TOKEN_BYTES = 2  # a draft on the wire, for vocabularies below 2^14 and most ids above 127
FIRST_WINDOW = 8  # while nothing has been measured
_SURELY = 1 + 1e-9  # times a bound: beyond what rounding can make of a chance


@dataclass(frozen=True, slots=True)
class Window:
    """Limit of unverified tokens: a fixed number, or as many as pay.

    A draft pays while its chance to survive, times the time that it saves, exceeds its price. A token that survives
    saves a target step, and where the verifier waits for drafts (goal efficiency) the round trip that comes with it. On
    a link shorter than a step drafting and verifying alternate, and there it saves the mean time of a token: the reward
    rate of rounds is highest when the last unit of time brings the average (renewal reward). It costs its drafting, its
    row in a step, its bytes on the uplink, and a share `min_share` of the possible saving, which bounds the bytes spent
    on chains that will hardly be read. Tokens that the verifier has by its own drafts save nothing.

    Attributes:
        tokens: unverified tokens at all times, whatever they cost; 0 turns drafting off; None: as many as pay.
        max_tokens: most unverified tokens, however well they pay.
    """

    tokens: int | None = None
    max_tokens: int = 64
    min_share: float = 0.015

    def __post_init__(self) -> None:
        if self.tokens is not None and self.tokens < 0:
            raise InvalidArgument("must be 0 or more", field="window")

    def more(
        self,
        measured: Measurements,
        goal: Goal,
        most: int,
        *,
        in_flight: int,
        survival: float,
        acceptance: float,
        drafting_s: float,
        covered: int,
    ) -> int:
        """Return the tokens to draft now, at most `most`; 0: enough until the next commit.

        Args:
            measured: link and verifier.
            goal: goal of the verifier.
            most: limit by credit, the length of the text and that of a job.
            in_flight: drafted tokens that no commit has met.
            survival: chance that all of them agree with the target.
            acceptance: chance that a further one does, given that.
            drafting_s: time of a drafted token, in seconds.
            covered: next tokens that the verifier has by its own drafts before any of the edge's can come.
        """
        if self.tokens is not None:
            return max(0, min(most, self.tokens - in_flight))
        step_s, row_s = measured.step.fit()
        most = min(most, (self.max_tokens if step_s else min(FIRST_WINDOW, self.max_tokens)) - in_flight)
        if most <= 0 or not step_s:
            return max(0, most)
        round_trip_s, byte_s, token_s = measured.round_trip_s, measured.round_trip.slope, measured.pace.token_s
        saved_s = step_s
        if goal is Goal.EFFICIENCY:
            saved_s = step_s + round_trip_s
        elif token_s and round_trip_s < step_s:
            saved_s = min(step_s, token_s)
        unhidden = min(1.0, step_s / round_trip_s) if round_trip_s else 1.0  # share of drafting that the link leaves
        price_s = unhidden * drafting_s + (unhidden * self.min_share * saved_s + row_s + TOKEN_BYTES * byte_s)
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

    The step of the last commit ended about round_trip_s / 2 before the commit came at `commit_at`, and a verifier that
    runs ahead begins one every step_s (0: unknown, and drafts are always due); a message is round_trip_s / 2 on its
    way. So there is a deadline every step_s, at commit_at - round_trip_s + j step_s, and drafts may be held while the
    next look at them, in `next_s` seconds, comes before it.
    """
    if not step_s:
        return True
    since = now - (commit_at - round_trip_s)
    deadline = math.ceil(since / step_s) * step_s
    return since + next_s > deadline
