"""Real coordinator processes, stand-ins of verifiers that report to them, and processes of edges."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.coordinator.cluster import VerifierInfo, VerifierState
from outrider.drafters.packages import FAMILY
from outrider.proto.channel import OWN_CONNECTION, REPORT_METHOD
from outrider.proto.errors import Unavailable
from outrider.proto.lease import text_name
from outrider.proto.plumbing.access import Key, new_secret, secret_sha256
from outrider.proto.tokenizer import TOKENIZER_FILE, shipped_tokenizer
from research.crowd.crowd_edges import MODEL

VERIFIERS, SLOTS = 16, 1024
MAX_ADMITTED = 256  # that a verifier reports
KEYS = 64
UPDATED = "swift"  # drafter whose new version edges are told of
PROBE_EVERY_S = 0.05
START_WITHIN_S = 60.0


class Verifiers:
    """Servers that report as verifiers do, by the texts that edges say they have there."""

    def __init__(self) -> None:
        self.texts: dict[str, dict[tuple[str, str], float]] = {f"v{i}": {} for i in range(VERIFIERS)}
        self.addresses: dict[str, str] = {}
        self._servers: list[grpc.aio.Server] = []

    async def start(self) -> None:
        """Listen on loopback."""
        service, method = REPORT_METHOD.strip("/").split("/")
        for name in self.texts:
            server = grpc.aio.server()
            handler = grpc.unary_unary_rpc_method_handler(self._reporter(name))
            server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, {method: handler}),))
            self.addresses[name] = f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}"
            await server.start()
            self._servers.append(server)

    async def stop(self) -> None:
        """Listen no more."""
        await asyncio.gather(*(server.stop(0) for server in self._servers))

    def _reporter(self, name: str) -> Callable[[bytes, Any], Any]:
        async def report(_: bytes, __: Any) -> bytes:
            texts, now = self.texts[name], time.monotonic()
            of_keys: dict[str, dict[str, float]] = {}
            for (key, session), since in texts.items():
                of_keys.setdefault(key, {})[session] = now - since
            newest = list(texts)[-MAX_ADMITTED:]
            info = VerifierInfo(
                name,
                self.addresses[name],
                MODEL,
                VerifierState.READY,
                tokenizer_sha256="",
                sessions=len(texts),
                max_sessions=SLOTS,
                step_s=0.03,
                incarnation=f"{name}-1",
                admitted={text_name(key, session): 0 for key, session in newest},
                texts_of_keys=of_keys,
            )
            return json.dumps(asdict(info)).encode()

        return report


class CoordinatorProcess:
    """One `outrider coordinator`, its memory and its CPU time; at the same address however often it is started."""

    def __init__(self, folder: Path, name: str, verifiers: Verifiers) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        fixed = [word for each in verifiers.addresses.items() for word in ("--verifier", "=".join(each))]
        options = ["--listen", self.address, "--model", MODEL, "--tokenizer", str(_tokenizer(folder))]
        options += ["--lease-secret-file", str(folder / "secret"), "--api-keys", str(folder / "keys.toml")]
        options += ["--drafters", str(folder / "drafters"), "--state", str(folder / f"{name}.json")]
        options += ["--connections-per-address", "0"]  # all edges are at one address
        self._words = [sys.executable, "-m", "outrider.deploy", "--log-level", "warning", "coordinator"]
        self._words += [*fixed, *options]
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._usage: psutil.Process | None = None
        self._spent_s = 0.0  # CPU time of earlier starts

    def start(self) -> None:
        """Start it and return at once."""
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(self._words, stdout=log, stderr=log)  # noqa: S603 - our own
        self._usage = psutil.Process(self._process.pid)

    async def until_serving(self) -> None:
        """Wait until it answers; raises `Unavailable` where it ends or takes too long."""
        until = time.monotonic() + START_WITHIN_S
        while await probe(self.address) is None:
            if time.monotonic() > until or (self._process is not None and self._process.poll() is not None):
                raise Unavailable(f"the coordinator does not start: {self._log.read_text()[-500:]}")
            await asyncio.sleep(0.05)

    def kill(self) -> None:
        """End it without a word."""
        if self._process is not None:
            self._spent_s, self._usage = self.cpu_s, None
            self._process.kill()
            self._process.wait()

    @property
    def rss_bytes(self) -> int:
        """Memory that it has."""
        return self._usage.memory_info().rss if self._usage is not None else 0

    @property
    def cpu_s(self) -> float:
        """CPU time of all its starts."""
        times = self._usage.cpu_times() if self._usage is not None else None
        return self._spent_s + (times.user + times.system if times is not None else 0.0)


async def probe(address: str) -> float | None:
    """Return the seconds that a health check takes, which passes through the event loop; None: no answer in 10 s."""
    began = time.monotonic()
    async with grpc.aio.insecure_channel(address, options=[OWN_CONNECTION]) as channel:
        with suppress(grpc.aio.AioRpcError):
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            return time.monotonic() - began
    return None


@dataclass
class Period:
    """What all edges saw in some time.

    Attributes:
        probes: seconds that health checks took.
        offers: times at which watches got offers, with these.
    """

    seconds: float = 0.0
    asked: int = 0
    late: int = 0
    leases: list[float] = field(default_factory=list)
    failed: Counter[str] = field(default_factory=Counter)
    refused: Counter[str] = field(default_factory=Counter)
    offers: list[tuple[float, str]] = field(default_factory=list)
    probes: list[float] = field(default_factory=list)
    edges_lags: list[float] = field(default_factory=list)
    cpu_s: float = 0.0
    edges_cpu_s: float = 0.0
    rss_bytes: int = 0


class EdgeProcesses:
    """Processes of edges, and what they report."""

    def __init__(self, verifiers: Verifiers) -> None:
        self._verifiers = verifiers
        self._processes: list[asyncio.subprocess.Process] = []
        self._reading: list[asyncio.Task[None]] = []
        self.newest: dict[int, dict[str, Any]] = {}
        self.period = Period()

    async def start(self, number: int, addresses: Sequence[str], keys: Sequence[tuple[str, str]], of: int) -> None:
        """Start processes whose edges share a connection between `of` each."""
        for index in range(number):
            mine = [*addresses[index % len(addresses) :], *addresses[: index % len(addresses)]]
            settings = {"addresses": mine, "keys": keys[index::number], "edges_of_connection": of}
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "research.crowd.crowd_edges", json.dumps(settings)),
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                env={**os.environ, "no_proxy": "*"},
                limit=1 << 26,
            )
            self._processes.append(process)
            self._reading.append(asyncio.create_task(self._read(index, process)))

    async def stop(self) -> None:
        """End them, and their texts."""
        for process in self._processes:
            with suppress(ProcessLookupError):
                process.kill()
            await process.wait()
        await asyncio.gather(*self._reading)
        for texts in self._verifiers.texts.values():
            texts.clear()

    def order(self, **orders: float) -> None:
        """Tell each process its share."""
        for process in self._processes:
            share = {
                name: value if name == "all_within" else value / len(self._processes) for name, value in orders.items()
            }
            if process.stdin is not None:
                process.stdin.write(json.dumps(share).encode() + b"\n")

    def count(self, name: str) -> float:
        """Return the sum of a count of the newest reports."""
        return sum(report[name] for report in self.newest.values())

    async def _read(self, index: int, process: asyncio.subprocess.Process) -> None:
        while process.stdout is not None and (line := await process.stdout.readline()):
            report = json.loads(line)
            self.newest[index] = report
            for verifier, key, session in report["begun"]:
                self._verifiers.texts[verifier][key, session] = time.monotonic()
            for verifier, key, session in report["ended"]:
                self._verifiers.texts[verifier].pop((key, session), None)
            period = self.period
            period.asked += report["asked"]
            period.late += report["late"]
            period.leases += report["leases"]
            period.edges_lags += report["lags"]
            period.offers += [tuple(offer) for offer in report["offers"]]
            period.failed.update(report["failed"])
            period.refused.update(report["refused"])


async def observed(edges: EdgeProcesses, coordinators: Sequence[CoordinatorProcess], over: asyncio.Event) -> Period:
    """Return what happens until `over`."""
    edges.period = period = Period()
    began, cpu_s, edges_cpu_s = time.monotonic(), sum(each.cpu_s for each in coordinators), edges.count("cpu_s")
    while not over.is_set():
        if (took_s := await probe(coordinators[0].address)) is not None:
            period.probes.append(took_s)
        await asyncio.sleep(PROBE_EVERY_S)
    period.seconds = time.monotonic() - began
    period.cpu_s = sum(each.cpu_s for each in coordinators) - cpu_s
    period.edges_cpu_s = edges.count("cpu_s") - edges_cpu_s
    period.rss_bytes = sum(each.rss_bytes for each in coordinators)
    edges.period = Period()
    return period


def prepare(folder: Path) -> list[tuple[str, str]]:
    """Write what coordinators read, and return the API keys: names and secrets."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "drafters").mkdir(parents=True)
    keys = [(f"key-{number}", new_secret()) for number in range(KEYS)]
    (folder / "keys.toml").write_text("".join(Key(n, secret_sha256(s), max_sessions=SLOTS).toml() for n, s in keys))
    (folder / "secret").write_text("0123456789abcdef" * 2)
    for name in ("keys.toml", "secret"):
        (folder / name).chmod(0o600)
    return keys


def _tokenizer(folder: Path) -> Path:
    manifest = json.loads((FAMILY / UPDATED / "manifest.json").read_text())
    found = shipped_tokenizer(manifest["tokenizer_sha256"])
    return found if found is not None else folder / TOKENIZER_FILE


def publish(folder: Path) -> str:
    """Put a new version of a drafter into the coordinators' folder, and return its identity."""
    version = f"{time.time():.0f}"
    made = folder / "drafters" / f".{version}"
    shutil.copytree(FAMILY / UPDATED, made)
    manifest = made / "manifest.json"
    text = re.sub(r'("version": )"\w+"', rf'\1"{version}"', manifest.read_text(), count=1)
    manifest.write_text(text)
    made.rename(made.with_name(version))
    return f"{UPDATED}@{version}"
