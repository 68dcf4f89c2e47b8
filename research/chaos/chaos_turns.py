"""One turn that a user asks for, and the check of what the user gets."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.proto.session import Done, EdgeSession, Emit
from outrider.proto.types import CommittedToken, FinishReason, Sampling
from research.chaos.chaos_target import ToyTarget
from research.chaos.world import Violation


@dataclass(frozen=True, slots=True)
class Turn:
    """A turn of a conversation.

    Attributes:
        prompt: new tokens.
        after_s: time that the user thinks before it, in seconds.
        forgets: tokens at the end of the transcript that it does not follow.
    """

    prompt: tuple[int, ...]
    sampling: Sampling
    after_s: float = 0.0
    forgets: int = 0


class TurnCheck:
    """Compares what a user gets with the text of plain decoding, token by token.

    Attributes:
        emitted: tokens so far.
        cancelled: whether the user has stopped the turn.
    """

    def __init__(self, turn: Turn, prompt: tuple[int, ...], target: ToyTarget) -> None:
        self.emitted: list[CommittedToken] = []
        self.cancelled = False
        self._prompt = prompt
        self._text, self._finish = target.text(prompt, turn.sampling.max_tokens)
        self._ended = False

    def emit(self, emit: Emit) -> None:
        """Fail where tokens are lost, repeated, late or others than the target's."""
        start = len(self._prompt) + len(self.emitted)
        if self._ended:
            raise Violation("tokens come after the end of their turn")
        if emit.start != start:
            raise Violation(f"tokens come for position {emit.start}; the user has those before {start}")
        wanted = self._text[len(self.emitted) : len(self.emitted) + len(emit.tokens)]
        if emit.tokens != wanted:
            raise Violation(f"position {start}: {emit.tokens} instead of {wanted}")
        self.emitted += emit.tokens

    def end(self, done: Done, machine: EdgeSession) -> None:
        """Fail where the turn ends twice, too soon, for another reason or with other counts than plain decoding's."""
        if self._ended:
            raise Violation("a turn ends twice")
        self._ended = True
        count = len(self.emitted)
        if machine.statistics.committed != count:
            raise Violation(f"the usage says {machine.statistics.committed} tokens; the user has {count}")
        if tuple(machine.transcript[len(self._prompt) :]) != tuple(token.id for token in self.emitted):
            raise Violation("the transcript is not what the user has")
        if done.error is not None:
            return
        whole = count == len(self._text)
        if not (whole and done.finish is self._finish) and not (
            self.cancelled and done.finish is FinishReason.CANCELLED and count <= len(self._text)
        ):
            raise Violation(f"ends with {done.finish} after {count} tokens instead of {self._finish}")
