"""A process of many edges: shipped clients, looks and watches of coordinators, and texts that decode nothing.

It reads its orders from standard input and reports to standard output, both in lines of JSON.
"""

from __future__ import annotations

import asyncio
import json
import logging
import resource
import sys
import time
import uuid
from collections import Counter, deque
from collections.abc import Sequence
from concurrent.futures import Future
from types import SimpleNamespace
from typing import Any, cast

from outrider.edge.daemon.cloud import Cloud
from outrider.edge.link import control_client
from outrider.edge.link.control_client import CoordinatorClient
from outrider.edge.link.routes import CoordinatorRoute
from outrider.edge.link.security import Security
from outrider.edge.preparation import Preparation
from outrider.proto.channel import OWN_CONNECTION
from outrider.proto.errors import OutriderError, ResourceExhausted, Unavailable
from outrider.proto.session.stream import RetryRules
from outrider.proto.types import DrafterHits, DrafterManifest, Lease, LeaseRequest, SessionReport

MODEL = "reference"
DRAFTERS = ("general", "swift")
TEXT_S = 10.0
LOOK_EVERY_S = 0.01
REPORT_EVERY_S = 0.25
STARTS_PER_S = 150.0  # of a process, so that a crowd that grows is no storm
PROMPT = tuple(range(100, 164))
RETRY = RetryRules()


class Seen:
    """What the edges of this process have seen since the newest report."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin with nothing."""
        self.leases: list[float] = []  # seconds from a text's first question to its lease
        self.failed = Counter[str]()  # texts that were given up, by error
        self.refused = Counter[str]()  # calls for a lease that were not answered by one
        self.begun: list[tuple[str, str, str]] = []  # verifier, key, session
        self.ended: list[tuple[str, str, str]] = []
        self.offers: list[tuple[float, str]] = []  # times at which watches got offers, and the newest version
        self.asked = 0  # texts that were due
        self.lags: list[float] = []  # seconds by which this process's own event loop came late


class CrowdEdge:
    """One edge: looks at the cloud every few seconds, watches for drafters, and has one text at a time."""

    def __init__(self, client: CoordinatorClient, key: str, name: str, seen: Seen) -> None:
        self.watching = False
        self._client = client
        self._key = key
        self._name = name
        self._seen = seen
        self._route = CoordinatorRoute(client, MODEL, "")
        self.ready = SimpleNamespace(tokenizer_sha256="", shelf=SimpleNamespace(begun=Future()))
        self.ready.shelf.begun.set_result(None)
        self._cloud = Cloud(cast("Any", self))
        self._cloud.served = cast("Any", self.ready)  # it has its tokenizer and drafters from an earlier start
        self.tasks = [asyncio.create_task(self._cloud.watch()), asyncio.create_task(self._watch())]

    async def inquire(self, avoid: Sequence[str] = ()) -> Lease:
        """Ask as `Client.inquire` does."""
        return await self._route.lease(LeaseRequest(MODEL, uuid.uuid4().hex, avoid=tuple(avoid), inquiry=True))

    async def _watch(self) -> None:
        """Watch by the shipped loop."""
        await Preparation._watch(cast("Any", self), cast("Any", self), cast("Any", self.ready))

    async def watch_drafters(self, tokenizer_sha256: str) -> Any:
        """Pass the client's watch on, and note while it stands."""
        try:
            async for offers in self._client.watch_drafters(tokenizer_sha256):
                self.watching = True
                yield offers
        finally:
            self.watching = False

    async def _renew(self, _: Any, offers: tuple[DrafterManifest, ...]) -> None:
        self._seen.offers.append((time.time(), ",".join(f"{each.name}@{each.version}" for each in offers)))

    async def text(self, seconds: float) -> None:
        """Get a lease as a text does, stay for some time, and report."""
        session, began = uuid.uuid4().hex, time.monotonic()
        self._seen.asked += 1
        lease = await self._leased(session, began)
        if lease is None:
            return
        self._seen.leases.append(time.monotonic() - began)
        self._seen.begun.append((lease.verifier, self._key, session))
        await asyncio.sleep(seconds)
        self._seen.ended.append((lease.verifier, self._key, session))
        hits = tuple(DrafterHits(drafter, "1", 20, 32) for drafter in DRAFTERS)
        counts = {"committed_tokens": 48, "verified_tokens": 32, "accepted_tokens": 20, "steps": 28}
        report = SessionReport(session, MODEL, lease.verifier, edge=self._name, drafter_hits=hits, **counts)
        await self._route.report(report)

    async def _leased(self, session: str, began: float) -> Lease | None:
        """Ask until there is a lease, with the pauses of `EdgeStream.lose`; None: the text is given up."""
        retries = 0
        while True:
            try:
                return await self._route.lease(LeaseRequest(MODEL, session), PROMPT)
            except OutriderError as error:
                self._seen.refused[type(error).__name__] += 1
                pause_s = max(error.retry_after_s, RETRY.first_s)
                if not isinstance(error, ResourceExhausted):
                    pause_s = max(error.retry_after_s, min(RETRY.max_s, RETRY.first_s * 2.0 ** min(retries, 64)))
                if not isinstance(error, Unavailable | ResourceExhausted) or (
                    time.monotonic() - began > RETRY.abandon_after_s
                ):
                    self._seen.failed[f"{error}"[:100]] += 1
                    return None
                retries += 1
                await asyncio.sleep(pause_s)


class Crowd:
    """The edges of this process, and the texts that they ask for at a steady rate, whether answers come or not."""

    def __init__(self, addresses: Sequence[str], keys: Sequence[tuple[str, str]], edges_of_connection: int) -> None:
        self.edges: list[CrowdEdge] = []
        self.rate = 0.0  # texts a second
        self.late = 0  # texts that were due while every edge waited for a lease or had a text
        self.seen = Seen()
        self._addresses = addresses
        self._keys = keys
        self._of_connection = edges_of_connection
        self._idle: deque[CrowdEdge] = deque()
        self._texts: set[asyncio.Task[None]] = set()
        self._clients: list[CoordinatorClient] = []

    async def grow(self, number: int) -> None:
        """Have `number` edges."""
        while len(self.edges) < number:
            index = len(self.edges)
            if index % self._of_connection == 0:
                _, secret = self._keys[len(self._clients) % len(self._keys)]
                address = self._addresses[len(self._clients) % len(self._addresses)]
                self._clients.append(CoordinatorClient(address, security=Security(api_key=secret, plaintext=True)))
            key, _ = self._keys[(len(self._clients) - 1) % len(self._keys)]
            self.edges.append(CrowdEdge(self._clients[-1], key, f"edge-{index}", self.seen))
            self._idle.append(self.edges[-1])
            await asyncio.sleep(1 / STARTS_PER_S)

    async def ask(self) -> None:
        """Begin texts at the present rate, for ever."""
        due = time.monotonic()
        while True:
            now = time.monotonic()
            due = max(due, now - 1.0) if self.rate else now
            while self.rate and due <= now:
                due += 1 / self.rate
                if self._idle:
                    self.begin()
                else:
                    self.late += 1
            slept = time.monotonic()
            await asyncio.sleep(LOOK_EVERY_S)
            self.seen.lags.append(time.monotonic() - slept - LOOK_EVERY_S)

    def begin(self, seconds: float = TEXT_S) -> None:
        """Begin the text of an idle edge."""
        edge = self._idle.popleft()
        task = asyncio.create_task(edge.text(seconds))
        self._texts.add(task)
        task.add_done_callback(self._texts.discard)
        task.add_done_callback(lambda _: self._idle.append(edge))

    async def all_within(self, seconds: float) -> None:
        """Begin a text at every idle edge, spread over some seconds."""
        pause_s = seconds / max(1, len(self._idle))
        while self._idle:
            self.begin(60.0)
            await asyncio.sleep(pause_s)

    def report(self) -> dict[str, Any]:
        """Return what was seen since the last call, and forget it."""
        seen, late, self.late = dict(vars(self.seen)), self.late, 0
        self.seen.forget()
        counts = {"watching": sum(edge.watching for edge in self.edges), "texts": len(self._texts), "late": late}
        return {**seen, **counts, "edges": len(self.edges), "at": time.time(), "cpu_s": time.process_time()}


async def serve(addresses: Sequence[str], keys: Sequence[tuple[str, str]], edges_of_connection: int) -> None:
    """Take orders until the end of standard input."""
    crowd = Crowd(addresses, keys, edges_of_connection)
    orders: asyncio.Queue[dict[str, float]] = asyncio.Queue()
    loop = asyncio.get_running_loop()

    def read() -> None:
        for line in sys.stdin:
            loop.call_soon_threadsafe(orders.put_nowait, json.loads(line))
        loop.call_soon_threadsafe(orders.put_nowait, {})

    reading = asyncio.create_task(asyncio.to_thread(read))
    tasks = {asyncio.create_task(crowd.ask()), asyncio.create_task(_tell(crowd)), reading}
    while order := await orders.get():
        for name, value in order.items():
            match name:
                case "edges":
                    tasks.add(asyncio.create_task(crowd.grow(int(value))))
                case "rate":
                    crowd.rate = value
                case "all_within":
                    tasks.add(asyncio.create_task(crowd.all_within(value)))


async def _tell(crowd: Crowd) -> None:
    while True:
        await asyncio.sleep(REPORT_EVERY_S)
        print(json.dumps(crowd.report()), flush=True)


def main() -> None:
    """Run the edges that the one argument, an object of JSON, describes."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    logging.disable(logging.WARNING)
    control_client.CLIENT_OPTIONS.append(OWN_CONNECTION)  # else all edges of this process would share one
    asyncio.run(serve(**json.loads(sys.argv[1])))


if __name__ == "__main__":
    main()
