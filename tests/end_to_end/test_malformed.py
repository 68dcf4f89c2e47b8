"""1,000 malformed HTTP and gRPC requests: each a proper error, no crash, and a text beside them comes out whole."""

from __future__ import annotations

import asyncio
import itertools
import random
import socket
import struct
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import pytest
from command_processes import Command, free_port
from http_streams import ERROR_FIELDS, Answer, ask_patiently, get, metric_value, read_answer, until_healthy
from malformed_http import COMPLETIONS, bad_framing, refused_requests, request
from questions import Question, questions

from outrider.cloud.testing import save_tiny_target
from outrider.proto import codec
from outrider.proto.tokenizer import tokenizer_hash
from outrider.proto.types import LeaseRequest, SessionReport

pytestmark = pytest.mark.soak

CANARIES = 4
TOKENS = 150
AT_ONCE = 12
WRONG_IN_CONTENT, WRONG_IN_FRAMING, BROKEN_OFF, WRONG_CALLS = 520, 120, 60, 200
NEVER = (grpc.StatusCode.UNKNOWN, grpc.StatusCode.INTERNAL)
DEFECTS = ("Traceback", " ERROR ", " CRITICAL ")


@dataclass
class System:
    """One of each, in processes of their own."""

    commands: dict[str, Command]
    port: int
    verifier: str
    verifier_metrics: int
    coordinator: str
    folder: Path
    canaries: list[Question]


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = save_tiny_target(tmp_path_factory.mktemp("tiny"))
    secret = folder / "secret"
    secret.write_text("a secret of the fleet")
    port, metrics_port = free_port(), free_port()
    verifier, coordinator = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    target = ["--name", "v", "--target", str(folder), "--dtype", "float32", "--target-threads", "1"]
    metrics = ["--metrics-listen", f"127.0.0.1:{metrics_port}"]
    fixed = ["--verifier", f"v={verifier}", "--model", str(folder), "--tokenizer", str(folder / "tokenizer.json")]
    place = ["--listen", coordinator, "--lease-secret-file", str(secret)]
    cloud = ["--coordinator", coordinator, "--drafter", "ngram", "--cache", str(folder / "cache")]
    wanted = {
        "verifier": ["verifier", *target, *metrics, "--listen", verifier],
        "coordinator": ["coordinator", *fixed, *place],
        "daemon": ["edge", *cloud, "--listen", f"127.0.0.1:{port}"],
    }
    commands = {name: Command(*arguments, log=folder / f"{name}.log") for name, arguments in wanted.items()}
    try:
        for command in commands.values():
            command.start()
        canaries = questions(folder, CANARIES, TOKENS)
        for command in commands.values():
            command.line()
        asyncio.run(until_healthy(port))
        yield System(commands, port, verifier, metrics_port, coordinator, folder, canaries)
        for name, command in commands.items():
            assert command.terminate() == 0, name
    finally:
        for command in commands.values():
            command.end()


@asynccontextmanager
async def canaries_sing(at: System) -> AsyncIterator[None]:
    """Meanwhile texts stream, one after the other, without end; each must come out right."""
    over = asyncio.Event()
    sung = 0

    async def sing() -> None:
        nonlocal sung
        for canary in itertools.cycle(at.canaries):
            answer = await ask_patiently(at.port, canary.asks(str(at.folder)))
            assert answer.done, answer
            assert answer.text == canary.text
            sung += 1
            if over.is_set():
                return

    singing = [asyncio.create_task(sing()) for _ in range(2)]
    try:
        yield
    finally:
        over.set()
        await asyncio.gather(*singing)
    assert sung >= 2


async def together(work: Iterable[Callable[[], Awaitable[None]]]) -> None:
    """Send all of it, this many requests at once."""
    waiting = iter(work)

    async def one_after_the_other() -> None:
        for piece in waiting:
            async with asyncio.timeout(60):
                await piece()

    async with asyncio.TaskGroup() as group:
        for _ in range(AT_ONCE):
            group.create_task(one_after_the_other())


async def exchange(port: int, data: bytes) -> Answer:
    """Return a server's answer to these bytes."""
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    try:
        writer.write(data)
        return await read_answer(reader)
    finally:
        writer.transport.abort()


def check_refusal(at: System, answer: Answer, why: bytes) -> None:
    """It is the client's fault, in OpenAI's shape, and tells nothing of anybody else's text."""
    assert 400 <= answer.status < 500, (answer, why[:300])
    assert answer.status != 429
    assert answer.headers["content-type"] == "application/json", (answer, why[:300])
    assert answer.headers["x-request-id"]
    assert answer.error is not None
    assert set(answer.error) == ERROR_FIELDS
    assert answer.error["type"] == "invalid_request_error"
    assert answer.error["message"]
    assert not any(canary.text[:30].encode() in answer.body for canary in at.canaries)


async def check_all_is_well(at: System) -> None:
    """Everybody lives, holds nothing for anybody, and has met no defect."""
    assert (await get(at.port, "/health")).status == 200
    began = time.monotonic()
    while await metric_value(at.verifier_metrics, "outrider:kv_cache_usage_perc") or await metric_value(
        at.port, "outrider:num_requests_running"
    ):
        assert time.monotonic() - began < 30, "something is left of the malformed requests"
        await asyncio.sleep(0.05)
    for name, command in at.commands.items():
        assert command.runs, f"{name} has crashed"
        assert not any(defect in command.errors for defect in DEFECTS), f"{name}: {command.errors[-4000:]}"


@pytest.mark.parametrize(("where", "count"), [("content", WRONG_IN_CONTENT), ("framing", WRONG_IN_FRAMING)])
async def test_requests_that_are_wrong_in_content_or_framing_are_refused(at: System, where: str, count: int) -> None:
    statuses: Counter[int] = Counter()
    rng = random.Random(1)

    async def one(data: bytes) -> None:
        answer = await exchange(at.port, data)
        check_refusal(at, answer, data)
        statuses[answer.status] += 1

    wrong = refused_requests(rng, str(at.folder), at.port) if where == "content" else bad_framing(rng, at.port)
    async with canaries_sing(at):
        await together((lambda data=data: one(data)) for data in itertools.islice(wrong, count))  # type: ignore[misc]
    await check_all_is_well(at)
    print(f"\nwrong in {where}", dict(statuses))
    assert statuses.total() == count
    assert where == "framing" or set(statuses) == {400, 403, 404, 405, 415}


async def test_clients_that_break_off_close_half_or_dawdle_harm_nobody(at: System) -> None:
    body = b'{"model": "x", "prompt": "w5"}'
    whole = request("POST", COMPLETIONS, body, at.port)

    async def resets(rng: random.Random) -> None:
        _, writer = await asyncio.open_connection("127.0.0.1", at.port)
        writer.write(whole[: rng.randrange(1, len(whole))])
        await writer.drain()
        own = writer.get_extra_info("socket")
        own.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        writer.transport.abort()

    async def closes_half(rng: random.Random) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
        writer.write(whole[: rng.randrange(1, len(whole))])
        writer.write_eof()
        with suppress(asyncio.IncompleteReadError, ConnectionError):
            check_refusal(at, await read_answer(reader), b"half closed")
        assert await reader.read() == b"", "the server closes its half too"
        writer.transport.abort()

    async def dawdles(rng: random.Random) -> None:
        reader, writer = await asyncio.open_connection("127.0.0.1", at.port)
        for at_byte in range(0, len(whole), 16):
            writer.write(whole[at_byte : at_byte + 16])
            await asyncio.sleep(0.005 * rng.random())
        check_refusal(at, await read_answer(reader), b"slow")
        writer.transport.abort()

    rng = random.Random(3)
    ways = itertools.islice(itertools.cycle((resets, closes_half, dawdles)), BROKEN_OFF)
    async with canaries_sing(at):
        await together((lambda way=way: way(rng)) for way in ways)  # type: ignore[misc]
    await check_all_is_well(at)


async def test_a_client_that_never_ends_its_head_gets_a_408(
    at: System, monkeypatch: pytest.MonkeyPatch, tokenizer_file: Path
) -> None:
    from outrider.edge import Client, EdgeConfig
    from outrider.edge.daemon import DaemonConfig
    from outrider.edge.daemon.http_server import Daemon

    monkeypatch.setattr("outrider.edge.daemon.http_server.HEAD_WITHIN_S", 0.3)

    edge = EdgeConfig(verifier=at.verifier, model="x", tokenizer=tokenizer_file, drafter="none")
    daemon = Daemon(DaemonConfig(listen="127.0.0.1:0", grace_s=0), Client(edge))
    port = int((await daemon.start()).rpartition(":")[2])
    for beginning in (b"", b"GET /version HTTP/1.1\r\nHost: localhost\r\n"):
        answer = await exchange(port, beginning)
        check_refusal(at, answer, beginning)
        assert answer.status == 408
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(2):  # a connection that is kept open between requests owes none
        writer.write(b"GET /version HTTP/1.1\r\nHost: localhost\r\n\r\n")
        assert (await read_answer(reader)).status == 200
        await asyncio.sleep(0.5)
    writer.transport.abort()
    await daemon.stop()


def damaged(rng: random.Random, data: bytes) -> bytes:
    made = bytearray(data)
    for _ in range(rng.choice([1, 2, 4])):
        at_byte = rng.randrange(len(made))
        made[at_byte : at_byte + rng.randrange(2)] = rng.randbytes(rng.randrange(1, 3))
    return bytes(made[: rng.randrange(1, len(made) + 1)])


def wrong_message(rng: random.Random, right: bytes) -> bytes:
    return damaged(rng, right) if right and rng.random() < 0.6 else rng.randbytes(rng.randrange(1, 80))


async def test_wrong_calls_to_the_coordinator_are_errors_with_a_name(at: System) -> None:
    statuses: Counter[grpc.StatusCode] = Counter()
    tokenizer_sha256 = tokenizer_hash((at.folder / "tokenizer.json").read_text())
    right = {
        "OpenLease": codec.encode_lease_request(LeaseRequest(str(at.folder), "s1", tokenizer_sha256=tokenizer_sha256)),
        "ListDrafters": codec.encode_drafter_query(tokenizer_sha256),
        "FetchFile": codec.encode_fetch("0" * 64, 1),
        "ReportSession": codec.encode_report(
            SessionReport("s1", str(at.folder), "v", "ngram", "1", 5, 2, 4, 4, 3, 0.5, 100, 200)
        ),
        "Drain": codec.encode_drain("nobody"),
        "NoSuchMethod": b"x",
    }
    rng = random.Random(4)
    async with grpc.aio.insecure_channel(at.coordinator) as channel, canaries_sing(at):

        async def one(method: str) -> None:
            path = f"/{rng.choice([codec.CONTROL_SERVICE] * 9 + ['no.such.Service'])}/{method}"
            make = channel.unary_stream if method == "FetchFile" else channel.unary_unary
            call: Any = make(path)(wrong_message(rng, right[method]), timeout=30)
            statuses[await call.code()] += 1

        methods = itertools.islice(itertools.cycle(right), WRONG_CALLS)
        await together((lambda method=method: one(method)) for method in methods)  # type: ignore[misc]
    await check_all_is_well(at)
    print("\nwrong calls", {status.name: count for status, count in statuses.items()})
    assert statuses.total() == WRONG_CALLS
    assert not set(statuses) & set(NEVER), statuses
    assert statuses[grpc.StatusCode.INVALID_ARGUMENT] > WRONG_CALLS // 4
    assert statuses[grpc.StatusCode.UNIMPLEMENTED] > WRONG_CALLS // 10


async def test_bytes_that_are_no_grpc_are_shut_out(at: System) -> None:
    rng = random.Random(6)

    async def one(address: str, data: bytes) -> None:
        host, _, port = address.partition(":")
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(data)
        writer.write_eof()
        with suppress(ConnectionError):
            await reader.read()
        writer.transport.abort()

    preface = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"
    wrong = [b"GET / HTTP/1.1\r\n\r\n", preface, *(preface + rng.randbytes(200) for _ in range(8)), rng.randbytes(99)]
    async with canaries_sing(at):
        pairs = itertools.product((at.verifier, at.coordinator), wrong)
        await together((lambda pair=pair: one(*pair)) for pair in pairs)  # type: ignore[misc]
    await check_all_is_well(at)
