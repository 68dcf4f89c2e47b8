"""The streams of one text, one after the other: when one is left, whom the next avoids. Pure."""

from __future__ import annotations

from outrider.proto.session import EdgeSession, Reopen

MAX_AVOIDED = 16  # verifiers that a lease request names


class Attempts:
    """The attempts of one text to reach verifiers; its shell opens the streams and closes them.

    Attributes:
        reopen: when to open the next stream, as the machine says; None: it has not said that.
    """

    def __init__(self, machine: EdgeSession) -> None:
        self.reopen: Reopen | None = None
        self._machine = machine
        self._lost: list[str] = []

    @property
    def avoid(self) -> tuple[str, ...]:
        """Verifiers that were just lost, the newest last."""
        return tuple(self._lost[-MAX_AVOIDED:])

    @property
    def wanted(self) -> bool:
        """Whether there is a text to open streams for."""
        return not self._machine.done

    @property
    def stays(self) -> bool:
        """Whether to read on from the stream that the verifier has answered."""
        return self._machine.connected and self.reopen is None

    @property
    def pause_s(self) -> float:
        """Seconds from the end of a stream to the next attempt."""
        return self.reopen.after_s if self.reopen is not None else 0.0

    def begin(self) -> None:
        """Begin an attempt with a new lease."""
        self.reopen = None

    def answered(self) -> None:
        """Note that the verifier has answered the Open."""
        if self._machine.connected:  # else its terms were refused
            self._lost.clear()

    def failed(self, verifier: str) -> None:
        """Note that a stream to `verifier` broke, was refused or left while a text ran."""
        self._lost = [*(name for name in self._lost if name != verifier), verifier]
