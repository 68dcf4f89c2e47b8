"""A stream that falls silent is left where another verifier answers, and nowhere else."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
from scripted_cloud import ScriptedChannels, ScriptedStream

from outrider.edge import Client, EdgeConfig
from outrider.edge.link.routes import DirectRoute
from outrider.proto.errors import Unavailable
from outrider.proto.policy.suspicion import ReopenBudget, SilenceRules
from outrider.proto.tokenizer import tokenizer_hash
from outrider.proto.types import (
    CloudFrame,
    Commit,
    CommittedToken,
    EdgeFrame,
    FinishReason,
    Lease,
    Open,
    Opened,
    Ping,
    Pong,
)

TOKENS = tuple(range(10, 30))
QUICK = SilenceRules(quiet_s=0.02, min_s=0.1, opening_s=0.3)


class Stream(ScriptedStream):
    """A stream of verifier `address`, whose session the channels' `behave` decides."""

    def __init__(self, channels: Cloud, address: str, statistics: Any) -> None:
        super().__init__(channels, statistics)
        self.cloud = channels
        self.address = address
        self.pings = 0

    def send(self, frame: EdgeFrame) -> None:
        if isinstance(frame, Open):
            self.cloud.opens.append((self.address, frame))
            start = len(frame.prompt) + len(frame.committed)
            rest = TOKENS[len(frame.committed) :]
            frames: list[CloudFrame] = [
                Opened(len(frame.committed), 8, 99, self.address, 8192, vocab_size=8192, epoch=frame.epoch)
            ]
            for index, token in enumerate(rest):
                last = len(rest) == index + 1
                finish = FinishReason.LENGTH if last else None
                commit = Commit(start + index, (CommittedToken(token),), 0, 8, finish=finish, epoch=frame.epoch)
                frames.append(commit)
            self.cloud.behave(self, frames)
        elif isinstance(frame, Ping):
            self.pings += 1
            self.cloud.pinged(self, frame)

    def say(self, *frames: CloudFrame) -> None:
        for frame in frames:
            self._frames.put_nowait(frame)


class Cloud(ScriptedChannels):
    """Verifiers of which `answering` answer a health check.

    Attributes:
        behave: what a stream does with the frames of its text.
        pinged: what it does with a ping.
    """

    def __init__(self) -> None:
        super().__init__()
        self.opens: list[tuple[str, Open]] = []
        self.answering: set[str] = set()
        self.checked: list[str] = []
        self.streams: list[Stream] = []
        self.behave: Callable[[Stream, list[CloudFrame]], None] = lambda stream, frames: stream.say(*frames)
        self.pinged: Callable[[Stream, Ping], None] = lambda stream, ping: None

    def open_stream(self, lease: Lease, statistics: Any, *_: object) -> Stream:
        self.streams.append(Stream(self, lease.address, statistics))
        return self.streams[-1]

    async def renew(self, lease: Lease) -> None:
        self.checked.append(lease.address)
        if lease.address not in self.answering:
            raise Unavailable("does not answer")


def text_through(tokenizer, arrange: Callable[[Cloud], None], addresses=("a", "b"), **options: Any):
    """The tokens and statistics of one text, and the cloud."""

    async def main():
        route = DirectRoute(addresses, "tiny", tokenizer_hash(tokenizer.read_text(encoding="utf-8")))
        config = EdgeConfig(verifier="127.0.0.1:1", model="tiny", drafter="none", tokenizer=tokenizer, silence=QUICK)
        client = Client(config, route=route)
        cloud = client._channels = Cloud()  # type: ignore[assignment]
        if "budget" in options:
            client._budget = options["budget"]
        arrange(cloud)
        try:
            done = await asyncio.wait_for(client.complete([3, 4], max_tokens=len(TOKENS), ignore_eos=True), 60)
        finally:
            await client.close()
        return done.ids, done.statistics, cloud

    return asyncio.run(main())


def silent_at_a(cloud: Cloud) -> None:
    """Verifier a says four tokens and no more; b answers."""
    cloud.answering = {"b"}
    cloud.behave = lambda stream, frames: stream.say(*(frames[:5] if stream.address == "a" else frames))


def test_a_text_goes_on_at_another_verifier_where_its_own_falls_silent(tokenizer_file) -> None:
    ids, statistics, cloud = text_through(tokenizer_file, silent_at_a)
    assert ids == TOKENS, "nothing is lost and nothing comes twice"
    assert [(address, frame.committed, frame.epoch) for address, frame in cloud.opens] == [
        ("a", (), 0),
        ("b", TOKENS[:4], 1),
    ]
    assert cloud.checked == ["b"]
    assert cloud.streams[0].pings >= 1
    assert (statistics.suspected, statistics.reopened, statistics.resumes) == (1, 1, 1)


def test_a_verifier_that_never_answers_an_open_is_left_too(tokenizer_file) -> None:
    def arrange(cloud: Cloud) -> None:
        cloud.answering = {"b"}
        cloud.behave = lambda stream, frames: None if stream.address == "a" else stream.say(*frames)

    ids, statistics, cloud = text_through(tokenizer_file, arrange)
    assert ids == TOKENS
    assert [address for address, _ in cloud.opens] == ["a", "b"]
    assert statistics.reopened == 1


def test_a_verifier_that_answers_pings_is_never_left_however_long_it_takes(tokenizer_file) -> None:
    def arrange(cloud: Cloud) -> None:
        cloud.answering = {"a", "b"}
        rest: list[CloudFrame] = []

        def behave(stream: Stream, frames: list[CloudFrame]) -> None:
            stream.say(*frames[:5])
            rest.extend(frames[5:])

        def pinged(stream: Stream, ping: Ping) -> None:
            stream.say(Pong(ping.number), *(rest if stream.pings == 12 else ()))

        cloud.behave, cloud.pinged = behave, pinged

    ids, statistics, cloud = text_through(tokenizer_file, arrange)
    assert ids == TOKENS
    assert cloud.streams[0].pings >= 12, "that is several times its bound"
    assert (len(cloud.opens), statistics.suspected, statistics.resumes) == (1, 0, 0)


@pytest.mark.parametrize("addresses", [("a",), ("a", "b")], ids=["one verifier", "two"])
def test_where_nobody_answers_the_stream_stays_until_its_verifier_wakes(tokenizer_file, addresses) -> None:
    """So it is with one verifier that is stopped for a while, or a link that stands still."""

    def arrange(cloud: Cloud) -> None:
        def behave(stream: Stream, frames: list[CloudFrame]) -> None:
            stream.say(*frames[:5])
            asyncio.create_task(wake(stream, frames[5:]))  # noqa: RUF006 - the test waits for what it says

        async def wake(stream: Stream, rest: list[CloudFrame]) -> None:
            while len(cloud.checked) < 2:  # noqa: ASYNC110 - another task is waited for
                await asyncio.sleep(0.01)
            stream.say(*rest)

        cloud.behave = behave

    ids, statistics, cloud = text_through(tokenizer_file, arrange, addresses)
    assert ids == TOKENS
    assert len(cloud.opens) == 1, "its session and what it holds were never given up"
    assert (statistics.suspected, statistics.reopened, statistics.resumes) == (1, 0, 0), "one silence, looked at twice"


def test_a_lone_verifier_whose_connection_alone_is_dead_is_opened_again(tokenizer_file) -> None:
    def arrange(cloud: Cloud) -> None:
        cloud.answering = {"a"}
        cloud.behave = lambda stream, frames: stream.say(*(frames[:5] if len(cloud.streams) == 1 else frames))

    ids, statistics, cloud = text_through(tokenizer_file, arrange, ("a",))
    assert ids == TOKENS
    assert [frame.epoch for _, frame in cloud.opens] == [0, 1]
    assert statistics.reopened == 1


def test_suspicion_that_has_cost_enough_leaves_no_stream(tokenizer_file) -> None:
    def arrange(cloud: Cloud) -> None:
        cloud.answering = {"a", "b"}

        def behave(stream: Stream, frames: list[CloudFrame]) -> None:
            """Stop after each token for longer than the bound, as an overloaded verifier does, and answer no ping."""
            asyncio.create_task(slowly(stream, frames))  # noqa: RUF006 - the test waits for what it says

        async def slowly(stream: Stream, frames: list[CloudFrame]) -> None:
            for index, frame in enumerate(frames):
                await asyncio.sleep(0.0 if index < 2 or index > 6 else 0.4)
                stream.say(frame)

        cloud.behave = behave

    budget = ReopenBudget(QUICK, events=2.0, refill_s=1e9)
    ids, statistics, cloud = text_through(tokenizer_file, arrange, budget=budget)
    assert ids == TOKENS
    assert statistics.reopened <= 2
    assert len(cloud.opens) <= 3
