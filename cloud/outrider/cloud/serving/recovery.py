"""Recovery from a failed step or plan, by finding out whether a session, the step's size or the verifier failed.

A failed step is made once more as it was, then in halves. Where all halves succeed, the step was too large, and later
ones stay smaller. A session that fails alone is at fault, unless a text of the verifier's own fails too, or texts of
several API keys fail in a row: then it is the verifier that fails, and no session must end for it. Texts of one key
prove nothing, since whoever holds it may have found how to make a text fail.
"""

from __future__ import annotations

import logging
import math
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from outrider.cloud.serving.batching import Batch, Batching, Share, cut
from outrider.cloud.serving.sessions import Sessions, verifier_failed
from outrider.cloud.serving.slots import Outbox, Owner, Slot
from outrider.cloud.serving.steps import Runner
from outrider.cloud.serving.verifier_metrics import VerifierCounts
from outrider.proto.errors import Internal, OutriderError, Unavailable
from outrider.proto.session.verifier import VerifierSession
from outrider.proto.types import CloudFrame, Goaway, Open, Sampling

MAX_IN_A_ROW = 3  # keys whose texts fail alone, or plans that fail for nobody alone, with no success between
FEW_ROWS = 16  # of a session alone: if these fail, it is not for their number, unless memory is what lacks
PROBE_TOKENS = 8
_NO_MEMORY = ("OutOfMemoryError", "MemoryError")  # the first is torch's
_NO_MEMORY_ON_CPU = "can't allocate memory"  # torch raises a plain RuntimeError

log = logging.getLogger(__name__)


class VerifierFailed(Exception):
    """Steps fail whatever they are for: the process should end, and its sessions go on elsewhere."""


@dataclass(frozen=True, slots=True)
class Part:
    """A part of a step to make again: the next tokens of a session, and the drafts after them.

    Attributes:
        max_tokens: most uncomputed tokens of the transcript.
        max_drafts: most drafts, of the block and its branches, if these are the last.
        tried: whether it has failed alone before.
    """

    slot: Slot
    max_tokens: int
    max_drafts: int
    tried: bool = False

    def split(self, few_rows: int) -> list[Part]:
        """Return smaller parts; none: it is as small as they come. Drafts keep until a later step."""
        if self.max_drafts:
            return [Part(self.slot, self.max_tokens, 0)]
        if self.max_tokens <= few_rows:
            return []
        half = self.max_tokens // 2
        return [Part(self.slot, half, 0), Part(self.slot, self.max_tokens - half, 0)]


class Recovery:
    """The judge of what fails in an engine."""

    def __init__(
        self,
        sessions: Sessions,
        batching: Batching,
        runner: Runner | None,
        step: Callable[[Batch], None],
        masked: Callable[[Sequence[Share]], list[Share]],
        counts: VerifierCounts,
    ) -> None:
        """Judge for the engine of `sessions`, whose batches are made by `batching` and run by `runner`.

        Without a runner there are no steps to make again, and no text of the verifier's own proves anything.

        `step` makes a step of the engine again, and `masked` returns the shares whose grammars, if any, have answered.
        """
        self._sessions = sessions
        self._batching = batching
        self._runner = runner
        self._step = step
        self._masked = masked
        self._counts = counts
        self._failed_keys: set[str] = set()
        self._failed_plans = 0

    def note_commit(self) -> None:
        self._failed_keys.clear()

    def note_plan(self) -> None:
        self._failed_plans = 0

    def after_step(self, batch: Batch) -> None:
        """Make a step that failed again, in smaller steps if need be; end the sessions that are at fault.

        Raises:
            VerifierFailed: none of them is.
        """
        alone = len(batch.shares) == 1
        parts = [Part(share.slot, share.num_tokens, share.num_rows - share.num_tokens, alone) for share in batch.shares]
        done = self._attempt(parts)
        if isinstance(done, Exception) and (fitting := self._in_parts(parts, done)):
            self._batching.limit.fail(batch.num_rows, fitting)
            log.warning("a step of %d rows is too large, one of %d is not", batch.num_rows, fitting)

    def after_plan(self, now: float) -> None:
        """Find the sessions for which planning fails, and end them.

        Raises:
            VerifierFailed: none of them is at fault, or planning fails for none alone but again and again for all.
        """
        self._failed_plans += 1
        for slot in self._sessions.running():
            try:
                self._batching.plan([slot], now)
            except Exception as error:  # a session's report may meet any defect
                self.end(slot, error)
                self._failed_plans = 0
        if self._failed_plans >= MAX_IN_A_ROW:
            raise VerifierFailed("no step can be planned")

    def end(self, slot: Slot, error: Exception) -> None:
        """End a session by the error for which something of it failed.

        Raises:
            VerifierFailed: it is not at fault.
        """
        self._sessions.release(slot)  # the verifier's own text may need its pages
        if isinstance(error, FloatingPointError):
            self._counts.corrupted += 1
        session = slot.session
        whole = Goaway("the session cannot be kept", epoch=session.epoch) if session.finish is not None else None
        self.refuse(slot.outbox, slot.owner, error, whole)

    def refuse(self, outbox: Outbox, owner: Owner, error: Exception, ending: CloudFrame | None = None) -> None:
        """Answer a session without a slot, for which something failed, by `ending` or else by an error.

        Sessions without an API key count as those of one key.

        Raises:
            VerifierFailed: it is not at fault.
        """
        try:
            self._check_verifier()
            self._failed_keys.add(owner.key)
            if len(self._failed_keys) >= MAX_IN_A_ROW:
                raise VerifierFailed(f"texts of {MAX_IN_A_ROW} keys failed in a row, the last with {error!r}")
        except VerifierFailed:
            outbox.put(verifier_failed())
            raise
        outbox.put(ending or _ending(error))

    def _check_verifier(self) -> None:
        """Decode a text of the verifier's own.

        Raises:
            VerifierFailed: it fails too, twice.
        """
        for tries_left in (1, 0):
            try:
                self.decode_own_text()
                return
            except Exception as error:  # torch may raise anything
                if not tries_left:
                    raise VerifierFailed(f"a text of its own fails with {error!r}") from error

    def decode_own_text(self) -> None:
        """Plan, compute and commit a few tokens of a text of the verifier's own, as any other.

        It is as long as there are KV pages for. What goes wrong is raised, whatever it is.
        """
        runner, backend, rules, now = self._runner, self._sessions.backend, self._sessions.rules, 0.0
        capacity = backend.capacity
        room = min(capacity.free_pages * capacity.page_size, rules.context_length)
        if room < 2 or runner is None:
            return
        length = min(PROBE_TOKENS, room - 1)
        prompt = tuple((i + 1) * rules.vocab_size // (length + 1) for i in range(length))  # the first are often special
        sampling = Sampling(max_tokens=2, ignore_eos=True)
        frame = Open(rules.model, rules.tokenizer_sha256, prompt, sampling, "probe", drafting=False)
        session = VerifierSession(frame, rules, now)
        handle = backend.open()
        slot = Slot(-1, session, Outbox(), now, handle=handle)
        try:
            backend.reserve(handle, min(room, len(prompt) + sampling.max_tokens))
            while session.finish is None:
                for _, verified in runner.run(self._batching.plan([slot], math.inf).shares).verified:
                    session.on_verified(verified, now)
                slot.forget_drafts(backend)
        finally:
            backend.release(handle)

    def _in_parts(self, parts: Sequence[Part], error: Exception) -> int:
        """Compute in smaller steps what failed with `error`.

        Returns:
            The rows of the largest of these steps; 0: not the size was at fault.
        """
        if len(parts) > 1:
            half = len(parts) // 2
            rows = [self._computed(parts[:half]), self._computed(parts[half:])]
            return max(rows) if all(rows) else 0
        [part] = parts
        few_rows = 1 if _lacks_memory(error) else FEW_ROWS
        if smaller := part.split(few_rows):
            rows = [self._computed([each]) for each in smaller]
            return max(rows) if all(rows) and part.max_tokens + part.max_drafts > few_rows else 0
        if not part.tried:
            return self._computed([replace(part, tried=True)])
        self.end(part.slot, error)
        return 0

    def _computed(self, parts: Sequence[Part]) -> int:
        done = self._attempt(parts)
        return self._in_parts(parts, done) if isinstance(done, Exception) else done

    def _attempt(self, parts: Sequence[Part]) -> int | Exception:
        """Make a step for those that still run, and return its rows, or what went wrong."""
        here = set(self._sessions.running())
        running = [part for part in parts if part.slot in here]
        try:
            batch = Batch(self._masked([self._share(part) for part in running]))
            if batch.shares:
                self._step(batch)
            return batch.num_rows
        except VerifierFailed:
            raise
        except Exception as error:  # torch may raise anything
            log.warning("a step of %d sessions failed again: %r", len(running), error)
            traceback.clear_frames(error.__traceback__)  # they hold the step's tensors
            return error.with_traceback(None)

    def _share(self, part: Part) -> Share:
        part.slot.forget_drafts(self._sessions.backend)
        share = self._batching.share_of(part.slot, part.max_tokens)
        return cut(share, share.num_tokens + part.max_drafts)


def _lacks_memory(error: Exception) -> bool:
    return type(error).__name__ in _NO_MEMORY or _NO_MEMORY_ON_CPU in str(error)


def _ending(error: Exception) -> OutriderError:
    if _lacks_memory(error):
        message = "the verifier lacks the memory for this session; resume elsewhere"
        return Unavailable(message, retry_after_s=1.0, code="OUT-303")
    return Internal(f"the step failed: {type(error).__name__}")
