"""Which drafter is active in the next round: the protocol of selectors, and the one that never switches.

The objective is committed tokens a second, E[N]/E[T] (renewal reward), with each drafter's speed, its switch and the
link in T. `outrider.edge.selectors` has selectors that learn.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol, Self

from outrider.proto.errors import InvalidArgument


class RoundCosts(NamedTuple):
    """Costs of a round with each of K drafters, in seconds.

    Attributes:
        drafting_s: [K] time to draft one token.
        catch_up_s: [K] time to read one token that others have committed, in a batched pass.
        round_trip_s: round-trip time of a small message.
        step_s: a step of the verifier, without its rows.
        row_s: each row of a step; there is one more than drafts.
    """

    drafting_s: Sequence[float]
    catch_up_s: Sequence[float]
    round_trip_s: float
    step_s: float
    row_s: float


@dataclass(frozen=True, slots=True)
class SelectionView:
    """Basis of a choice among K drafters, the arms of a bandit.

    Attributes:
        round_s: [K] duration of a round with each arm without its switch, in seconds.
        switch_s: [K] time before each arm can draft, since it has to catch up, in seconds.
        waiting_s: time of a round in which the edge has nothing to draft and idle arms can catch up, in seconds.
        current: arm of the round before; None: there was none.
        delay_tokens: [K] tokens after a miss that the target writes alone, before drafts of each arm can reach it;
            empty: none, since it waits.
        alone_s: time of a token that the target writes alone, in seconds.

    Raises:
        InvalidArgument: no arm, lists of unequal length, or a time that is none; the field is named.
    """

    drafts: int
    round_s: tuple[float, ...]
    switch_s: tuple[float, ...]
    waiting_s: float = 0.0
    current: int | None = None
    delay_tokens: tuple[int, ...] = ()
    alone_s: float = 0.0

    def __post_init__(self) -> None:
        arms = len(self.round_s)
        if not arms or not len(self.switch_s) == len(self.delay_tokens or self.round_s) == arms:
            raise InvalidArgument("must hold one entry for each drafter, and there must be one", field="view.round_s")
        for times, field in ((self.round_s, "view.round_s"), (self.switch_s, "view.switch_s")):
            if not all(0 <= seconds < math.inf for seconds in times):
                raise InvalidArgument("must be finite numbers of seconds, 0 or more", field=field)

    @classmethod
    def of_rounds(cls, costs: RoundCosts, unread: Sequence[int], *, drafts: int, current: int | None) -> Self:
        """Return the view of synchronous rounds, of drafters that have not read `unread` [K] tokens of the text."""
        waiting_s = costs.round_trip_s + costs.step_s + costs.row_s * (drafts + 1)
        round_s = tuple([drafts * drafting_s + waiting_s for drafting_s in costs.drafting_s])
        switch_s = tuple(map(operator.mul, costs.catch_up_s, unread))
        return cls(drafts, round_s, switch_s, waiting_s, current)

    @classmethod
    def of_stream(cls, costs: RoundCosts, unread: Sequence[int], *, drafts: int, current: int | None) -> Self:
        """Return the view of a target that does not wait but goes on alone after a miss, until drafts reach it again.

        Drafts that come later meet a text that has gone on, and count if all before them were right too. A round is a
        step then, or the time that its drafts take where that is longer.
        """
        trip_s, alone_s = costs.round_trip_s, costs.step_s + costs.row_s
        step_s = costs.step_s + costs.row_s * (drafts + 1)
        round_s = tuple([max(step_s, drafts * drafting_s) for drafting_s in costs.drafting_s])
        switch_s = tuple(map(operator.mul, costs.catch_up_s, unread))
        delays = [math.ceil((trip_s + drafting_s) / alone_s) if alone_s else 0 for drafting_s in costs.drafting_s]
        return cls(drafts, round_s, switch_s, trip_s, current, tuple(delays), alone_s)

    @property
    def arms(self) -> range:
        return range(len(self.round_s))


class RoundOutcome(NamedTuple):
    """Evidence of a commit about the drafters.

    Attributes:
        committed: committed tokens: the accepted drafts and the target's own.
        verified: drafts that the target verified: the accepted ones and the first that missed.
        agreement: mean min(1, p(x) / q(x)) over the drafts, the estimate of block divergence; NaN: unknown.
        seconds: duration of the round, switch included.
        hits: [K] for each arm and each committed token that is new for it, in the order of the text, whether it
            proposed the token or would have; None: unknown. Empty: no arm has read anything.
    """

    view: SelectionView
    arm: int
    committed: int
    verified: int
    accepted: int
    agreement: float
    seconds: float
    hits: Sequence[Sequence[bool | None]] = ()


class Selector(Protocol):
    """A rule that chooses the active drafter, and may learn; one serves a session, or texts one after the other.

    Attributes:
        catches_up: whether it uses hits of teacher-forced proposals, so that idle drafters catch up.
        stride: uncomputed tokens below which it lets no idle arm catch up.
    """

    catches_up: ClassVar[bool] = False
    stride: int = 1

    def choose(self, view: SelectionView) -> int: ...

    def read_prompt(self, log_q: Sequence[float]) -> None:
        """Take each arm's mean log probability of the prompt's last tokens, [K] in nats; NaN: not known yet."""
        del log_q

    def score(self, view: SelectionView, chosen: int, unread: Sequence[int]) -> tuple[int, ...]:
        """Return the idle arms that should catch up during this round's wait, best first; there may be time for few.

        Catching up shows an arm's counterfactual hits, and shortens its switch if it is chosen. By now the arms have
        not read `unread` [K] tokens of the text.
        """
        del view, chosen, unread
        return ()

    def learn(self, outcome: RoundOutcome) -> None: ...


@dataclass(slots=True)
class StaticSelector(Selector):
    """Chooses the same drafter always."""

    arm: int = 0

    def choose(self, view: SelectionView) -> int:
        del view
        return self.arm

    def learn(self, outcome: RoundOutcome) -> None:
        """Learn nothing."""
