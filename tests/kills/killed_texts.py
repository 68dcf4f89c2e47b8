"""Texts that are asked of daemons without a pause, and all that a client sees of each."""

from __future__ import annotations

import asyncio
import itertools
import random
import time
from collections.abc import Sequence
from dataclasses import dataclass, field

from http_streams import ask
from killed_fleet import Member
from questions import Question

ASK_AGAIN_S = 0.1
RETRIED = (429, 503)


@dataclass
class TextRun:
    """One text, from the request that was taken to its end; times are those of the monotonic clock.

    Attributes:
        question: what was asked for, and the text that must follow.
        daemon: name of the daemon.
        process: process that took the request.
        moments: when the request went, when each piece came, and when it ended.
        text: what came.
        done: the daemon said that it is whole.
        error: what the client saw instead; empty: nothing.
        request_id: by which logs name it.
    """

    question: Question
    daemon: str
    process: int
    moments: list[float]
    text: str = ""
    done: bool = False
    error: str = ""
    request_id: str = ""

    def gap_over(self, begin: float, end: float) -> float:
        """Return the longest time without a piece that meets an interval, in seconds; 0: the text did not run then."""
        if end < self.moments[0] or begin >= self.moments[-1]:
            return 0.0
        return max((e - b for b, e in itertools.pairwise(self.moments) if b <= end and begin < e), default=0.0)


@dataclass
class Clients:
    """Clients that ask one text after the other, as many at each daemon at once."""

    daemons: Sequence[Member]
    questions: Sequence[Question]
    model: str
    at_once: int
    rng: random.Random
    runs: list[TextRun] = field(default_factory=list)
    refusals: int = 0
    _asking: list[asyncio.Task[None]] = field(default_factory=list)
    _over: bool = False

    def start(self) -> None:
        """Begin to ask."""
        self._over = False
        each = (daemon for daemon in self.daemons for _ in range(self.at_once))
        self._asking = [asyncio.create_task(self._ask_on(daemon)) for daemon in each]

    async def stop(self) -> None:
        """Wait for the texts that run, and ask no more."""
        self._over = True
        await asyncio.gather(*self._asking)

    async def _ask_on(self, daemon: Member) -> None:
        while not self._over:
            run = await self._ask(daemon, self.rng.choice(self.questions))
            if run is None:
                self.refusals += 1
                await asyncio.sleep(ASK_AGAIN_S)
            else:
                self.runs.append(run)

    async def _ask(self, daemon: Member, question: Question) -> TextRun | None:
        """Ask once; None: it was refused, before it became a text."""
        run = TextRun(question, daemon.name, daemon.pid, [time.monotonic()])
        answer = await ask(daemon.port, question.asks(self.model), lambda _: run.moments.append(time.monotonic()))
        run.moments.append(time.monotonic())
        if answer.status in RETRIED:
            await asyncio.sleep(min(1.0, float(answer.headers["retry-after"])))
            return None
        run.text, run.done = answer.text, answer.done
        run.error = str((answer.error or {}).get("message", ""))
        if answer.status == 0 and (run.process in daemon.killed or run.error.startswith("ConnectionRefused")):
            return None  # nobody listens yet, or it was killed before it answered
        run.request_id = answer.headers.get("x-request-id", "")
        return run
