"""One text on its edge: its transcript and counts, and its streams, opened, accepted, lost and kept between turns."""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from outrider.proto.errors import InvalidArgument, LeaseExpired, OutriderError, ResourceExhausted, Unavailable
from outrider.proto.policy.measurements import BETTER
from outrider.proto.session.events import Done, Emit, Reopen
from outrider.proto.session.service_record import ServiceRecord
from outrider.proto.types import (
    LATER_SETTINGS,
    MAX_TOKEN_ID,
    Commit,
    Continue,
    FinishReason,
    Open,
    Opened,
    PromptLogprobs,
    Report,
    Sampling,
    ServiceGoal,
    SteeringRequest,
    TokenFacts,
    token_ids,
)


@dataclass(slots=True)
class DrafterCounts:
    """Tokens of one drafter in one text.

    Attributes:
        committed: tokens committed while it was active.
        hits: committed tokens that it proposed, or would have proposed, of those `compared` with its proposals.
    """

    committed: int = 0
    hits: int = 0
    compared: int = 0


@dataclass(slots=True)
class EdgeStatistics:
    """Counts of one text; the link fills in the bytes.

    Attributes:
        committed: tokens of text.
        accepted: drafts among them, of which `accepted_cloud` are the verifier's own.
        drafted: tokens that drafters proposed; `branched` are those after likely misses.
        sent_beside: branches of one token, or more, that went with drafts.
        verified: drafts that the verifier's steps verified, of which `verified_cloud` are its own.
        verified_beside: drafts that steps verified beside the chain, or the path that they followed.
        branches_taken: misses after which the verifier went on with a branch.
        cloud_drafting_s: time that the verifier's own drafter has worked, in seconds.
        drafting_s, reading_s: time of the edge's drafting jobs, and that of idle drafters to catch up, in seconds.
        hits: drafts that agreed with the committed token of their position.
        compared: drafts up to the first miss of their chain that met a committed token; acceptance is hits / compared.
        cached_tokens: tokens of the prompt that the verifier had computed already.
        steps, messages: commits, and Draft messages.
        resumes: streams opened after the first.
        suspected, reopened: times that a stream was silent beyond its bound, and was left for it.
        fenced: frames of streams that had been left, which were ignored.
        round_trip_s: smoothed round-trip time of a small message, in seconds.
        steered: whether the verifier sends the steering vectors that the drafter takes.
        vectors, vector_bytes: vectors received, unreadable ones included, and their bytes without framing.
        steered_jobs: drafting jobs steered by a vector.
        vector_age: sum over these of the positions from the vector's own to the one that the first draft follows.
        of_drafters: counts by name, for each drafter that was active or caught up.
        read: tokens that idle drafters caught up with.
        service: what became of the service that the text asked for; None: it asked for none.
    """

    committed: int = 0
    accepted: int = 0
    accepted_cloud: int = 0
    drafted: int = 0
    branched: int = 0
    sent_beside: int = 0
    verified_beside: int = 0
    branches_taken: int = 0
    verified: int = 0
    verified_cloud: int = 0
    cloud_drafting_s: float = 0.0
    drafting_s: float = 0.0
    reading_s: float = 0.0
    hits: int = 0
    compared: int = 0
    cached_tokens: int = 0
    steps: int = 0
    messages: int = 0
    resumes: int = 0
    suspected: int = 0
    reopened: int = 0
    fenced: int = 0
    uplink_bytes: int = 0
    downlink_bytes: int = 0
    round_trip_s: float = 0.0
    drafter_error: str = ""
    steered: bool = False
    vectors: int = 0
    vector_bytes: int = 0
    bad_vectors: int = 0
    steered_jobs: int = 0
    vector_age: int = 0
    of_drafters: dict[str, DrafterCounts] = field(default_factory=dict)
    switches: int = 0
    read: int = 0
    service: ServiceRecord | None = None

    def of(self, drafter: str) -> DrafterCounts:
        if drafter not in self.of_drafters:
            self.of_drafters[drafter] = DrafterCounts()
        return self.of_drafters[drafter]


class EdgeText:
    """The transcript and its counts.

    Attributes:
        frame: Open of the present turn, as a fresh session would begin with it.
        tokens: prompt and committed tokens.
        finish: why the turn ended; None: it runs, or failed.
        prompt: what the model says of the prompt's tokens after the first, as far as it has come.
    """

    def __init__(self, frame: Open) -> None:
        self.frame = frame
        self.tokens: list[int] = [*frame.prompt, *frame.committed]
        self.prompt_length = len(frame.prompt)
        self.statistics = EdgeStatistics(service=ServiceRecord(frame.service) if frame.service is not None else None)
        self.turns = 0
        self.done = False
        self.finish: FinishReason | None = None
        self.prompt: list[TokenFacts] = []

    @property
    def generated(self) -> int:
        return len(self.tokens) - self.prompt_length

    def begin_turn(self, start: int, prompt: tuple[int, ...], sampling: Sampling) -> None:
        """Continue with `prompt` after the first `start` tokens.

        Raises:
            InvalidArgument: with the field named; nothing has changed then.
        """
        if not self.done:
            raise InvalidArgument("still runs; finish or leave it before the next", field="turn")
        prompt = (*self.tokens[:start], *prompt)
        self.frame = replace(self.frame, prompt=prompt, committed=(), sampling=sampling, prompt_logprobs=None)
        self.prompt = []
        self.tokens = list(self.frame.prompt)
        self.prompt_length = len(self.tokens)
        self.statistics = EdgeStatistics(
            round_trip_s=self.statistics.round_trip_s,
            drafter_error=self.statistics.drafter_error,
            steered=self.statistics.steered,
            service=self.statistics.service.fresh() if self.statistics.service is not None else None,
        )
        self.turns += 1
        self.done, self.finish = False, None

    def take_service(self, service: ServiceGoal | None, *, unkept: bool) -> None:
        """Ask for the service that a lease names, unless the text asks for another; None: it names none."""
        if service is not None and self.frame.service is None:
            self.frame = replace(self.frame, service=service)
            self.statistics.service = ServiceRecord(service)
        if self.statistics.service is not None:
            self.statistics.service.unlikely = unkept

    @property
    def lacks_prompt(self) -> bool:
        return self.frame.prompt_logprobs is not None and len(self.prompt) < self.prompt_length - 1

    def take_prompt(self, frame: PromptLogprobs) -> None:
        """Take in what is new, since a verifier that takes a text over begins again."""
        known = len(self.prompt) + 1 - frame.start
        if self.lacks_prompt and known >= 0:
            self.prompt += frame.tokens[known : known + self.prompt_length - 1 - len(self.prompt)]

    def emit(self, commit: Commit, known: int) -> Emit:
        """Count the commit's tokens after the first `known`, and return what hands them to the user."""
        prompt: tuple[TokenFacts, ...] = ()
        if not self.generated:  # a resumed text's is that of its first stream
            self.statistics.cached_tokens = min(commit.cached_tokens, self.prompt_length)
            prompt = tuple(self.prompt)
        drafted = tuple(i < commit.accepted for i in range(known, len(commit.tokens)))
        if self.statistics.service is not None and drafted:
            self.statistics.service.take(commit, first=not self.generated)
        self.statistics.committed += len(drafted)
        self.statistics.accepted += sum(drafted)
        self.statistics.accepted_cloud += min(commit.accepted_here, sum(drafted))  # they come last
        return Emit(len(self.tokens), commit.tokens[known:], drafted, prompt)

    def end(self, finish: FinishReason | None = None, error: OutriderError | None = None) -> Done:
        self.done, self.finish = True, finish
        return Done(finish, error)


@dataclass(frozen=True, slots=True)
class RetryRules:
    """Rules by which a lost stream is reopened.

    Attributes:
        first_s: wait before the first retry, in seconds; each further one waits twice as long, up to `max_s`.
        abandon_after_s: time without a verifier, since the newest commit, after which the text fails, in seconds.
        max_losses: verifiers that may lose the text without a commit between, once it has tried for that long; beyond
            these it may be what ends them.
    """

    first_s: float = 0.05
    max_s: float = 2.0
    abandon_after_s: float = 60.0
    max_losses: int = 12


class EdgeStream:
    """The stream of one text, with the terms that its verifier has set.

    Attributes:
        connected: whether a verifier has the session, running or kept; `opening`: whether an Open is under way.
        has_opened: whether any has left.
        terms: newest answer to an Open, or else that which is expected.
        credit: unverified drafts that the verifier allows now.
        covered: tokens after the newest commit that the verifier has by its own drafts before the edge's can come.
        max_tokens: tokens of text in this turn, as promised by the verifier that began it.
        turn: number of Continues that have gone over this stream.
        epoch: number of streams before this one; frames of another are not this stream's.
        opened_at: sending of the newest Open, in seconds.
        reported: newest report, or else that of the Open.
    """

    def __init__(self, text: EdgeText, retry: RetryRules) -> None:
        frame = text.frame
        self.connected = self.opening = self.has_opened = False
        self.terms = Opened(0, 0, frame.sampling.max_tokens, "", MAX_TOKEN_ID, max_drafts=frame.max_drafts)
        self.credit = 0
        self.covered = 0
        self.max_tokens = frame.sampling.max_tokens
        self.turn = 0
        self.epoch = 0
        self.opened_at = 0.0
        self.reported = Report(frame.drafting)
        self._text = text
        self._retry = retry
        self._opened_for = 0  # turns of the text when the newest Open was sent
        self._opened_with = 0  # tokens of text in that Open
        self._retries = 0  # since a verifier has answered
        self._failing_since = math.inf  # without a verifier that has the text; infinite: one has it
        self._failed_s = 0.0  # before that, since a verifier has answered
        self._losses = 0  # of verifiers that had the text, since one has answered
        self._losing_since = math.inf  # time of the first of these
        self._precision = ""  # of the newest verifier that states one
        self._promised = 0  # tokens of text, by the newest verifier
        self._refusal: OutriderError | None = None  # of other terms than the text's, since a verifier has answered
        self._expects = False  # whether drafts may follow the newest Open before it is answered
        self._trusts = True  # no verifier has refused such drafts

    @property
    def precision(self) -> str:
        """Precision of the text so far and of its prompt's scores, which later verifiers must have; empty: any."""
        return self._precision if self._text.generated or self._text.prompt else ""

    @property
    def context_length(self) -> int:
        """Positions that the text so far was promised, and ends at, whichever verifier it has; 0: none yet."""
        promised = self._promised if self._text.generated else 0
        return self._text.prompt_length + promised if promised else 0

    @property
    def next_epoch(self) -> int:
        return self.epoch + self.has_opened

    @property
    def takes_drafts(self) -> bool:
        return self.connected or (self.opening and self._expects)

    def open(
        self, lease: bytes, now: float, *, drafting: bool, steering: SteeringRequest | None, expected: Opened | None
    ) -> Open:
        """Return the Open of a stream, fresh or resumed; drafts may follow it at once within expected terms."""
        text = self._text
        self.opened_at = now
        self.epoch = self.next_epoch
        self.opening = self.has_opened = True
        self._expects = expected is not None and self._trusts
        if expected is not None:
            self._set_terms(replace(expected, verifier=self.terms.verifier))
            ends = self.context_length or expected.context_length
            self.max_tokens = min(text.frame.sampling.max_tokens, ends - text.prompt_length)
        self._opened_for, self._opened_with = text.turns, text.generated
        self.turn = 0
        self.reported = Report(drafting)
        committed = tuple(text.tokens[text.prompt_length :])
        return replace(
            text.frame,
            lease=lease,
            committed=committed,
            drafting=drafting,
            steering=steering,
            epoch=self.epoch,
            prompt_logprobs=text.frame.prompt_logprobs if text.lacks_prompt else None,
            prompt_logprobs_from=1 + len(text.prompt) if text.lacks_prompt and text.prompt else 0,
            context_length=self.context_length,
        )

    def accept(self, opened: Opened, now: float) -> Reopen | None:
        """Take the verifier's terms; return a Reopen where they are for a turn that has ended meanwhile.

        Raises:
            InvalidArgument: it took over another text, or does not know one of its settings.
            Unavailable: it computes in another precision than the text so far, or would end it elsewhere.
        """
        if self._opened_for != self._text.turns:
            return Reopen(0.0, Unavailable("opened for a turn that has ended"))
        if opened.committed != self._opened_with:
            raise InvalidArgument("the verifier took over another text", field="opened.committed")
        check_terms(opened, self._text.frame.sampling)
        self._check_promises(opened)
        self._precision = opened.precision or self.precision
        self._promised = opened.max_tokens
        self.connected, self.opening = True, False
        self._failed_s += now - min(now, self._failing_since)
        self._failing_since = math.inf
        self._set_terms(opened)
        self.max_tokens = opened.max_tokens
        return None

    def _check_promises(self, opened: Opened) -> None:
        if opened.precision not in ("", self.precision or opened.precision):
            self._refusal = Unavailable(
                f"is {opened.precision} at verifier {opened.verifier}, the text was begun in {self.precision} and goes "
                "on in no other; start a verifier with the --engine, --dtype and other settings of the first",
                field="opened.precision",
                code="OUT-306",
            )
        elif self.context_length and opened.max_tokens != self._promised:
            self._refusal = Unavailable(
                f"is {opened.max_tokens} at verifier {opened.verifier}, the text was promised {self._promised} "
                "and ends there alone; start one with the release, --context-length and --kv-tokens of the first",
                field="opened.max_tokens",
                code="OUT-306",
            )
        else:
            return
        raise self._refusal

    def _set_terms(self, terms: Opened) -> None:
        self.terms = terms
        self.credit, self.covered = terms.credit, 0

    def lose(self, error: OutriderError, now: float) -> Reopen | OutriderError:
        """Return when to open another stream, or why the text fails: none can help, or retries have lasted too long."""
        had_it, self.connected, self.opening = self.connected, False, False
        if self._expects and error.field.startswith("draft."):  # its terms have changed, and drafts came before them
            self._trusts = self._expects = False
            return Reopen(0.0, error)
        if not _may_heal(error):
            return error
        retry = self._retry
        self._failing_since, self._losing_since = min(self._failing_since, now), min(self._losing_since, now)
        self._losses += had_it
        backoff_s = min(retry.max_s, retry.first_s * 2.0 ** min(self._retries, 64))
        if max(self._failed_s + now - self._failing_since, error.retry_after_s) > retry.abandon_after_s:
            return self._refusal or error
        if self._losses >= retry.max_losses and now - self._losing_since > retry.abandon_after_s:
            return error
        self._retries += 1
        self._text.statistics.resumes += 1
        if isinstance(error, ResourceExhausted):  # whoever comes at the time that it was told keeps its turn
            return Reopen(max(error.retry_after_s, retry.first_s), error)
        return Reopen(max(error.retry_after_s, backoff_s), error)

    def forget_retries(self) -> None:
        """Start over counting failures, since the verifier has answered or another turn begins."""
        self._retries = 0
        self._failing_since, self._failed_s = math.inf, 0.0
        self._losses, self._losing_since = 0, math.inf
        self._refusal = None

    def begin_turn(self, start: int, prompt: tuple[int, ...], sampling: Sampling | None, chain: int) -> Continue:
        """Return the Continue of a kept session; `sampling` None means that of the last turn."""
        self.turn += 1
        self.credit = self.terms.credit
        self._promised = self.max_tokens
        return Continue(start, prompt, sampling, chain)

    def end_turn(self, error: OutriderError | None) -> None:
        self.connected = self.connected and self.terms.keep_s > 0 and error is None
        self.opening = False

    def serves(self, commit: Commit) -> bool:
        """Return whether a commit is of the present turn; one of an earlier turn may come until this has a stream."""
        return commit.turn == self.turn and self._opened_for + self.turn == self._text.turns

    def follow(self, commit: Commit) -> int:
        """Return the number of the commit's tokens that the transcript has already.

        Raises:
            Unavailable: a commit before it is missing.
            InvalidArgument: it contradicts the transcript, goes on where the text must end, or comes before what was
                wanted of the prompt.
        """
        text = self._text
        known = len(text.tokens) - commit.start
        if known < 0:
            raise Unavailable("a commit was lost; resuming")
        mine = text.tokens[commit.start : commit.start + len(commit.tokens)]
        if commit.start < text.prompt_length or token_ids(commit.tokens[:known]) != tuple(mine):
            raise InvalidArgument("contradicts the transcript", field="commit.tokens")
        if text.lacks_prompt and commit.tokens:
            raise InvalidArgument("do not come from this verifier; update it", field="open.prompt_logprobs")
        left = text.frame.sampling.max_tokens - text.generated - max(0, len(commit.tokens) - known)
        if left < 0 or (left == 0 and commit.finish is None):
            raise InvalidArgument("goes on beyond sampling.max_tokens", field="commit.tokens")
        return known

    def changed(self, report: Report, *, hits_more: bool) -> bool:
        """Return whether the report differs by a quarter from the verifier's; it counts as sent then.

        The acceptance counts where the edge's drafter rests and `hits_more` than the verifier's, which cannot see that.
        """
        old = self.reported
        same = (
            report.steering is None
            and report.drafting == old.drafting
            and math.isclose(report.drafting_s, old.drafting_s, rel_tol=0.25)
            and not (hits_more and abs(report.acceptance - old.acceptance) > BETTER)
            and math.isclose(report.round_trip_s, old.round_trip_s, rel_tol=0.25, abs_tol=1e-3)
        )
        if not same:
            self.reported = report
        return not same


def check_terms(terms: Opened, sampling: Sampling) -> None:
    """Raise `InvalidArgument` where a verifier would ignore a setting, and might write another text."""
    usual = Sampling()
    for name in LATER_SETTINGS:
        if getattr(sampling, name) != getattr(usual, name) and name not in terms.settings:
            message = f"is not known to verifier {terms.verifier}; update it, or leave {name} out"
            raise InvalidArgument(message, field=f"sampling.{name}")


def _may_heal(error: OutriderError) -> bool:
    """Return whether another lease and another stream can help."""
    if isinstance(error, ResourceExhausted):
        return error.retry_after_s > 0
    return isinstance(error, Unavailable | LeaseExpired)
