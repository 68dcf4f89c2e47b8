"""The relay with real sockets, in its own process: exact, controllable, and gone with its parent."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import statistics
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator

import pytest
from echo_server import connected, echo_server

from outrider.deploy.cli import main
from outrider.deploy.link.link_process import LinkProcess
from outrider.deploy.link.link_relay import Counters
from outrider.deploy.link.link_traces import LinkTrace, TracePoint, find_trace
from outrider.deploy.link.shape import LinkShape
from outrider.proto.errors import ConfigError, Unavailable

SILENCE_S = 60.0
TRIES = 12


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    with echo_server() as address:
        yield address


def read(edge: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := edge.recv(size - len(data))):
        data += more
    return data


def with_link(to: str, use: Callable[[LinkProcess], Awaitable[None]], **options: object) -> None:
    async def run() -> None:
        async with LinkProcess(to=to, **options) as link:
            await use(link)

    asyncio.run(run())


def median_round_trip_s(address: str, count: int) -> float:
    times = []
    with connected(address, SILENCE_S) as edge:
        for _ in range(count + 1):
            began = time.perf_counter()
            edge.sendall(b"x" * 64)
            read(edge, 64)
            times.append(time.perf_counter() - began)
            time.sleep(0.002)
    return statistics.median(times[1:])  # the first one waits for the handshake


def median_rate(address: str, size: int) -> float:
    """Return the median over tenths of `size` of the bytes per second that come back through a full pipe."""
    with connected(address, SILENCE_S) as edge:
        sender = threading.Thread(target=edge.sendall, args=(bytes(size),))
        sender.start()
        read(edge, size // 10)
        rates = []
        for _ in range(9):
            began = time.perf_counter()
            read(edge, size // 10)
            rates.append(size // 10 / (time.perf_counter() - began))
        sender.join()
    return statistics.median(rates)


def share_of_a_core() -> float:
    """Return the share of a core that this process gets when it wants all of it; below 1 on a busy machine."""
    wall, used = time.perf_counter(), time.process_time()
    while time.perf_counter() - wall < 0.1:
        pass
    return (time.process_time() - used) / (time.perf_counter() - wall)


async def assert_honest(asked: float, measure: Callable[[], float]) -> None:
    """Check that a measurement is within 5 % in one of many tries; skip the test on a busy machine."""
    measured, shares = [], []
    for _ in range(TRIES):
        measured.append(await asyncio.to_thread(measure))
        if measured[-1] == pytest.approx(asked, rel=0.05):
            return
        shares.append(share_of_a_core())
    if min(shares) < 0.9:
        pytest.skip(f"this machine is too busy to measure: a process gets {min(shares):.0%} of a core")
    raise AssertionError(f"asked for {asked}, measured {measured}")


@pytest.mark.parametrize(("rtt_ms", "count"), [(2, 50), (20, 15), (100, 4)])
async def test_the_link_is_as_slow_as_it_says(rtt_ms, count, echo) -> None:
    async with LinkProcess(to=echo, shape=LinkShape.of(rtt_ms=rtt_ms)) as link:
        await assert_honest(rtt_ms, lambda: 1e3 * median_round_trip_s(link.address, count))


@pytest.mark.parametrize("way", ["up_mbit", "down_mbit"])
@pytest.mark.parametrize(("mbit", "size"), [(1, 60_000), (20, 1_200_000)])
async def test_the_link_carries_as_much_as_it_says(way, mbit, size, echo) -> None:
    async with LinkProcess(to=echo, shape=LinkShape.of(rtt_ms=10, queue_kib=16, **{way: mbit})) as link:
        await assert_honest(mbit, lambda: median_rate(link.address, size) * 8 / 1e6)


async def test_bytes_arrive_as_they_were_sent_in_both_directions_and_are_counted(echo) -> None:
    payload = os.urandom(300_000)
    async with LinkProcess(
        to=echo, shape=LinkShape.of(rtt_ms=4, jitter_ms=2, up_mbit=100, down_mbit=100, queue_kib=8), seed=1
    ) as link:
        assert await link.counters() == Counters(0, 0, 0)

        def transfer() -> bytes:
            with connected(link.address, SILENCE_S) as edge:
                sender = threading.Thread(target=lambda: (edge.sendall(payload), edge.shutdown(socket.SHUT_WR)))
                sender.start()
                received = read(edge, len(payload) + 1)  # to the end, which the shutdown brings
                sender.join()
                return received

        first, second = await asyncio.gather(asyncio.to_thread(transfer), asyncio.to_thread(transfer))
        assert first == payload
        assert second == payload
        assert await link.counters() == Counters(2 * len(payload), 2 * len(payload), 2)


async def test_a_full_queue_holds_the_sender_back(echo) -> None:
    async with LinkProcess(to=echo, shape=LinkShape.of(up_mbit=0, queue_kib=16)) as link:
        with connected(link.address, SILENCE_S) as edge:
            edge.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 64 << 10)
            edge.setblocking(False)
            sent = 0
            quiet_since = time.monotonic()
            while time.monotonic() - quiet_since < 0.3:
                try:
                    sent += edge.send(bytes(65536))
                    quiet_since = time.monotonic()
                except BlockingIOError:
                    await asyncio.sleep(0.02)
        assert sent < 2 << 20, "an outage with a queue of 16 KiB took megabytes"
        assert (await link.counters()).up_bytes == 0


async def test_a_reader_that_does_not_read_stops_its_own_connection_only(echo) -> None:
    async with LinkProcess(to=echo) as link:
        with connected(link.address, SILENCE_S) as deaf, connected(link.address, SILENCE_S) as other:
            deaf.setblocking(False)
            blocked = 0
            while blocked < 10:
                try:
                    deaf.send(bytes(65536))
                    blocked = 0
                except BlockingIOError:
                    blocked += 1
                    await asyncio.sleep(0.02)
            other.sendall(b"still there")
            assert await asyncio.to_thread(read, other, 11) == b"still there"


async def test_a_stall_is_silence_and_then_everything(echo) -> None:
    async with LinkProcess(to=echo) as link:
        with connected(link.address, SILENCE_S) as edge:
            edge.sendall(b"before")
            assert read(edge, 6) == b"before"
            began = time.monotonic()
            await link.stall(0.3)
            edge.sendall(b"during")
            assert await asyncio.to_thread(read, edge, 6) == b"during"
            assert time.monotonic() - began >= 0.299
        with pytest.raises(ConfigError, match="seconds"):
            await link.stall(-1)


async def test_a_cut_aborts_every_connection_and_new_ones_are_welcome(echo) -> None:
    async with LinkProcess(to=echo) as link:
        with connected(link.address, SILENCE_S) as edge, connected(link.address, SILENCE_S) as other:
            for end in (edge, other):
                end.sendall(b"x")
                assert read(end, 1) == b"x"
            await link.cut()
            for end in (edge, other):
                with pytest.raises(ConnectionResetError):
                    end.recv(1)
        with connected(link.address, SILENCE_S) as edge:
            edge.sendall(b"again")
            assert read(edge, 5) == b"again"
        assert (await link.counters()).connections == 3


async def test_a_connection_that_is_not_yet_through_is_cut_too(echo) -> None:
    async with LinkProcess(to=echo, shape=LinkShape.of(rtt_ms=60_000)) as link:
        with connected(link.address, SILENCE_S) as edge:
            while not (await link.counters()).connections:  # noqa: ASYNC110 - the relay accepts in its own time
                await asyncio.sleep(0.01)
            await link.cut()
            with pytest.raises(ConnectionResetError):
                edge.recv(1)
        await link.set_shape(LinkShape())
        with connected(link.address, SILENCE_S) as edge:
            edge.sendall(b"again")
            assert read(edge, 5) == b"again"


async def test_a_trace_is_played_in_time_and_a_shape_ends_it(echo) -> None:
    trace = LinkTrace("t", (TracePoint(0.0, 0, 100, 100), TracePoint(0.4, 150, 100, 100)))
    async with LinkProcess(to=echo, trace=trace) as link:
        with connected(link.address, SILENCE_S) as edge:

            def round_trip_s() -> float:
                began = time.monotonic()
                edge.sendall(b"x")
                read(edge, 1)
                return time.monotonic() - began

            deadline = time.monotonic() + SILENCE_S
            for is_far in (True, False, True):
                while (await asyncio.to_thread(round_trip_s) >= 0.149) != is_far:
                    assert time.monotonic() < deadline, "a point of the trace is never played"
            await link.set_shape(LinkShape.of(rtt_ms=250))
            assert min(round_trip_s() for _ in range(4)) >= 0.249, "the trace goes on, which takes 0.8 s"
            await link.play(find_trace("lte-motion"))  # a long line on standard input
            assert round_trip_s() > 0.044


async def test_a_new_connection_waits_a_round_trip_for_its_handshake(echo) -> None:
    async with LinkProcess(to=echo, shape=LinkShape.of(rtt_ms=100)) as link:
        began = time.monotonic()
        with connected(link.address, SILENCE_S) as edge:
            edge.sendall(b"x")
            assert await asyncio.to_thread(read, edge, 1) == b"x"
        assert time.monotonic() - began >= 0.199


async def test_a_verifier_that_is_not_there_is_a_reset() -> None:
    async with LinkProcess(to="127.0.0.1:1") as link:
        with pytest.raises(ConnectionResetError), connected(link.address, SILENCE_S) as edge:
            edge.recv(1)


async def test_a_port_that_is_taken_and_a_link_that_has_died_are_unavailable(echo) -> None:
    async with LinkProcess(to=echo) as link:
        with pytest.raises(Unavailable, match="cannot listen"):
            async with LinkProcess(to=echo, listen=link.address):
                pass
        assert link.process is not None
        link.process.kill()
        with pytest.raises(Unavailable, match="died"):
            await link.counters()
    with pytest.raises(Unavailable, match="not running"):
        await link.counters()


PARENT = """
import asyncio, sys
from outrider.deploy.link.link_process import LinkProcess

async def main():
    async with LinkProcess(to="127.0.0.1:1") as link:
        print(link.process.pid, flush=True)
        await asyncio.sleep(60)

asyncio.run(main())
"""


def test_the_link_ends_when_its_parent_is_killed() -> None:
    parent = subprocess.Popen([sys.executable, "-c", PARENT], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    deadline = time.monotonic() + SILENCE_S
    while _runs(child):
        assert time.monotonic() < deadline, "the link outlived its parent"
        time.sleep(0.05)


def _runs(pid: int) -> bool:
    """Return whether the process runs, and is no zombie."""
    try:
        with open(f"/proc/{pid}/stat") as stat:
            return stat.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_the_command_stays_until_it_is_stopped_and_says_what_it_carried(echo) -> None:
    command = [sys.executable, "-m", "outrider.deploy", "link", "--to", echo, "--trace", "fibre", "--jitter", "1"]
    running = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    assert running.stdout is not None
    line = running.stdout.readline()
    assert line.startswith(f"link to {echo} on 127.0.0.1:")
    with connected(line.split()[-1], SILENCE_S) as edge:
        edge.sendall(b"hello")
        assert read(edge, 5) == b"hello"
    running.send_signal(signal.SIGTERM)
    output, _ = running.communicate(timeout=SILENCE_S)
    assert output == "1 connection(s), 5 bytes up, 5 bytes down\n"
    assert running.returncode == 0


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["link"], 2, "--to"),
        (["link", "--to", "nowhere"], 1, "to: 'nowhere' is not host:port"),
        (["link", "--to", "no-such-host.invalid:1"], 1, "to: "),
        (["link", "--to", "127.0.0.1:1", "--listen", "0.0.0.0:0"], 1, "listen: '0.0.0.0:0' is not a loopback address"),
        (["link", "--to", "127.0.0.1:1", "--rtt", "-1"], 2, "--rtt"),
        (
            ["link", "--to", "127.0.0.1:1", "--trace", "wifi", "--rtt", "9", "--up", "1"],
            1,
            "trace: says what --rtt, --up",
        ),
        (["link", "--to", "127.0.0.1:1", "--trace", "pigeon"], 1, "trace: there is no file pigeon"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_on_the_command_line_is_one_clear_line(arguments, status, says, capfd) -> None:
    try:
        got = main(arguments)
    except SystemExit as ended:
        got = int(ended.code or 0)
    out, err = capfd.readouterr()
    assert got == status
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""
