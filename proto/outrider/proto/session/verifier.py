"""The verifier's half of a session: committed tokens, and the drafts that may follow them."""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, replace

from outrider.proto.errors import (
    InvalidArgument,
    PromptTooLong,
    ResourceExhausted,
    TokenizerMismatch,
    UnknownToken,
    UnsupportedProtocol,
)
from outrider.proto.policy import (
    Acceptance,
    Plan,
    Prospect,
    VerifierView,
    best_block,
    expected_tokens,
    overtakes,
    plan_for,
)
from outrider.proto.session.acceptance import accept_drafts
from outrider.proto.types import (
    PROTOCOL_VERSION,
    Commit,
    Continue,
    Draft,
    FinishReason,
    Goal,
    Open,
    Opened,
    Patience,
    Report,
    Steering,
    SteeringRequest,
    Timing,
    TopLogprobs,
)

MOST_TOLD = 64
PROBE_EVERY, PROBE = 12, 6  # while drafts do not pay, so many are asked for after so many tokens


@dataclass(frozen=True, slots=True)
class VerifierRules:
    """What a verifier tells its sessions; fixed while it runs."""

    name: str
    model: str
    tokenizer_sha256: str
    vocab_size: int
    context_length: int
    eos_tokens: frozenset[int]
    max_drafts: int = 16
    max_credit: int = 64
    patience: Patience | None = None  # None: planned, from each session's own measurements
    goal: Goal = Goal.LATENCY
    batch_invariant: bool = False
    keep_s: float = 300.0  # an idle session, at most, where its edge wants it kept
    release: str = ""  # of Outrider, for people
    projections: frozenset[str] = frozenset()  # whose steering vectors it can make


@dataclass(frozen=True, slots=True)
class Verified:
    """The engine has judged `block`: event of the verifier's half.

    tokens_by_target: [k + 1], logp [k + 1] natural logs of their processed probabilities, reward as in Commit.
    logprobs, top_logprobs: [a + 1] as in Commit, of the a drafts that agree and the token after; empty: not asked.
    steering: the vector of the state behind the last draft that agrees, or behind the transcript's end where none does,
    if `wanted_vector` asked for it.
    """

    block: tuple[int, ...]
    tokens_by_target: tuple[int, ...]
    logp: tuple[float, ...]
    queue_s: float = 0.0
    verify_s: float = 0.0
    reward: float | None = None
    logprobs: tuple[float, ...] = ()
    top_logprobs: tuple[TopLogprobs, ...] = ()
    steering: Steering | None = None


class VerifierSession:
    """One text as the verifier sees it: committed tokens, and the drafts that may follow them."""

    def __init__(self, frame: Open, rules: VerifierRules, now: float) -> None:
        """Take the session, or refuse it before any compute.

        Raises:
            UnsupportedProtocol, TokenizerMismatch, PromptTooLong, UnknownToken, InvalidArgument.
        """
        _check_open(frame, rules)
        self.id = frame.session
        self.sampling = replace(
            frame.sampling, max_tokens=min(frame.sampling.max_tokens, rules.context_length - len(frame.prompt))
        )
        self.prompt_length = len(frame.prompt)
        self.transcript: list[int] = [*frame.prompt, *frame.committed]
        self.finish: FinishReason | None = None
        self.keep_s = min(frame.keep_s, rules.keep_s)
        self.turn = 0
        self.chain = -1
        self.credit = rules.max_credit
        self._frame = frame
        self._first_chain = 0  # of this turn
        self._granted = self.credit  # with which a turn begins
        self.logprobs = frame.logprobs
        self.top_logprobs = frame.top_logprobs
        self._rules = rules
        self._resumed = len(frame.committed)
        self._max_drafts = min(frame.max_drafts or rules.max_drafts, rules.max_drafts)
        self._window = frame.window or rules.max_credit
        self._wish = frame.patience
        self._wants_logp = frame.logp
        self._drafting = frame.drafting
        self._drafts: list[int] = []
        self._q: list[float] = []
        self._alive = True
        self._complete = False
        self._acceptance = Acceptance()
        self._report = Report(frame.drafting)
        self._ready_since = now
        self._drafts_heard = 0
        self._newest_arrival = now
        self._since_miss = 0  # tokens committed since a draft last missed
        self._missed_at = now
        self._plan: Plan | None = None
        self._pays = True
        self._told: deque[tuple[int, float]] = deque(maxlen=MOST_TOLD)  # where recent commits ended, and when
        self._steering = frame.steering
        self._without_vector = math.inf  # commits since the last with a vector of this projection

    def opened(self) -> Opened:
        """The answer to Open."""
        rules = self._rules
        self._granted = self.credit
        return Opened(
            committed=self._resumed,
            credit=self.credit,
            max_tokens=self.sampling.max_tokens,
            verifier=rules.name,
            context_length=rules.context_length,
            batch_invariant=rules.batch_invariant,
            vocab_size=rules.vocab_size,
            goal=rules.goal,
            max_drafts=self._max_drafts,
            planned=self._wish is None and rules.patience is None,
            keep_s=self.keep_s,
            release=rules.release,
            steered=self.steered,
        )

    def continued(self, frame: Continue, now: float) -> VerifierSession:
        """The session of the next turn: that of a fresh Open, but for what was measured.

        Raises:
            InvalidArgument, PromptTooLong, UnknownToken: with the field named; this session stays as it was.
        """
        if not self.keep_s:
            raise InvalidArgument(
                "is 0, or this verifier keeps no sessions; open another stream for the next turn", field="open.keep_s"
            )
        if self.finish is None:
            raise InvalidArgument(
                "comes while a turn still runs; cancel it or wait for its last commit", field="frame.continuation"
            )
        if frame.start > len(self.transcript):
            raise InvalidArgument(
                f"{frame.start} lies beyond the transcript, which ends at {len(self.transcript)}",
                field="continuation.start",
            )
        if frame.chain < self._first_chain:
            raise InvalidArgument(
                f"is {frame.chain}, the last turn began with {self._first_chain}", field="continuation.chain"
            )
        prompt = (*self.transcript[: frame.start], *frame.prompt)
        if not prompt:
            raise InvalidArgument("leaves no token at all; give at least one", field="continuation.prompt")
        _check_vocabulary(frame.prompt, self._rules.vocab_size, "continuation.prompt")
        _check_prompt_length(prompt, self._rules.context_length, "continuation.prompt")
        sampling = frame.sampling or self._frame.sampling
        session = VerifierSession(
            replace(
                self._frame,
                prompt=prompt,
                committed=(),
                sampling=sampling,
                drafting=self._drafting,
                steering=self._steering,
            ),
            self._rules,
            now,
        )
        session.turn = self.turn + 1
        session.chain = frame.chain - 1
        session.credit = session._granted = self._granted
        session._first_chain = frame.chain
        session._acceptance = self._acceptance
        session._report = self._report
        return session

    @property
    def generated(self) -> int:
        """Tokens of text so far."""
        return len(self.transcript) - self.prompt_length

    @property
    def waiting_drafts(self) -> int:
        """Drafts at hand that follow the transcript."""
        return len(self._drafts)

    @property
    def waits_for_drafts(self) -> bool:
        """Whether more drafts of the chain may come before the next commit."""
        return self._drafting and not self._complete

    @property
    def steered(self) -> bool:
        """Whether the verifier has the projection that the edge wishes for."""
        return self._steering is not None and self._steering.projection in self._rules.projections

    @property
    def wanted_vector(self) -> SteeringRequest | None:
        """Which steering vector the next commit should carry, unless it ends the text; None: none."""
        wish = self._steering
        if wish is None or not wish.every or not self.steered or self._without_vector + 1 < wish.every:
            return None
        return wish

    def block(self, step_s: float = 0.0, row_s: float = 0.0) -> tuple[int, ...]:
        """[k] drafts to judge in a step now: no more than pay, are allowed, or the text has room for.

        Args:
            step_s: this session's share of what a step costs beside its rows, seconds; 0: not known, judge all.
            row_s: what a row costs, seconds.
        """
        view = self._view(step_s, row_s, self._ready_since)
        worthwhile = best_block(view)
        self._pays = worthwhile > 0 and (not self.joins_any_step or overtakes(view))
        if not worthwhile and self.generated % PROBE_EVERY == 0:
            worthwhile = 1  # acceptance that is never put to the question could never be seen to have risen
        return tuple(self._drafts[: max(0, min(worthwhile, self._most_useful()))])

    def q_of(self, block: tuple[int, ...]) -> tuple[float, ...]:
        """[k] the drafter's probability of each draft in `block`, NaN where it was not sent."""
        return tuple(self._q[: len(block)])

    def _most_useful(self) -> int:
        return min(self._max_drafts, self.sampling.max_tokens - self.generated - 1)

    def ready_at(self, step_s: float, row_s: float = 0.0) -> float:
        """When the next step should begin at the latest, on the clock of `now`; infinite: at the next event.

        Args:
            step_s: as of `block`.
            row_s: as of `block`.
        """
        patience = self._wish or self._rules.patience or self._planned(step_s, row_s).patience
        enough = min(patience.drafts, self._most_useful(), self._window, self.credit)
        if not self.waits_for_drafts or len(self._drafts) >= enough:
            return self._ready_since
        return self._ready_since + patience.seconds

    @property
    def joins_any_step(self) -> bool:
        """Whether a step that begins for others should take this session along, drafts or not: it costs a row."""
        return self._wish is None and self._rules.patience is None and self._rules.goal is Goal.LATENCY

    def prospect(self, step_s: float, row_s: float, now: float) -> Prospect:
        """What it would bring into a step now, and when the drafts are here that it waits for."""
        plan = self._planned(step_s, row_s)
        acceptance = self._acceptance.rate
        tokens_now = expected_tokens(acceptance, min(len(self._drafts), self._max_drafts))
        if not self.waits_for_drafts:
            return Prospect(0.0, tokens_now, tokens_now)
        wait_s = max(0.0, self._ready_since + plan.expected_s - now)
        return Prospect(wait_s, tokens_now, expected_tokens(acceptance, max(plan.drafts, len(self._drafts))))

    def _planned(self, step_s: float, row_s: float) -> Plan:
        """The plan made for what was at hand when the session became ready; drafts that come do not change it."""
        if self._plan is None:
            self._plan = plan_for(self._view(step_s, row_s, self._ready_since))
        return self._plan

    def _view(self, step_s: float, row_s: float, now: float) -> VerifierView:
        return VerifierView(
            acceptance=self._acceptance.rate,
            step_s=step_s,
            row_s=row_s,
            drafting_s=self._report.drafting_s,
            round_trip_s=self._report.round_trip_s,
            most_drafts=self._max_drafts,
            at_hand=len(self._drafts),
            since_miss=self._since_miss,
            since_miss_s=now - self._missed_at,
            goal=self._rules.goal,
        )

    # --- events ---

    def on_draft(self, draft: Draft, now: float) -> None:
        """Take drafts in; stale ones are ignored.

        Raises:
            InvalidArgument, UnknownToken: what no honest edge sends; the field is named.
            ResourceExhausted: more unverified tokens than any credit allowed.
        """
        if draft.chain < self._first_chain:
            return  # of an earlier turn
        self._check_draft(draft)
        self._drafts_heard += 1
        self._newest_arrival = now
        if draft.chain < self.chain or (draft.chain == self.chain and not self._alive):
            return
        if draft.chain > self.chain:
            self.chain = draft.chain
            self._alive = True
            self._complete = False
            self._drop_drafts()
        path = draft.first_path()
        if draft.start > len(self.transcript) + len(self._drafts):
            self._complete = True  # a hole: what is missing will not come in order, so do not wait for it
            return
        q = draft.q or (math.nan,) * len(path)
        for i, token in enumerate(path):
            if not self._take_draft(draft.start + i, token, q[i]):
                return
        overtaken = draft.start + len(path) < len(self.transcript) + bool(path)
        if draft.complete and not overtaken:  # else it was said of an older text; the next commit is answered anew
            self._complete = True

    def _take_draft(self, position: int, token: int, q: float) -> bool:
        """Whether the chain still lives after `token` at `position`."""
        ahead = position - len(self.transcript)
        if ahead < 0:
            hit = self.transcript[position] == token
            self._acceptance.add(hit)
            if not hit:
                self._kill_chain()
                self._missed(position)
                return False
        elif ahead < len(self._drafts):
            if self._drafts[ahead] != token:
                raise InvalidArgument(f"contradicts what chain {self.chain} said at {position}", field="draft.tokens")
        elif ahead >= self._rules.max_credit:
            raise ResourceExhausted(
                f"more than {self._rules.max_credit} unverified tokens; respect the credit", field="draft.tokens"
            )
        else:
            self._drafts.append(token)
            self._q.append(q)
        return True

    def _check_draft(self, draft: Draft) -> None:
        if draft.start < self.prompt_length:
            raise InvalidArgument(
                f"{draft.start} lies inside the prompt; text begins at {self.prompt_length}", field="draft.start"
            )
        if draft.start + len(draft.tokens) > self._rules.context_length + self._rules.max_credit:
            raise InvalidArgument(
                f"{draft.start} lies beyond the context of {self._rules.context_length}", field="draft.start"
            )
        _check_vocabulary(draft.tokens, self._rules.vocab_size, "draft.tokens")

    def on_report(self, report: Report) -> None:
        """Remember what the edge measured, which replaces the last report, and which vectors it wants from now on."""
        self._report = report
        if report.steering is not None:
            if self._steering is None or report.steering.projection != self._steering.projection:
                self._without_vector = math.inf  # what it has is of another projection
            self._steering = report.steering
        if report.acceptance:
            self._acceptance.believe(report.acceptance)
        self._drafting = report.drafting

    def on_cancel(self) -> Commit:
        """End the text; the last commit says so."""
        self.finish = FinishReason.CANCELLED
        return Commit(
            len(self.transcript), (), 0, self.credit, finish=self.finish, chain=max(0, self.chain), turn=self.turn
        )

    def on_verified(self, verified: Verified, now: float) -> Commit:
        """Make text of a judged block: the only way in which a token gets into the transcript."""
        tokens, accepted, self.finish = accept_drafts(
            verified.block,
            verified.tokens_by_target,
            generated=self.generated,
            sampling=self.sampling,
            eos_tokens=self._rules.eos_tokens,
        )
        start = len(self.transcript)
        self.transcript.extend(tokens)
        if not self._pays:
            self.credit = PROBE if self.generated % PROBE_EVERY < len(tokens) else 0
        self._told.append((len(self.transcript), now))
        self._since_miss += len(tokens)
        self._follow(tokens)
        if self._complete and self._alive:  # the edge drafts on only when it hears of this commit
            self._since_miss, self._missed_at = -len(self._drafts), now
        self._complete = False
        self._ready_since = now
        self._plan = None
        steering = verified.steering if self.finish is None else None  # no drafts are made after the end
        self._without_vector = self._without_vector + 1 if steering is None else 0
        return Commit(
            start=start,
            tokens=tokens,
            accepted=accepted,
            credit=self.credit,
            logp=verified.logp[: len(tokens)] if self._wants_logp else (),
            reward=verified.reward,
            steering=steering,
            timing=Timing(
                echo=self._drafts_heard,
                hold_s=now - self._newest_arrival,
                queue_s=verified.queue_s,
                verify_s=verified.verify_s,
            ),
            finish=self.finish,
            chain=max(0, self.chain),
            judged=len(verified.block),
            turn=self.turn,
            logprobs=verified.logprobs[: len(tokens)],
            top_logprobs=verified.top_logprobs[: len(tokens)],
        )

    def _follow(self, tokens: tuple[int, ...]) -> None:
        first = len(self.transcript) - len(tokens)
        for position, token in enumerate(tokens, first):
            if not self._drafts:
                return  # drafts for these positions may still come, and will be compared then
            hit = self._drafts[0] == token
            self._acceptance.add(hit)
            if not hit:
                self._kill_chain()
                self._missed(position)
                return
            del self._drafts[0], self._q[0]

    def _missed(self, position: int) -> None:
        """The draft for `position` was wrong; the edge was told so by the commit that held it."""
        self._since_miss = len(self.transcript) - position - 1
        self._missed_at = next((at for end, at in self._told if end > position), self._missed_at)
        self._plan = None  # what it waits for will not come

    def _kill_chain(self) -> None:
        self._alive = False
        self._drop_drafts()

    def _drop_drafts(self) -> None:
        self._drafts.clear()
        self._q.clear()


def _check_open(frame: Open, rules: VerifierRules) -> None:
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
    _check_prompt_length(frame.prompt, rules.context_length, "open.prompt")
    if len(frame.prompt) + len(frame.committed) >= rules.context_length:
        raise InvalidArgument("fills the target's context; there is nothing left to generate", field="open.committed")
    _check_vocabulary(frame.prompt, rules.vocab_size, "open.prompt")
    _check_vocabulary(frame.committed, rules.vocab_size, "open.committed")
    sampling = frame.sampling
    _check_vocabulary(sampling.allowed_tokens, rules.vocab_size, "sampling.allowed_tokens")
    _check_vocabulary(sampling.stop_tokens, rules.vocab_size, "sampling.stop_tokens")
    _check_vocabulary(tuple(token for token, _ in sampling.logit_bias), rules.vocab_size, "sampling.bias_tokens")
    over = rules.eos_tokens & set(frame.committed) if not sampling.ignore_eos else set()
    if over or set(sampling.stop_tokens) & set(frame.committed):
        raise InvalidArgument("holds a token that ends the text; there is nothing to resume", field="open.committed")


def _check_prompt_length(prompt: tuple[int, ...], context_length: int, field_name: str) -> None:
    if len(prompt) >= context_length:
        raise PromptTooLong(
            f"has {len(prompt)} tokens; the target holds {context_length}, text included; shorten it", field=field_name
        )


def _check_vocabulary(tokens: tuple[int, ...], vocab_size: int, field_name: str) -> None:
    if tokens and max(tokens) >= vocab_size:
        raise UnknownToken(f"token id {max(tokens)} is not in the vocabulary of {vocab_size}", field=field_name)
