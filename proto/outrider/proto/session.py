"""The session machine: both halves of the decoding contract, without any input or output.

Events go in with the time of a clock that is passed in, instructions come out. The edge, the verifier, the simulator
and the tests run this same code; sockets, threads and models live in thin shells around it.

The rules, in short. Positions are absolute and commits append only. A *chain* is a run of drafts that continues the
transcript; it dies at the first draft that contradicts a committed token, and what else arrives of it is ignored. A
chain whose next draft equals the target's own token lives on.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from outrider.proto.errors import (
    InvalidArgument,
    LeaseExpired,
    OutriderError,
    PromptTooLong,
    ResourceExhausted,
    TokenizerMismatch,
    Unavailable,
    UnknownToken,
    UnsupportedProtocol,
)
from outrider.proto.policy import (
    Acceptance,
    EdgeView,
    Smoothed,
    SurvivalWindow,
    VerifierView,
    WindowPolicy,
    balanced_patience,
)
from outrider.proto.types import (
    PROTOCOL_VERSION,
    Cancel,
    Commit,
    Draft,
    EdgeFrame,
    FinishReason,
    Goaway,
    Open,
    Opened,
    Patience,
    Report,
    Sampling,
    Timing,
)

# === the one place where a step becomes text ====================================================================


def settle(
    block: tuple[int, ...],
    tokens_by_target: tuple[int, ...],
    *,
    generated: int,
    sampling: Sampling,
    eos_tokens: frozenset[int],
) -> tuple[tuple[int, ...], int, FinishReason | None]:
    """Follow the drafts while they agree, then take the target's own token; end where the text ends.

    Args:
        block: [k] drafts that the step judged.
        tokens_by_target: [k + 1]; entry j is the target's token after the transcript and block[:j], so it means
            something only while block[:j] was agreed with.
        generated: tokens of text before this step.
        sampling: for stop tokens and the length limit.
        eos_tokens: of the target.

    Returns:
        The committed tokens, how many of the first were drafts, and why the text ends (None: it goes on). EOS is
        settled before stop tokens, and these before the length limit.
    """
    tokens: list[int] = []
    for j, token in enumerate(tokens_by_target):
        tokens.append(token)
        agreed = j < len(block) and block[j] == token
        accepted = j + agreed
        if token in eos_tokens and not sampling.ignore_eos:
            return tuple(tokens), accepted, FinishReason.EOS
        if token in sampling.stop_tokens:
            return tuple(tokens), accepted, FinishReason.STOP_TOKEN
        if generated + len(tokens) >= sampling.max_tokens:
            return tuple(tokens), accepted, FinishReason.LENGTH
        if not agreed:
            return tuple(tokens), accepted, None
    raise ValueError("tokens_by_target must hold one token more than block")


# === verifier ===================================================================================================


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
    patience: Patience | None = None  # None: balanced, from each session's own measurements
    batch_invariant: bool = False


@dataclass(frozen=True, slots=True)
class Verified:
    """The engine has judged `block`: event of the verifier's half.

    tokens_by_target: [k + 1], logp [k + 1] natural logs of their processed probabilities, reward as in Commit.
    """

    block: tuple[int, ...]
    tokens_by_target: tuple[int, ...]
    logp: tuple[float, ...]
    queue_s: float = 0.0
    verify_s: float = 0.0
    reward: float | None = None


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
        self.chain = -1
        self.credit = rules.max_credit
        self._rules = rules
        self._resumed = len(frame.committed)
        self._max_drafts = min(frame.max_drafts or rules.max_drafts, rules.max_drafts)
        self._window = frame.window or rules.max_credit
        self._wish = frame.patience
        self._drafting = frame.drafting
        self._drafts: list[int] = []
        self._q: list[float] = []
        self._alive = True
        self._complete = False
        self._acceptance = Acceptance()
        self._report = Report(frame.drafting)
        self._ready_since = now
        self._newest_sent_s = 0.0
        self._newest_arrival = now

    def opened(self) -> Opened:
        """The answer to Open."""
        rules = self._rules
        return Opened(
            committed=self._resumed,
            credit=self.credit,
            max_tokens=self.sampling.max_tokens,
            verifier=rules.name,
            context_length=rules.context_length,
            batch_invariant=rules.batch_invariant,
        )

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

    def block(self) -> tuple[int, ...]:
        """[k] drafts to judge in a step now: no more than allowed, nor than the text has room for."""
        return tuple(self._drafts[: max(0, self._most_useful())])

    def block_q(self) -> tuple[float, ...]:
        """[k] the drafter's probability of each draft in `block`, NaN where it was not sent."""
        return tuple(self._q[: max(0, self._most_useful())])

    def _most_useful(self) -> int:
        return min(self._max_drafts, self.sampling.max_tokens - self.generated - 1)

    def ready_at(self, step_s: float) -> float:
        """When the next step should begin at the latest, on the clock of `now`; infinite: at the next event.

        Args:
            step_s: what a target step takes at present, seconds.
        """
        patience = self._patience(step_s)
        enough = min(patience.drafts, self._most_useful(), self._window, self.credit)
        if not self.waits_for_drafts or len(self._drafts) >= enough:
            return self._ready_since
        return self._ready_since + patience.seconds

    def _patience(self, step_s: float) -> Patience:
        chosen = self._wish or self._rules.patience
        if chosen is not None:
            return chosen
        return balanced_patience(
            VerifierView(
                acceptance=self._acceptance.rate,
                drafting_s=self._report.drafting_s,
                step_s=step_s,
                round_trip_s=0.0 if self._drafts else self._report.round_trip_s,
                most_drafts=self._max_drafts,
            )
        )

    # --- events ---

    def on_draft(self, draft: Draft, now: float) -> None:
        """Take drafts in; stale ones are ignored.

        Raises:
            InvalidArgument, UnknownToken: what no honest edge sends; the field is named.
            ResourceExhausted: more unverified tokens than any credit allowed.
        """
        self._check_draft(draft)
        self._newest_sent_s, self._newest_arrival = draft.sent_s, now
        if draft.chain < self.chain or (draft.chain == self.chain and not self._alive):
            return
        if draft.chain > self.chain:
            self.chain = draft.chain
            self._alive = True
            self._complete = False
            self._drop_drafts()
        self._complete = self._complete or draft.complete  # a late message must not take back what a later one said
        path = draft.first_path()
        if draft.start > len(self.transcript) + len(self._drafts):
            self._complete = True  # a hole: what is missing will not come in order, so do not wait for it
            return
        q = draft.q or (math.nan,) * len(path)
        for i, token in enumerate(path):
            if not self._take_draft(draft.start + i, token, q[i]):
                return

    def _take_draft(self, position: int, token: int, q: float) -> bool:
        """Whether the chain still lives after `token` at `position`."""
        ahead = position - len(self.transcript)
        if ahead < 0:
            if self.transcript[position] != token:
                self._kill_chain()
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
        """Remember what the edge measured; it replaces the last report."""
        self._report = report
        self._drafting = report.drafting

    def on_cancel(self) -> Commit:
        """End the text; the last commit says so."""
        self.finish = FinishReason.CANCELLED
        return Commit(len(self.transcript), (), 0, self.credit, finish=self.finish, chain=max(0, self.chain))

    def on_verified(self, verified: Verified, now: float) -> Commit:
        """Make text of a judged block: the only way in which a token gets into the transcript."""
        tokens, accepted, self.finish = settle(
            verified.block,
            verified.tokens_by_target,
            generated=self.generated,
            sampling=self.sampling,
            eos_tokens=self._rules.eos_tokens,
        )
        start = len(self.transcript)
        self.transcript.extend(tokens)
        self._acceptance.add(accepted, len(verified.block))
        self._follow(tokens)
        self._complete = False
        self._ready_since = now
        return Commit(
            start=start,
            tokens=tokens,
            accepted=accepted,
            credit=self.credit,
            logp=verified.logp[: len(tokens)],
            reward=verified.reward,
            timing=Timing(
                echo_sent_s=self._newest_sent_s,
                hold_s=now - self._newest_arrival,
                queue_s=verified.queue_s,
                verify_s=verified.verify_s,
            ),
            finish=self.finish,
            chain=max(0, self.chain),
            judged=len(verified.block),
        )

    def _follow(self, tokens: tuple[int, ...]) -> None:
        for token in tokens:
            if not self._drafts:
                return  # drafts for these positions may still come, and will be compared then
            if self._drafts[0] != token:
                self._kill_chain()
                return
            del self._drafts[0], self._q[0]

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
    if len(frame.prompt) >= rules.context_length:
        raise PromptTooLong(
            f"has {len(frame.prompt)} tokens; the target holds {rules.context_length}, text included; shorten it",
            field="open.prompt",
        )
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


def _check_vocabulary(tokens: tuple[int, ...], vocab_size: int, field_name: str) -> None:
    if tokens and max(tokens) >= vocab_size:
        raise UnknownToken(f"token id {max(tokens)} is not in the vocabulary of {vocab_size}", field=field_name)


CATCH_UP = 8  # a job that first has to read more tokens than this says nothing about drafting speed

# === edge =======================================================================================================


@dataclass(frozen=True, slots=True)
class Send:
    """Put `frame` on the stream."""

    frame: EdgeFrame


@dataclass(frozen=True, slots=True)
class Emit:
    """Hand committed tokens to the user. `drafted[i]` tells whether tokens[i] was an accepted draft."""

    start: int
    tokens: tuple[int, ...]
    drafted: tuple[bool, ...]
    logp: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Reopen:
    """The stream is gone: get a lease and open again after `after_s` seconds."""

    after_s: float
    reason: OutriderError


@dataclass(frozen=True, slots=True)
class Done:
    """The text is whole (`finish`) or can never be (`error`)."""

    finish: FinishReason | None = None
    error: OutriderError | None = None


EdgeInstruction = Send | Emit | Reopen | Done


@dataclass(frozen=True, slots=True)
class DraftJob:
    """What the drafter should do next: truncate its prefix, extend it, propose up to `count` tokens."""

    truncate_to: int
    extend_with: tuple[int, ...]
    count: int
    epoch: int

    @property
    def start(self) -> int:
        """Position of the first proposed token."""
        return self.truncate_to + len(self.extend_with)


@dataclass(slots=True)
class EdgeStatistics:
    """Counts of one session. Seconds and bytes; bytes are filled in by the link."""

    committed: int = 0
    accepted: int = 0
    drafted: int = 0
    judged: int = 0
    questioned: int = 0  # judged drafts up to the first that missed in each step: acceptance is accepted / questioned
    steps: int = 0
    resumes: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    round_trip_s: float = 0.0
    drafter_error: str = ""


@dataclass(frozen=True, slots=True)
class RetryRules:
    """How long and how often a lost stream is reopened."""

    first_s: float = 0.05
    most_s: float = 2.0
    give_up_s: float = 60.0


@dataclass(slots=True)
class _Retries:
    count: int = 0
    since: float = math.inf


class EdgeSession:
    """One text as the edge sees it: the transcript is its own; drafts run ahead of it."""

    def __init__(
        self,
        frame: Open,
        window: WindowPolicy | None = None,
        retry: RetryRules | None = None,
        *,
        send_q: bool = False,
    ) -> None:
        """Begin a text.

        Args:
            frame: what to open streams with.
            window: how far ahead to draft; None: as `SurvivalWindow` says.
            retry: how long lost streams are reopened.
            send_q: send the drafter's probabilities, which earn rewards in the commits.
        """
        self._send_q = send_q
        self.statistics = EdgeStatistics()
        self.finish: FinishReason | None = None
        self.done = False
        self.transcript: list[int] = [*frame.prompt, *frame.committed]
        self.prompt_length = len(frame.prompt)
        self.verifier = ""
        self._open = frame
        self._policy = window or SurvivalWindow()
        self._retry = retry or RetryRules()
        self._retries = _Retries()
        self._connected = False
        self._max_tokens = frame.sampling.max_tokens
        self._credit = 0
        self._drafting = frame.drafting
        self._drafted: list[int] = []  # unverified, follows the transcript
        self._sent = 0  # so many of them are on the wire
        self._chain = 0
        self._chain_sent = False  # whether the wire has heard of the chain
        self._agreed = 0  # so much of the drafter's prefix is known to agree with transcript + drafted
        self._epoch = 0  # counts contradictions; a job of an older epoch proposes in vain
        self._job_running = False
        self._stalled = False  # the drafter had nothing to say; ask again after the next commit
        self._acceptance = Acceptance()
        self._drafting_s = Smoothed()
        self._round_trip_s = Smoothed()
        self._step_s = Smoothed()
        self._opened_at = 0.0
        self._opened_with = 0  # tokens of text that the last Open held
        self._reported = Report(frame.drafting)

    # --- opening and reopening ---

    def open_frame(self, lease: bytes, now: float) -> Open:
        """What to open a stream with, fresh or resumed."""
        self._opened_at = now
        self._opened_with = self.generated
        self._reported = Report(self._drafting)
        return replace(
            self._open,
            lease=lease,
            committed=tuple(self.transcript[self.prompt_length :]),
            drafting=self._drafting,
        )

    def on_opened(self, opened: Opened, now: float) -> list[EdgeInstruction]:
        """A verifier has taken the session. Drafts that it has not seen go again, as a new chain."""
        if self.done or self._connected:
            return []  # said before
        if opened.committed != self._opened_with:
            error = InvalidArgument("the verifier took over another text", field="opened.committed")
            return self.on_disconnected(error, now)
        self.verifier = opened.verifier
        self._max_tokens = opened.max_tokens
        self._credit = opened.credit
        self._connected = True
        self._round_trip_s.add(now - self._opened_at)
        self.statistics.round_trip_s = self._round_trip_s.value
        self._new_chain()
        self._sent = 0
        if len(self._drafted) > self._credit:
            self._forget_drafts()
        return [*self._flush(now), *self._reports()]

    def on_disconnected(self, error: OutriderError, now: float) -> list[EdgeInstruction]:
        """The stream broke, or could not be opened."""
        if self.done:
            return []
        self._connected = False
        if not _may_heal(error):
            return self._end(error=error)
        self._retries.since = min(self._retries.since, now)
        if now - self._retries.since > self._retry.give_up_s:
            return self._end(error=error)
        backoff_s = min(self._retry.most_s, self._retry.first_s * 2.0 ** min(self._retries.count, 64))
        self._retries.count += 1
        self.statistics.resumes += 1
        return [Reopen(max(error.retry_after_s, backoff_s), error)]

    def on_goaway(self, goaway: Goaway, now: float) -> list[EdgeInstruction]:
        """The verifier drains."""
        return self.on_disconnected(Unavailable(goaway.reason, retry_after_s=goaway.retry_after_s), now)

    def on_cancel(self, finish: FinishReason = FinishReason.CANCELLED) -> list[EdgeInstruction]:
        """The user wants no more, or has seen a stop string."""
        if self.done:
            return []
        sends: list[EdgeInstruction] = [Send(Cancel(finish.name.lower()))] if self._connected else []
        return [*sends, *self._end(finish=finish)]

    # --- commits ---

    def on_commit(self, commit: Commit, now: float) -> list[EdgeInstruction]:
        """Append to the transcript what is new; follow or abandon the chain."""
        if self.done:
            return []
        known = len(self.transcript) - commit.start
        if known < 0:
            return self.on_disconnected(Unavailable("a commit was lost; resuming"), now)
        if commit.start < self.prompt_length or commit.tokens[:known] != tuple(
            self.transcript[commit.start : commit.start + len(commit.tokens)]
        ):
            return self._end(error=InvalidArgument("contradicts the transcript", field="commit.tokens"))
        tokens = commit.tokens[known:]
        if tokens or commit.finish is not None:  # else a replay
            self._measure(commit, now)
            self._credit = commit.credit
        instructions: list[EdgeInstruction] = []
        if tokens:
            drafted = tuple(i < commit.accepted for i in range(known, len(commit.tokens)))
            instructions.append(Emit(len(self.transcript), tokens, drafted, commit.logp[known:]))
            self.statistics.committed += len(tokens)
            self.statistics.accepted += sum(drafted)
            self._follow(tokens)
        if commit.finish is not None:
            return [*instructions, *self._end(finish=commit.finish)]
        self._stalled = False
        self._retries = _Retries()
        return [*instructions, *self._reports(), *self._nothing_more(now)]

    def _measure(self, commit: Commit, now: float) -> None:
        self.statistics.steps += 1
        self.statistics.judged += commit.judged
        self.statistics.questioned += min(commit.accepted + 1, commit.judged)
        self._acceptance.add(commit.accepted, commit.judged)
        timing = commit.timing
        if timing.verify_s > 0:
            self._step_s.add(timing.verify_s)
        if timing.echo_sent_s > 0:
            self._round_trip_s.add(max(0.0, now - timing.echo_sent_s - timing.hold_s))
            self.statistics.round_trip_s = self._round_trip_s.value

    def _follow(self, tokens: tuple[int, ...]) -> None:
        for token in tokens:
            position = len(self.transcript)
            self.transcript.append(token)
            if not self._drafted:
                continue  # a running job may be proposing this position; on_drafted compares
            if self._drafted[0] == token:
                del self._drafted[0]
                self._sent = max(0, self._sent - 1)
            else:
                self._forget_drafts()
                self._agreed = min(self._agreed, position)

    def _forget_drafts(self) -> None:
        self._agreed = min(self._agreed, len(self.transcript))
        self._drafted.clear()
        self._sent = 0
        self._epoch += 1
        self._new_chain()

    def _new_chain(self) -> None:
        if self._chain_sent:
            self._chain += 1
            self._chain_sent = False

    # --- drafting ---

    @property
    def generated(self) -> int:
        """Tokens of text so far."""
        return len(self.transcript) - self.prompt_length

    @property
    def in_flight(self) -> int:
        """Drafted tokens that no commit has settled yet."""
        return len(self._drafted)

    @property
    def drafting_s(self) -> float:
        """Smoothed time to draft one token, seconds; 0: not measured yet."""
        return self._drafting_s.value

    def window(self) -> int:
        """Unverified tokens that the policy allows at present, before credit."""
        return self._policy.limit(
            EdgeView(self._acceptance.rate, self._drafting_s.value, self._step_s.value, self._round_trip_s.value)
        )

    def allowance(self) -> int:
        """How many more tokens may be drafted now."""
        if not (self._connected and self._drafting) or self.done or self._stalled:
            return 0
        room = self._max_tokens - self.generated - 1
        return max(0, min(self.window(), self._credit, room) - len(self._drafted))

    def next_job(self, most: int) -> DraftJob | None:
        """The drafter's next piece of work, at most `most` tokens; None: wait for an event. One job runs at a time."""
        count = min(most, self.allowance())
        if self._job_running or count == 0:
            return None
        self._job_running = True
        prefix_length = len(self.transcript) + len(self._drafted)
        behind = (
            *self.transcript[self._agreed :],
            *self._drafted[max(0, self._agreed - len(self.transcript)) :],
        )
        job = DraftJob(self._agreed, behind, count, self._epoch)
        self._agreed = prefix_length
        return job

    def on_drafted(
        self, job: DraftJob, tokens: tuple[int, ...], q: tuple[float, ...], seconds: float, now: float
    ) -> list[EdgeInstruction]:
        """The drafter did `job` in `seconds` and proposed `tokens`."""
        self._job_running = False
        if self.done:
            return []
        if job.epoch != self._epoch:
            self._agreed = min(self._agreed, job.start)
            return self._nothing_more(now)
        self.statistics.drafted += len(tokens)
        if not tokens:
            self._stalled = True
        elif len(job.extend_with) <= CATCH_UP:
            self._drafting_s.add(seconds / len(tokens))
        overtaken = min(len(tokens), len(self.transcript) - job.start)
        if overtaken > 0:
            committed = self.transcript[job.start : job.start + overtaken]
            agreeing = next((i for i in range(overtaken) if tokens[i] != committed[i]), overtaken)
            self._agreed = job.start + agreeing
            if agreeing < overtaken:
                return self._nothing_more(now)
            tokens, q = tokens[overtaken:], q[overtaken:]
        room = max(0, self._credit - len(self._drafted))  # the credit may have shrunk meanwhile
        tokens, q = tokens[:room], q[:room]
        self._drafted.extend(tokens)
        self._agreed = max(self._agreed, len(self.transcript) + len(self._drafted)) if tokens else self._agreed
        return self._flush(now, q)

    def on_drafter_failed(self, error: OutriderError) -> list[EdgeInstruction]:
        """The drafter is broken: go on as plain cloud streaming, and say so."""
        self._job_running = False
        self._drafting = False
        self.statistics.drafter_error = str(error)
        self._forget_drafts()
        return self._reports()

    def _flush(self, now: float, q: tuple[float, ...] = ()) -> list[EdgeInstruction]:
        unsent = tuple(self._drafted[self._sent :])
        if not self._connected or not unsent:
            return self._nothing_more(now)
        frame = Draft(
            chain=self._chain,
            start=len(self.transcript) + self._sent,
            tokens=unsent,
            q=q if self._send_q and len(q) == len(unsent) else (),
            sent_s=now,
            complete=self.allowance() == 0,
        )
        self._sent = len(self._drafted)
        self._chain_sent = True
        return [Send(frame)]

    def _nothing_more(self, now: float) -> list[EdgeInstruction]:
        """Tell a waiting verifier that it waits in vain, where that is so."""
        if not (self._connected and self._drafting) or self._job_running or self.allowance() > 0:
            return []
        self._chain_sent = True
        return [Send(Draft(self._chain, len(self.transcript) + len(self._drafted), (), sent_s=now, complete=True))]

    def _reports(self) -> list[EdgeInstruction]:
        """A report when what the verifier's patience rests on has changed by a quarter."""
        report = Report(self._drafting, self._drafting_s.value, self._round_trip_s.value)
        old = self._reported
        same = (
            report.drafting == old.drafting
            and math.isclose(report.drafting_s, old.drafting_s, rel_tol=0.25)
            and math.isclose(report.round_trip_s, old.round_trip_s, rel_tol=0.25, abs_tol=1e-3)
        )
        if same or not self._connected:
            return []
        self._reported = report
        return [Send(report)]

    def _end(self, finish: FinishReason | None = None, error: OutriderError | None = None) -> list[EdgeInstruction]:
        self.done = True
        self.finish = finish
        return [Done(finish, error)]


def _may_heal(error: OutriderError) -> bool:
    """Whether another lease and another stream can help."""
    if isinstance(error, ResourceExhausted):
        return error.retry_after_s > 0
    return isinstance(error, Unavailable | LeaseExpired)


__all__ = [
    "Done",
    "DraftJob",
    "EdgeInstruction",
    "EdgeSession",
    "EdgeStatistics",
    "Emit",
    "Reopen",
    "RetryRules",
    "Send",
    "Verified",
    "VerifierRules",
    "VerifierSession",
    "settle",
]
