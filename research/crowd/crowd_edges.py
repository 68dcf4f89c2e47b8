"""A process of many edges: shipped clients, looks and watches of coordinators, and texts that decode nothing."""

from __future__ import annotations

import asyncio
import gc
import logging
import math
import resource
import time
import uuid
from collections import deque
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import Future
from functools import partial
from multiprocessing.connection import Connection
from types import SimpleNamespace
from typing import Any, cast

from outrider.edge.daemon.cloud import Cloud
from outrider.edge.link.control_client import CoordinatorClient
from outrider.edge.link.routes import CoordinatorRoute
from outrider.edge.link.security import Security
from outrider.edge.preparation import Preparation
from outrider.proto.channel import CLIENT_OPTIONS, OWN_CONNECTION
from outrider.proto.errors import OutriderError, ResourceExhausted, Unavailable
from outrider.proto.session.stream import RetryRules
from outrider.proto.types import DrafterHits, DrafterManifest, Lease, LeaseRequest, SessionReport

MODEL = "reference"
REPORT_EVERY_S, TURN_S = 0.25, 0.01
STARTS_PER_S = 150.0  # of a process, so that a crowd that grows is no storm
PROMPT = tuple(range(100, 164))
HITS = tuple(DrafterHits(drafter, "1", 20, 32) for drafter in ("general", "swift"))
RETRY = RetryRules()


class CrowdEdge:
    """One edge: looks at the cloud, watches for drafters, and has one text at a time; what it sees becomes events."""

    def __init__(self, client: CoordinatorClient, key: str, name: str, events: list[tuple[Any, ...]]) -> None:
        self.watching = False
        self._client, self._key, self._name, self._events = client, key, name, events
        self._route = CoordinatorRoute(client, MODEL, "")
        ready = SimpleNamespace(tokenizer_sha256="", shelf=SimpleNamespace(begun=Future()))
        ready.shelf.begun.set_result(None)
        cloud, me = Cloud(cast("Any", self)), cast("Any", self)
        cloud.served = cast("Any", ready)  # it has its tokenizer and drafters from an earlier start
        loops = cloud.watch(), Preparation._watch(me, me, cast("Any", ready))  # the shipped ones
        self.tasks = [asyncio.create_task(each) for each in loops]

    async def inquire(self, avoid: Sequence[str] = ()) -> Lease:
        """Ask as `Client.inquire` does."""
        return await self._route.lease(LeaseRequest(MODEL, uuid.uuid4().hex, avoid=tuple(avoid), inquiry=True))

    async def watch_drafters(self, tokenizer_sha256: str) -> AsyncIterator[tuple[DrafterManifest, ...]]:
        """Pass the client's watch on, and note while it stands."""
        try:
            async for offers in self._client.watch_drafters(tokenizer_sha256):
                self.watching = True
                yield offers
        finally:
            self.watching = False

    async def _renew(self, _: Any, offers: tuple[DrafterManifest, ...]) -> None:
        self._events.append(("offers", time.time(), ",".join(f"{each.name}@{each.version}" for each in offers)))

    async def text(self, seconds: float) -> None:
        """Get a lease as a text does, stay for some time, and report."""
        session, began = uuid.uuid4().hex, time.monotonic()
        lease = await self._leased(session, began)
        if lease is None:
            return
        self._events.append(("lease", time.monotonic() - began))
        self._events.append(("begun", lease.verifier, self._key, session))
        await asyncio.sleep(seconds)
        self._events.append(("ended", lease.verifier, self._key, session))
        report = SessionReport(session, MODEL, lease.verifier, committed_tokens=48, edge=self._name, drafter_hits=HITS)
        await self._route.report(report)

    async def _leased(self, session: str, began: float) -> Lease | None:
        """Ask until there is a lease, with the pauses of `EdgeStream.lose`; None: the text is given up."""
        retries = 0
        while True:
            try:
                return await self._route.lease(LeaseRequest(MODEL, session), PROMPT)
            except OutriderError as error:
                self._events.append(("refused", type(error).__name__))
                lost = time.monotonic() - began > RETRY.abandon_after_s
                if lost or not isinstance(error, Unavailable | ResourceExhausted):
                    self._events.append(("failed", f"{error}"[:100]))
                    return None
                backoff_s = min(RETRY.max_s, RETRY.first_s * 2.0 ** min(retries, 64))
                backoff_s = RETRY.first_s if isinstance(error, ResourceExhausted) else backoff_s
                retries += 1
                await asyncio.sleep(max(error.retry_after_s, backoff_s))


def _free(idle: deque[CrowdEdge], edge: CrowdEdge, _: object) -> None:
    idle.append(edge)


async def live(pipe: Connection, addresses: Sequence[str], keys: Sequence[tuple[str, str]]) -> None:
    """Have edges and texts by orders, and report what they see: ("edges", number), ("texts", rate, seconds, number)."""
    edges, wanted, events = list[CrowdEdge](), 0.0, list[tuple[Any, ...]]()
    idle, texts = deque[CrowdEdge](), set[asyncio.Task[None]]()
    rate, seconds, left, due, told, turn = 0.0, 0.0, 0.0, 0.0, 0.0, time.monotonic()
    while True:
        now = time.monotonic()
        while pipe.poll():
            match pipe.recv():
                case ("edges", number):
                    wanted = number
                case ("texts", rate, seconds, left):
                    due = now
        for _ in range(math.ceil(min(wanted - len(edges), STARTS_PER_S * min(now - turn, 0.1)))):
            name, secret = keys[len(edges) % len(keys)]
            client = CoordinatorClient(addresses[len(edges) % len(addresses)], security=Security(None, secret, True))
            edges.append(CrowdEdge(client, name, f"edge-{len(edges)}", events))
            idle.append(edges[-1])
            if len(edges) == wanted:  # thousands of clients in one process, over which each collection would go
                gc.freeze()
        while rate and left >= 1 and due <= now:
            due, left = max(due, now - 1.0) + 1 / rate, left - 1
            if not idle:
                events.append(("late",))
                continue
            edge = idle.popleft()
            text = asyncio.create_task(edge.text(seconds))
            texts.add(text)
            text.add_done_callback(texts.discard)
            text.add_done_callback(partial(_free, idle, edge))
        if now > told + REPORT_EVERY_S:
            counts = {"edges": len(edges), "watching": sum(edge.watching for edge in edges)}
            pipe.send({"events": tuple(events), "at": time.time(), "cpu_s": time.process_time(), **counts})
            events.clear()
            told = now
        turn = now
        await asyncio.sleep(TURN_S)
        events.append(("lag", time.monotonic() - now - TURN_S))


def main(pipe: Connection, addresses: Sequence[str], keys: Sequence[tuple[str, str]]) -> None:
    """Run edges of these API keys, names and secrets, each with a connection of its own, until the process ends."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    logging.disable(logging.WARNING)
    CLIENT_OPTIONS.append(OWN_CONNECTION)  # else all edges of this process would share one
    asyncio.run(live(pipe, addresses, keys))
