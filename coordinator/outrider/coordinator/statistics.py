"""Statistics of finished sessions, and the prior that they give to the next one."""

from __future__ import annotations

import json
import logging
import math
import os
import time
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from outrider.coordinator.fleet_hits import REPORT_COMPARED, CellRow, Drafter, FleetAcceptance, Hits
from outrider.coordinator.version_trials import DrafterVersions, VersionChange, VersionState, hashed
from outrider.proto.errors import InvalidArgument
from outrider.proto.status import ClassAcceptance, EdgeStatus, VersionStatus
from outrider.proto.types import MAX_REPORTED_DRAFTERS, DrafterPrior, DraftingPrior, SessionReport

logger = logging.getLogger(__name__)

RECENT_REPORTS = 64
# Limits of the weight of a session and of the average, in verified drafts, since drafters and texts change.
REPORT_TOKENS = 20_000
MEMORY_TOKENS = 400_000
# Reports come from strangers, whose names must not grow the table without end.
MAX_ROWS = 1024
MAX_KEYS = 32  # whose hits are known apart; the one that was longest not reported goes
MAX_EDGES = 256
MAX_NAME_LENGTH = 256
MAX_SHOWN = 256
DAY_S = 86400.0

KeyedRow = tuple[str, str, str, int, int, float, float, str]  # a `CellRow` and the hash of a key; empty: none


@dataclass(frozen=True, slots=True)
class _Edge:
    last: SessionReport
    came_at_s: float
    sessions: int


class SharedAcceptance:
    """The hits of all drafters in the texts of all API keys, each of which has a bounded share of every answer.

    The hits of each key are kept apart, by a hash of its name, and brought together when they are asked for.
    """

    def __init__(self) -> None:
        self._of_keys: OrderedDict[str, FleetAcceptance] = OrderedDict()  # most recently reported last

    def add(self, report: SessionReport, served: Collection[Drafter], key: str) -> None:
        """Count a checked report that came with a key; see `FleetAcceptance.add`."""
        self._of_keys.setdefault(key, FleetAcceptance()).add(report, served)
        self._of_keys.move_to_end(key)
        if len(self._of_keys) > MAX_KEYS:
            self._of_keys.popitem(last=False)

    def inherit(self, name: str, version: str, parent: str) -> None:
        """Let a version begin with its parent's hits at half their weight."""
        for acceptance in self._of_keys.values():
            acceptance.inherit(name, version, parent)

    def forget(self, name: str, version: str) -> None:
        for acceptance in self._of_keys.values():
            acceptance.forget(name, version)

    def total(self, name: str, version: str) -> Hits:
        """Return the hits of a version in all texts for all models."""
        return _shared({key: each.total(name, version) for key, each in self._of_keys.items()})

    def prior(self, model: str, prompt_class: int, link_class: int) -> tuple[DrafterPrior, ...]:
        """Return the expected hit rates of the drafters of `model`, most trials first; see `FleetAcceptance.prior`."""
        of: defaultdict[Drafter, dict[str, Hits]] = defaultdict(dict)
        for key, acceptance in self._of_keys.items():
            for each in acceptance.prior(model, prompt_class, link_class):
                of[each.drafter, each.drafter_version][key] = Hits(each.acceptance * each.trials, each.trials)
        shared = ((drafter, _shared(of_keys)) for drafter, of_keys in of.items())
        priors = (DrafterPrior(*drafter, hits.rate, hits.trials) for drafter, hits in shared)
        return tuple(sorted(priors, key=lambda prior: -prior.trials)[:MAX_REPORTED_DRAFTERS])

    @property
    def shown(self) -> tuple[ClassAcceptance, ...]:
        """Hits by drafter and class, most trials first."""
        found: defaultdict[tuple[str, str, str, int, int], dict[str, Hits]] = defaultdict(dict)
        for key, acceptance in self._of_keys.items():
            for row in acceptance.rows():
                found[row[:5]][key] = Hits(*row[5:])
        shared = {cell: _shared(of_keys) for cell, of_keys in found.items()}
        cells = [
            ClassAcceptance(model, prompt_class, link_class, DrafterPrior(name, version, hits.rate, hits.trials))
            for (model, name, version, prompt_class, link_class), hits in shared.items()
        ]
        return tuple(sorted(cells, key=lambda cell: -cell.prior.trials)[:MAX_SHOWN])

    def rows(self) -> list[KeyedRow]:
        """Return all hits as rows to save, with the key's hash at the end."""
        return [(*row, key) for key, acceptance in self._of_keys.items() for row in acceptance.rows()]

    def take_over(self, rows: Iterable[KeyedRow]) -> None:
        """Begin with saved rows; raises `ValueError` or `TypeError` if they are malformed."""
        of_keys: defaultdict[str, list[CellRow]] = defaultdict(list)
        for model, name, version, prompt_class, link_class, hits, trials, *key in rows:  # older releases wrote no key
            of_keys["".join(map(str, key))].append((model, name, version, prompt_class, link_class, hits, trials))
        taken = OrderedDict((of_key, FleetAcceptance()) for of_key in of_keys)
        for of_key, acceptance in taken.items():
            acceptance.take_over(of_keys[of_key])
        self._of_keys = OrderedDict(list(taken.items())[-MAX_KEYS:])


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
        self.acceptance = SharedAcceptance()
        self.versions = DrafterVersions()
        self._rows: OrderedDict[tuple[str, str, str, str], Hits] = OrderedDict()  # accepted of verified drafts

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
        if not report.verified_tokens:
            return changed
        key = (report.model, report.drafter, report.drafter_version, of_key)
        session = Hits(report.accepted_tokens, report.verified_tokens).limited(REPORT_TOKENS)
        self._rows[key] = self._rows.pop(key, Hits()).plus(session).limited(MEMORY_TOKENS)
        if len(self._rows) > MAX_ROWS:  # whoever invents drafters pushes out its own
            ((most, _),) = Counter(of_key for *_, of_key in self._rows).most_common(1)
            del self._rows[next(row for row in self._rows if row[3] == most)]
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
        fitting = {key: row for key, row in rows.items() if key[1:3] in drafters}
        of_keys: defaultdict[str, Hits] = defaultdict(Hits)
        for (*_, of_key), row in (fitting or rows).items():
            of_keys[of_key] = of_keys[of_key].plus(row)
        verified = _shared(of_keys)
        return DraftingPrior(verified.rate, step_s, self.acceptance.prior(model, prompt_class, link_class))

    def save(self, path: Path) -> None:
        """Write the statistics to `path`, whole or not at all; raises `OSError`."""
        rows = [[*key[:3], row.hits, row.trials, key[3]] for key, row in self._rows.items()]
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
            rows = {  # the key at the end is missing where an older release wrote them
                (str(m), str(d), str(v), str(*k)): Hits(float(a), float(j)) for m, d, v, a, j, *k in parsed["verified"]
            }
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


def _shared(of_keys: Mapping[str, Hits]) -> Hits:
    """Return the sum of the hits of all keys, none of which weighs more than the largest other one and one text."""
    weights = sorted((hits.trials for key, hits in of_keys.items() if key), reverse=True)
    most = REPORT_COMPARED + sum(weights[1:2])
    return Hits.total(hits.limited(most) if key else hits for key, hits in of_keys.items())


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
