"""A coordinator, verifiers behind links, and edge daemons: processes that are killed, stopped and started again."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import psutil
from command_forks import CommandForks
from command_processes import free_port
from http_streams import metric_value, until_healthy

from outrider.edge.link.control_client import CoordinatorClient
from outrider.proto.errors import OutriderError

START_WITHIN_S = 120.0
QUIET_WITHIN_S = 120.0
END_WITHIN_S = 60.0
VERIFIERS = DAEMONS = ("a", "b")


@dataclass
class Member:
    """One process of the fleet, started again whenever it ends.

    Attributes:
        kind: coordinator, verifier, link or daemon.
        pid: process of the newest start; 0: there is none.
        starts: times that it was started.
        killed: processes that were killed on purpose.
        unexpected: exit statuses of processes that ended by themselves.
    """

    forks: CommandForks
    kind: str
    name: str
    argv: list[str]
    port: int
    metrics_port: int = 0
    pid: int = 0
    starts: int = 0
    killed: set[int] = field(default_factory=set)
    unexpected: list[int] = field(default_factory=list)
    ending: bool = False

    async def keep(self) -> None:
        """Start it, again and again, until `ending`."""
        while not self.ending:
            self.pid, end = await self.forks.start(self.name, self.argv)
            self.starts += 1
            status = await end
            pid, self.pid = self.pid, 0
            if pid not in self.killed and not (self.ending and status == 0):
                self.unexpected.append(status)

    def signal(self, number: int) -> bool:
        """Send a signal to its process; return whether there was one."""
        if not self.pid:
            return False
        if number == signal.SIGKILL:
            self.killed.add(self.pid)
        try:
            os.kill(self.pid, number)
        except ProcessLookupError:  # it has ended just now
            return False
        return True

    async def until_serving(self) -> None:
        """Wait for the line by which it says that it serves."""
        async with asyncio.timeout(START_WITHIN_S):
            while not self.serves:  # noqa: ASYNC110 - another process is waited for
                await asyncio.sleep(0.05)

    @property
    def serves(self) -> bool:
        """Whether its newest process has said so."""
        with suppress(FileNotFoundError):
            return bool(self.pid) and b"\n" in self.forks.output(self.name).read_bytes()
        return False

    def holds(self) -> tuple[float, int]:
        """Return its resident memory in MiB and its descriptors."""
        process = psutil.Process(self.pid)
        return process.memory_info().rss / (1 << 20), process.num_fds()


@dataclass
class KilledFleet:
    """Every process, by name, and how to reach the daemons and the coordinator."""

    members: dict[str, Member]
    coordinator_address: str
    forks: CommandForks

    def of(self, kind: str) -> list[Member]:
        """Return all members of one kind."""
        return [member for member in self.members.values() if member.kind == kind]

    def down(self) -> int:
        """Return the number of processes that do not say that they serve."""
        return sum(not member.serves for member in self.members.values())

    async def until_ready(self) -> None:
        """Until all serve, the coordinator places on every verifier, and every daemon finds them."""
        for member in self.members.values():
            await member.until_serving()
        control = CoordinatorClient(self.coordinator_address)
        try:
            await _until(lambda: _all_ready(control), START_WITHIN_S, "the coordinator finds not all verifiers")
        finally:
            await control.close()
        for daemon in self.of("daemon"):
            await until_healthy(daemon.port)

    async def until_quiet(self) -> None:
        """Until no verifier and no daemon holds a slot, a sequence or a KV page for anybody."""
        running, used = "outrider:num_requests_running", "outrider:kv_cache_usage_perc"
        gauges = [
            (verifier, verifier.metrics_port, name) for verifier in self.of("verifier") for name in (running, used)
        ]
        for member, port, name in (*gauges, *((daemon, daemon.port, running) for daemon in self.of("daemon"))):
            await _until(partial(_is_zero, port, name), QUIET_WITHIN_S, f"{member.name} keeps {name}")

    async def end(self) -> dict[str, int]:
        """Tell all to go, edges first; return the processes that are left, which should be none, by name."""
        for kind in ("daemon", "coordinator", "link", "verifier"):
            for member in self.of(kind):
                member.ending = True
                member.signal(signal.SIGCONT)
                member.signal(signal.SIGTERM)
            with suppress(TimeoutError):
                gone = (_until(partial(_is_gone, member), END_WITHIN_S, "") for member in self.of(kind))
                await asyncio.gather(*gone)
        return {child.name(): child.pid for child in psutil.Process(self.forks.pid).children(recursive=True)}


@asynccontextmanager
async def killed_fleet(folder: Path) -> AsyncIterator[KilledFleet]:
    """Start a fleet that serves the target in `folder`; whatever is left of it at the end is killed."""
    async with AsyncExitStack() as stack:
        forks = await stack.enter_async_context(CommandForks(folder))
        fleet = KilledFleet(*_members(folder, forks), forks)
        keeping = [asyncio.create_task(member.keep()) for member in fleet.members.values()]
        try:
            await fleet.until_ready()
            yield fleet
        finally:
            for member, task in zip(fleet.members.values(), keeping, strict=True):
                member.ending = True
                task.cancel()
                member.signal(signal.SIGKILL)
            await asyncio.gather(*keeping, return_exceptions=True)


def _members(folder: Path, forks: CommandForks) -> tuple[dict[str, Member], str]:
    secret = folder / "secret"
    secret.write_text("a secret of the killed fleet")
    members: dict[str, Member] = {}

    def add(kind: str, name: str, port: int, *argv: str, metrics: int = 0) -> None:
        members[name] = Member(forks, kind, name, ["--log-level", "info", "--log-format", "json", *argv], port, metrics)

    links = {}
    for name in VERIFIERS:
        port, metrics, links[name] = free_port(), free_port(), free_port()
        target = ("--target", str(folder), "--dtype", "float32", "--target-threads", "1", "--kv-tokens", "32768")
        listening = ("--listen", f"127.0.0.1:{port}", "--metrics-listen", f"127.0.0.1:{metrics}")
        common = ("--name", name, "--max-sessions", "64", "--lease-secret-file", str(secret), "--drain-grace", "1")
        add("verifier", f"verifier-{name}", port, "verifier", *common, *target, *listening, metrics=metrics)
        ends = ("--to", f"127.0.0.1:{port}", "--listen", f"127.0.0.1:{links[name]}", "--rtt", "4")
        add("link", f"link-{name}", links[name], "link", *ends)
    port = free_port()
    address = f"127.0.0.1:{port}"
    fixed = [text for name in VERIFIERS for text in ("--verifier", f"{name}=127.0.0.1:{links[name]}")]
    served = ("--model", str(folder), "--tokenizer", str(folder / "tokenizer.json"))
    kept = ("--state", str(folder / "state.json"), "--lease-secret-file", str(secret))
    add("coordinator", "coordinator", port, "coordinator", *fixed, *served, *kept, "--listen", address)
    for name in DAEMONS:
        port = free_port()
        here = ("--listen", f"127.0.0.1:{port}", "--cache", str(folder / f"cache-{name}"))
        add("daemon", f"daemon-{name}", port, "edge", "--coordinator", address, "--drafter", "ngram", *here)
    return members, address


async def _until(holds: Callable[[], Awaitable[bool]], within_s: float, what: str) -> None:
    async with asyncio.timeout(within_s):
        try:
            while not await holds():  # noqa: ASYNC110 - other processes are waited for
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            if what:
                print(f"waited for in vain: {what}", flush=True)
            raise


async def _all_ready(control: CoordinatorClient) -> bool:
    try:
        return all(verifier.state == "ready" for verifier in (await control.status()).verifiers)
    except OutriderError:
        return False


async def _is_zero(port: int, name: str) -> bool:
    try:
        return await metric_value(port, name) == 0
    except (OSError, asyncio.IncompleteReadError):
        return False


async def _is_gone(member: Member) -> bool:
    return member.pid == 0
