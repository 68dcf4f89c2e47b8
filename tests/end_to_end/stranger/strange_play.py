"""A world at work over real gRPC: its texts are asked for while it fails, and each is held against the stranger's."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import AsyncGenerator, AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from plain_rule import NoLaw
from plain_texts import BROKEN, ROUNDING, PlainText
from scripted_ends import Known, ScriptedDrafter
from strange_worlds import World, settings, target

from outrider.cloud.serving import backends
from outrider.cloud.serving.local_source import LocalSource
from outrider.cloud.serving.own_drafter import DraftThreads, OwnDrafter
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.edge import Client, Conversation, EdgeConfig, Tokens
from outrider.edge.decoding import Observer
from outrider.edge.link.routes import DirectRoute
from outrider.proto.errors import InvalidArgument, ModelRefused, OutriderError
from outrider.proto.session import Disconnected, EdgeSession, verifier
from outrider.proto.session.both_ends import BothEnds
from outrider.proto.types import CloudFrame, Commit, FinishReason, Opened, Sampling

AN_AGE_S = 61.0  # longer than a text may fail
EMPTY_WITHIN_S, WITHIN_S = 10.0, 150.0


@dataclass
class Told:
    """A turn as its edge saw it."""

    tokens: list[Any] = field(default_factory=list)
    text: str = ""
    reason: FinishReason | None = None
    stop: str | None = None
    prompt: tuple[Any, ...] = ()

    @property
    def ids(self) -> list[int]:
        """Ids of its tokens."""
        return [token.id for token in self.tokens]


class FirstVerifier(Observer):
    """Sees which verifier a text has when its first tokens come, whose promises hold to its end.

    Attributes:
        name: its name; empty: no token has come.
    """

    def __init__(self) -> None:
        self.name = ""
        self._begun = False

    def received(self, frame: CloudFrame, at: float) -> None:
        """Note who has opened the text, until it begins."""
        if isinstance(frame, Opened) and not self._begun:
            self.name = frame.verifier
        self._begun = self._begun or (isinstance(frame, Commit) and bool(frame.tokens))


class Play:
    """One world, played once.

    Attributes:
        complaints: what is wrong, a line each.
        counts: what was tried.
    """

    def __init__(self, world: World, base: Path, relay: type[Any], patch: pytest.MonkeyPatch) -> None:
        self.complaints: list[str] = []
        self.counts: Counter[str] = Counter()
        self._world = world
        self._relay = relay
        self._patch = patch
        self._rng = random.Random(f"play {world.seed}")
        self._folder, self._plain = target(base, world.vocabulary, world.model, world.dtype)
        self._known = Known(self._plain.vocabulary.size)
        plain = range(3, self._known.vocab_size)
        self._prefixes = [self._rng.choices(plain, k=70) for _ in range(3)]

    async def run(self) -> None:
        """Serve the target, ask for the texts, and see that nothing is left of them."""
        world = self._world
        self._change_the_product()
        try:
            served = [self._verifier(place) for place in range(len(world.contexts))]
        except ModelRefused as error:
            self.complaints.append(f"the target is refused: {error}")
            return
        async with AsyncExitStack() as stack:
            links = [await stack.enter_async_context(self._relay(await each.start())) for each in served]
            client = await stack.enter_async_context(self._edge([link.address for link in links]))
            losing = asyncio.create_task(self._lose(served, links))
            places = asyncio.Semaphore(self._world.at_once)
            try:
                async with asyncio.timeout(WITHIN_S):
                    await asyncio.gather(*(self._text(client, number, places) for number in range(world.texts)))
            except TimeoutError:
                self.complaints.append(f"not all texts have ended in {WITHIN_S:.0f} s")
            finally:
                losing.cancel()
                await asyncio.gather(losing, return_exceptions=True)
        for each in served:
            await self._check_is_empty(each)
            await each.stop(0)

    # --- the world ---

    def _change_the_product(self) -> None:
        """Make what depends on speed depend on the seed: rows cost nothing, a loss is an age after the one before."""
        world, patch = self._world, self._patch
        patch.setattr(backends, "local_source", lambda _, facts: self._own_source())
        if world.pays:
            really = verifier.best_tree
            patch.setattr("outrider.proto.session.verifier.best_block", lambda view: view.max_drafts)
            patch.setattr("outrider.proto.session.verifier.overtakes", lambda view: True)
            patch.setattr(BothEnds, "edge_pays", property(lambda _: True, lambda *_: None), raising=False)
            patch.setattr(verifier, "best_tree", lambda *given, row_share=0.0, **named: really(*given, **named))
        handle, ages = EdgeSession.handle, Counter[int]()

        def handled(machine: EdgeSession, event: Any, now: float, *more: Any) -> Any:
            if isinstance(event, Disconnected) and machine.connected:
                ages[id(machine)] += 1
            return handle(machine, event, now + ages[id(machine)] * AN_AGE_S, *more)

        patch.setattr(EdgeSession, "handle", handled)

    def _own_source(self) -> LocalSource | None:
        if self._world.own_hits is None:
            return None
        drafter = ScriptedDrafter(self._known, "own", self._world.own_hits, self._world.own_token_s)
        return LocalSource(OwnDrafter(drafter, self._known.vocab_size), DraftThreads(1))

    def _verifier(self, place: int, listen: str = "127.0.0.1:0") -> VerifierServer:
        world = self._world
        served = VerifierServer(
            VerifierConfig(
                target=str(self._folder),
                name=str(place),
                listen=listen,
                threads=1,
                dtype=world.dtype,
                context_length=world.contexts[place],
                kv_tokens=world.kv_tokens,
                min_step_s=world.min_step_s,
                prefill_chunk=world.reads,
            )
        )
        if world.fails:
            self._let_steps_fail(served)
        return served

    def _let_steps_fail(self, served: VerifierServer) -> None:
        """Fail steps of several texts when their pass is over, as for a lack of memory."""
        backend: Any = served._engine.backend
        step, sample, rows_now = backend.step, backend._sampler.sample, [0]

        def stepping(rows: Sequence[Any]) -> Any:
            rows_now[0] = len(rows)
            return step(rows)

        def sampling(*given: Any) -> Any:
            if rows_now[0] > 1 and self._rng.random() < 0.6:
                self.counts["failed steps"] += 1
                raise RuntimeError("[enforce fail] DefaultCPUAllocator: can't allocate memory")
            return sample(*given)

        backend.step, backend._sampler.sample = stepping, sampling

    @asynccontextmanager
    async def _edge(self, addresses: Sequence[str]) -> AsyncIterator[Client]:
        world, drafters = self._world, []
        tokenizer = self._folder / "tokenizer.json"
        for number, hits in enumerate(world.hits):
            slow_s = self._rng.choice((0.0, 0.0005))
            drafters.append(ScriptedDrafter(self._known, f"edge {number}", hits, slow_s, 0.03 + 0.3 * number))
        config = EdgeConfig(
            verifier=addresses[0],
            model=str(self._folder),
            tokenizer=tokenizer,
            drafter="auto" if drafters else "ngram",
            chains=world.chains,
            patience=world.patience,
            drafts_here=world.drafts_here,
            selector=world.selector,
            window=world.window,
        )
        client = Client(config, drafters=tuple(drafters))
        await client.prepare()
        ready: Any = client.ready
        object.__setattr__(ready, "route", DirectRoute(tuple(addresses), ready.model, ready.tokenizer_sha256))
        try:
            yield client
        finally:
            await client.close()

    async def _lose(self, served: list[VerifierServer], links: Sequence[Any]) -> None:
        """Cut the streams, or replace a verifier, now and then."""
        for _ in range(self._world.losses):
            await asyncio.sleep(self._rng.uniform(0.05, 0.3))
            if self._rng.random() < 0.7:
                self._rng.choice(links).cut()
                self.counts["cuts"] += 1
                continue
            place = self._rng.randrange(len(served))
            before, address = served[place], f"{links[place]._host}:{links[place]._port}"
            if self._rng.random() < 0.5:
                await before.drain(0.2)
            await before.stop(0)
            served[place] = self._verifier(place, address)
            await served[place].start()
            self.counts["restarts"] += 1

    async def _check_is_empty(self, served: VerifierServer) -> None:
        engine: Any = served._engine
        for _ in range(int(EMPTY_WITHIN_S / 0.05)):
            if not len(engine.sessions) and not engine.backend.capacity.used_pages:
                return
            await asyncio.sleep(0.05)
        self.complaints.append(f"is left: {len(engine.sessions)} slots, {engine.backend.capacity}")

    # --- a text ---

    async def _text(self, client: Client, number: int, places: asyncio.Semaphore) -> None:
        async with places:
            try:
                await self._turns(client, random.Random(f"text {self._world.seed} {number}"), number)
            except OutriderError as error:
                self.complaints.append(f"text {number} ends with {type(error).__name__}: {error}")
            except Exception as error:  # whatever it is, it is not the product's
                self.complaints.append(f"text {number} dies of {type(error).__name__}: {error}")

    async def _turns(self, client: Client, rng: random.Random, number: int) -> None:
        world = self._world
        turns = {"turns": rng.choice((2, 3)), "contexts": 1, "failing steps": 1}.get(world.theme, rng.choice((1, 1, 3)))
        prompt = self._prompt(rng)
        conversation = client.conversation(Sampling(), keep_s=rng.choice((0, 20)), logprobs=True) if turns > 1 else None
        said: list[int] = []
        try:
            for turn in range(turns):
                if len(said) > min(world.contexts) - 70:
                    break
                new = self._new(rng) if turn else prompt
                told = await self._turn(client, conversation, rng, said, new, f"text {number}.{turn}")
                if told is None:
                    break
                said += [*new, *told.ids]
                if conversation is not None and list(conversation.transcript.tokens) != said:
                    self.complaints.append(f"text {number}.{turn}: the transcript is another")
        finally:
            if conversation is not None:
                await conversation.close()

    def _prompt(self, rng: random.Random) -> list[int]:
        base = rng.choice(self._prefixes)
        least = {"slow reading": 60, "contexts": 40, "failing steps": 40}.get(self._world.theme, 1)
        prompt = base[: rng.randrange(least, len(base) + 1)] + rng.choices(range(3, self._known.vocab_size), k=2)
        if rng.random() < 0.04:
            prompt = (prompt * 60)[: min(self._world.contexts) - rng.choice((1, 2, 5))]
        return prompt

    def _new(self, rng: random.Random) -> list[int]:
        return rng.choices(range(3, self._known.vocab_size), k=rng.choice((0, 0, 1, 5)))

    async def _turn(
        self,
        client: Client,
        conversation: Conversation | None,
        rng: random.Random,
        said: list[int],
        new: list[int],
        name: str,
    ) -> Told | None:
        """Ask for one turn and judge it; return what came, or None where it was refused or cannot be judged further."""
        world, prompt, told, first = self._world, [*said, *new], Told(), FirstVerifier()
        drawn, pattern = settings(rng, world, self._plain.vocabulary)
        try:
            sampling = Sampling(seed=rng.getrandbits(64), **drawn)  # by which the drafters know it
            whole = await self._written(prompt, sampling, pattern)
            stop = _stops(rng, whole.text) if whole is not None else ()
            scored = conversation is None and rng.random() < (1.0 if world.fails else 0.2)
            if conversation is None:
                top = 0 if scored else None
                events = client.generate(
                    prompt, sampling, stop=stop, logprobs=True, prompt_logprobs=top, observer=first
                )
            else:
                events = conversation.say(new, sampling, stop=stop)
            await self._hear(events, told, left=conversation is not None and rng.random() < 0.15)
        except InvalidArgument as error:
            if world.theme != "extremes" or not error.field.startswith("sampling."):
                raise
            self.counts["settings refused"] += 1
            return None
        self.counts["texts"] += 1
        self.counts["tokens"] += len(told.tokens)
        if whole is None:
            found = _all_numbers(told)
        else:
            context = world.contexts[int(first.name or 0)]
            wanted = self._plain.shortened(whole, prompt, context - len(prompt))
            found = self._compared(told, self._plain.stopped(wanted, prompt, stop, sampling.min_tokens))
        if scored:
            found += self._judge_prompt(told, prompt)
        self.complaints += [f"{name}: {each}; {sampling}, stop {stop}" for each in found]
        return None if found else told

    async def _written(self, prompt: list[int], sampling: Sampling, pattern: str) -> PlainText | None:
        """Return the text in the longest context; None: a stranger cannot know it."""
        self._known.texts[sampling.seed] = PlainText(), 0
        try:
            whole = await asyncio.to_thread(self._plain.write, prompt, sampling, max(self._world.contexts), pattern)
        except NoLaw:
            return None
        self._known.texts[sampling.seed] = whole, len(prompt)
        return whole

    async def _hear(self, events: AsyncGenerator[Any], told: Told, *, left: bool) -> None:
        """Take a turn's events in; one that is to be `left` is left after a few tokens."""
        async for event in events:
            told.text += event.text
            if isinstance(event, Tokens):
                told.tokens += event.tokens
                told.prompt += event.prompt
                if left and len(told.tokens) > 3:
                    return
            else:
                told.reason, told.stop = event.reason, event.stop_string
                for name in ("accepted", "accepted_cloud", "verified_beside", "branches_taken", "resumes"):
                    self.counts[name] += getattr(event.statistics, name)

    # --- judging ---

    def _compared(self, told: Told, wanted: PlainText) -> list[str]:
        """Return what a text that came has otherwise than the stranger's."""
        for place, (token, choice) in enumerate(zip(told.tokens, wanted.choices, strict=False)):
            if token.id != choice.token:
                if choice.doubtful:
                    self.counts["near ties"] += 1
                    return []
                return [f"token {place} is {token.id}, not {choice.token}"]
            near = 4 * choice.doubt * max(1.0, abs(choice.logp or 0.0))
            if choice.logp is not None and not abs(token.logp - choice.logp) <= near:
                return [f"token {place} has logp {token.logp}, not {choice.logp}"]
            if token.logprob is not None and not abs(token.logprob - choice.logprob) <= 1e-3 + 4 * choice.doubt:
                return [f"token {place} has logprob {token.logprob}, not {choice.logprob}"]
        if told.reason is None:
            return []  # it was left
        found = []
        if len(told.tokens) != len(wanted.choices):
            found.append(f"has {len(told.tokens)} tokens, not {len(wanted.choices)}")
        if told.reason is not wanted.reason or told.stop != wanted.stop:
            found.append(f"ends by {told.reason} {told.stop!r}, not {wanted.reason} {wanted.stop!r}")
        if told.text != wanted.text:
            found.append(f"reads {told.text!r}, not {wanted.text!r}")
        return found

    def _judge_prompt(self, told: Told, prompt: list[int]) -> list[str]:
        self.counts["scored prompts"] += 1
        wanted, got = self._plain.scores(prompt), [token.logprob for token in told.prompt]
        near = 1e-3 + 4 * ROUNDING[self._world.dtype]
        if len(wanted) != len(got) or any(not abs(a - b) <= near for a, b in zip(wanted, got, strict=True)):
            return [f"scores of its prompt are {got[:3]}, {len(got)}; not {wanted[:3]}, {len(wanted)}"]
        return []


def _stops(rng: random.Random, text: str) -> tuple[str, ...]:
    """Return stop strings of which a text has some."""
    whole = text.replace(BROKEN, "")
    if rng.random() > 0.35 or len(whole) < 4:
        return ()
    places = [rng.randrange(len(whole)) for _ in range(2)]
    return tuple({whole[at : at + rng.randrange(1, 4)] for at in places})


def _all_numbers(told: Told) -> list[str]:
    """Judge a text that has no law: its numbers at least are numbers."""
    wrong = [token for token in told.tokens if not token.logp <= 0 or (token.logprob or 0) > 0]
    return [f"log probabilities are {wrong[:2]}"] if wrong else []
