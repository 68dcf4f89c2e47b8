"""The guard of a text's stream: it asks a quiet verifier for signs of life, and finds another where none come.

A suspect stream is left only once the place to go to has answered over a connection of its own. Where the whole link
stands still, or there is no other verifier, nothing answers, and the stream stays: its session is still there when the
verifier wakes. A verifier whose connection alone is dead answers over the new one, and is opened again.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass, field

from outrider.edge.link.link import Channels, Stream
from outrider.edge.link.routes import Route
from outrider.proto.errors import OutriderError
from outrider.proto.plumbing.logs import about
from outrider.proto.policy.suspicion import AnswerLaw, ReopenBudget, SilenceWatch, Silent
from outrider.proto.session import EdgeSession
from outrider.proto.types import CloudFrame, Lease

ANSWER_WITHIN_S = 2.0  # of another verifier; longer where answers usually take long

log = logging.getLogger(__name__)


@dataclass(slots=True)
class SilenceGuard:
    """Guard of the streams of one session.

    Attributes:
        machine: session machine.
        route: where other verifiers are found.
        channels: connections to them.
        session: id of the session.
        begun: set when a turn begins; an idle session is not watched.
        budget: what all texts of the edge share, with the bounds.
        law: answers of this session's verifiers so far.
    """

    machine: EdgeSession
    route: Route
    channels: Channels
    session: str
    begun: asyncio.Event
    budget: ReopenBudget
    law: AnswerLaw = field(default_factory=AnswerLaw)
    _watch: SilenceWatch | None = None

    def hear(self, frame: CloudFrame) -> None:
        """Note a frame of the stream that is guarded."""
        if self._watch is not None:
            self._watch.hear(frame, time.monotonic())

    async def find_another(self, stream: Stream, lease: Lease, avoid: tuple[str, ...]) -> Lease:
        """Watch `stream`, just opened by `lease`, until it is to be left; return the lease of where to go.

        Args:
            stream: stream whose frames `hear` gets.
            lease: what it was opened with.
            avoid: verifiers lost before, the newest last.
        """
        opened_at = time.monotonic()
        watch = self._watch = SilenceWatch(self.law, self.budget.rules, opened_at)
        while True:
            if self.machine.done:
                self.begun.clear()
                await self.begun.wait()
                watch.resume(time.monotonic())
            await asyncio.sleep(max(0.0, watch.next_look - time.monotonic()))
            if self.machine.done:
                continue
            word = watch.look(time.monotonic(), self.machine.round_trip_s)
            if isinstance(word, Silent):
                self._note(word, lease)
                found = await self._another(word, lease, avoid, opened_at)
                now = time.monotonic()
                if self.machine.done:  # the turn was left meanwhile, and its end reported before the lease came
                    await self.route.give_back(self.session)
                elif watch.silent and found is not None:
                    self.budget.take(lease.verifier, opened_at, now)
                    self.machine.statistics.reopened += 1
                    return found
                watch.postpone(now)
            elif word is not None:
                stream.send(word)

    def _note(self, word: Silent, lease: Lease) -> None:
        if word.again:
            return
        self.machine.statistics.suspected += 1
        line = "verifier %s is silent for %.1f s, %.1f s are usual at most; looking for another"
        log.info(line, lease.verifier, word.silence_s, word.bound_s, extra=about(self.session, lease.verifier))

    async def _another(self, word: Silent, lease: Lease, avoid: tuple[str, ...], opened_at: float) -> Lease | None:
        """Return a lease of a verifier that answers now; None: none does, or suspicion has cost enough already."""
        if not self.budget.allows(lease.verifier, opened_at, time.monotonic()):
            return None
        machine = self.machine
        avoid = (*(name for name in avoid if name != lease.verifier), lease.verifier)
        try:
            async with asyncio.timeout(max(ANSWER_WITHIN_S, word.bound_s)):
                found = await self.route.lease(
                    self.session,
                    avoid,
                    machine.transcript,
                    machine.precision,
                    machine.next_epoch,
                    machine.needed_context,
                    suspected=True,
                )
                await self.channels.renew(found.address, found.tls_name if found.tls else None)
                return found
        except (OutriderError, TimeoutError) as error:
            log.debug("no other verifier answers: %r", error)
            return None
