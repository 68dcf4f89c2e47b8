"""An admitted session as the engine holds it, and the way of its frames to its stream."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider.cloud.grammar.grammar import GrammarMatcher
from outrider.cloud.target.backend import Backend, Handle
from outrider.proto.errors import OutriderError
from outrider.proto.lease import text_name
from outrider.proto.session.verifier import VerifierSession
from outrider.proto.token_counts import TokenCounts
from outrider.proto.types import CloudFrame

MAX_UNREAD = 64


class Outbox:
    """The way of a session's frames to its stream, called from the engine's thread."""

    def put(self, item: CloudFrame | OutriderError) -> None:
        """Hand over a frame, or the error that ends the stream."""
        raise NotImplementedError

    def unread(self) -> int:
        """Return how many frames the client has not taken yet."""
        raise NotImplementedError


@dataclass(frozen=True, slots=True)
class NoHandle:
    """The sequence of a session that holds no pages."""

    length: int = 0
    num_pages: int = 0


NO_HANDLE = NoHandle()


@dataclass(frozen=True, slots=True)
class Owner:
    """The owner of a session, as its lease says.

    Attributes:
        key: name of its API key; empty: it has none.
        max_sessions: texts of the key that may go on here at once; 0: any number.
        isolation: only sessions of the same one share KV pages.
        teaches: whether the key allows learning from its texts, which their edges must allow, too.
    """

    key: str = ""
    max_sessions: int = 0
    isolation: str = ""
    teaches: bool = False


ANYBODY = Owner()


@dataclass(slots=True, eq=False)
class Slot:
    """An admitted session and the engine's state for it.

    Attributes:
        key: number of its stream.
        session: session machine of the present turn.
        ready_since: when it could have begun its next step, seconds.
        matcher: enforces its grammar, if it has one.
        masks_by: until when a step waits for its grammar's mask, seconds.
        counts: those of its transcript so far, where penalties want them.
        began: start of its turn, in seconds.
    """

    key: int
    session: VerifierSession
    outbox: Outbox
    ready_since: float
    owner: Owner = ANYBODY
    handle: Handle = NO_HANDLE
    matcher: GrammarMatcher | None = None
    masks_by: float = 0.0
    counts: TokenCounts | None = None
    began: float = field(init=False)

    def __post_init__(self) -> None:
        self.began = self.ready_since

    @property
    def num_uncomputed_tokens(self) -> int:
        """Committed tokens that the KV cache lacks; 1 while decoding: the last one."""
        return len(self.session.transcript) - self.handle.length

    @property
    def text_name(self) -> str:
        """Name of its text for coordinators; sessions of two keys may have one name, since edges choose it."""
        return text_name(self.owner.key, self.session.id)

    @property
    def waits_for_pages(self) -> bool:
        return not self.handle.num_pages

    @property
    def next_tokens(self) -> int:
        """Positions that its next steps fill until they commit a token, with all drafts."""
        return len(self.session.transcript) + self.session.max_useful_drafts

    @property
    def backlogged(self) -> bool:
        """Whether its client leaves so much unread that its text stands still."""
        return self.outbox.unread() > MAX_UNREAD

    @property
    def busy(self) -> bool:
        """Whether its grammar is being asked what may come next."""
        return self.matcher is not None and self.matcher.busy

    def count_tokens(self) -> TokenCounts:
        transcript = self.session.transcript
        if self.counts is None:
            self.counts = TokenCounts(self.session.prompt_length)
        self.counts.extend(transcript[self.counts.length :])
        return self.counts

    def forget_drafts(self, backend: Backend) -> None:
        """Truncate the sequence to the transcript, but for its last token, which the next step computes."""
        backend.truncate(self.handle, min(self.handle.length, len(self.session.transcript) - 1))
