"""The verifier's half of a session: committed tokens, the drafts that may follow, and whether to wait for them.

Its parts, in this order: the rules that it announces, the session, the checks of frames against the rules, and the
branches that a step verifies beside the chain, which are those that pay for their rows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from outrider.proto.errors import (
    InvalidArgument,
    PromptTooLong,
    ResourceExhausted,
    TokenizerMismatch,
    Unavailable,
    UnknownToken,
    UnsupportedProtocol,
)
from outrider.proto.policy.likely_branches import MAX_BRANCHES
from outrider.proto.policy.measurements import Acceptance
from outrider.proto.policy.patience import (
    LATE,
    MARGIN_S,
    Plan,
    Prospect,
    VerifierView,
    best_block,
    expected_tokens,
    overtakes,
    plan_for,
)
from outrider.proto.policy.trees import Run, best_tree
from outrider.proto.session.acceptance import accept_drafts
from outrider.proto.session.both_ends import BothEnds, DraftingHere, LocalJob
from outrider.proto.session.received import ReceivedDrafts
from outrider.proto.session.selection import DrafterName
from outrider.proto.session.service_record import ServiceRecord
from outrider.proto.types import (
    LATER_SETTINGS,
    PROTOCOL_VERSION,
    BlockBranch,
    Branch,
    Branches,
    Commit,
    CommittedToken,
    Continue,
    Draft,
    DraftToken,
    FinishReason,
    Goal,
    Guarantee,
    Open,
    Opened,
    Patience,
    Report,
    Sampling,
    Steering,
    SteeringRequest,
    Timing,
    token_ids,
)

PROBE_EVERY, PROBE = 12, 6  # while drafts do not pay, PROBE of them are requested every PROBE_EVERY tokens
PROBE_RARELY_EVERY = 48  # where the verifier drafts itself
RATE_FADE = 0.9  # of what is known of a session's rate, at each commit
_UNKNOWN_SHARE = 0.4  # of misses whose token is the first of a branch, where its edge does not say

_Candidate = tuple[Run, tuple[DraftToken, ...]]


@dataclass(frozen=True, slots=True)
class VerifierRules:
    """Rules that a verifier announces to its sessions; fixed while it runs.

    Attributes:
        max_credit: most unverified drafts of a session.
        patience: how long to wait for drafts; None: planned, from each session's own measurements.
        max_patience_s: longest that a step waits for drafts, whatever an edge asks for, in seconds.
        keep_s: longest time that an idle session is kept at its edge's request, in seconds.
        projections: projections whose steering vectors the verifier can make.
        scores_prompts: whether it can tell the log probabilities of prompts.
    """

    name: str
    model: str
    tokenizer_sha256: str
    vocab_size: int
    context_length: int
    eos_tokens: frozenset[int]
    max_drafts: int = 16
    max_credit: int = 64
    patience: Patience | None = None
    max_patience_s: float = 10.0
    goal: Goal = Goal.LATENCY
    guarantee: Guarantee = Guarantee.DISTRIBUTION
    keep_s: float = 300.0
    release: str = ""
    projections: frozenset[str] = frozenset()
    precision: str = ""
    scores_prompts: bool = True
    trees: bool = False


@dataclass(frozen=True, slots=True)
class Verified:
    """Result of a step for one session.

    Attributes:
        block: [k] the drafts, or those along the branch that the target's tokens took.
        tokens_by_target: [k + 1] the target's tokens; `facts` are those of the a drafts that agree and the token after
            them, where asked for.
        queue_s: time between being due and the step, in seconds.
        reward: mean of min(1, p / q) over the drafts; None: no q came.
        steering: vector of the state after the last draft that agrees, or else after the transcript, where
            `wanted_vector` asked for it.
        beside: other drafts that the step verified.
    """

    block: tuple[DraftToken, ...]
    tokens_by_target: tuple[CommittedToken, ...]
    queue_s: float = 0.0
    verify_s: float = 0.0
    reward: float | None = None
    steering: Steering | None = None
    beside: int = 0


class VerifierSession:
    """One text as the verifier sees it: committed tokens, and the drafts that may follow them.

    Attributes:
        received: drafts of the edge.
        ends: drafts of both ends, where the verifier has a drafter of its own.
        report: newest report of the edge; `drafting`: whether it drafts.
        ready_since: time from which the next step could begin, in seconds.
        pays: whether the edge's drafts are worth their while.
        wants_logp: whether commits have log probabilities.
        branches: branches that the step of the newest block verifies beside it.
        service: service that the text asks for; None: none.
        record: what became of it.
    """

    def __init__(self, frame: Open, rules: VerifierRules, now: float, here: DraftingHere | None = None) -> None:
        """Take the session, or refuse it before any compute.

        Args:
            frame: the edge's request.
            rules: rules of the verifier.
            now: time on the clock of all events, in seconds.
            here: drafter of the verifier's own; None: it has none.

        Raises:
            UnsupportedProtocol, TokenizerMismatch, InvalidArgument: a field is wrong; it is named.
            Unavailable: the text was promised more positions than the target has.
        """
        _check_open(frame, rules)
        self.id, self.epoch = frame.session, frame.epoch
        self.sampling = _limited(frame, rules)
        self.eos_tokens = rules.eos_tokens
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
        self.learning = frame.learning
        self.logprobs, self.top_logprobs = frame.logprobs, frame.top_logprobs
        self.prompt_logprobs, self.prompt_logprobs_from = frame.prompt_logprobs, max(1, frame.prompt_logprobs_from)
        self._rules, self.wants_logp = rules, frame.logp
        self._resumed = len(frame.committed)
        self.received = ReceivedDrafts(self.transcript, rules.max_credit, now, chain=-1, acceptance=Acceptance())
        self.ends: BothEnds | None = None
        if here is not None and frame.drafts_here != 0:
            self.ends = BothEnds(here, self.received, self.transcript, frame.drafts_here)
            self.ends.edge_drafts = frame.drafting
        self.report = Report(frame.drafting)
        self.drafting = frame.drafting
        self.ready_since = now
        self.pays = True
        self.max_drafts = min(frame.max_drafts or rules.max_drafts, rules.max_drafts)
        self.branches: tuple[BlockBranch, ...] = ()
        self.service = frame.service
        self.record = ServiceRecord(frame.service) if frame.service is not None else None
        self._recent_tokens = self._recent_s = 0.0
        self._trees = rules.trees and frame.trees
        self._patience = frame.patience or rules.patience
        self._window = frame.window or rules.max_credit
        self._plan: Plan | None = None
        self._messages_received, self._newest_arrival = 0, now
        self._steering = frame.steering
        self._without_vector = math.inf  # commits since the last with a vector of this projection

    def opened(self) -> Opened:
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
            max_drafts=self.max_drafts,
            planned=self._patience is None,
            keep_s=self.keep_s,
            release=rules.release,
            steered=self.steered,
            drafter_here=self.own_drafter,
            branches=True,
            precision=rules.precision,
            epoch=self.epoch,
            settings=LATER_SETTINGS,
            eos_tokens=tuple(sorted(self.eos_tokens)),
            trees=rules.trees,
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
        prompt = _check_continue(frame, self.transcript, self._first_chain, self._rules)
        session = VerifierSession(
            replace(
                self._frame,
                prompt=prompt,
                committed=(),
                sampling=frame.sampling or self._frame.sampling,
                drafting=self.drafting,
                steering=self._steering,
                prompt_logprobs=None,
                prompt_logprobs_from=0,
                context_length=0,
            ),
            self._rules,
            now,
        )
        session.turn = self.turn + 1
        session.credit = session._granted = self._granted
        session._first_chain = frame.chain
        session.received = self.received.continued(session.transcript, frame.chain, now)
        session.report, session.ends = self.report, self.ends
        if session.ends is not None:
            session.ends.begin_turn(session.received, session.transcript, frame.start)
        return session

    @property
    def generated(self) -> int:
        return len(self.transcript) - self.prompt_length

    def rate(self, now: float) -> float:
        """Return the tokens a second of late, with the time since the newest commit; 0: not known yet."""
        return self._recent_tokens / (self._recent_s + now - self.ready_since) if self._recent_s else 0.0

    @property
    def chain(self) -> int:
        """Number of the newest chain; -1 before the first."""
        return self.received.chain

    @property
    def drafter(self) -> DrafterName:
        """Name and version of the drafter of the edge's newest drafts, as the edge says; empty: it says none."""
        return self.received.drafter

    @property
    def own_drafter(self) -> str:
        """The verifier's own drafter in this text, as name@version; empty: there is none."""
        return self.ends.here.name if self.ends is not None else ""

    def drafts(self) -> list[DraftToken]:
        """Return the drafts that follow the transcript, the edge's first."""
        return self.received.tokens if self.ends is None else self.ends.chain()

    @property
    def waits_for_drafts(self) -> bool:
        """Whether more drafts of the chain may come before the next commit."""
        from_edge = self.drafting and not self.received.complete
        if self.ends is None:
            return from_edge
        return self.ends.drafts_here or (self.ends.awaits_edge and from_edge)

    @property
    def steered(self) -> bool:
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
            step_s: time of a step beside its rows, in seconds; 0: unknown, verify all.
            row_s: time of a row of every session in the step, in seconds: they all wait for the rows of each.
        """
        room, view = self.max_useful_drafts, self._view(step_s, row_s, self.ready_since)
        worthwhile = best_block(view)
        pays = overtakes(view) if self.ends is None else self.ends.edge_pays
        self.pays = worthwhile > 0 and (not self.joins_any_step or pays)
        drafts = self.drafts()
        if self.ends is not None and drafts and drafts[-1].other:
            worthwhile = self.ends.worth_their_rows(row_s)
        probe = self.generated % PROBE_EVERY == 0  # a rise of acceptance shows only where drafts are verified
        length, self.branches = max(0, min(worthwhile or int(probe), room)), ()
        if self._trees and worthwhile and room > 0:
            row_share = row_s / step_s if step_s else 0.0
            beside = _branches_beside(
                drafts, self.received, self.ends, depth=room, room=self.max_drafts, row_share=row_share
            )
            length = min(length, len(drafts), self.max_drafts - sum(len(branch.drafts) for branch in beside))
            self.branches = tuple(branch for branch in beside if branch.index <= length)
        # The edge's drafter is rewarded for its own drafts alone.
        return tuple([DraftToken(draft.id, other=True) if draft.other else draft for draft in drafts[:length]])

    @property
    def max_useful_drafts(self) -> int:
        """Drafts that one step can verify at most, as the session and the room that its text has left allow."""
        return min(self.max_drafts, self.sampling.max_tokens - self.generated - 1)

    def ready_at(self, step_s: float, row_s: float = 0.0) -> float:
        """Return the time by which the next step should begin, on the clock of `now`; infinite: at the next event."""
        patience = self._patience or self._planned(step_s, row_s).patience
        from_edge = self.ends is None or not self.ends.drafts_here  # what is made here no credit bounds
        enough = min(patience.drafts, self.max_useful_drafts, *((self._window, self.credit) if from_edge else ()))
        if not self.waits_for_drafts or len(self.drafts()) >= enough:
            return self.ready_since
        return self.ready_since + min(patience.seconds, self._rules.max_patience_s)

    @property
    def joins_any_step(self) -> bool:
        """Whether the session joins any step that begins for others, with drafts or without, at the price of a row."""
        return self._patience is None and self._rules.goal is Goal.LATENCY

    def prospect(self, step_s: float, row_s: float, now: float) -> Prospect:
        """Return the expected tokens of a step now, and of one after the drafts that are due.

        Drafts of the edge that are not here at the expected time may still be on their way: from then on they are
        expected at the end of a margin, and after that no more.
        """
        plan = self._planned(step_s, row_s)
        acceptance = self.acceptance
        here = len(self.drafts())
        tokens_now = expected_tokens(acceptance, min(here, self.max_drafts))
        wait_s = self.ready_since + plan.expected_s - now
        if self.ends is None and wait_s <= MARGIN_S:
            wait_s += (LATE - 1) * plan.expected_s + MARGIN_S
        if not self.waits_for_drafts or (self.ends is None and wait_s <= 0):
            return Prospect(0.0, tokens_now, tokens_now)
        return Prospect(max(0.0, wait_s), tokens_now, expected_tokens(acceptance, max(plan.drafts, here)))

    def local_job(
        self, step_s: float, row_s: float, now: float, block: tuple[DraftToken, ...] | None = None
    ) -> LocalJob | None:
        """Return the next job for the verifier's own drafter; `ends.take` answers it, also after the text's end.

        The step that begins now verifies `block`; None: none begins.
        """
        full = self.sampling.max_tokens - self.generated - 1 <= len(self.drafts())
        length = len(block) if block is not None else None
        if self.finish is not None or full or self.ends is None or not self.ends.may_draft(length):
            return None
        if block is None:
            self._planned(step_s, row_s)
        return self.ends.job(self._view(step_s, row_s, now), length)

    def draft_here_no_more(self) -> None:
        """Go on without the verifier's own drafter, which is broken."""
        self.ends = self._plan = None

    def _planned(self, step_s: float, row_s: float) -> Plan:
        """Return the plan for the drafts received when the session became ready; later ones do not change it."""
        if self._plan is None:
            view = self._view(step_s, row_s, self.ready_since)
            self._plan = plan_for(view) if self.ends is None else self.ends.plan(view)
        return self._plan

    @property
    def acceptance(self) -> float:
        """Chance that a draft after the transcript agrees, given that all before it do."""
        return self.received.acceptance.rate if self.ends is None else self.ends.acceptance

    def _view(self, step_s: float, row_s: float, now: float) -> VerifierView:
        return VerifierView(
            acceptance=self.acceptance,
            step_s=step_s,
            row_s=row_s,
            drafting_s=self.report.drafting_s,
            round_trip_s=self.report.round_trip_s,
            max_drafts=self.max_drafts,
            received=len(self.received),
            since_miss=self.received.since_miss,
            since_miss_s=now - self.received.missed_at,
            goal=self._rules.goal,
        )

    # --- events ---

    def on_draft(self, draft: Draft, now: float) -> None:
        """Take drafts in; stale ones are ignored.

        Raises:
            InvalidArgument, ResourceExhausted: no honest edge sends such drafts; the field is named.
        """
        if draft.chain < self._first_chain:
            return  # it belongs to an earlier turn
        _check_draft(draft, self.prompt_length, self._rules)
        self._messages_received += 1
        self._newest_arrival = now
        if self.received.receive(draft):
            self._plan = None  # what it waits for will not come

    def on_branches(self, frame: Branches) -> None:
        """Keep what follows likely misses of the newest chain; stale branches are ignored.

        Raises:
            InvalidArgument, ResourceExhausted: no honest edge sends such branches; the field is named.
        """
        if frame.chain >= self._first_chain:
            _check_branches(frame, self.prompt_length, self._rules)
            self.received.receive_branches(frame)

    def on_report(self, report: Report) -> None:
        """Replace the last report, and the request for vectors where this one has another."""
        self.report, self.drafting = report, report.drafting
        acceptance, resting = self.received.acceptance, False
        if self.ends is not None:
            self.ends.edge_drafts, resting = report.drafting, self.ends.edge_rests
        if report.acceptance:
            (acceptance.restate if resting else acceptance.believe)(report.acceptance)
        if report.steering is not None:
            if self._steering is None or report.steering.projection != self._steering.projection:
                self._without_vector = math.inf  # the edge's vector is of another projection
            self._steering = report.steering

    def on_cancel(self) -> Commit:
        """End the text; the last commit says so."""
        self.finish, chain = FinishReason.CANCELLED, max(0, self.chain)
        return Commit(
            len(self.transcript), (), 0, self.credit, finish=self.finish, chain=chain, turn=self.turn, epoch=self.epoch
        )

    def on_verified(self, verified: Verified, now: float) -> Commit:
        """Make text of a verified block; only here do tokens enter the transcript."""
        tokens, accepted, self.finish = accept_drafts(
            verified.block,
            verified.tokens_by_target,
            generated=self.generated,
            sampling=self.sampling,
            eos_tokens=self.eos_tokens,
        )
        start, ids, first = len(self.transcript), token_ids(tokens), not self.generated
        ends = self.ends
        self.transcript.extend(ids)
        if not self.pays:
            probe, every = min(PROBE, self._rules.max_credit), PROBE_EVERY if ends is None else PROBE_RARELY_EVERY
            self.credit = probe if self.generated % every < len(tokens) else 0
        self.received.commit(ids, now)
        drafting_s = 0.0
        if ends is not None:
            drafting_s, ends.edge_rests = ends.commit(ids, now), not self.credit
        if not first:
            self._recent_tokens = RATE_FADE * self._recent_tokens + len(ids)
            self._recent_s = RATE_FADE * self._recent_s + now - self.ready_since
        self.ready_since, self._plan = now, None
        steering = verified.steering if self.finish is None else None  # no drafts are made after the end
        self._without_vector = self._without_vector + 1 if steering is None else 0
        cached_tokens, self.cached_tokens = self.cached_tokens, 0
        commit = Commit(
            start=start,
            tokens=tokens if self.wants_logp else tuple([token._replace(logp=None) for token in tokens]),
            accepted=accepted,
            credit=self.credit,
            reward=verified.reward,
            steering=steering,
            timing=Timing(
                echo=self._messages_received,
                hold_s=now - self._newest_arrival,
                queue_s=verified.queue_s,
                verify_s=verified.verify_s,
                drafting_s=drafting_s,
            ),
            finish=self.finish,
            chain=max(0, self.chain),
            verified=len(verified.block),
            verified_beside=verified.beside,
            verified_here=sum(draft.other for draft in verified.block),
            covered=ends.covered if ends is not None else 0,
            turn=self.turn,
            cached_tokens=cached_tokens,
            epoch=self.epoch,
        )
        if self.record is not None:
            self.record.take(commit, first=first)
        return commit


def tokens_before_scores(session: VerifierSession, uncomputed: int) -> int:
    """Return how many uncomputed tokens, of `uncomputed`, come before the first that gives a log probability."""
    if session.prompt_logprobs is None:
        return 0
    return max(0, session.prompt_logprobs_from - 1 - (len(session.transcript) - uncomputed))


def unscored_tokens(session: VerifierSession, uncomputed: int) -> int:
    """Return how many tokens of the prompt are yet to get their log probabilities; 0: the session wants none.

    The target has not computed the last `uncomputed` tokens; the first of them gives that of the token after it.
    """
    return 0 if session.prompt_logprobs is None else max(0, uncomputed - 1 - session.generated)


# --- checks of frames ---


def _check_continue(
    frame: Continue, transcript: Sequence[int], first_chain: int, rules: VerifierRules
) -> tuple[int, ...]:
    """Return the prompt of the turn that `frame` begins; `first_chain` is the first chain number of the last turn.

    Raises:
        InvalidArgument: the frame cannot follow the transcript; the field is named.
    """
    if frame.start > len(transcript):
        raise InvalidArgument(
            f"{frame.start} lies beyond the transcript, which ends at {len(transcript)}", field="continuation.start"
        )
    if frame.chain < first_chain:
        raise InvalidArgument(f"is {frame.chain}, the last turn began with {first_chain}", field="continuation.chain")
    prompt = (*transcript[: frame.start], *frame.prompt)
    if not prompt:
        raise InvalidArgument("leaves no token at all; give at least one", field="continuation.prompt")
    _check_vocabulary(frame.prompt, rules.vocab_size, "continuation.prompt")
    _check_prompt_length(prompt, rules.context_length, "continuation.prompt")
    return prompt


def _check_draft(draft: Draft, prompt_length: int, rules: VerifierRules) -> None:
    """Refuse drafts that no text of this prompt can hold, by an `InvalidArgument` that names the field."""
    if draft.start < prompt_length:
        raise InvalidArgument(
            f"{draft.start} lies inside the prompt; text begins at {prompt_length}", field="draft.start"
        )
    if draft.start + len(draft.tokens) > rules.context_length + rules.max_credit:
        raise InvalidArgument(f"{draft.start} lies beyond the context of {rules.context_length}", field="draft.start")
    if draft.tokens:
        largest = max(draft.tokens).id  # tokens are ordered by their ids first
        _check_vocabulary((largest,), rules.vocab_size, "draft.tokens")
    if draft.branches:
        _check_runs(draft.branches, prompt_length, rules, "draft.branches.")


def _check_branches(frame: Branches, prompt_length: int, rules: VerifierRules) -> None:
    _check_runs(frame.branches, prompt_length, rules, "branches.")


def _check_runs(branches: tuple[Branch, ...], prompt_length: int, rules: VerifierRules, prefix: str) -> None:
    if len(branches) > MAX_BRANCHES:
        raise ResourceExhausted(f"are {len(branches)}; send {MAX_BRANCHES} at most", field=f"{prefix}starts")
    for branch in branches:
        if not prompt_length <= branch.start < rules.context_length + rules.max_credit:
            raise InvalidArgument(f"{branch.start} lies outside the text", field=f"{prefix}starts")
        if len(branch.tokens) > rules.max_credit:
            raise ResourceExhausted(f"exceed {rules.max_credit}; respect the credit", field=f"{prefix}lengths")
        _check_vocabulary(branch.tokens, rules.vocab_size, f"{prefix}tokens")


def _check_open(frame: Open, rules: VerifierRules) -> None:
    """Refuse a session before any compute, by the errors of `VerifierSession`."""
    if frame.protocol_version != PROTOCOL_VERSION:
        raise UnsupportedProtocol(
            f"is {frame.protocol_version}, this verifier speaks {PROTOCOL_VERSION}; update the older side",
            field="open.protocol_version",
        )
    if frame.tokenizer_sha256 != rules.tokenizer_sha256:
        raise TokenizerMismatch(
            f"is {frame.tokenizer_sha256[:12]}…, the target {rules.model!r} has {rules.tokenizer_sha256[:12]}…; "
            "fetch the target's tokenizer from the coordinator",
            field="open.tokenizer_sha256",
        )
    if frame.prompt_logprobs is not None and not rules.scores_prompts:
        raise InvalidArgument(
            "are not to be had of this verifier's engine; ask a verifier with --engine transformers",
            field="open.prompt_logprobs",
        )
    _check_room(frame, rules)
    _check_vocabulary(frame.prompt, rules.vocab_size, "open.prompt")
    _check_vocabulary(frame.committed, rules.vocab_size, "open.committed")
    sampling = frame.sampling
    _check_vocabulary(sampling.allowed_tokens, rules.vocab_size, "sampling.allowed_tokens")
    _check_vocabulary(sampling.stop_tokens, rules.vocab_size, "sampling.stop_tokens")
    _check_vocabulary(tuple(token for token, _ in sampling.logit_bias), rules.vocab_size, "sampling.bias_tokens")
    over = rules.eos_tokens & set(frame.committed) if not sampling.ignore_eos else set()
    if over or set(sampling.stop_tokens) & set(frame.committed):
        raise InvalidArgument("holds a token that ends the text; there is nothing to resume", field="open.committed")


def _check_room(frame: Open, rules: VerifierRules) -> None:
    so_far = len(frame.prompt) + len(frame.committed)
    if frame.context_length and so_far >= frame.context_length:
        raise InvalidArgument("fills the context that the text was promised; nothing is left", field="open.committed")
    if max(frame.context_length, so_far + 1 if frame.committed else 0) > rules.context_length:
        raise Unavailable(
            f"is {frame.context_length or 'unknown'} and {so_far} positions are taken, verifier {rules.name} has "
            f"{rules.context_length}; start another one with the --context-length and --kv-tokens of the first",
            field="open.context_length",
            code="OUT-306",
        )
    _check_prompt_length(frame.prompt, rules.context_length, "open.prompt")


def _limited(frame: Open, rules: VerifierRules) -> Sampling:
    """Return the settings of a text that ends with the context that it was promised, or else with the target's."""
    sampling, room = frame.sampling, (frame.context_length or rules.context_length) - len(frame.prompt)
    max_tokens, min_tokens = min(sampling.max_tokens, room), min(sampling.min_tokens, room)
    return replace(sampling, max_tokens=max_tokens, min_tokens=min_tokens)


def _check_prompt_length(prompt: tuple[int, ...], context_length: int, field_name: str) -> None:
    if len(prompt) >= context_length:
        raise PromptTooLong(
            f"has {len(prompt)} tokens; the target holds {context_length}, text included; shorten it", field=field_name
        )


def _check_vocabulary(tokens: tuple[int, ...], vocab_size: int, field_name: str) -> None:
    if tokens and max(tokens) >= vocab_size:
        raise UnknownToken(f"token id {max(tokens)} is not in the vocabulary of {vocab_size}", field=field_name)


# --- branches beside the chain ---


def _branches_beside(
    chain: Sequence[DraftToken],
    received: ReceivedDrafts,
    own: BothEnds | None,
    *,
    depth: int,
    room: int,
    row_share: float,
) -> tuple[BlockBranch, ...]:
    """Return the branches that a step verifies beside the chain [n].

    Args:
        chain: drafts that follow the transcript, the edge's first.
        received: what the edge has sent.
        own: chain of the verifier's own drafter; None: it has none.
        depth: most drafts along a path that the text has room for.
        room: most drafts of the step.
        row_share: time of a row over that of a step beside its rows; 0: unknown.
    """
    follows = received.acceptance.rate
    chances = [follows] * min(depth, len(chain))
    candidates = _of_edge(received, chain, depth)
    if own is not None:
        own_chance = own.calibration.chance
        chances = [own_chance(draft.score) if draft.other else follows for draft in chain[:depth]]
        candidates = _without_twins([*candidates, *_of_own(own, chain[:depth], chances)])
    tree = best_tree(chances, [run for run, _ in candidates], follows=follows, room=room, row_share=row_share)
    kept = zip(candidates, tree.runs, strict=True)
    return tuple(BlockBranch(run.index, drafts[:length]) for (run, drafts), length in kept if length)


def _of_edge(received: ReceivedDrafts, chain: Sequence[DraftToken], depth: int) -> list[_Candidate]:
    """Return the branches of the edge that leave its part of the chain, or its end."""
    end, unknown = received.end, (1 - received.acceptance.rate) * _UNKNOWN_SHARE
    ids, of_edge = token_ids(chain), sum(not draft.other for draft in chain)
    found = []
    for branch in received.branches():
        index = branch.start - end
        length = min(len(branch.tokens), depth - index)
        if index > of_edge or length < 1 or ids[index : index + 1] == branch.tokens[:1]:
            continue
        chance = unknown if math.isnan(branch.chance) else branch.chance
        found.append((Run(index, chance, length), tuple(map(DraftToken, branch.tokens))))
    return found


def _of_own(own: BothEnds, chain: Sequence[DraftToken], chances: Sequence[float]) -> list[_Candidate]:
    """Return the runners-up of the verifier's own drafts."""
    return [
        (Run(index, (1 - chance) * own.shares.of(rank), 1), (DraftToken(token, other=True),))
        for index, (draft, chance) in enumerate(zip(chain, chances, strict=True))
        if draft.other
        for rank, token in enumerate(draft.runners_up)
    ]


def _without_twins(candidates: Sequence[_Candidate]) -> list[_Candidate]:
    """Return the branches, each position and token once, with the larger chance; the first has no shorter run."""
    found: dict[tuple[int, int], _Candidate] = {}
    for run, drafts in candidates:
        key = run.index, drafts[0].id
        kept, first = found.get(key, (run, drafts))
        found[key] = replace(kept, chance=max(kept.chance, run.chance)), first
    return list(found.values())
