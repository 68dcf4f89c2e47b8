"""Which drafter drafts the next round: the protocol of selectors, and the one that never switches.

A selector is asked at the beginning of a round (`choose`), says which idle drafters are worth reading along (`score`),
and learns from each round's outcome (`learn`). The objective is committed tokens a second, E[N]/E[T] (renewal reward),
with each drafter's speed, its switch and the link in T. `outrider.edge.policies.selection` has selectors that learn.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Protocol, Self

from outrider.proto.errors import InvalidArgument


@dataclass(frozen=True, slots=True)
class Arm:
    """A drafter. Both costs are known before it is chosen.

    Attributes:
        name: of the drafter.
        drafting_s: to draft one token.
        catch_up_s: to read one token that others have committed, in one batched pass with the rest.

    Raises:
        InvalidArgument: a cost is no time; the field is named.
    """

    name: str
    drafting_s: float
    catch_up_s: float

    def __post_init__(self) -> None:
        for field in ("drafting_s", "catch_up_s"):
            if not 0 <= getattr(self, field) < math.inf:
                raise InvalidArgument("must be a finite number of seconds, 0 or more", field=f"arm.{field}")


@dataclass(frozen=True, slots=True)
class SelectionView:
    """What a choice is made on; K arms.

    Attributes:
        drafts: of a round.
        round_s: [K] seconds that a round with this arm takes, without its switch.
        switch_s: [K] seconds before this arm can draft, since it has not read what others have committed.
        behind: [K] tokens that it has not read.
        waiting_s: of a round, in which the edge has nothing to draft and can read with idle arms at no loss.
        current: the arm of the round before; None: there was none.
        lead: [K] tokens after a miss that the target writes alone, before drafts of this arm can reach it; empty: none,
            since it waits.
        alone_s: of the target for a token that it writes alone.

    Raises:
        InvalidArgument: no arm, or lists of unequal length.
    """

    drafts: int
    round_s: tuple[float, ...]
    switch_s: tuple[float, ...]
    behind: tuple[int, ...]
    waiting_s: float = 0.0
    current: int | None = None
    lead: tuple[int, ...] = ()
    alone_s: float = 0.0

    def __post_init__(self) -> None:
        lists = (self.switch_s, self.behind, self.lead or self.round_s)
        if not self.round_s or any(len(entries) != len(self.round_s) for entries in lists):
            raise InvalidArgument("must hold one entry for each drafter, and there must be one", field="view.round_s")

    @classmethod
    def of_rounds(
        cls,
        arms: Sequence[Arm],
        behind: Sequence[int],
        *,
        drafts: int,
        round_trip_s: float,
        step_s: float,
        row_s: float,
        current: int | None,
    ) -> Self:
        """Of synchronous rounds: draft, send, wait for the verdict, begin again.

        Args:
            arms: [K] the drafters.
            behind: [K] tokens that each has not read.
            drafts: of a round.
            round_trip_s: of a small message and its answer.
            step_s: of the verifier, beside its rows.
            row_s: of each row in a step; a round has one more than drafts.
            current: the arm of the round before.
        """
        waiting_s = round_trip_s + step_s + row_s * (drafts + 1)
        return cls(
            drafts=drafts,
            round_s=tuple(drafts * arm.drafting_s + waiting_s for arm in arms),
            switch_s=tuple(arm.catch_up_s * unread for arm, unread in zip(arms, behind, strict=True)),
            behind=tuple(behind),
            waiting_s=waiting_s,
            current=current,
        )

    @classmethod
    def of_stream(
        cls,
        arms: Sequence[Arm],
        behind: Sequence[int],
        *,
        drafts: int,
        round_trip_s: float,
        step_s: float,
        row_s: float,
        current: int | None,
    ) -> Self:
        """Of a target that does not wait: it goes on alone after a miss, while the edge hears of it and drafts anew.

        Drafts that come later meet a text that has gone on, and count if all before them were right too. A round is a
        step then, or the time that its drafts take where that is longer. Arguments as of `of_rounds`.
        """
        alone_s = step_s + row_s
        return cls(
            drafts=drafts,
            round_s=tuple(max(step_s + row_s * (drafts + 1), drafts * arm.drafting_s) for arm in arms),
            switch_s=tuple(arm.catch_up_s * unread for arm, unread in zip(arms, behind, strict=True)),
            behind=tuple(behind),
            waiting_s=round_trip_s,
            current=current,
            lead=tuple(math.ceil((round_trip_s + arm.drafting_s) / alone_s) if alone_s else 0 for arm in arms),
            alone_s=alone_s,
        )

    @property
    def arms(self) -> range:
        """Their indices."""
        return range(len(self.round_s))


@dataclass(frozen=True, slots=True)
class RoundOutcome:
    """What a commit tells.

    Attributes:
        view: that the choice was made on.
        arm: that drafted.
        committed: tokens: the accepted drafts and the target's own.
        verified: drafts that the target put to the question: the accepted ones and the first that missed.
        accepted: of them.
        agreement: mean min(1, p(x) / q(x)) over the drafts, the estimate of block divergence; NaN: not known.
        seconds: that the round took, switch included.
        hits: [K] for each arm, whether it proposed, or would have, the committed tokens of which nothing was said of it
            before, in the order of the text; None: nobody knows. A token that it had nothing to do with, since its
            round was full, counts as a miss. May itself be empty: nobody has read anything.
        confidence: [K] beside `hits`: the probability that each arm gives to what it proposed there, or would have;
            0: it proposed nothing; NaN: nobody knows. May itself be empty: no arm says.
    """

    view: SelectionView
    arm: int
    committed: int
    verified: int
    accepted: int
    agreement: float
    seconds: float
    hits: tuple[tuple[bool | None, ...], ...] = ()
    confidence: tuple[tuple[float, ...], ...] = ()


class Selector(Protocol):
    """Which drafter drafts. Holds what it has learned; one for each session, or for many texts one after the other.

    Attributes:
        catches_up: whether hits of drafters are of use to it that come from reading and not from drafting.
    """

    catches_up: ClassVar[bool] = False

    def choose(self, view: SelectionView) -> int:
        """The arm of the round that begins."""
        ...

    def read_prompt(self, log_q: Sequence[float]) -> None:
        """[arms] nats a token that each gave to the end of the prompt; NaN: not known yet, and told later perhaps."""
        del log_q

    def score(self, view: SelectionView, chosen: int) -> tuple[int, ...]:
        """Idle arms to read with during this round's wait, the most wanted first; what does not fit is left.

        Reading tells an arm's counterfactual hits, and leaves less to catch up with if it is chosen.
        """
        del view, chosen
        return ()

    def learn(self, outcome: RoundOutcome) -> None:
        """What the round gave."""
        ...


@dataclass(slots=True)
class StaticSelector(Selector):
    """Always the same drafter."""

    arm: int = 0

    def choose(self, view: SelectionView) -> int:
        """The arm of the round that begins."""
        del view
        return self.arm

    def learn(self, outcome: RoundOutcome) -> None:
        """Nothing to learn."""
