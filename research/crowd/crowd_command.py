"""A coordinator at the size of a fleet: `python -m research crowd`."""

from __future__ import annotations

import asyncio
import json
import math
import resource
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from rich.console import Console

from outrider.bench.environment import machine
from outrider.deploy.arguments import Given
from research.crowd.crowd_fleet import (
    CoordinatorProcess,
    EdgeProcesses,
    Period,
    Verifiers,
    observed,
    prepare,
    publish,
)
from research.research_settings import CrowdSettings

PROCESSES = 2  # of edges
SLOW_S = 1.0  # a lease that takes longer is no service
REST_S, RATE_S, CALM_S = 8.0, 12.0, 5.0
WITHIN_S = 90.0  # for everybody to be back
GENTLE = 50.0  # texts a second


@dataclass(frozen=True, slots=True)
class CrowdRow:
    """One period of a fleet, and what its edges saw in it.

    Attributes:
        what: what happened, in words.
        edges: edges, each with a watch if `watching` is as many.
        rate: texts a second that were due.
        lease_p50_ms: time from a text's first question to its lease, refusals included; None: no text came.
        late: texts that were due while every edge still waited or had one.
        failed: texts that were given up.
        refused: questions that were answered by another error.
        cpu: CPUs that the coordinators used.
        edges_cpu: CPUs that the edges used, on the same machine.
        lag_p99_ms: time of a health check on a connection of its own, which waits for the event loop.
        edges_lag_p99_ms: time by which the edges' own event loops came late, which is no coordinator's fault.
        rss_mib: memory of the coordinators.
        back_s: seconds until every edge was served again, or had the news; None: nothing had happened.
    """

    what: str
    edges: int
    watching: int
    rate: float
    seconds: float
    leases: int
    lease_p50_ms: float | None
    lease_p99_ms: float | None
    late: int
    failed: int
    refused: int
    cpu: float
    edges_cpu: float
    lag_p50_ms: float
    lag_p99_ms: float
    edges_lag_p99_ms: float
    rss_mib: float
    back_s: float | None = None

    @property
    def breaks(self) -> str:
        """Why this is no service; empty: it is one."""
        if self.lease_p99_ms is not None and self.lease_p99_ms > 1000 * SLOW_S:
            return f"the p99 of a lease is {self.lease_p99_ms / 1000:.1f} s"
        if self.failed or self.late:
            return f"{self.failed} texts fail and {self.late} come late"
        due = round(self.rate * self.seconds)
        return "" if self.leases >= 0.8 * due else f"only {self.leases:,} of {due:,} texts have a lease"


def quantile(values: Sequence[float], share: float) -> float | None:
    """Return the smallest of the values that so large a share of them does not exceed; None: there are none."""
    return sorted(values)[max(0, math.ceil(share * len(values)) - 1)] if values else None


def row_of(what: str, period: Period, *, edges: int, watching: int, rate: float, back_s: float | None) -> CrowdRow:
    """Return the row of a period."""
    p50, p99 = (_ms(quantile(period.leases, share)) for share in (0.5, 0.99))
    lag = [_ms(quantile(period.probes, share)) or 0.0 for share in (0.5, 0.99)]
    lag.append(_ms(quantile(period.edges_lags, 0.99)) or 0.0)
    failed, refused = period.failed.total(), period.refused.total()
    cpus = [round(cpu_s / period.seconds, 3) for cpu_s in (period.cpu_s, period.edges_cpu_s)]
    mib = round(period.rss_bytes / (1 << 20), 1)
    counts = (len(period.leases), p50, p99, period.late, failed, refused)
    back = None if back_s is None else round(back_s, 2)
    return CrowdRow(what, edges, watching, rate, round(period.seconds, 2), *counts, *cpus, *lag, mib, back)


def bytes_an_edge(rows: Sequence[CrowdRow]) -> float:
    """Return the coordinator's memory for each further edge, by the first and the last of some rows at rest."""
    first, last = rows[0], rows[-1]
    return round((last.rss_mib - first.rss_mib) * (1 << 20) / max(1, last.edges - first.edges))


def _ms(seconds: float | None) -> float | None:
    return None if seconds is None else round(1000 * seconds, 2)


def crowd(given: Given) -> int:
    """Run the command; return 0 where every edge is served up to the rate at which the coordinator breaks."""
    options = given(CrowdSettings)
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))
    console = Console(width=120, highlight=False)
    trials = Trials(options, console.print)
    asyncio.run(trials.run())
    if options.json is not None:
        record = {"environment": machine(), "bytes_an_edge": trials.bytes_an_edge, "first": trials.first}
        rows = [asdict(row) for row in trials.rows]
        options.json.write_text(json.dumps({**record, "rows": rows}, indent=1) + "\n")
    return 0 if trials.served else 1


class Trials:
    """The trials of one fleet, one after the other, and their rows.

    Attributes:
        first: what broke first; empty: nothing did.
        served: whether all edges were served before that, and after every fault.
    """

    def __init__(self, options: CrowdSettings, say: Callable[[str], None]) -> None:
        self.rows: list[CrowdRow] = []
        self.bytes_an_edge: dict[str, float] = {}
        self.first = ""
        self.served = True
        self._options = options
        self._say = say
        self._folder = options.folder.resolve()
        self._keys = prepare(self._folder)
        self._verifiers = Verifiers()
        self._edges = EdgeProcesses(self._verifiers)
        self._coordinators: list[CoordinatorProcess] = []

    async def run(self) -> None:
        """Run the trials that were asked for."""
        await self._verifiers.start()
        try:
            for name in self._options.trials:
                await getattr(self, f"_{name}")()
        finally:
            await self._end()
            await self._verifiers.stop()

    async def _one(self) -> None:
        """One coordinator: edges at rest, texts at rising rates, and a new version of a drafter."""
        options = self._options
        await self._begin(1, 1)
        steps = [round(options.edges * share) for share in (0, 0.1, 0.5, 1)]
        at_rest = [await self._at_rest(number) for number in steps]
        self.bytes_an_edge["a connection each"] = bytes_an_edge(at_rest)
        await self._new_version()
        for rate in options.rates:
            row = await self._texts(f"{rate:g} texts/s", rate)
            if row.breaks:
                self.first = f"{row.breaks} at {rate:g} texts/s"
                break
        await self._end()

    async def _shared(self) -> None:
        """One coordinator whose edges share connections, as behind a proxy."""
        await self._begin(1, self._options.edges_of_connection)
        at_rest = [await self._at_rest(number) for number in (0, self._options.edges)]
        self.bytes_an_edge[f"{self._options.edges_of_connection} a connection"] = bytes_an_edge(at_rest)
        await self._texts("on shared connections", 2 * GENTLE)
        await self._end()

    async def _two(self) -> None:
        """Two coordinators, of which one is killed under texts."""
        await self._begin(2, 1)
        await self._at_rest(self._options.edges)
        await self._texts("two coordinators", 2 * GENTLE)
        killed = self._coordinators.pop(0)
        self._edges.order(rate=2 * GENTLE)
        await asyncio.sleep(CALM_S)

        async def kill() -> None:
            killed.kill()

        await self._through("one of two is killed", 2 * GENTLE, kill)
        await self._end()

    async def _restart(self) -> None:
        """Kill a coordinator and start it again, while all edges of a smaller fleet want a lease."""
        for number in self._options.back:
            await self._begin(1, 1)
            await self._at_rest(number)

            async def again() -> None:
                self._coordinators[0].kill()
                self._edges.order(all_within=1.0)
                self._coordinators[0].start()
                await self._coordinators[0].until_serving()

            await self._through(f"{number:,} come back", 0.0, again, leases=number)
            await self._end()

    # === parts of trials ===

    async def _begin(self, coordinators: int, edges_of_connection: int) -> None:
        self._coordinators = [CoordinatorProcess(self._folder, f"c{i}", self._verifiers) for i in range(coordinators)]
        for each in self._coordinators:
            each.start()
        for each in self._coordinators:
            await each.until_serving()
        addresses = [each.address for each in self._coordinators]
        lists = [f"ipv4:{','.join([*addresses[i:], *addresses[:i]])}" for i in range(len(addresses))]
        self._edges = EdgeProcesses(self._verifiers)
        await self._edges.start(PROCESSES, addresses if len(addresses) == 1 else lists, self._keys, edges_of_connection)

    async def _end(self) -> None:
        await self._edges.stop()
        for each in self._coordinators:
            each.kill()
        self._coordinators = []

    async def _at_rest(self, number: int) -> CrowdRow:
        self._edges.order(edges=number)
        await self._until_watched(number, time.time())
        await asyncio.sleep(CALM_S)
        return await self._row("at rest", 0.0, REST_S)

    async def _texts(self, what: str, rate: float) -> CrowdRow:
        self._edges.order(rate=rate)
        await asyncio.sleep(2.0)
        row = await self._row(what, rate, RATE_S)
        self._edges.order(rate=0)
        return row

    async def _new_version(self) -> None:
        self._edges.order(rate=GENTLE)
        await asyncio.sleep(CALM_S)
        observing = asyncio.create_task(self._row("a new version", GENTLE, RATE_S))
        identity = await asyncio.to_thread(publish, self._folder)
        row = await observing
        came = [at for at, offers in self._period.offers if identity in offers]
        self._edges.order(rate=0)
        spread_s = round(max(came) - min(came), 2) if came else None
        self.rows[-1] = self._note(replace(row, back_s=spread_s))
        if len(came) < row.edges:
            self.served = False
            self._say(f"{row.edges - len(came)} edges have no news")

    async def _through(self, what: str, rate: float, happen: Callable[[], Any], leases: int = 0) -> None:
        """Let something happen, and observe until every edge watches and so many leases were given since."""
        over = asyncio.Event()
        observing = asyncio.create_task(observed(self._edges, self._coordinators, over))
        await asyncio.sleep(0.1)
        period, began = self._edges.period, time.time()
        await happen()
        number = int(self._edges.count("edges"))
        back_s = await self._until_watched(number, began, lambda: len(period.leases) >= leases)
        await asyncio.sleep(CALM_S)
        over.set()
        await observing
        row = row_of(what, period, edges=number, watching=int(self._edges.count("watching")), rate=rate, back_s=back_s)
        self.rows.append(self._note(row))

    async def _until_watched(self, number: int, since: float, also: Callable[[], bool] = lambda: True) -> float:
        """Return after how many seconds from `since` every edge watches, and something else holds."""
        while time.time() < since + WITHIN_S:
            fresh = self._edges.newest and all(report["at"] > since for report in self._edges.newest.values())
            if fresh and self._edges.count("edges") >= number <= self._edges.count("watching") and also():
                break
            await asyncio.sleep(0.05)
        else:
            self.served = False
            self._say(f"only {self._edges.count('watching'):g} of {number} edges watch")
        return time.time() - since

    async def _row(self, what: str, rate: float, seconds: float) -> CrowdRow:
        over = asyncio.Event()
        asyncio.get_running_loop().call_later(seconds, over.set)
        self._period = period = await observed(self._edges, self._coordinators, over)
        edges, watching = (int(self._edges.count(name)) for name in ("edges", "watching"))
        row = row_of(what, period, edges=edges, watching=watching, rate=rate, back_s=None)
        self.rows.append(self._note(row))
        return row

    def _note(self, row: CrowdRow) -> CrowdRow:
        self._say(str(row))
        return row
