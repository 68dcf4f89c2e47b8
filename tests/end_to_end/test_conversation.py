"""Conversations over real gRPC: every turn is what a fresh text with the whole transcript is, whatever happens."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random
from contextlib import asynccontextmanager
from typing import Any

import grpc
import pytest
from command_processes import free_port
from fleets import SECRET, LeasedRoute, SentFrames, until

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
from outrider.proto.rpc_errors import from_rpc_error
from outrider.proto.session import RetryRules
from outrider.proto.types import (
    Cancel,
    Commit,
    Continue,
    Draft,
    DraftToken,
    EdgeFrame,
    Goaway,
    Open,
    Opened,
    Patience,
    Sampling,
    token_ids,
)

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
    async def start(*names: str, secret: bytes = b"", **config: Any):
        defaults = {"target": str(tiny), "model": "tiny", "threads": 1, "page_size": PAGE}
        made = [VerifierServer(VerifierConfig(**{**defaults, "name": name, **config}), secret) for name in names or "v"]
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


@pytest.mark.usefixtures("all_drafts_pay")
async def test_the_neural_drafter_goes_on_with_its_cache_when_sampling_changes(verifier, edge) -> None:
    async with (
        edge(verifier, drafter="general", patience=Patience(math.inf, 3)) as client,
        client.conversation(max_tokens=10) as talk,
    ):
        accepted = []
        for text, way in zip(TURNS, ("greedy", "drawn", "greedy"), strict=True):
            turn = await said_as_fresh(client, talk, text, max_tokens=10, **WAYS[way])
            accepted.append(turn.statistics.accepted)
            assert not turn.statistics.drafter_error
    assert accepted[0] > 0
    assert accepted[2] > 0


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


async def test_eos_and_stop_tokens_are_part_of_the_transcript(verifiers, clients) -> None:
    async with verifiers() as servers, clients(*servers) as client, client.conversation(max_tokens=9) as talk:
        eos = await talk.complete("a", allowed_tokens=(1,))
        assert (eos.finish_reason, eos.ids) == (FinishReason.EOS, (1,))
        await said_as_fresh(client, talk, "b", max_tokens=9)
        last = talk.transcript.tokens[-1]
        stopped = await talk.complete("c", stop_tokens=(last,), allowed_tokens=(last,))
        assert (stopped.finish_reason, stopped.ids) == (FinishReason.STOP_TOKEN, (last,))
        await said_as_fresh(client, talk, "d", max_tokens=5)


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


async def test_an_idle_session_gives_its_pages_to_a_text_that_grows(verifiers, clients) -> None:
    async with verifiers(kv_tokens=20 * PAGE) as (server,), clients(server) as client, client.conversation() as talk:
        await talk.complete("a", max_tokens=5)
        await until(lambda: server._engine.sessions.num_parked == 1)
        running = client.generate("d", max_tokens=20 * PAGE - 4, ignore_eos=True)
        await anext(running)
        assert server._engine.sessions.num_parked == 1
        assert len([event async for event in running if isinstance(event, Finished)]) == 1
        assert server._engine.sessions.num_parked == 1, "it holds nothing"
        await said_as_fresh(client, talk, "f", max_tokens=5)


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


async def test_a_verifier_that_is_restarted_between_turns_is_told_the_whole_transcript(verifiers, clients) -> None:
    frames, address = SentFrames(), f"127.0.0.1:{free_port()}"
    async with (
        verifiers(listen=address) as (server,),
        clients(address) as client,
        client.conversation(max_tokens=6, observer=frames) as talk,
    ):
        first = await talk.complete(TURNS[0])
        await server.stop(0)
        async with verifiers(listen=address):
            await said_as_fresh(client, talk, TURNS[1], max_tokens=6)
            await said_as_fresh(client, talk, TURNS[2], max_tokens=6)
    whole = frames.of(Open)[-1].prompt
    assert whole == (*client.encode(TURNS[0]), *first.ids, *client.encode(TURNS[1]))


async def test_a_lease_that_expires_between_turns_is_renewed(verifiers, tokenizer_file) -> None:
    frames = SentFrames()
    async with verifiers(secret=SECRET) as (server,):
        address = server.status().address
        config = EdgeConfig(verifier=address, model="tiny", tokenizer=tokenizer_file, drafter="ngram")
        async with Client(config) as probe:
            assert probe.ready is not None
            route = LeasedRoute((address,), "tiny", probe.ready.tokenizer_sha256)
        route.lasts_s = 0.5
        async with Client(config, route=route) as client, client.conversation(observer=frames) as talk:
            await talk.complete("a", max_tokens=4)
            await until(lambda: len(server._engine.sessions) == 0)
            route.lasts_s = 60.0
            await said_as_fresh(client, talk, "b", max_tokens=4)
            await said_as_fresh(client, talk, "c", max_tokens=4)
    assert len(frames.of(Open)) >= 2
    assert len(frames.of(Continue)) == 1


# === without async, and in raw frames ===========================================================================


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


class Raw:
    """One Decode call in frames."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        self.call = channel.stream_stream(codec.DECODE_METHOD)()

    async def send(self, *frames: EdgeFrame) -> None:
        for frame in frames:
            await self.call.write(codec.encode_edge_frame(frame))

    async def rest_of_turn(self) -> tuple[int, ...]:
        tokens: tuple[int, ...] = ()
        while True:
            frame = await self.next()
            if isinstance(frame, Commit):
                tokens += token_ids(frame.tokens)
                if frame.finish is not None:
                    return tokens

    async def next(self) -> Any:
        """The next frame, None at the end, or the error that ends the stream."""
        try:
            data = await asyncio.wait_for(self.call.read(), 120)
            if data is grpc.aio.EOF and await self.call.code() == grpc.StatusCode.OK:
                return None
            if data is not grpc.aio.EOF:
                return codec.decode_cloud_frame(data)
        except grpc.RpcError as error:
            return from_rpc_error(error)
        metadata, details = await self.call.trailing_metadata(), await self.call.details()
        return from_rpc_error(grpc.aio.AioRpcError(await self.call.code(), grpc.aio.Metadata(), metadata, details))


@asynccontextmanager
async def raw(server: VerifierServer, **changes: Any):
    async with grpc.aio.insecure_channel(server.status().address) as channel:
        stream = Raw(channel)
        frame = {
            "model": "tiny",
            "tokenizer_sha256": server.tokenizer_sha256,
            "prompt": (5, 6),
            "sampling": Sampling(max_tokens=4, ignore_eos=True),
            "session": "raw",
            "drafting": False,
            "keep_s": 60.0,
        }
        await stream.send(Open(**(frame | changes)))
        yield stream


async def test_a_continue_while_a_turn_runs_or_where_nothing_is_kept_is_refused(verifiers) -> None:
    async with verifiers(min_step_s=0.01) as (server,):
        long = Sampling(max_tokens=1000, ignore_eos=True)
        for keep_s, field in ((60.0, "frame.continuation"), (0.0, "open.keep_s")):
            async with raw(server, sampling=long, keep_s=keep_s) as stream:
                opened = await stream.next()
                assert isinstance(opened, Opened)
                assert opened.keep_s == keep_s
                await stream.send(Continue(2, (5,)))
                while isinstance(answer := await stream.next(), Commit):
                    pass
                assert isinstance(answer, InvalidArgument)
                assert answer.field == field


async def test_a_stream_without_keeping_ends_with_its_text_as_does_a_half_closed_one(verifiers) -> None:
    async with verifiers() as (server,):
        async with raw(server, keep_s=0.0) as stream:
            await stream.rest_of_turn()
            assert await stream.next() is None
        async with raw(server) as stream:
            await stream.rest_of_turn()
            await stream.call.done_writing()
            assert isinstance(await stream.next(), Goaway)
            assert await stream.next() is None
            await until(lambda: server._engine.sessions.num_parked == 0)
        async with raw(server) as stream:
            await stream.call.done_writing()
            assert len(await stream.rest_of_turn()) == 4
            while (frame := await stream.next()) is not None:
                assert isinstance(frame, Goaway)


async def test_whatever_frames_come_the_others_texts_are_right_and_all_pages_come_back(verifiers, clients) -> None:
    async def strange(server: VerifierServer, seed: int) -> None:
        dice = random.Random(seed)

        def frame() -> EdgeFrame:
            start, chain = dice.choice([0, 2, 5, 6, 9, 5000]), dice.randrange(4)
            tokens = tuple(dice.choice([5, 6, 7, 8191, 9000]) for _ in range(dice.randrange(4)))
            sampling = dice.choice([None, Sampling(max_tokens=3), Sampling(max_tokens=1900, temperature=1.0)])
            kinds = [
                Cancel(),
                Continue(start, tokens, sampling, chain),
                Draft(chain, start, tuple(map(DraftToken, tokens)), complete=True),
            ]
            return dice.choice(kinds)

        async with raw(server, session=f"strange{seed}", keep_s=dice.choice([0.0, 0.1, 60.0])) as stream:
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):
                for _ in range(dice.randrange(1, 8)):
                    await stream.send(frame())
                    await asyncio.sleep(dice.choice([0.0, 0.01]))
            stream.call.cancel()

    async with verifiers(kv_tokens=150 * PAGE, max_sessions=4) as (server,), clients(server) as client:
        expected = await client.complete(TURNS[0], max_tokens=20)
        async with client.conversation() as talk:
            for batch in range(8):
                strangers = [strange(server, 10 * batch + i) for i in range(4)]
                turn, *_ = await asyncio.gather(talk.complete(TURNS[0], max_tokens=20), *strangers)
                if batch == 0:
                    assert turn.ids == expected.ids
            await said_as_fresh(client, talk, TURNS[1], max_tokens=5)
        await until(lambda: server.status().sessions == server._engine.sessions.num_parked == 0)
        assert server._engine.backend.capacity.used_pages == 0
