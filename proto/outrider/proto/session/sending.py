"""Times at which an edge sends drafts (in one message, just in time for a step) and reports measurements."""

from __future__ import annotations

import itertools
import math
import operator
from dataclasses import dataclass

from outrider.proto.policy.branches import BRANCH_BYTES
from outrider.proto.policy.window import TOKEN_BYTES, due_to_flush, worth_a_message
from outrider.proto.session.chain import Chain
from outrider.proto.session.drafting import Drafting
from outrider.proto.session.events import EdgeInstruction, Send
from outrider.proto.session.measuring import Meter
from outrider.proto.session.steering import VectorKeeper
from outrider.proto.session.stream import EdgeStream
from outrider.proto.session.text import EdgeText
from outrider.proto.types import DraftToken, Goal, Report, token_ids

_TOKENS_OF_A_BRANCH = BRANCH_BYTES // TOKEN_BYTES  # whose bytes it has


@dataclass(frozen=True, slots=True, eq=False)
class Sender:
    """Sends the drafts of one text, and reports to its verifier."""

    _text: EdgeText
    _chain: Chain
    _stream: EdgeStream
    _meter: Meter
    _drafting: Drafting
    _vectors: VectorKeeper | None
    _send_q: bool

    def flush(self, now: float) -> list[EdgeInstruction]:
        """Send the drafts when the chain is complete, or when waiting for more would miss a step."""
        chain, stream, drafting = self._chain, self._stream, self._drafting
        if not stream.takes_drafts:
            return []
        unsent = chain.unsent(stream.credit)  # it may have shrunk
        if not unsent:
            return self._say_complete(now)
        if chain.sent and not self._may_wait_long() and not self._worth_a_message():
            return []  # the verifier has the beginning of the chain; the rest goes after the next commit
        allowance = drafting.allowance()
        if allowance and not (len(chain) >= stream.terms.max_drafts > chain.sent or self._due(now)):
            return []
        return [self._send(unsent, now, complete=not (allowance or drafting.job_runs))]

    def send_branches(self, now: float, *, finished: bool) -> list[EdgeInstruction]:
        """Send the branches made when no more are worth making, or when more would come too late."""
        message = self._drafting.branching.message(now, finished=finished)
        return [] if message is None else [Send(message)]

    def report(self) -> list[EdgeInstruction]:
        """Report where measurements for the verifier's patience have changed by a quarter."""
        if not self._stream.connected:
            return []
        drafting, meter = self._drafting, self._meter
        mine = meter.drafter(drafting.active)
        request = None
        if self._vectors is not None and self._text.statistics.steered:
            request = self._vectors.changed_request(drafting=drafting.enabled)
        acceptance = mine.calibration.acceptance.rate
        report = Report(drafting.enabled, mine.drafting_s.value, meter.round_trip_s, acceptance, request)
        return [Send(report)] if self._stream.changed(report, wants_to_lead=drafting.should_lead) else []

    def _say_complete(self, now: float) -> list[EdgeInstruction]:
        """Send an empty end of the chain to a verifier that waits in vain."""
        drafting = self._drafting
        if not (self._stream.connected and drafting.enabled) or drafting.job_runs or self._chain.said_complete:
            return []
        if not self._may_wait_long() or drafting.allowance():
            return []
        return [self._send([], now, complete=True)]

    def _may_wait_long(self) -> bool:
        """Return whether the verifier may wait for long: not one that plans and has drafts or a long link."""
        stream = self._stream
        if not stream.credit:
            return False  # it wants no drafts
        if not stream.terms.planned or stream.terms.goal is Goal.EFFICIENCY:
            return True
        return not self._chain.sent and self._meter.round_trip_s < self._meter.measurements.step.mean

    def _worth_a_message(self) -> bool:
        measured = self._meter.measurements
        survival = itertools.accumulate(self._meter.chances(self._chain, self._drafting.active), operator.mul)
        expected = sum(itertools.islice(survival, self._chain.sent, None))  # of the unsent drafts, accepted ones
        return worth_a_message(expected, step_s=measured.step.mean, byte_s=measured.round_trip.slope)

    def _due(self, now: float) -> bool:
        meter = self._meter
        return due_to_flush(
            now,
            commit_at=meter.commit_at,
            round_trip_s=meter.round_trip_s,
            step_s=meter.measurements.step.mean,
            next_s=self._drafting.last_job_s,
        )

    def _send(self, drafts: list[DraftToken], now: float, *, complete: bool) -> Send:
        confidence = [draft.confidence for draft in drafts]
        with_q = self._send_q and not any(map(math.isnan, confidence))
        ids = token_ids(drafts)
        tokens = tuple(map(DraftToken, ids, confidence) if with_q else map(DraftToken, ids))
        sent = self._chain.sent
        branches = self._drafting.branching.leaves(self._drafting.active, sent) if drafts else ()
        self._meter.send_draft(len(drafts) + _TOKENS_OF_A_BRANCH * len(branches), now)
        self._text.statistics.messages += 1
        self._text.statistics.sent_beside += len(branches)
        start = len(self._text.tokens) + sent
        return Send(self._chain.send(start, tokens, self._drafting.drafter, branches, complete=complete))
