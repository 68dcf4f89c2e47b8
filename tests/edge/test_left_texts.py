"""A text that is left takes no place and leaves no task, while its lease is awaited and while its stream closes."""

from __future__ import annotations

import asyncio
import gc
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from typing import Any

import pytest
from scripted_cloud import ScriptedChannels, ScriptedStream, scripted_client

from outrider.edge import Client
from outrider.edge.drafter_states import DrafterStates
from outrider.edge.link.routes import Route
from outrider.proto.errors import DeadlineExceeded
from outrider.proto.policy.suspicion import SilenceRules
from outrider.proto.types import CommittedToken, Lease, LeaseRequest, Open, Opened

TOKENS = tuple(range(10, 16))
QUICK = SilenceRules(quiet_s=0.02, min_s=0.1, opening_s=0.3)


class Coordinator(Route):
    """Leases that come when they are `allowed`; `log` has what was asked and given back, in order."""

    def __init__(self) -> None:
        self.log: list[str] = []
        self.asked = asyncio.Event()
        self.allowed = asyncio.Event()
        self.given_back = asyncio.Event()

    async def lease(self, request: LeaseRequest, transcript: Sequence[int] = ()) -> Lease:
        self.asked.set()
        await self.allowed.wait()
        self.log.append("suspected" if request.suspected else "leased")
        return Lease(b"", "scripted", "127.0.0.1:1", 600.0, "tiny", "")

    async def give_back(self, session: str) -> None:
        self.log.append("given back")
        self.given_back.set()


class Channels(ScriptedChannels):
    """A verifier whose streams are noted in the coordinator's log, and say nothing after `Opened` where it is mute."""

    def __init__(self, route: Coordinator, *, mute: bool) -> None:
        super().__init__()
        self.script = lambda _: [CommittedToken(token) for token in TOKENS * 20]
        self.route = route
        self.mute = mute

    def open_stream(self, lease: Lease, statistics: Any, *_: object) -> ScriptedStream:
        self.route.log.append("opened")
        return MuteStream(self, statistics) if self.mute else ScriptedStream(self, statistics)

    async def renew(self, lease: Lease) -> None:
        pass


class MuteStream(ScriptedStream):
    def send(self, frame: object) -> None:
        if isinstance(frame, Open):
            self._frames.put_nowait(Opened(0, 8, frame.sampling.max_tokens, "scripted", 8192, vocab_size=8192))


@asynccontextmanager
async def client_of(tokenizer, *, mute: bool = False) -> AsyncIterator[tuple[Client, Coordinator]]:
    route = Coordinator()
    client, _ = scripted_client(tokenizer, Channels(route, mute=mute), silence=QUICK)
    ready = await client.prepare()
    object.__setattr__(ready, "route", route)
    try:
        yield client, route
    finally:
        await client.close()


async def test_no_stream_is_opened_and_the_lease_is_given_back(tokenizer_file) -> None:
    async with client_of(tokenizer_file) as (client, route):
        async with client.conversation(max_tokens=4, ignore_eos=True) as talk:
            with pytest.raises(DeadlineExceeded):
                await talk.complete([3, 4], deadline_s=0.05)
            await route.given_back.wait()  # the text is over, as far as the edge knows
            assert route.log == ["given back"]
            route.given_back.clear()
            route.allowed.set()
            await route.given_back.wait()
            assert route.log == ["given back", "leased", "given back"]
            assert (await talk.complete([3, 4])).ids == TOKENS[:4], "the next turn has a lease of its own"
        assert route.log[3:] == ["leased", "opened"]


async def test_the_next_turn_takes_the_lease_if_it_comes_after_that_began(tokenizer_file) -> None:
    async with client_of(tokenizer_file) as (client, route):
        async with client.conversation(max_tokens=4, ignore_eos=True) as talk:
            with pytest.raises(DeadlineExceeded):
                await talk.complete([3, 4], deadline_s=0.05)
            turn = asyncio.create_task(talk.complete([5]))
            while not talk.transcript.tokens:  # noqa: ASYNC110 - the turn sets it
                await asyncio.sleep(0)
            route.allowed.set()
            assert (await turn).ids == TOKENS[:4]
        assert route.log == ["given back", "leased", "opened"]


async def test_a_lease_to_leave_a_silent_verifier_is_given_back_if_its_turn_is_left(tokenizer_file) -> None:
    async with client_of(tokenizer_file, mute=True) as (client, route):
        route.allowed.set()
        async with client.conversation(max_tokens=4, ignore_eos=True) as talk:
            turn = asyncio.create_task(talk.complete([3, 4]))
            while "opened" not in route.log:  # noqa: ASYNC110 - the channels set it
                await asyncio.sleep(0.01)
            route.allowed.clear()
            route.asked.clear()
            await route.asked.wait()
            turn.cancel()
            await asyncio.wait([turn])
            route.given_back.clear()
            route.allowed.set()
            await route.given_back.wait()
            assert route.log == ["leased", "opened", "suspected", "given back"]


# --- a text that is left while it waits or closes ---


class SlowToClose(ScriptedChannels):
    """A verifier whose streams close after a while, as those do that send what is still waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.closing = asyncio.Event()

    async def close_stream(self, stream: ScriptedStream) -> None:
        self.closing.set()
        await asyncio.sleep(0.2)


async def tasks_left_by(tokenizer_file, monkeypatch, leave_when: str) -> tuple[set[str], list[str], int]:
    """Leave a text; return the tasks that still run, what the loop complained about, and the states closed."""
    complaints: list[str] = []
    closed = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))
    monkeypatch.setattr(DrafterStates, "close", lambda *_: closed.append(1))
    client, channels = scripted_client(tokenizer_file, SlowToClose())
    channels.script = lambda _: [CommittedToken(10)] * 9
    began = asyncio.Event()
    before = asyncio.all_tasks()

    async def decode() -> None:
        async with aclosing(client.generate("a prompt", max_tokens=8)) as events:
            async for _ in events:
                began.set()
                if leave_when == "closing":
                    break

    text = asyncio.create_task(decode())
    await (channels.closing if leave_when == "closing" else began).wait()
    text.cancel()
    await asyncio.gather(text, return_exceptions=True)
    await loop.run_in_executor(client._thread, lambda: None)
    await client.close()
    left = {str(task.get_coro()) for task in asyncio.all_tasks() - before - {text}}
    gc.collect()
    return left, complaints, len(closed)


@pytest.mark.parametrize("leave_when", ["waiting", "closing"])
def test_a_text_that_is_left_leaves_no_task_and_no_state(tokenizer_file, monkeypatch, leave_when) -> None:
    left, complaints, closed = asyncio.run(tasks_left_by(tokenizer_file, monkeypatch, leave_when))
    assert left == set()
    assert complaints == []
    assert closed == 1
