"""The engine of a verifier that computes nothing: each text has a request of its own at a server, which scores it.

It lives in the event loop of the verifier's server. What it shares with the engine on a target is all that is not the
target's: admission, sessions, drafts of both ends, grammars, metrics. A probe's rows are read by the rule on listed
rows; where they leave a token open, its row is asked for once more, by names or with a longer list.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Coroutine, Sequence
from contextlib import aclosing
from dataclasses import replace
from typing import Any

from outrider.cloud.grammar.grammar import GrammarMatcher
from outrider.cloud.probes.listed_rule import choose, loudest, refusal
from outrider.cloud.probes.scoring import ListedRow, ScoringServer
from outrider.cloud.serving.batching import Batch, Share
from outrider.cloud.serving.engine import BACKLOG_S, IDLE_S, EngineCore, rules_of
from outrider.cloud.serving.local_source import NoSource
from outrider.cloud.serving.probe_plan import ProbePlan, ServedText, chain_of, streams
from outrider.cloud.serving.slots import Outbox, Owner, Slot
from outrider.cloud.serving.steps import StepTiming, verification_of
from outrider.cloud.serving.verifier_metrics import VerifierMetrics
from outrider.cloud.target.backend import Capacity, StepOutput, StepRow, TargetFacts
from outrider.cloud.target.verification import VerificationInput
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto.errors import Internal, InvalidArgument, ModelRefused, OutriderError, Unavailable
from outrider.proto.session.verifier import Verified, VerifierSession
from outrider.proto.types import CommittedToken, Continue, EdgeFrame, Open, Sampling, TokenFacts, token_ids

FEW, SOME = 4, 20  # likeliest tokens of a row: of greedy texts, and of others
MAX_NAMES = 1024  # asked for at once; beyond it a longer list costs less
LONGER = 16  # times as long is the next list of an open row
LOUDEST = 64  # named in the probe itself
TIMED, TIMES = (0, 4, 12), 3  # drafts of the probes of the first measurement, and how often
PAGE = 16


class ServedTarget:
    """A target that a server computes, as a verifier's sessions see it: room for as many texts as it admits."""

    def __init__(self, facts: TargetFacts, max_sessions: int) -> None:
        self.facts = facts
        self._pages = max_sessions * math.ceil(2 * facts.context_length / PAGE)
        self._used = 0

    @property
    def capacity(self) -> Capacity:
        return Capacity(PAGE, self._pages, self._pages - self._used)

    def tap(self, layers: Sequence[int]) -> None:  # noqa: ARG002
        """Refuse: a server has no layers to tap."""
        raise ModelRefused("a server's layers cannot be tapped; leave --steering out")

    def open(self, tokens: Sequence[int] = (), isolation: str = "") -> ServedText:  # noqa: ARG002
        text = ServedText()
        self.reserve(text, len(tokens))
        return text

    def reserve(self, handle: Any, tokens: int) -> None:
        pages = math.ceil(tokens / PAGE)
        self._used += pages - handle.num_pages
        handle.num_pages = pages

    def compute(self, handle: Any, length: int) -> None:
        handle.length = length

    def truncate(self, handle: Any, length: int) -> None:
        handle.length = min(handle.length, length)

    def release(self, handle: Any) -> None:
        self.reserve(handle, 0)

    def step(self, rows: Sequence[StepRow]) -> StepOutput:
        """Refuse: nothing is computed here."""
        raise NotImplementedError

    def close(self) -> None:
        """Leave the server as it is."""


class ProbeEngine(EngineCore):
    """An engine whose steps are requests to `server`, one for each text, in the event loop that starts it."""

    def __init__(
        self,
        server: ScoringServer,
        facts: TargetFacts,
        config: VerifierConfig,
        source: NoSource | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Decode by `server`, whose model has the tokenizer and the context of `facts`."""
        self.server = server
        self.target = ServedTarget(facts, config.max_sessions)
        self.requests = ProbePlan(block_size=server.facts.block_size, apart=server.facts.apart)
        rules = rules_of(config, facts)
        super().__init__(
            self.target,
            None,
            rules,
            config.max_sessions,
            self.requests,
            VerifierMetrics(rules.model, rules.name),
            self._ring,
            source=source,
            clock=clock,
        )
        self._loop: asyncio.AbstractEventLoop | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._rung = False
        self._tasks: dict[Slot, asyncio.Task[None]] = {}

    # --- the event loop ---

    def start(self) -> None:
        self._loop = asyncio.get_running_loop()
        self._ring()

    def stop(self) -> None:
        """End all requests; call it from another thread than the loop's, which goes on meanwhile."""
        if self._loop is not None:
            asyncio.run_coroutine_threadsafe(self._end(), self._loop).result()
        self.source.stop()

    def set_pace(self, min_step_s: float) -> None:
        """Do nothing: a server has its own pace."""

    async def _end(self) -> None:
        self.sessions.stop()
        if self._timer is not None:
            self._timer.cancel()
        self._loop = None
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await self.server.close()

    def _ring(self) -> None:
        if self._loop is not None and not self._rung:
            self._rung = True
            self._loop.call_soon_threadsafe(self._go_on)

    def _go_on(self) -> None:
        self._rung = False
        if self._loop is None:
            return
        batch = self.handle()
        for share in batch.shares:
            self._begin(share)
        for slot, task in self._tasks.items():
            if self.sessions.get(slot.key) is not slot or slot.session.finish is not None:
                task.cancel()
        if self._timer is not None:
            self._timer.cancel()
        wait_s = min(max(0.0, batch.wake_at - self._clock()), IDLE_S)
        self._timer = self._loop.call_later(wait_s, self._go_on)

    def _schedule(self, now: float) -> Batch:
        """Return what begins now: nobody waits for anybody else."""
        self.sessions.expire(now)
        self.sessions.grow()
        self.sessions.start_waiting()
        self.source.drive(now)
        running = self.sessions.running()
        ready = [slot for slot in running if not (slot.backlogged or slot.busy)]
        batch = self.requests.plan(ready, now)
        shares = self.sessions.masked(batch.shares, now, self._wake)
        backlogged = any(slot.backlogged for slot in running)
        return Batch(shares, min(batch.wake_at, now + BACKLOG_S) if backlogged else batch.wake_at)

    def _admit(self, key: int, frame: Open, outbox: Outbox, matcher: GrammarMatcher | None, owner: Owner) -> None:
        if (error := self._refused(frame.sampling, frame.top_logprobs)) is not None:
            outbox.put(error)
        else:
            super()._admit(key, frame, outbox, matcher, owner)

    def _take_frame(
        self, key: int, frame: EdgeFrame, arrived: float, taken: Callable[[], None], matcher: GrammarMatcher | None
    ) -> None:
        slot, sampling = self.sessions.get(key), frame.sampling if isinstance(frame, Continue) else None
        if slot is not None and sampling is not None:
            error = self._refused(sampling, slot.session.top_logprobs)
            if error is not None:
                self.sessions.fail(slot, error)
        super()._take_frame(key, frame, arrived, taken, matcher)

    def _refused(self, sampling: Sampling, top_logprobs: int) -> OutriderError | None:
        """Return why a text of these settings cannot be promised to be exact at this server; None: it can."""
        facts = self.server.facts
        if top_logprobs > facts.max_list:
            message = f"is {top_logprobs}, and this server tells {facts.max_list}; raise its --max-logprobs"
            return InvalidArgument(message, field="open.top_logprobs")
        return refusal(sampling, facts, self.rules.vocab_size, self.rules.eos_tokens)

    # --- requests ---

    def _begin(self, share: Share) -> None:
        slot = share.slot
        if (before := self._tasks.get(slot)) is not None:
            if slot.handle.length:  # else the server reads the prompt for it, which a probe would have to do again
                before.cancel()  # the stream, in whose place a probe comes
            return
        if share.block is None:
            self.requests.streaming.add(slot)
            work = self._stream(slot, slot.session)
        else:
            self.requests.probing.add(slot)
            work = self._probe(slot, slot.session, share)
        self._tasks[slot] = asyncio.get_running_loop().create_task(self._until_done(slot, work))

    async def _until_done(self, slot: Slot, work: Coroutine[None, None, None]) -> None:
        try:
            await work
        except OutriderError as error:
            self._fail(slot, error)
        except FloatingPointError as error:
            self._fail(slot, Internal(f"{error}: there is no text to make of them"))
        except Exception as error:  # a defect, and this text's alone
            self._note_defect("a probe failed", error)
            self._fail(slot, Internal(f"the probe failed: {type(error).__name__}"))
        finally:
            self.requests.probing.discard(slot)
            self.requests.streaming.discard(slot)
            del self._tasks[slot]
            self._ring()

    def _fail(self, slot: Slot, error: OutriderError) -> None:
        self.heart.fail()
        self.metrics.counts.failed_steps += 1
        if self.sessions.get(slot.key) is slot:
            self.sessions.fail(slot, error)

    def _goes_on(self, slot: Slot, session: VerifierSession) -> bool:
        return self.sessions.get(slot.key) is slot and slot.session is session and session.finish is None

    async def _probe(self, slot: Slot, session: VerifierSession, share: Share) -> None:
        text, block = list(session.transcript), share.block or ()
        verification, _ = verification_of(share, block)
        verification, began = replace(verification, transcript=text), self._clock()
        first, salt = not slot.handle.length, slot.owner.isolation
        width, ends = self._width(session), self._ends(session)
        probe = await self.server.probe(text, token_ids(block), width, self._named(verification), salt)
        answered = self._clock()
        tokens = list[CommittedToken]()
        for place, row in enumerate(probe.rows):
            tokens.append(await self._chosen(row, verification, place, width, salt))
            if tokens[-1].id in ends or (place < len(block) and block[place].id != tokens[-1].id):
                break
        if not self._goes_on(slot, session):
            return
        if any(token.logp is None for token in tokens):  # a commit has all or none
            tokens = [token._replace(logp=None) for token in tokens]
        now, rows = self._clock(), self.requests.rows(len(text), len(block))
        if first:
            session.cached_tokens = min(probe.cached_tokens or 0, len(text) - 1)  # of drafts some may be, too
        elif not probe.lost:
            self.requests.time_probe(rows, answered - began)
        # The edge learns what rows cost from this time; rows that were lost, or a pause, are no price.
        took = now - began
        verify_s = min(took, self.requests.probes.seconds(rows) or took)
        queued_s = max(0.0, began - slot.ready_since) + took - verify_s
        verified = Verified(block, tuple(tokens), queued_s, verify_s)
        self._take(self.inbox.take_drafts())
        self._note(slot, verified, StepTiming(1, len(probe.rows), answered - began, now - answered, 0.0))

    def _note(self, slot: Slot, verified: Verified, timing: StepTiming) -> None:
        """Make text of a request's answer."""
        chain_of(slot).compare(token_ids(slot.session.drafts()), token_ids(verified.tokens_by_target))
        self.target.compute(slot.handle, len(slot.session.transcript))
        timing = replace(timing, sessions=len(self._tasks))
        self.timings.append(timing)
        self.metrics.step(timing)
        self.heart.note(timing.rows, timing.forward_s)
        self.step_s.add(timing.forward_s)
        self._commit_or_end(slot, verified)
        if slot.session.finish is not None:
            self.requests.usual.add(slot.session.acceptance)

    async def _chosen(
        self, row: ListedRow, verification: VerificationInput, place: int, width: int, salt: str
    ) -> CommittedToken:
        """Return the target's token in row `place`, and ask the server for what the row leaves open."""
        facts, vocab = self.server.facts, self.rules.vocab_size
        while (choice := choose(row, verification, place, vocab)).token is None:
            text = [*verification.transcript, *token_ids(verification.block[:place])]
            longest = width >= facts.max_list
            if facts.names and len(choice.wanted) and (longest or len(choice.wanted) <= MAX_NAMES):
                row = row.with_named(await self.server.name(text, choice.wanted.tolist(), salt))
            elif not longest:
                width = min(LONGER * width, facts.max_list)
                row = (await self.server.probe(text, (), width, salt=salt)).rows[0]
            else:
                raise Internal("the server tells too little to choose a token; its log says how it answered")
        said = facts_of(row, choice.token, verification.top_logprobs) if verification.logprobs else None
        return CommittedToken(choice.token, None if math.isnan(choice.logp) else choice.logp, said)

    def _ends(self, session: VerifierSession) -> frozenset[int]:
        sampling = session.sampling
        return frozenset(sampling.stop_tokens) | (frozenset() if sampling.ignore_eos else session.eos_tokens)

    def _named(self, verification: VerificationInput) -> list[list[int]]:
        """Return, by row, the tokens of loud noise, which may win where nothing is cut; none: not asked for."""
        sampling, first = verification.sampling, len(verification.transcript)
        if not self.server.facts.names_in_rows or sampling.temperature == 0 or sampling.top_k:
            return []
        vocab = self.rules.vocab_size
        count = min(LOUDEST, self.server.facts.max_list)
        return [loudest(sampling, first + row, count, vocab).tolist() for row in range(verification.rows)]

    def _width(self, session: VerifierSession) -> int:
        sampling = session.sampling
        few = FEW if streams(sampling) else max(SOME, sampling.top_k + 1 if sampling.top_k < 4 * SOME else 0)
        return min(max(few, session.top_logprobs), self.server.facts.max_list)

    async def _stream(self, slot: Slot, session: VerifierSession) -> None:
        """Let the server write the text by itself, until it ends or a probe is worth more."""
        sampling, asked = session.sampling, self._clock()
        left, top = sampling.max_tokens - session.generated, session.top_logprobs if session.logprobs else 0
        began, read = asked, slot.handle.length > 0
        width = max(1, top) if session.wants_logp or session.logprobs else 0
        stream = self.server.stream(list(session.transcript), left, self._ends(session), width, slot.owner.isolation)
        async with aclosing(stream) as answers:
            async for token, row in answers:
                now = self._clock()
                if began != asked:
                    self.requests.time_token(now - began)
                elif read:
                    self.requests.firsts.add(1, now - began)
                said = facts_of(row, token, top) if row is not None else None
                logp = said.logprob if said is not None else None
                committed = CommittedToken(token, logp, said if session.logprobs else None)
                verified = Verified((), (committed,), 0.0, now - began)
                self._note(slot, verified, StepTiming(1, 1, now - began, 0.0, 0.0))
                if slot.backlogged or not self._goes_on(slot, session):
                    return
                if session.drafts():
                    self._ring()
                began = now
        if began == asked:
            raise Unavailable("the server ended a stream before its first token; resume")

    async def measure(self) -> None:
        """Time probes and a stream of a made-up text, so that the first texts are planned by the server's prices.

        The text ends a token behind a block of its cache, so that a probe reads no other token again.
        """
        vocab, length = self.rules.vocab_size, max(self.requests.block_size, PAGE) + 1
        text = [(i + 1) * vocab // (length + max(TIMED) + 1) for i in range(length + max(TIMED))]  # few are special
        for number, drafts in enumerate((0, *TIMED * TIMES)):
            if self.requests.apart:
                text = text[1:] + text[:1]  # that nobody has read
            began = self._clock()
            probe = await self.server.probe(text[:length], text[length:][:drafts], FEW)
            if number and not probe.lost:
                self.requests.time_probe(self.requests.rows(length, drafts), self._clock() - began)
        began, first = self._clock(), True
        async with aclosing(self.server.stream(text[:length], max(TIMED), frozenset(), 1)) as answers:
            async for _ in answers:
                now = self._clock()
                (self.requests.firsts if first else self.requests.tokens).add(1, now - began)
                began, first = now, False


def facts_of(row: ListedRow, token: int, top: int) -> TokenFacts:
    """Return the model's own word on the token of a row; its entropy no list tells."""
    [logp] = row.logp[row.tokens == token]
    rank = int((row.logp > logp).sum()) + 1 if logp >= row.bound else 0
    likeliest = zip(row.tokens[:top].tolist(), row.logp[:top].tolist(), strict=True)
    return TokenFacts(float(logp), rank, tuple(likeliest))
