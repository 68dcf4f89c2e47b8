"""The link of packets with the kernel's own TCP: it loses, delays, and leaves nothing behind."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path

import pytest
from echo_server import connected, echo_server

from outrider.deploy.cli import main
from outrider.deploy.link import namespace
from outrider.deploy.link.process import LinkProcess
from outrider.deploy.link.shape import LinkShape, PacketFaults
from outrider.deploy.link.traces import LinkTrace, TracePoint
from outrider.deploy.loss import PacketLoss
from outrider.proto.errors import ConfigError, OutriderError, Unavailable

SILENCE_S = 60.0

pytestmark = pytest.mark.usefixtures("_tun_links")


@pytest.fixture(scope="module")
def echo() -> Iterator[str]:
    with echo_server() as address:
        yield address


def read(edge: socket.socket, size: int) -> bytes:
    data = b""
    while len(data) < size and (more := edge.recv(size - len(data))):
        data += more
    return data


def echoed(address: str, payload: bytes) -> bytes:
    """Return what comes back for `payload`, to the end that closing the sending direction brings."""
    with connected(address, SILENCE_S) as edge:
        sender = threading.Thread(target=lambda: (edge.sendall(payload), edge.shutdown(socket.SHUT_WR)))
        sender.start()
        received = read(edge, len(payload) + 1)
        sender.join()
        return received


def with_link(to: str, use: Callable[[LinkProcess], Awaitable[None]], faults=PacketFaults(), **options) -> None:  # noqa: B008
    async def run() -> None:
        async with LinkProcess(to, faults=faults, **options) as link:
            await use(link)

    asyncio.run(run())


def test_bytes_arrive_as_they_were_sent_though_packets_are_lost_and_overtaken(echo) -> None:
    payload = os.urandom(400_000)

    async def talk(link: LinkProcess) -> None:
        assert await asyncio.to_thread(echoed, link.address, payload) == payload
        counters = await link.counters()
        assert (counters.up_bytes, counters.down_bytes, counters.connections) == (len(payload), len(payload), 1)
        assert counters.packets_lost > 0

    with_link(echo, talk, PacketFaults(PacketLoss(0.03), reordered=0.05), shape=LinkShape.of(rtt_ms=4), seed=1)


def test_without_faults_no_packet_is_lost(echo) -> None:
    async def talk(link: LinkProcess) -> None:
        assert await asyncio.to_thread(echoed, link.address, bytes(200_000)) == bytes(200_000)
        counters = await link.counters()
        assert (counters.packets_lost, counters.packets_dropped) == (0, 0)

    with_link(echo, talk)


def test_a_short_queue_before_a_slow_rate_drops_packets_and_tcp_sends_them_again(echo) -> None:
    async def talk(link: LinkProcess) -> None:
        assert await asyncio.to_thread(echoed, link.address, bytes(300_000)) == bytes(300_000)
        assert (await link.counters()).packets_dropped > 0

    with_link(echo, talk, shape=LinkShape.of(rtt_ms=20, up_mbit=20, queue_kib=8))


def test_no_answer_is_earlier_than_the_round_trip_and_a_connection_costs_one_more(echo) -> None:
    async def talk(link: LinkProcess) -> None:
        def times() -> list[float]:
            began = time.monotonic()
            with connected(link.address, SILENCE_S) as edge:
                passed = []
                for _ in range(5):
                    edge.sendall(b"x")
                    assert read(edge, 1) == b"x"
                    passed.append(time.monotonic() - began)
                    began = time.monotonic()
                return passed

        first, *others = await asyncio.to_thread(times)
        assert first >= 0.099
        assert min(others) >= 0.049
        await link.set_shape(LinkShape())
        assert min(await asyncio.to_thread(times)) < 0.049

    with_link(echo, talk, shape=LinkShape.of(rtt_ms=50))


def test_a_trace_a_stall_and_a_cut_work_as_on_the_link_of_bytes(echo) -> None:
    trace = LinkTrace("t", (TracePoint(0.0, 0, 100, 100), TracePoint(0.4, 80, 100, 100)))

    async def talk(link: LinkProcess) -> None:
        with connected(link.address, SILENCE_S) as edge:

            def round_trip_s() -> float:
                began = time.monotonic()
                edge.sendall(b"x")
                assert read(edge, 1) == b"x"
                return time.monotonic() - began

            deadline = time.monotonic() + SILENCE_S
            await asyncio.to_thread(round_trip_s)
            while await asyncio.to_thread(round_trip_s) < 0.079:
                assert time.monotonic() < deadline, "the second point never came"
            await link.set_shape(LinkShape())
            await link.stall(0.3)
            assert await asyncio.to_thread(round_trip_s) >= 0.25
            await link.cut()
            with pytest.raises(ConnectionResetError):
                edge.recv(1)
        assert await asyncio.to_thread(echoed, link.address, b"again") == b"again"

    with_link(echo, talk, trace=trace)


def test_a_verifier_that_is_not_there_is_a_reset() -> None:
    async def talk(link: LinkProcess) -> None:
        with pytest.raises(ConnectionResetError), connected(link.address, SILENCE_S) as edge:
            await asyncio.to_thread(edge.recv, 1)

    with_link("127.0.0.1:1", talk)


@pytest.mark.parametrize("faults", [None, PacketFaults()], ids=["bytes", "packets"])
def test_the_first_byte_after_silence_waits_for_the_radio_and_the_next_does_not(faults, echo) -> None:
    async def talk(link: LinkProcess) -> None:
        def times() -> list[float]:
            with connected(link.address, SILENCE_S) as edge:
                passed = []
                for pause_s in (0.0, 0.0, 1.0):
                    time.sleep(pause_s)
                    began = time.monotonic()
                    edge.sendall(b"x")
                    assert read(edge, 1) == b"x"
                    passed.append(time.monotonic() - began)
                return passed

        deadline = time.monotonic() + SILENCE_S
        while True:
            asleep, awake, again = await asyncio.to_thread(times)
            assert asleep >= 0.29
            assert again >= 0.29
            if awake < 0.29:
                return
            assert time.monotonic() < deadline, "the radio never was awake"
            await asyncio.sleep(1.0)

    with_link(echo, talk, faults, radio_idle_s=0.3)


def namespaces_of(pid: int) -> set[str]:
    """Return the network namespaces that the threads of a process are in."""
    return {os.readlink(link) for link in Path(f"/proc/{pid}/task").glob("*/ns/net")}


def all_namespaces() -> set[str]:
    found = set()
    for link in Path("/proc").glob("[0-9]*/task/*/ns/net"):
        try:
            found.add(os.readlink(link))
        except OSError:
            continue
    return found


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_the_command_leaves_nothing_behind_however_it_ends(number, echo) -> None:
    words = ["--to", echo, "--tun", "--rtt", "2", "--loss", "0.5:20", "--reorder", "1", "--jitter", "1"]
    running = subprocess.Popen(
        [sys.executable, "-m", "outrider.deploy", "link", *words], stdout=subprocess.PIPE, text=True
    )
    assert running.stdout is not None
    line = running.stdout.readline()
    assert line.startswith(f"link to {echo} on 127.0.0.1:")
    made = namespaces_of(running.pid) - {os.readlink("/proc/self/ns/net")}
    assert len(made) == 2
    with connected(line.split()[-1], SILENCE_S) as edge:
        edge.sendall(b"hello")
        assert read(edge, 5) == b"hello"
        running.send_signal(number)
        output, _ = running.communicate(timeout=SILENCE_S)
    if number == signal.SIGTERM:
        assert output.startswith("1 connection(s), 5 bytes up, 5 bytes down, ")
        assert running.returncode == 0
    assert not made & all_namespaces()
    assert "outrider" not in Path("/proc/net/dev").read_text()


UNPRIVILEGED = """
import asyncio, ctypes, os, sys
from pathlib import Path
from outrider.deploy.link import namespace
from outrider.deploy.link.process import open_link
from outrider.deploy.link.shape import LinkShape, PacketFaults

async def main():
    link = open_link(sys.argv[1], LinkShape(), 0, faults=PacketFaults(), radio_idle_s=None)
    host, _, port = (await link.start()).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    writer.write(b"hello")
    print((await reader.readexactly(5)).decode(), namespace._has_capabilities())
    writer.close()
    await link.stop()

namespace.DEVICE = Path(sys.argv[2])
"".encode("idna")  # what is imported later may lie in a folder that this user cannot read
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)  # PR_SET_DUMPABLE: a new process of this user would own its /proc
assert not namespace._has_capabilities()
asyncio.run(main())
"""


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root; for other users all tests of this file are this one")
def test_a_user_without_rights_gets_them_in_a_user_namespace(echo, tmp_path_factory) -> None:
    folder = Path(tmp_path_factory.mktemp("device")).resolve()
    device = folder / "tun"
    try:
        os.mknod(device, stat.S_IFCHR | 0o666, os.makedev(10, 200))
        device.chmod(0o666)
        os.close(os.open(device, os.O_RDWR))
    except OSError as error:
        pytest.skip(f"needs to make and open a device (CAP_MKNOD): {error.strerror}")
    for above in (folder, *folder.parents[:3]):  # three with xdist
        above.chmod(above.stat().st_mode | 0o111)
    ended = subprocess.run(
        [sys.executable, "-c", UNPRIVILEGED, echo, device], capture_output=True, text=True, timeout=SILENCE_S
    )
    if "are not allowed here" in ended.stderr:
        pytest.skip(ended.stderr.splitlines()[-1])
    assert ended.stdout == "hello True\n", ended.stderr


def test_where_it_is_not_allowed_the_remedy_is_named(monkeypatch, tmp_path) -> None:
    def refused() -> str:
        with pytest.raises(Unavailable) as error:
            namespace.gain_rights()
        assert error.value.field == "tun"
        return error.value.message

    with monkeypatch.context() as patched:
        patched.setattr(namespace, "DEVICE", tmp_path / "tun")
        assert "modprobe tun" in refused()
    with monkeypatch.context() as patched:
        patched.setattr(os, "access", lambda *_: False)
        assert "chmod 666 /dev/net/tun" in refused()
    with monkeypatch.context() as patched:
        patched.setattr(namespace, "_has_capabilities", lambda: False)
        text = refused()  # this process has threads, and may not enter a user namespace
        assert "threads" in text
        assert "run it as root" in text


def test_a_namespace_that_may_not_be_made_names_the_remedy(monkeypatch) -> None:
    def refuse(_flags: int) -> None:
        raise PermissionError(1, "Operation not permitted")

    monkeypatch.setattr(namespace, "_unshare", refuse)
    with pytest.raises(Unavailable, match="Operation not permitted; run it as root"):
        namespace.Namespace("10.9.0.1")


@pytest.mark.parametrize(
    ("options", "kind", "field"),
    [
        ({"to": "nowhere"}, ConfigError, "to"),
        ({"to": "no-such-host.invalid:1"}, ConfigError, "to"),
        ({"to": "127.0.0.1:1", "listen": "0.0.0.0:0"}, ConfigError, "listen"),
    ],
)
def test_a_link_that_cannot_start_says_why(options, kind, field) -> None:
    async def start() -> None:
        async with LinkProcess(**options, faults=PacketFaults()):
            pass

    with pytest.raises(OutriderError) as refused:
        asyncio.run(start())
    assert type(refused.value) is kind
    assert refused.value.field == field


@pytest.mark.parametrize(
    ("words", "status", "says"),
    [
        (["--loss", "2"], 1, "loss: happens to packets; give --tun, too"),
        (["--reorder", "2"], 1, "reorder: happens to packets; give --tun, too"),
        (["--tun", "--loss", "much"], 2, "'much' is neither PERCENT nor PERCENT:MS"),
        (["--tun", "--reorder", "101"], 2, "--reorder"),
        (["--radio-idle", "-1"], 2, "--radio-idle"),
    ],
)
def test_a_mistake_on_the_command_line_is_one_clear_line(words, status, says, capfd) -> None:
    try:
        ended = main(["link", "--to", "127.0.0.1:1", *words])
    except SystemExit as end:
        ended = end.code
    assert ended == status
    error = capfd.readouterr().err
    assert says in error
    assert len(error.splitlines()) == 1
