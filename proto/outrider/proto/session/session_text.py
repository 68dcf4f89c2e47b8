"""One text on its edge: the transcript, its turn and its counts."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

from outrider.proto.errors import InvalidArgument, OutriderError
from outrider.proto.session.events import Done, Emit
from outrider.proto.types import Commit, FinishReason, Open, PromptLogprobs, Sampling, TokenFacts


@dataclass(slots=True)
class DrafterCounts:
    """Tokens of one drafter in one text.

    Attributes:
        committed: tokens committed while it was active.
        hits: committed tokens that it proposed, or would have proposed.
        compared: committed tokens with which its proposals were compared.
    """

    committed: int = 0
    hits: int = 0
    compared: int = 0


@dataclass(slots=True)
class EdgeStatistics:
    """Counts of one text; the link fills in the bytes.

    Attributes:
        committed: tokens of text.
        accepted: drafts among them, the verifier's own included.
        accepted_here: those of these that the verifier's own drafter made.
        drafted: tokens that drafters proposed.
        branched: tokens that drafters proposed after likely misses.
        sent_beside: branches of one token, or more, that went with drafts.
        verified_beside: drafts that steps verified beside the chain, or the path that they followed.
        branches_taken: misses after which the verifier went on with a branch.
        verified: drafts that the verifier's steps verified, its own included.
        verified_here: those of these that the verifier's own drafter made.
        drafting_here_s: time that the verifier's own drafter has worked, in seconds.
        drafting_s: time of the edge's drafting jobs, in seconds.
        reading_s: time that idle drafters of the edge took to catch up, in seconds.
        hits: drafts that agreed with the committed token of their position.
        compared: drafts up to the first miss of their chain that met a committed token; acceptance is hits / compared.
        cached_tokens: tokens of the prompt that the verifier had computed already.
        steps: commits.
        messages: Draft messages.
        resumes: streams opened after the first.
        suspected: times that a stream was silent beyond its bound.
        reopened: streams that were left for their silence.
        fenced: frames of streams that had been left, which were ignored.
        round_trip_s: smoothed round-trip time of a small message, in seconds.
        steered: whether the verifier sends the steering vectors that the drafter takes.
        vectors: vectors received, unreadable ones included.
        vector_bytes: their bytes on the downlink, without framing.
        steered_jobs: drafting jobs steered by a vector.
        vector_age: sum over these of the positions from the vector's own to the one that the first draft follows.
        of_drafters: counts by name, for each drafter that was active or caught up.
        read: tokens that idle drafters caught up with.
    """

    committed: int = 0
    accepted: int = 0
    accepted_here: int = 0
    drafted: int = 0
    branched: int = 0
    sent_beside: int = 0
    verified_beside: int = 0
    branches_taken: int = 0
    verified: int = 0
    verified_here: int = 0
    drafting_here_s: float = 0.0
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

    def of(self, drafter: str) -> DrafterCounts:
        """Return the counts of the drafter of that name."""
        if drafter not in self.of_drafters:
            self.of_drafters[drafter] = DrafterCounts()
        return self.of_drafters[drafter]


class EdgeText:
    """The transcript and its counts.

    Attributes:
        frame: Open of the present turn, as a fresh session would begin with it.
        tokens: prompt and committed tokens.
        turns: turns begun after the first.
        finish: why the turn ended; None: it runs, or failed.
        prompt: what the model says of the prompt's tokens after the first, as far as it has come.
    """

    def __init__(self, frame: Open) -> None:
        self.frame = frame
        self.tokens: list[int] = [*frame.prompt, *frame.committed]
        self.prompt_length = len(frame.prompt)
        self.statistics = EdgeStatistics()
        self.turns = 0
        self.done = False
        self.finish: FinishReason | None = None
        self.prompt: list[TokenFacts] = []

    @property
    def generated(self) -> int:
        """Tokens of text so far."""
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
        )
        self.turns += 1
        self.done, self.finish = False, None

    @property
    def lacks_prompt(self) -> bool:
        """Whether log probabilities of the prompt are wanted that have not come."""
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
        self.statistics.committed += len(drafted)
        self.statistics.accepted += sum(drafted)
        self.statistics.accepted_here += min(commit.accepted_here, sum(drafted))  # they come last
        return Emit(len(self.tokens), commit.tokens[known:], drafted, prompt)

    def end(self, finish: FinishReason | None = None, error: OutriderError | None = None) -> Done:
        """End the turn."""
        self.done, self.finish = True, finish
        return Done(finish, error)
