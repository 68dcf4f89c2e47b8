"""Statistics of finished sessions, and the prior that they give to the next one."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import OrderedDict, deque
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.coordinator.fleet import Drafter, FleetAcceptance, Hits
from outrider.coordinator.versions import DrafterVersions, VersionChange, VersionState
from outrider.proto.drafter_format import ON_TRIAL
from outrider.proto.errors import InvalidArgument
from outrider.proto.types import DraftingPrior, EdgeStatus, SessionReport, VersionStatus

logger = logging.getLogger(__name__)

RECENT_REPORTS = 64
# Limits of the weight of a session and of the average, in verified drafts, since drafters and texts change.
REPORT_TOKENS = 20_000
MEMORY_TOKENS = 400_000
# Reports come from strangers, whose names must not grow the table without end.
MAX_ROWS = 1024
MAX_EDGES = 256
MAX_NAME_LENGTH = 256
MAX_SHOWN_VERSIONS = 256
DAY_S = 86400.0


@dataclass(frozen=True, slots=True)
class _Edge:
    last: SessionReport
    came_at_s: float
    sessions: int


class FleetStatistics:
    """Acceptance by model, drafter and version, the newest reports, and the newest of each edge.

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
        self.versions = DrafterVersions(self.acceptance.classes)
        self._rows: OrderedDict[tuple[str, str, str], Hits] = OrderedDict()  # accepted of verified drafts

    def look(self, offered: Iterable[tuple[str, str, int]]) -> bool:
        """Take in line, version and sequence of the catalogue's drafters; return whether any version's state changed.

        The newest version of a line comes first.
        """
        return self._follow(self.versions.look(offered, self._unix_clock()))

    def add(self, report: SessionReport, served: Collection[Drafter] = (), tenant: str = "", owner: str = "") -> bool:
        """Count a finished session, and return whether it changed the state of any version.

        Args:
            report: report of the session.
            served: drafters of the catalogue.
            tenant: name of the API key that it came with; empty: there are none that could outvote each other.
            owner: salt of that key, if versions may be its own; empty: none.

        Raises:
            InvalidArgument: its numbers are impossible.
        """
        check_report(report)
        offered = [each for each in report.drafter_hits if self._is_for_all(each.drafter, each.drafter_version)]
        self.acceptance.add(replace(report, drafter_hits=tuple(offered)), served)
        voter = f"{tenant}/{report.edge}" if report.edge else ""
        hits, now_s = report.drafter_hits, self._unix_clock()
        voted = self.versions.add(hits, report.prompt_class, voter, now_s, self._votes_a_day, owner, tenant)
        changed = self._follow(voted)
        report = replace(report, drafter_hits=(), prompt_class=0, link_class=0)
        self.recent.append(report)
        self._see_edge(report)
        if not report.verified_tokens:
            return changed
        key = (report.model, report.drafter, report.drafter_version)
        session = Hits(report.accepted_tokens, report.verified_tokens).limited(REPORT_TOKENS)
        self._rows[key] = self._rows.pop(key, Hits()).plus(session).limited(MEMORY_TOKENS)
        while len(self._rows) > MAX_ROWS:
            self._rows.popitem(last=False)
        return changed

    def _is_for_all(self, name: str, version: str) -> bool:
        """Return whether others may learn how a version hits: it is neither retired nor one key's own."""
        retired = self.versions.state(name, version) is VersionState.RETIRED
        return not (retired or self.versions.has_owner(name, version))

    def share(self, name: str, version: str) -> float:
        """Return the share of edges that are offered a version, 0 to 1."""
        recently = self._clock() - self._began_s < DAY_S
        return self.versions.share(name, version, max(len(self._edges), self._edges_before if recently else 0))

    @property
    def version_states(self) -> tuple[VersionStatus, ...]:
        """The versions that no key owns, by name."""
        shown = []
        for name, version, known in self.versions.known():
            if ON_TRIAL in name:
                continue
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
        return tuple(shown[:MAX_SHOWN_VERSIONS])

    def _follow(self, changes: Sequence[VersionChange]) -> bool:
        """Carry hits over to versions that begin, and drop those of retired ones; return whether there are changes."""
        for change in changes:
            log = logger.warning if change.state is VersionState.RETIRED and change.why else logger.info
            log("drafter %s version %s is %s: %s", change.name, change.version, change.state, change.why or "new")
            if change.state is VersionState.CANDIDATE:
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

    def prior(
        self,
        model: str,
        drafters: Collection[tuple[str, str]],
        step_s: float,
        prompt_class: int = 0,
        link_class: int = 0,
    ) -> DraftingPrior:
        """Return the expected acceptance of `model` with `drafters` (name, version), or with any if those are unknown.

        The classes select the hits of each drafter; 0: any.
        """
        rows = {key: row for key, row in self._rows.items() if key[0] == model}
        fitting = [row for key, row in rows.items() if key[1:] in drafters]
        verified = Hits.total(fitting or rows.values())
        return DraftingPrior(verified.rate, step_s, self.acceptance.prior(model, prompt_class, link_class))

    def save(self, path: Path) -> None:
        """Write the statistics to `path`, whole or not at all; raises `OSError`."""
        rows = [[*key, row.hits, row.trials] for key, row in self._rows.items()]
        whole = json.dumps(
            {
                "leases_granted": self.leases_granted,
                "verified": rows,
                "acceptance": self.acceptance.rows(),
                "versions": self.versions.saved(),
                "edges": max(len(self._edges), self._edges_before),
            }
        )
        beside = path.with_name(f".{path.name}.{os.getpid()}")
        beside.write_text(whole)
        beside.replace(path)

    def load(self, path: Path) -> None:
        """Restore what `save` wrote; without a readable file, begin with nothing."""
        try:
            parsed = json.loads(path.read_text(), parse_constant=finite_number, parse_float=finite_number)
            rows = {(str(m), str(d), str(v)): Hits(float(a), float(j)) for m, d, v, a, j in parsed["verified"]}
            leases_granted, edges = int(parsed["leases_granted"]), int(parsed.get("edges", 0))
            self.versions.take_over(parsed.get("versions", {}))  # which older releases did not write
            self.acceptance.take_over(parsed.get("acceptance", ()))  # nor this
        except FileNotFoundError:
            return
        except (OSError, ValueError, LookupError, TypeError, AttributeError, ArithmeticError, RecursionError) as error:
            logger.warning("statistics in %s cannot be read, and begin with nothing: %r", path, error)
            return
        self.leases_granted, self._edges_before = leases_granted, edges
        self._rows = OrderedDict(list(rows.items())[-MAX_ROWS:])


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
