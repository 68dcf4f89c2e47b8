"""A coordinator at the size of a fleet: `python -m research crowd`.

Coordinators and edges are processes of their own; stand-ins of verifiers report from this one.
"""

from __future__ import annotations

import asyncio
import json
import math
import multiprocessing
import resource
import shutil
import socket
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import grpc
import psutil
from grpc_health.v1 import health_pb2, health_pb2_grpc
from rich.console import Console

from outrider.bench.environment import machine
from outrider.deploy.arguments import Given
from outrider.drafters.packages import FAMILY
from outrider.proto.channel import OWN_CONNECTION, REPORT_METHOD
from outrider.proto.errors import Unavailable
from outrider.proto.lease import text_name
from outrider.proto.plumbing.access import Key, new_secret, secret_sha256
from outrider.proto.plumbing.connections import lease_in
from outrider.proto.tokenizer import shipped_tokenizer
from research.crowd import crowd_edges
from research.crowd.crowd_edges import MODEL
from research.research_settings import CrowdSettings

VERIFIERS, SLOTS, KEYS = 16, 1024, 64
MAX_ADMITTED = 256  # that a verifier reports
PROCESSES = 2  # of edges
UPDATED = "swift"  # drafter of which edges are told a new version
SLOW_MS = 1000.0  # a lease that takes longer is no service
PERIOD_S, CALM_S, WITHIN_S, TEXT_S = 10.0, 5.0, 150.0, 10.0
GENTLE, USUAL = 0.005, 0.01  # texts a second, of each edge
START_WITHIN_S = 60.0
NOTHING = {"address": "", "model": "", "tokenizer_sha256": ""}  # that a coordinator asks a fixed verifier for
Row = dict[str, Any]  # one period: counts of its texts, and what its processes used; docs/load.md names the columns
Texts = dict[str, dict[tuple[str, str], float]]  # beginnings, by verifier and by key and session


async def start_verifiers(texts: Texts, secret: bytes) -> tuple[grpc.aio.Server, dict[str, str]]:
    """Start a server on loopback that reports for all verifiers, by the texts of each; return both."""

    async def report(_: bytes, context: Any) -> bytes:
        name = lease_in(context.invocation_metadata(), secret, time.time()).verifier
        of_keys = defaultdict[str, dict[str, float]](dict)
        for (key, session), since in texts[name].items():
            of_keys[key][session] = time.monotonic() - since
        admitted = {text_name(*text): 0 for text in list(texts[name])[-MAX_ADMITTED:]}
        load = {"sessions": len(texts[name]), "max_sessions": SLOTS, "admitted": admitted, "texts_of_keys": of_keys}
        return json.dumps({"name": name, "state": "ready", "incarnation": name, **NOTHING, **load}).encode()

    server = grpc.aio.server()
    service, method = REPORT_METHOD.strip("/").split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(report)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))
    addresses = {name: f"127.0.0.1:{server.add_insecure_port('127.0.0.1:0')}" for name in texts}
    await server.start()
    return server, addresses


class CoordinatorProcess:
    """One `outrider coordinator`, at the same address however often it is started."""

    def __init__(self, folder: Path, name: str, verifiers: Mapping[str, str]) -> None:
        with socket.create_server(("127.0.0.1", 0)) as free:
            self.address = f"127.0.0.1:{free.getsockname()[1]}"
        tokenizer = shipped_tokenizer(json.loads((FAMILY / UPDATED / "manifest.json").read_text())["tokenizer_sha256"])
        options: dict[str, object] = {
            "listen": self.address,
            "model": MODEL,
            "tokenizer": tokenizer,
            "state": folder / f"{name}.json",
        }
        options |= {"lease-secret-file": folder / "secret", "api-keys": folder / "keys.toml"}
        options |= {"drafters": folder / "drafters"}
        options |= {"connections-per-address": 0}  # all edges are at one address
        fixed = [f"--verifier={each}={address}" for each, address in verifiers.items()]
        words = ["-m", "outrider.deploy", "--log-level=warning", "coordinator", *fixed]
        self._words = [sys.executable, *words, *(f"--{name}={value}" for name, value in options.items())]
        self._log = folder / f"{name}.log"
        self._process: psutil.Popen | None = None
        self._spent_s = 0.0  # CPU time of earlier starts

    def start(self) -> None:
        """Start it and return at once."""
        with self._log.open("ab") as log:
            self._process = psutil.Popen(self._words, stdout=log, stderr=subprocess.STDOUT)

    async def until_serving(self) -> None:
        """Wait until it answers; raises `Unavailable` where it takes too long."""
        until = time.monotonic() + START_WITHIN_S
        while await probe(self.address) is None:
            if time.monotonic() > until:
                raise Unavailable(f"the coordinator does not start: {self._log.read_text()[-500:]}")
            await asyncio.sleep(0.05)

    def kill(self) -> None:
        """End it without a word."""
        if self._process is not None:
            self._spent_s, _ = self.used()
            self._process.kill()
            self._process.wait()
            self._process = None

    def used(self) -> tuple[float, int]:
        """Return the CPU time of all its starts, in seconds, and its memory, in bytes."""
        if self._process is None:
            return self._spent_s, 0
        return self._spent_s + float(sum(self._process.cpu_times()[:2])), self._process.memory_info().rss


async def probe(address: str) -> float | None:
    """Return the seconds that a health check takes, which passes through the event loop; None: no answer in 10 s."""
    began = time.monotonic()
    async with grpc.aio.insecure_channel(address, options=[OWN_CONNECTION]) as channel:
        with suppress(grpc.aio.AioRpcError):
            await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=10)
            return time.monotonic() - began
    return None


class EdgeProcesses:
    """Processes of edges; what they report becomes events by their kind, since the newest call of `begin`."""

    def __init__(self, texts: Texts, addresses: Sequence[str], keys: Sequence[tuple[str, str]]) -> None:
        self._texts = texts
        self.newest: dict[int, dict[str, Any]] = {}
        self.events: dict[str, list[Any]] = {}
        self.begin()
        spawning = multiprocessing.get_context("spawn")  # gRPC is up
        self._pipes, self._processes = [], []
        for number in range(PROCESSES):
            mine, theirs = spawning.Pipe()
            arguments = (theirs, addresses, keys[number::PROCESSES])
            process = spawning.Process(target=crowd_edges.main, args=arguments, daemon=True)
            process.start()
            self._pipes.append(mine)
            self._processes.append(process)
        self._reading = asyncio.create_task(self._read())

    def begin(self) -> dict[str, list[Any]]:
        """Begin a period, and return its events, which are still to come."""
        self.events = defaultdict(list)
        return self.events

    def order(self, what: str, number: float, *more: float) -> None:
        """Tell each process its share of a number, which is the first and the last of those that are given."""
        *middle, last = more or (0.0,)
        for pipe in self._pipes:
            pipe.send((what, number / PROCESSES, *middle, last / PROCESSES) if more else (what, number / PROCESSES))

    def count(self, name: str) -> float:
        """Return the sum of a count of the newest reports."""
        return math.fsum(report[name] for report in self.newest.values())

    async def stop(self) -> None:
        """End the processes, and their texts."""
        self._reading.cancel()
        for process in self._processes:
            process.kill()
            process.join()
        for texts in self._texts.values():
            texts.clear()

    async def _read(self) -> None:
        while True:
            for number, pipe in enumerate(self._pipes):
                while pipe.poll():
                    self.newest[number] = report = pipe.recv()
                    for kind, *what in report["events"]:
                        self.events[kind].append(what)
                        if kind in ("begun", "ended"):
                            self._texts[what[0]].pop((what[1], what[2]), None)
                        if kind == "begun":
                            self._texts[what[0]][what[1], what[2]] = time.monotonic()
            await asyncio.sleep(0.02)


def prepare(folder: Path) -> list[tuple[str, str]]:
    """Write what coordinators read, and return the API keys: names and secrets."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "drafters").mkdir(parents=True)
    keys = [(f"key-{number}", new_secret()) for number in range(KEYS)]
    (folder / "keys.toml").write_text("".join(Key(n, secret_sha256(s), max_sessions=SLOTS).toml() for n, s in keys))
    (folder / "secret").write_text(new_secret())
    for name in ("keys.toml", "secret"):
        (folder / name).chmod(0o600)
    return keys


def publish(folder: Path) -> str:
    """Put a new version of a drafter into the coordinators' folder, and return its identity."""
    version, made = f"{time.time():.0f}", folder / "drafters" / ".new"
    shutil.copytree(FAMILY / UPDATED, made)
    manifest = json.loads((made / "manifest.json").read_text()) | {"version": version}
    (made / "manifest.json").write_text(json.dumps(manifest))
    made.rename(made.with_name(version))
    return f"{UPDATED}@{version}"


def breaks(row: Row) -> str:
    """Return why what a row shows is no service; empty: it is one."""
    if (row["lease_p99_ms"] or 0.0) > SLOW_MS:
        return f"the p99 of a lease is {row['lease_p99_ms'] / 1000:.1f} s"
    if row["failed"] or row["late"]:
        return f"{row['failed']} texts fail and {row['late']} come late"
    return "" if row["leases"] >= 0.8 * row["due"] else f"only {row['leases']:,} of {row['due']:,} texts have a lease"


def quantile_ms(seconds: Sequence[Sequence[float]], share: float) -> float | None:
    """Return the smallest of the times, in ms, that so large a share does not exceed; None: there are none."""
    times = sorted(time_s for (time_s,) in seconds)
    return round(1000 * times[max(0, math.ceil(share * len(times)) - 1)], 2) if times else None


def bytes_an_edge(rows: Sequence[Row]) -> int:
    """Return the coordinator's memory for each further edge, by the first and the last of some rows at rest."""
    first, last = rows[0], rows[-1]
    return int((last["rss_mib"] - first["rss_mib"]) * (1 << 20) / max(1, last["edges"] - first["edges"]))


class Trials:
    """The trials of a fleet and their rows: what broke first, and whether all edges had a watch and the news."""

    def __init__(self, options: CrowdSettings, say: Callable[[object], None]) -> None:
        self.rows: list[Row] = []
        self.bytes_an_edge, self.first, self.served = 0, "", True
        self._options, self._say, self._folder = options, say, options.folder.resolve()
        self._keys = prepare(self._folder)
        self._coordinators: list[CoordinatorProcess] = []

    async def run(self) -> None:
        """Run the trials that were asked for."""
        texts: Texts = {f"v{i}": {} for i in range(VERIFIERS)}
        server, verifiers = await start_verifiers(texts, (self._folder / "secret").read_bytes())
        for name in self._options.trials:
            number = 2 if name == "two" else 1
            self._coordinators = [CoordinatorProcess(self._folder, f"c{i}", verifiers) for i in range(number)]
            started = [*self._coordinators]
            addresses = [each.address for each in started]
            lists = [f"ipv4:{','.join(addresses[i:] + addresses[:i])}" for i in range(number)]
            self._edges = EdgeProcesses(texts, lists if number > 1 else addresses, self._keys)
            try:
                for each in started:
                    each.start()
                    await each.until_serving()
                await getattr(self, f"_{name}")()
            finally:
                await self._edges.stop()
                for each in started:
                    each.kill()
        await server.stop(0)

    async def _one(self) -> None:
        """Have edges at rest, a new version of a drafter, and texts at rising rates until the coordinator breaks."""
        at_rest = [await self._at_rest(round(self._options.edges * share)) for share in (0, 0.1, 0.5, 1)]
        self.bytes_an_edge = bytes_an_edge(at_rest)
        await self._new_version()
        for rate in self._options.rates:
            self._edges.order("texts", rate, TEXT_S, math.inf)
            await asyncio.sleep(CALM_S)
            row = await self._observed(f"{rate:g} texts/s", asyncio.sleep(PERIOD_S), rate)
            if why := breaks(row):
                self.first = f"{why} at {rate:g} texts/s"
                break

    async def _new_version(self) -> None:
        async def told() -> float:
            identity = await asyncio.to_thread(publish, self._folder)
            await asyncio.sleep(2 * PERIOD_S)
            came = [at for at, offers in self._edges.events["offers"] if identity in offers]
            self.served &= len(came) >= self._options.edges
            return max(came, default=0.0) - min(came, default=0.0)

        rate = GENTLE * self._options.edges
        self._edges.order("texts", rate, TEXT_S, math.inf)
        await asyncio.sleep(CALM_S)
        await self._observed("a new version", told(), rate)

    async def _two(self) -> None:
        """Kill one of two coordinators under texts."""
        await self._at_rest(self._options.edges)
        rate = USUAL * self._options.edges
        self._edges.order("texts", rate, TEXT_S, math.inf)
        await asyncio.sleep(CALM_S)
        await self._observed("two coordinators", asyncio.sleep(PERIOD_S), rate)
        killed = self._coordinators.pop(0)

        async def kill() -> None:
            killed.kill()

        back = self._back(kill, self._options.edges * 2 // 5, 0)  # some may have left it before
        await self._observed("one of two is killed", back, rate)

    async def _restart(self) -> None:
        """Kill the coordinator and start it again; every edge of a smaller fleet wants a lease within a second."""
        number = self._options.back
        await self._at_rest(number)

        async def again() -> None:
            self._coordinators[0].kill()
            self._coordinators[0].start()
            await self._coordinators[0].until_serving()
            self._edges.order("texts", number, WITHIN_S, number)

        await self._observed(f"{number:,} come back", self._back(again, number, number), 0.0)

    async def _at_rest(self, number: int) -> Row:
        self._edges.order("edges", number)
        await self._until(lambda: self._edges.count("edges") >= number <= self._edges.count("watching"))
        await asyncio.sleep(CALM_S)
        return await self._observed("at rest", asyncio.sleep(PERIOD_S), 0.0)

    async def _back(self, happen: Callable[[], Awaitable[None]], watches: int, leases: int) -> float:
        """Return how long it takes, once something has happened, until so many watches and leases were had since."""
        events = self._edges.events
        await happen()
        began = time.monotonic()
        await self._until(
            lambda: (
                len(events["offers"]) >= watches
                and len(events["lease"]) >= leases
                and self._edges.count("watching") >= self._edges.count("edges")
            )
        )
        return time.monotonic() - began

    async def _until(self, holds: Callable[[], bool]) -> None:
        """Wait until a condition holds, or note that it does not."""
        until = time.monotonic() + WITHIN_S
        while not (self._edges.newest and holds()) and time.monotonic() < until:  # noqa: ASYNC110 - no event
            await asyncio.sleep(0.05)
        self.served &= holds()

    async def _observed(self, what: str, happening: Awaitable[float | None], rate: float) -> Row:
        """Return the row of the time in which something happens."""
        events, probes, began = self._edges.begin(), list[tuple[float]](), time.monotonic()
        before = self._used()
        over = asyncio.ensure_future(happening)
        while not over.done():
            if (took_s := await probe(self._coordinators[0].address)) is not None:
                probes.append((took_s,))
            await asyncio.wait([over], timeout=0.05)
        seconds = time.monotonic() - began
        cpu_s, edges_s, rss_bytes = self._used()
        back_s = over.result()
        row: Row = {"what": what, "due": round(rate * seconds), "leases": len(events["lease"])}
        row |= {name: int(self._edges.count(name)) for name in ("edges", "watching")}
        row |= {kind: len(events[kind]) for kind in ("late", "failed", "refused")}
        for name, times in (("lease", events["lease"]), ("lag", probes), ("edges_lag", events["lag"])):
            row |= {f"{name}_p50_ms": quantile_ms(times, 0.5), f"{name}_p99_ms": quantile_ms(times, 0.99)}
        row |= {"cpu": round((cpu_s - before[0]) / seconds, 3), "edges_cpu": round((edges_s - before[1]) / seconds, 3)}
        row |= {"rss_mib": round(rss_bytes / (1 << 20), 1), "back_s": None if back_s is None else round(back_s, 2)}
        row["why"] = sorted({why for (why,) in events["failed"]})[:3]
        self.rows.append(row)
        self._say(json.dumps(row))
        return row

    def _used(self) -> tuple[float, float, int]:
        used = [each.used() for each in self._coordinators]
        return sum(cpu_s for cpu_s, _ in used), self._edges.count("cpu_s"), sum(rss for _, rss in used)


def crowd(given: Given) -> int:
    """Run the command; return 0 where every edge was served until the rate at which the coordinator breaks."""
    options = given(CrowdSettings)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    trials = Trials(options, Console(width=120, highlight=False).print)
    asyncio.run(trials.run())
    if options.json is not None:
        found = {"bytes_an_edge": trials.bytes_an_edge, "first": trials.first, "rows": trials.rows}
        record = {"environment": machine(), **found}
        options.json.write_text(json.dumps(record, indent=1) + "\n")
    return 0 if trials.served else 1
