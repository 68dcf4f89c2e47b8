"""Statistics of finished sessions: what drafters hit, what edges reported last, and how versions compare."""

from __future__ import annotations

import json
import logging
import math
import time
import uuid
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.coordinator.fleet_hits import MAX_SHOWN, Drafter, FleetAcceptance
from outrider.coordinator.version_trials import DrafterVersions, VersionChange, VersionState, hashed
from outrider.proto.cluster_status import EdgeStatus, VersionStatus
from outrider.proto.errors import InvalidArgument
from outrider.proto.types import SessionReport

logger = logging.getLogger(__name__)

RECENT_REPORTS = 64
MAX_EDGES = 256
MAX_NAME_LENGTH = 256
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class _Edge:
    last: SessionReport
    came_at_s: float
    sessions: int


class FleetStatistics:
    """Hits of drafters, states of their versions, the newest reports, and the newest of each edge.

    Attributes:
        recent: newest reports, without kinds of prompt and link, which only go into sums.
        leases_granted: number of leases, saved ones included.
        acceptance: hits of drafters by kind of prompt and link.
        versions: states of the drafters' versions.

    Args:
        clock: monotonic time in seconds.
        unix_clock: Unix time in seconds.
        votes_a_day: texts of one edge that count a day where versions are compared.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        unix_clock: Callable[[], float] = time.time,
        *,
        votes_a_day: int = 1,
    ) -> None:
        self._clock = clock
        self._unix_clock = unix_clock
        self._votes_a_day = votes_a_day
        self._edges: OrderedDict[str, _Edge] = OrderedDict()  # the newest last
        self._began_s = clock()
        self._edges_before = 0  # named ones before a restart, which count until they had a day to come back
        self.recent: deque[SessionReport] = deque(maxlen=RECENT_REPORTS)
        self.leases_granted = 0
        self.acceptance = FleetAcceptance()
        self.versions = DrafterVersions()

    def look(self, offered: Iterable[tuple[str, str, int]]) -> bool:
        """Take in name, version and sequence of the catalogue's drafters; return whether any version's state changed.

        The newest version of a name comes first.
        """
        return self._follow(self.versions.look(offered, self._unix_clock()))

    def add(self, report: SessionReport, served: Collection[Drafter] = (), tenant: str = "") -> bool:
        """Count a finished session, and return whether it changed the state of any version.

        Args:
            report: report of the session.
            served: drafters of the catalogue.
            tenant: name of the API key that it came with, which has a bounded share of every sum; empty: there are none
                that could outvote each other.

        Raises:
            InvalidArgument: its numbers are impossible.
        """
        check_report(report)
        hits, now_s = report.drafter_hits, self._unix_clock()
        offered = [each for each in hits if not self._is_retired(each.drafter, each.drafter_version)]
        of_key = tenant and hashed(tenant)
        self.acceptance.add(replace(report, drafter_hits=tuple(offered)), served, of_key)
        voter = f"{tenant}/{report.edge}" if report.edge else ""
        voted = self.versions.add(hits, report.prompt_class, voter, now_s, self._votes_a_day, tenant)
        changed = self._follow(voted)
        report = replace(report, drafter_hits=(), prompt_class=0, link_class=0)
        self.recent.append(report)
        self._see_edge(report)
        return changed

    def _is_retired(self, name: str, version: str) -> bool:
        return self.versions.state(name, version) is VersionState.RETIRED

    def share(self, name: str, version: str) -> float:
        recently = self._clock() - self._began_s < DAY_S
        return self.versions.share(name, version, max(len(self._edges), self._edges_before if recently else 0))

    @property
    def version_states(self) -> tuple[VersionStatus, ...]:
        """The versions of all drafters, by name."""
        shown = []
        for name, version, known in self.versions.known():
            comparison, hits = known.comparison, self.acceptance.total(name, version)
            shown.append(
                VersionStatus(
                    drafter=name,
                    version=version,
                    state=known.state.value,
                    share=self.share(name, version),
                    why=known.why,
                    age_s=max(0.0, self._unix_clock() - known.since_s),
                    against=comparison.against if comparison else "",
                    texts=comparison.test.texts if comparison else 0,
                    difference=comparison.test.difference if comparison else 0.0,
                    evidence=comparison.test.evidence if comparison else 0.0,
                    acceptance=hits.rate,
                    trials=hits.trials,
                )
            )
        return tuple(shown[:MAX_SHOWN])

    def _follow(self, changes: Sequence[VersionChange]) -> bool:
        """Carry hits over to versions that begin, and drop those of retired ones; return whether there are changes."""
        for change in changes:
            log = logger.warning if change.state is VersionState.RETIRED and change.why else logger.info
            log("drafter %s version %s is %s: %s", change.name, change.version, change.state, change.why or "new")
            if change.against:
                self.acceptance.inherit(change.name, change.version, change.against)
            elif change.state is VersionState.RETIRED:
                self.acceptance.forget(change.name, change.version)
        return bool(changes)

    @property
    def edges(self) -> tuple[EdgeStatus, ...]:
        """Named edges, the newest report first."""
        now_s = self._clock()
        return tuple(
            EdgeStatus(name, edge.last, max(0.0, now_s - edge.came_at_s), edge.sessions)
            for name, edge in reversed(self._edges.items())
        )

    def _see_edge(self, report: SessionReport) -> None:
        if not report.edge:
            return
        before = self._edges.pop(report.edge, None)
        sessions = before.sessions + 1 if before else 1
        self._edges[report.edge] = _Edge(report, self._clock(), sessions)
        while len(self._edges) > MAX_EDGES:
            self._edges.popitem(last=False)

    def save(self, path: Path) -> None:
        """Write the statistics to `path`, whole or not at all; raises `OSError`."""
        whole = json.dumps(
            {
                "leases_granted": self.leases_granted,
                "acceptance": self.acceptance.rows(),
                "versions": self.versions.saved(),
                "edges": max(len(self._edges), self._edges_before),
            }
        )
        beside = path.with_name(f".{path.name}.{uuid.uuid4().hex}")  # process ids are those of one container
        try:
            beside.write_text(whole)
            beside.replace(path)
        except OSError:
            beside.unlink(missing_ok=True)
            raise

    def load(self, path: Path) -> None:
        """Restore what `save` wrote; without a readable file, begin with nothing."""
        try:
            parsed = json.loads(path.read_text(), parse_constant=finite_number, parse_float=finite_number)
            leases_granted, edges = int(parsed["leases_granted"]), int(parsed["edges"])
            self.versions.take_over(parsed["versions"])
            self.acceptance.take_over(parsed["acceptance"])
        except FileNotFoundError:
            return
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            logger.warning("statistics in %s cannot be read, and begin with nothing: %r", path, error)
            return
        self.leases_granted, self._edges_before = leases_granted, edges


def finite_number(text: str) -> float:
    """Return the number in a state file; raises `ValueError` for what is none or infinite."""
    number = float(text)
    if not math.isfinite(number):
        raise ValueError(f"{text[:40]} is not a finite number")
    return number


def check_report(report: SessionReport) -> None:
    """Refuse numbers that contradict each other; raises `InvalidArgument` with the field."""
    for name in ("session", "model", "verifier", "drafter", "drafter_version", "edge"):
        if len(getattr(report, name)) > MAX_NAME_LENGTH:
            raise InvalidArgument(f"is longer than {MAX_NAME_LENGTH} characters", field=f"report.{name}")
    for name in ("session", "model"):
        if not getattr(report, name):
            raise InvalidArgument("is empty", field=f"report.{name}")
    for name in ("seconds", "round_trip_s"):
        value = getattr(report, name)
        if not (math.isfinite(value) and value >= 0):
            raise InvalidArgument("must be a finite number, 0 or more", field=f"report.{name}")
    if any(max(len(each.drafter), len(each.drafter_version)) > MAX_NAME_LENGTH for each in report.drafter_hits):
        raise InvalidArgument(f"has a name of more than {MAX_NAME_LENGTH} characters", field="report.drafter_hits")
    if report.accepted_tokens > report.verified_tokens:
        raise InvalidArgument("exceeds verified_tokens", field="report.accepted_tokens")
