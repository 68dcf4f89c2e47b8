"""Streams that break in every way leave no object behind in a verifier, however many there are."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import itertools
import logging
import time
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

import grpc
import pytest
from test_server import FOREVER, SECRET, RawStream

from outrider.cloud.serving.stream_outbox import StreamOutbox
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.target import chunked_attention
from outrider.cloud.testing import save_tiny_target
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto.errors import OutriderError
from outrider.proto.lease import LeaseClaim, sign_lease
from outrider.proto.types import (
    Cancel,
    CloudFrame,
    Commit,
    Continue,
    Draft,
    DraftToken,
    Goaway,
    Open,
    Opened,
    Patience,
    Ping,
    Sampling,
)

TEXT_TOKENS = 6
WARM = 2  # rounds of all kinds of sessions


class Client:
    """An edge that behaves badly, in raw frames."""

    def __init__(self, server: VerifierServer, address: str) -> None:
        self._server = server
        self._address = address
        self._numbers = itertools.count()

    def open(self, session: str, *, seconds: float = 60.0, patience: Patience | None = None, **fields: object) -> Open:
        epoch = int(fields.get("epoch", 0))  # type: ignore[call-overload]
        claim = LeaseClaim(
            "verifier", "tiny", session, time.time() + seconds, key="k", tokens_per_minute=10**9, epoch=epoch
        )
        sampling = Sampling(temperature=1.0, seed=9, max_tokens=TEXT_TOKENS, ignore_eos=True)
        prompt = (5, 6, 7)
        frame = Open("tiny", self._server.tokenizer_sha256, prompt, sampling, session, patience=patience)
        return replace(frame, lease=sign_lease(claim, SECRET), **fields)  # type: ignore[arg-type]

    async def session(self, act: Callable[[Client, RawStream, str], Awaitable[None]]) -> None:
        """Let `act` use a stream on a connection of its own, and break both."""
        async with grpc.aio.insecure_channel(self._address, options=[("grpc.use_local_subchannel_pool", 1)]) as channel:
            name = f"s{next(self._numbers)}"
            stream = RawStream(channel, self.open(name).lease)
            with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError, OutriderError):
                await act(self, stream, name)
            stream.call.cancel()


async def until(stream: RawStream, kind: type[CloudFrame], *, finished: bool = False) -> None:
    while (frame := await stream.receive()) is not None:
        if isinstance(frame, kind) and not (finished and isinstance(frame, Commit) and frame.finish is None):
            return


# === ways to end ================================================================================================


async def whole(client: Client, stream: RawStream, name: str) -> None:
    await stream.send(client.open(name))
    await until(stream, Commit, finished=True)


async def broken_within_its_text(client: Client, stream: RawStream, name: str) -> None:
    await stream.send(client.open(name))
    await until(stream, Commit)


async def broken_before_its_answer(client: Client, stream: RawStream, name: str) -> None:
    await stream.send(client.open(name, patience=FOREVER))


async def half_open(client: Client, stream: RawStream, name: str) -> None:
    await asyncio.sleep(0.01)


async def half_closed(client: Client, stream: RawStream, name: str) -> None:
    await stream.send(client.open(name))
    await stream.call.done_writing()
    await until(stream, Commit, finished=True)


async def cancelled(client: Client, stream: RawStream, name: str) -> None:
    await stream.send(client.open(name, patience=FOREVER))
    await until(stream, Opened)
    await stream.send(Ping(1), Cancel())
    await until(stream, Commit, finished=True)


async def of_two_turns(client: Client, stream: RawStream, name: str) -> None:
    await stream.send(client.open(name, keep_s=9.0))
    await until(stream, Commit, finished=True)
    await stream.send(Continue(9, (8, 9), None, 1))
    await until(stream, Commit, finished=True)


async def broken_in_its_second_turn(client: Client, stream: RawStream, name: str) -> None:
    await stream.send(client.open(name, keep_s=9.0))
    await until(stream, Commit, finished=True)
    await stream.send(Continue(9, (8, 9), None, 1))


async def resumed(client: Client, stream: RawStream, name: str) -> None:
    await stream.send(client.open(name, patience=FOREVER))
    await until(stream, Opened)

    async def again(client: Client, other: RawStream, _: str) -> None:
        await other.send(client.open(name, committed=(8, 9), epoch=1))
        await until(other, Commit, finished=True)

    await client.session(again)


async def malformed(client: Client, stream: RawStream, name: str) -> None:
    await stream.send(client.open(name, patience=FOREVER), b"\xff\xff")
    await until(stream, Goaway)


async def refused(client: Client, stream: RawStream, name: str) -> None:
    await stream.send(client.open(name, model="other"))
    await until(stream, Opened)


async def contradictory(client: Client, stream: RawStream, name: str) -> None:
    drafts = [Draft(0, 3, tuple(map(DraftToken, (5, 6)))), Draft(0, 4, tuple(map(DraftToken, (7,))))]
    await stream.send(client.open(name, patience=FOREVER), *drafts)
    await asyncio.sleep(0.05)


async def outlived_by_its_lease(client: Client, stream: RawStream, name: str) -> None:
    await stream.send(client.open(name, patience=FOREVER, seconds=0.2))
    await until(stream, Goaway)


WAYS = (
    whole,
    broken_within_its_text,
    broken_before_its_answer,
    half_open,
    half_closed,
    cancelled,
    of_two_turns,
    broken_in_its_second_turn,
    resumed,
    malformed,
    refused,
    contradictory,
    outlived_by_its_lease,
)


# === what is left ===============================================================================================


async def run_rounds(client: Client, server: VerifierServer, rounds: int) -> None:
    for _ in range(rounds):
        await asyncio.gather(*(client.session(way) for way in WAYS))
    while server.status().sessions or server._health.outboxes:  # noqa: ASYNC110 - counted in another thread
        await asyncio.sleep(0.01)
    await asyncio.sleep(0.5)  # what gRPC closes by itself
    server.take_step_timings()  # of which some thousand are kept


def objects() -> Counter[str]:
    """Count the objects of a verifier's own types and its tensors: asyncio keeps up to a hundred cancelled timers."""
    chunked_attention._layout.cache_clear()  # 64 plans of steps are kept
    gc.collect()
    names = (f"{type(each).__module__}.{type(each).__qualname__}" for each in gc.get_objects())
    return Counter(name for name in names if name.startswith(("outrider.", "torch.")))


async def grown(folder: Path, more: int, within_s: float) -> dict[str, int]:
    """Return how many more objects there are `within_s` of `more` rounds, by type, where that is one for each round."""
    config = VerifierConfig(target=str(folder), model="tiny", dtype="float32", kv_tokens=8192, threads=1)
    server = VerifierServer(config, SECRET)
    client = Client(server, await server.start())
    try:
        await run_rounds(client, server, WARM)
        before = objects()
        await run_rounds(client, server, more)
        assert server.status().kv_pages_free == config.kv_tokens // config.page_size
        until = time.monotonic() + within_s
        while True:  # gRPC closes connections, and the engine lets its last step go, in a time of their own
            left = {name: count for name, count in (objects() - before).items() if count >= more}
            if not left or time.monotonic() > until:
                return left
            await asyncio.sleep(0.2)
    finally:
        await server.stop(0.2)


@pytest.fixture(autouse=True)
def _quiet(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.CRITICAL, "outrider")  # pytest keeps all records


def test_broken_streams_leave_nothing_behind(tmp_path: Path) -> None:
    assert asyncio.run(grown(save_tiny_target(tmp_path), 8, within_s=60)) == {}


def test_an_outbox_that_is_kept_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, init = [], StreamOutbox.__init__

    def keep(self: StreamOutbox, loop: asyncio.AbstractEventLoop) -> None:
        init(self, loop)
        kept.append(self)

    monkeypatch.setattr(StreamOutbox, "__init__", keep)
    assert "outrider.cloud.serving.stream_outbox.StreamOutbox" in asyncio.run(
        grown(save_tiny_target(tmp_path), 2, within_s=0.2)
    )
