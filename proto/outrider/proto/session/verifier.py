"""The verifier's half of a session: committed tokens, and the drafts that may follow them."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.measures import Acceptance
from outrider.proto.policy.patience import (
    Plan,
    Prospect,
    VerifierView,
    best_block,
    expected_tokens,
    overtakes,
    plan_for,
)
from outrider.proto.session.acceptance import accept_drafts
from outrider.proto.session.admission import VerifierRules, check_continue, check_draft, check_open
from outrider.proto.session.received import ReceivedDrafts
from outrider.proto.types import (
    Commit,
    CommittedToken,
    Continue,
    Draft,
    DraftToken,
    FinishReason,
    Goal,
    Open,
    Opened,
    Report,
    Steering,
    SteeringRequest,
    Timing,
    token_ids,
)

PROBE_EVERY, PROBE = 12, 6  # while drafts do not pay, PROBE of them are requested every PROBE_EVERY tokens


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of a step for one session.

    Attributes:
        block: [k] the drafts.
        tokens_by_target: [k + 1] the target's tokens; `logprob` and `top` are those of the a drafts that agree and the
            token after them, where asked for.
        queue_s: time between being due and the step, in seconds.
        reward: mean of min(1, p / q) over the drafts; None: no q came.
        steering: vector of the state after the last draft that agrees, or else after the transcript, where
            `wanted_vector` asked for it.
    """

    block: tuple[DraftToken, ...]
    tokens_by_target: tuple[CommittedToken, ...]
    queue_s: float = 0.0
    verify_s: float = 0.0
    reward: float | None = None
    steering: Steering | None = None


class VerifierSession:
    """One text as the verifier sees it: committed tokens, and the drafts that may follow them."""

    def __init__(self, frame: Open, rules: VerifierRules, now: float) -> None:
        """Take the session, or refuse it before any compute.

        Raises:
            UnsupportedProtocol, TokenizerMismatch, InvalidArgument: a field is wrong; it is named.
        """
        check_open(frame, rules)
        self.id = frame.session
        self.noise = frame.sampling.noise or rules.noise
        room = rules.context_length - len(frame.prompt)
        self.sampling = replace(frame.sampling, max_tokens=min(frame.sampling.max_tokens, room), noise=self.noise)
        self.prompt_length = len(frame.prompt)
        self.transcript: list[int] = [*frame.prompt, *frame.committed]
        self.finish: FinishReason | None = None
        self.keep_s = min(frame.keep_s, rules.keep_s)
        self.turn = 0
        self.credit = rules.max_credit
        self.cached_tokens = 0  # of the transcript, for the next commit to tell
        self._frame = frame
        self._first_chain = 0  # of this turn
        self._granted = self.credit  # with which a turn begins
        self.logprobs = frame.logprobs
        self.top_logprobs = frame.top_logprobs
        self._rules = rules
        self._resumed = len(frame.committed)
        self._max_drafts = min(frame.max_drafts or rules.max_drafts, rules.max_drafts)
        self._window = frame.window or rules.max_credit
        self._patience = frame.patience
        self._wants_logp = frame.logp
        self._drafting = frame.drafting
        self._received = ReceivedDrafts(self.transcript, rules.max_credit, now, chain=-1, acceptance=Acceptance())
        self._report = Report(frame.drafting)
        self._ready_since = now
        self._messages_received = 0
        self._newest_arrival = now
        self._plan: Plan | None = None
        self._pays = True
        self._steering = frame.steering
        self._without_vector = math.inf  # commits since the last with a vector of this projection

    def opened(self) -> Opened:
        """Return the answer to Open."""
        rules = self._rules
        self._granted = self.credit
        return Opened(
            committed=self._resumed,
            credit=self.credit,
            max_tokens=self.sampling.max_tokens,
            verifier=rules.name,
            context_length=rules.context_length,
            guarantee=rules.guarantee,
            vocab_size=rules.vocab_size,
            goal=rules.goal,
            max_drafts=self._max_drafts,
            planned=self._patience is None and rules.patience is None,
            keep_s=self.keep_s,
            release=rules.release,
            steered=self.steered,
            noise=self.noise,
        )

    def continued(self, frame: Continue, now: float) -> VerifierSession:
        """Return the session of the next turn: that of a fresh Open with these measurements.

        Raises:
            InvalidArgument: a field is wrong; it is named, and this session stays as it was.
        """
        if not self.keep_s:
            raise InvalidArgument(
                "is 0, or this verifier keeps no sessions; open another stream for the next turn", field="open.keep_s"
            )
        if self.finish is None:
            raise InvalidArgument(
                "comes while a turn still runs; cancel it or wait for its last commit", field="frame.continuation"
            )
        prompt = check_continue(frame, self.transcript, self._first_chain, self._rules)
        sampling = frame.sampling or self._frame.sampling
        session = VerifierSession(
            replace(
                self._frame,
                prompt=prompt,
                committed=(),
                sampling=replace(sampling, noise=sampling.noise or self.noise),
                drafting=self._drafting,
                steering=self._steering,
            ),
            self._rules,
            now,
        )
        session.turn = self.turn + 1
        session.credit = session._granted = self._granted
        session._first_chain = frame.chain
        session._received = ReceivedDrafts(
            session.transcript,
            self._rules.max_credit,
            now,
            chain=frame.chain - 1,
            acceptance=self._received.acceptance,
        )
        session._report = self._report
        return session

    @property
    def generated(self) -> int:
        """Tokens of text so far."""
        return len(self.transcript) - self.prompt_length

    @property
    def chain(self) -> int:
        """Number of the newest chain; -1 before the first."""
        return self._received.chain

    @property
    def waits_for_drafts(self) -> bool:
        """Whether more drafts of the chain may come before the next commit."""
        return self._drafting and not self._received.complete

    @property
    def steered(self) -> bool:
        """Whether the verifier has the projection that the edge requests."""
        return self._steering is not None and self._steering.projection in self._rules.projections

    @property
    def wanted_vector(self) -> SteeringRequest | None:
        """Steering vector that the next commit should carry, unless it ends the text; None: none."""
        request = self._steering
        if request is None or not request.every or not self.steered or self._without_vector + 1 < request.every:
            return None
        return request

    def block(self, step_s: float = 0.0, row_s: float = 0.0) -> tuple[DraftToken, ...]:
        """Return the drafts [k] to verify in a step now: no more than pay, are allowed, or the text has room for.

        Args:
            step_s: this session's share of a step's time beside its rows, in seconds; 0: unknown, verify all.
            row_s: time of a row, in seconds.
        """
        view = self._view(step_s, row_s, self._ready_since)
        worthwhile = best_block(view)
        self._pays = worthwhile > 0 and (not self.joins_any_step or overtakes(view))
        if not worthwhile and self.generated % PROBE_EVERY == 0:
            worthwhile = 1  # a rise of acceptance shows only where drafts are verified
        return tuple(self._received.tokens[: max(0, min(worthwhile, self.max_useful_drafts))])

    @property
    def max_useful_drafts(self) -> int:
        """Drafts that one step can verify at most, as the session and the room that its text has left allow."""
        return min(self._max_drafts, self.sampling.max_tokens - self.generated - 1)

    def ready_at(self, step_s: float, row_s: float = 0.0) -> float:
        """Return the time by which the next step should begin, on the clock of `now`; infinite: at the next event.

        The arguments are those of `block`.
        """
        patience = self._patience or self._rules.patience or self._planned(step_s, row_s).patience
        enough = min(patience.drafts, self.max_useful_drafts, self._window, self.credit)
        if not self.waits_for_drafts or len(self._received) >= enough:
            return self._ready_since
        return self._ready_since + patience.seconds

    @property
    def joins_any_step(self) -> bool:
        """Whether the session joins any step that begins for others, with drafts or without, at the price of a row."""
        return self._patience is None and self._rules.patience is None and self._rules.goal is Goal.LATENCY

    def prospect(self, step_s: float, row_s: float, now: float) -> Prospect:
        """Return the expected tokens of a step now, and of one after the drafts that are due."""
        plan = self._planned(step_s, row_s)
        acceptance = self._received.acceptance.rate
        tokens_now = expected_tokens(acceptance, min(len(self._received), self._max_drafts))
        if not self.waits_for_drafts:
            return Prospect(0.0, tokens_now, tokens_now)
        wait_s = max(0.0, self._ready_since + plan.expected_s - now)
        return Prospect(wait_s, tokens_now, expected_tokens(acceptance, max(plan.drafts, len(self._received))))

    def _planned(self, step_s: float, row_s: float) -> Plan:
        """Return the plan for the drafts received when the session became ready; later ones do not change it."""
        if self._plan is None:
            self._plan = plan_for(self._view(step_s, row_s, self._ready_since))
        return self._plan

    def _view(self, step_s: float, row_s: float, now: float) -> VerifierView:
        return VerifierView(
            acceptance=self._received.acceptance.rate,
            step_s=step_s,
            row_s=row_s,
            drafting_s=self._report.drafting_s,
            round_trip_s=self._report.round_trip_s,
            max_drafts=self._max_drafts,
            received=len(self._received),
            since_miss=self._received.since_miss,
            since_miss_s=now - self._received.missed_at,
            goal=self._rules.goal,
        )

    # --- events ---

    def on_draft(self, draft: Draft, now: float) -> None:
        """Take drafts in; stale ones are ignored.

        Raises:
            InvalidArgument: no honest edge sends such drafts; the field is named.
            ResourceExhausted: there are more unverified drafts than any credit allows.
        """
        if draft.chain < self._first_chain:
            return  # it belongs to an earlier turn
        check_draft(draft, self.prompt_length, self._rules)
        self._messages_received += 1
        self._newest_arrival = now
        if self._received.receive(draft):
            self._plan = None  # what it waits for will not come

    def on_report(self, report: Report) -> None:
        """Replace the last report, and the request for vectors where this one has another."""
        self._report = report
        if report.steering is not None:
            if self._steering is None or report.steering.projection != self._steering.projection:
                self._without_vector = math.inf  # the edge's vector is of another projection
            self._steering = report.steering
        if report.acceptance:
            self._received.acceptance.believe(report.acceptance)
        self._drafting = report.drafting

    def on_cancel(self) -> Commit:
        """End the text; the last commit says so."""
        self.finish = FinishReason.CANCELLED
        return Commit(
            len(self.transcript), (), 0, self.credit, finish=self.finish, chain=max(0, self.chain), turn=self.turn
        )

    def on_verified(self, verified: Verified, now: float) -> Commit:
        """Make text of a verified block; only here do tokens enter the transcript."""
        tokens, accepted, self.finish = accept_drafts(
            verified.block,
            verified.tokens_by_target,
            generated=self.generated,
            sampling=self.sampling,
            eos_tokens=self._rules.eos_tokens,
        )
        start, ids = len(self.transcript), token_ids(tokens)
        self.transcript.extend(ids)
        if not self._pays:
            probe = min(PROBE, self._rules.max_credit)
            self.credit = probe if self.generated % PROBE_EVERY < len(tokens) else 0
        self._received.commit(ids, now)
        self._ready_since = now
        self._plan = None
        steering = verified.steering if self.finish is None else None  # no drafts are made after the end
        self._without_vector = self._without_vector + 1 if steering is None else 0
        cached_tokens, self.cached_tokens = self.cached_tokens, 0
        return Commit(
            start=start,
            tokens=tokens if self._wants_logp else tuple([CommittedToken(t.id, None, *t[2:]) for t in tokens]),
            accepted=accepted,
            credit=self.credit,
            reward=verified.reward,
            steering=steering,
            timing=Timing(
                echo=self._messages_received,
                hold_s=now - self._newest_arrival,
                queue_s=verified.queue_s,
                verify_s=verified.verify_s,
            ),
            finish=self.finish,
            chain=max(0, self.chain),
            verified=len(verified.block),
            turn=self.turn,
            cached_tokens=cached_tokens,
        )
