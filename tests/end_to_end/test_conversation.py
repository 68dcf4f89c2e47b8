"""Conversations over real gRPC: every turn is what a fresh text with the whole transcript is, whatever happens."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from typing import Any

import pytest
from fleets import SentFrames, until

from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.edge import Client, EdgeConfig, Finished, FinishReason, SyncClient, Tokens
from outrider.proto import codec
from outrider.proto.errors import (
    DeadlineExceeded,
    InvalidArgument,
    OutriderError,
    PromptTooLong,
    ResourceExhausted,
    UnknownToken,
)
from outrider.proto.session import RetryRules
from outrider.proto.types import Cancel, Continue, Open

PAGE = 16
TURNS = ("def main(argv):\n", "\n# more of it\n", "class A:\n    pass\n")
WAYS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "drawn": {"temperature": 1.0, "seed": 20260},
    "penalised": {
        "temperature": 0.9,
        "seed": 7,
        "repetition_penalty": 1.2,
        "presence_penalty": 0.5,
        "frequency_penalty": 0.4,
    },
    "repeating": {"temperature": 0.9, "seed": 8, "presence_penalty": -30.0},  # a turn's text never counts in the next
}


@pytest.fixture
def verifiers(tiny):
    """Verifiers of the tiny target, one of each name."""

    @asynccontextmanager
    async def start(*names: str, **config: Any):
        defaults = {"target": str(tiny), "model": "tiny", "threads": 1, "page_size": PAGE}
        made = [VerifierServer(VerifierConfig(**{**defaults, "name": name, **config})) for name in names or "v"]
        for server in made:
            await server.start()
        try:
            yield made
        finally:
            for server in made:
                await server.stop(0)

    return start


@pytest.fixture
def clients(edge):
    """A client of the tiny target on the given verifiers; each lost one is followed by the next."""

    def make(*servers: VerifierServer | str, **config: Any):
        addresses = [server if isinstance(server, str) else server.status().address for server in servers]
        defaults = {"model": "tiny", "drafter": "ngram", "retry": RetryRules(0.02, 0.2, 30.0)}
        return edge(*addresses, **{**defaults, **config})

    return make


async def said_as_fresh(client: Client, talk: Any, text: str, **options: Any):
    """Say it; the turn must be that of a fresh text, and the transcript must hold it."""
    before = talk.transcript.tokens
    turn = await talk.complete(text, **options)
    whole = await client.complete((*before, *client.encode(text)), **options)
    assert (turn.ids, turn.text, turn.finish_reason) == (whole.ids, whole.text, whole.finish_reason)
    assert turn.prompt_tokens == whole.prompt_tokens
    assert talk.transcript.tokens == (*before, *client.encode(text), *turn.ids)
    return turn


# === what a turn is =============================================================================================


@pytest.mark.parametrize("drafter", ["ngram", "none"])
async def test_every_turn_equals_a_fresh_text_with_the_whole_transcript(verifiers, clients, drafter) -> None:
    async with verifiers() as servers, clients(*servers, drafter=drafter) as client:
        for way in WAYS.values():
            frames = SentFrames()
            async with client.conversation(observer=frames) as talk:
                for text in (*TURNS, ""):
                    await said_as_fresh(client, talk, text, max_tokens=10, **way)
                assert talk.transcript.text == client.decode(talk.transcript.tokens)
            assert [len(frames.of(kind)) for kind in (Open, Continue)] == [1, 3], "one session all the way"


async def test_a_later_turn_sends_up_its_new_tokens_and_nothing_else(verifiers, clients) -> None:
    frames = SentFrames()
    async with verifiers() as servers, clients(*servers, drafter="none") as client:
        async with client.conversation(max_tokens=20, observer=frames, **WAYS["drawn"]) as talk:
            first = await talk.complete("long " * 200)
            second = await talk.complete("and?")
            third = await talk.complete("so", max_tokens=5)
        news = client.encode("and?")
    one, two = frames.of(Continue)
    assert (one.prompt, one.sampling) == (news, None)
    assert one.start == first.prompt_tokens + len(first.ids)
    assert two.sampling.max_tokens == 5
    assert second.statistics.uplink_bytes == len(codec.encode_edge_frame(one)) + 5 < 30
    assert third.statistics.uplink_bytes < 60 < first.statistics.uplink_bytes // 4


async def test_an_idle_session_holds_no_pages_and_its_next_turn_finds_them(verifiers, clients) -> None:
    async with verifiers(kv_tokens=4096) as (server,), clients(server) as client:
        async with client.conversation(max_tokens=1000) as talk:
            events = talk.say("a b c")
            await anext(events)
            assert 256 - 1000 // PAGE < server.status().kv_pages_free < 256
            assert server.status().sessions == 1
            await events.aclose()
            await until(lambda: server._engine.sessions.num_parked == 1)
            assert server.status().sessions == 0, "it is not running"
            assert server.status().kv_pages_free == 256
            before = len(talk.transcript.tokens)
            turn = await talk.complete("d", max_tokens=3)
            assert turn.statistics.cached_tokens >= before - 1
        await until(lambda: len(server._engine.sessions) == 0)
        assert server.status().kv_pages_free == 256
        with pytest.raises(InvalidArgument, match="conversation"):
            await talk.complete("e")
        assert talk.transcript.text.endswith(client.decode(talk.transcript.tokens[-3:]))


# === ends of turns ==============================================================================================


async def test_a_turn_that_ends_with_a_stop_string_ends_with_the_token_that_completed_it(verifiers, clients) -> None:
    async with verifiers() as servers, clients(*servers) as client:
        for way in WAYS.values():
            frames = SentFrames()
            async with client.conversation(max_tokens=40, observer=frames, **way) as talk:
                whole = await client.complete(TURNS[0], max_tokens=40, **way)
                stop = whole.text[len(whole.text) // 3 :][:3]
                turn = await talk.complete(TURNS[0], stop=stop)
                assert turn.finish_reason is FinishReason.STOP_STRING
                assert turn.text == whole.text.split(stop)[0]
                assert turn.ids == whole.ids[: len(turn.ids)]
                assert stop in client.decode(turn.ids)
                assert stop not in client.decode(turn.ids[:-1])
                assert talk.transcript.tokens == (*client.encode(TURNS[0]), *turn.ids)
                await said_as_fresh(client, talk, TURNS[1], max_tokens=10, **way)
            (second,) = frames.of(Continue)
            assert second.start == len(client.encode(TURNS[0])) + len(turn.ids)


async def test_a_turn_left_midway_keeps_what_was_given_out_and_the_next_goes_on(verifiers, clients) -> None:
    frames = SentFrames()
    async with verifiers() as servers, clients(*servers) as client, client.conversation(observer=frames) as talk:
        for _ in range(3):
            before, given = talk.transcript.tokens, ()
            async for event in talk.say("more", max_tokens=1500):
                given += event.ids
                if len(given) > 4:
                    break
            await said_as_fresh(client, talk, "and on", max_tokens=6)
            said = (*before, *client.encode("more"), *given, *client.encode("and on"))
            assert talk.transcript.tokens[: len(said)] == said
    assert [len(frames.of(kind)) for kind in (Open, Cancel, Continue)] == [1, 3, 5], "on one stream"


async def test_a_cancelled_task_and_a_passed_deadline_leave_a_conversation_that_goes_on(verifiers, clients) -> None:
    async with verifiers(min_step_s=0.005) as servers, clients(*servers) as client, client.conversation() as talk:
        task = asyncio.create_task(talk.complete("a b", max_tokens=1500))
        await until(lambda: len(talk.transcript.tokens) > 8)
        with pytest.raises(InvalidArgument, match="another task"):
            await talk.complete("c")
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await said_as_fresh(client, talk, "c", max_tokens=5)
        length = len(talk.transcript.tokens)
        deadline_s = 0.15
        while len(talk.transcript.tokens) == length:  # a busy machine has no token before it
            deadline_s *= 2
            with pytest.raises(DeadlineExceeded, match="deadline_s"):
                await talk.complete("d", max_tokens=1500, deadline_s=deadline_s)
        await said_as_fresh(client, talk, "e", max_tokens=5)


REFUSED: list[tuple[Any, dict[str, Any], type[OutriderError], str]] = [
    ([8192], {}, UnknownToken, "prompt"),
    ([-1], {}, InvalidArgument, "open.prompt"),
    ([5] * 2048, {}, PromptTooLong, "prompt"),
    ("a", {"stop_tokens": (9000,)}, UnknownToken, "sampling.stop_tokens"),
    ("a", {"top_p": 0.0}, InvalidArgument, "sampling.top_p"),
    ("a", {"warmth": 1}, InvalidArgument, "sampling"),
    ("a", {"stop": [""]}, InvalidArgument, "stop"),
    ("a", {"deadline_s": 0.0}, DeadlineExceeded, "deadline_s"),
]


@pytest.mark.parametrize("first", [True, False], ids=["first turn", "later turn"])
async def test_a_turn_that_is_refused_is_as_if_it_had_not_been(verifiers, clients, first) -> None:
    async with verifiers() as servers, clients(*servers) as client:
        for prompt, options, error, field in REFUSED:
            async with client.conversation(max_tokens=4) as talk:
                if not first:
                    await talk.complete("before")
                before = talk.transcript.tokens
                with pytest.raises(error) as caught:
                    await talk.complete(prompt, **options)
                assert caught.value.field.endswith(field)
                assert talk.transcript.tokens == before
                await said_as_fresh(client, talk, "after", max_tokens=4)


# === faults =====================================================================================================


async def test_streams_cut_between_turns_and_within_them_change_nothing_but_time(verifiers, clients, relay) -> None:
    frames = SentFrames()
    async with (
        verifiers() as (server,),
        relay(server.status().address) as link,
        clients(link.address) as client,
        client.conversation(observer=frames, **WAYS["drawn"]) as talk,
    ):
        await said_as_fresh(client, talk, TURNS[0], max_tokens=8, **WAYS["drawn"])
        link.cut()
        await until(lambda: server._engine.sessions.num_parked == 0)
        await said_as_fresh(client, talk, TURNS[1], max_tokens=8, **WAYS["drawn"])
        before, given = talk.transcript.tokens, []
        async for event in talk.say(TURNS[2], max_tokens=12):
            given += event.ids if isinstance(event, Tokens) else ()
            if len(given) in (2, 7):
                link.cut()
        whole = await client.complete((*before, *client.encode(TURNS[2])), max_tokens=12, **WAYS["drawn"])
        assert tuple(given) == whole.ids
        await said_as_fresh(client, talk, "end", max_tokens=4, **WAYS["drawn"])
    assert len(frames.of(Open)) >= 3


async def test_an_idle_session_gives_way_to_a_running_one_and_a_running_one_to_nobody(verifiers, clients) -> None:
    async with (
        verifiers(min_step_s=0.003, max_sessions=1) as (server,),
        clients(server) as client,
        clients(server, retry=RetryRules(abandon_after_s=-1.0)) as impatient,
        client.conversation() as talk,
    ):
        for text in ("a", "b"):
            await said_as_fresh(client, talk, text, max_tokens=5)  # whose fresh text may take the place
            await until(lambda: server._engine.sessions.num_running == 0)
        await talk.complete("c", max_tokens=5)
        await until(lambda: server._engine.sessions.num_parked == 1)
        running = client.generate("d", max_tokens=98 * PAGE, ignore_eos=True)
        await anext(running)
        assert server._engine.sessions.num_parked == 0
        with pytest.raises(ResourceExhausted):
            await impatient.complete("e", max_tokens=40)
        assert isinstance(await anext(running), Tokens)
        assert server.status().sessions == 1
        await running.aclose()
        await until(lambda: server._engine.sessions.num_running == 0)
        await said_as_fresh(client, talk, "f", max_tokens=5)


async def test_the_session_that_idles_longest_is_given_up_first(verifiers, clients) -> None:
    async with verifiers(max_sessions=2) as (server,), clients(server) as client:
        observers = [SentFrames(), SentFrames()]
        async with client.conversation(observer=observers[0]) as old, client.conversation(observer=observers[1]) as new:
            for talk in (old, new):
                await talk.complete("a", max_tokens=3)
                await until(lambda: server.status().sessions == 0)
            await client.complete("b", max_tokens=3)
            await until(lambda: server._engine.sessions.num_running == 0)
            await new.complete("c", max_tokens=3)
            await old.complete("c", max_tokens=3)
        assert [len(observer.of(Continue)) for observer in observers] == [0, 1]
        assert [len(observer.of(Open)) for observer in observers] == [2, 1]


@pytest.mark.parametrize("keep", [{"keep_s": 0.05}, {"keep_s": 0.0}], ids=["briefly", "never"])
async def test_a_verifier_that_keeps_sessions_briefly_or_never_costs_only_a_reopening(verifiers, clients, keep) -> None:
    frames = SentFrames()
    async with verifiers(**keep) as (server,), clients(server) as client, client.conversation(observer=frames) as talk:
        for text in TURNS:
            await said_as_fresh(client, talk, text, max_tokens=5)
            await until(lambda: len(server._engine.sessions) == 0)
    assert len(frames.of(Open)) == 3
    # A turn may begin before the edge has heard that its session is gone, but only where one was kept.
    assert len(frames.of(Continue)) <= (2 if keep["keep_s"] else 0)


async def test_a_conversation_moves_when_its_verifier_drains_between_turns_or_within_one(verifiers, clients) -> None:
    async with (
        verifiers("a", "b", "c", min_step_s=0.003) as servers,
        clients(*servers) as client,
        clients(servers[2]) as other,
        client.conversation() as talk,
    ):

        async def as_elsewhere(text: str, drained: VerifierServer | None, max_tokens: int) -> None:
            before, given = talk.transcript.tokens, ()
            draining = None
            async for event in talk.say(text, max_tokens=max_tokens):
                given += event.ids if isinstance(event, Tokens) else ()
                if drained is not None and draining is None:
                    draining = asyncio.create_task(drained.drain(20.0))
            if draining is not None:
                assert await draining == 1
            whole = await other.complete((*before, *other.encode(text)), max_tokens=max_tokens)
            assert given == whole.ids

        await as_elsewhere(TURNS[0], None, 6)
        assert await servers[0].drain(20.0) == 0, "an idle session is none to wait for"
        await as_elsewhere(TURNS[1], servers[1], 30)
        await as_elsewhere(TURNS[2], None, 6)


# === without async ===============================================================================


async def test_the_synchronous_twin_has_conversations_too(verifiers, clients, tokenizer_file) -> None:
    async with verifiers() as (server,), clients(server) as client:
        address = server.status().address

        def blocking() -> list[tuple[int, ...]]:
            config = EdgeConfig(verifier=address, model="tiny", tokenizer=tokenizer_file, drafter="ngram")
            with SyncClient(config) as twin, twin.conversation(max_tokens=6) as talk:
                events = list(talk.say(TURNS[0]))
                assert isinstance(events[-1], Finished)
                turn = talk.complete(TURNS[1])
                given = ()
                for event in talk.say(TURNS[2], max_tokens=1500):
                    given += event.ids
                    break
                with pytest.raises(DeadlineExceeded):
                    talk.complete("x", deadline_s=0.0)
                tokens = talk.transcript.tokens
                assert tokens[-len(given) :] == given, "nothing beyond what was given out"
                assert talk.complete("").prompt_tokens == len(tokens)
                return [turn.ids, tokens]

        turn, tokens = await asyncio.to_thread(blocking)
        async with client.conversation(max_tokens=6) as talk:
            await talk.complete(TURNS[0])
            assert (await talk.complete(TURNS[1])).ids == turn
            assert tokens[: len(talk.transcript.tokens)] == talk.transcript.tokens
