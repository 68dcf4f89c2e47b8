"""States of the versions of each drafter: one is current, and the next must prove itself before it takes its place.

    waiting     in the catalogue, and offered to nobody yet
    candidate   an arm beside the current version at a share of the edges; at most one of a name
    current     offered to all edges; one of a name
    former      was current before; an arm at a share of the edges, so that the current one stays compared with it
    retired     offered to nobody

Edges say how often each version hits on the same texts, drafted by it or not. `PairedTest` decides on these differences
alone: a candidate that is better becomes current, and one that is worse is retired; so is a current version that turns
out worse than the former one, which then returns. A version whose drafting takes longer than the limit is retired too.

Reports come from strangers. A text counts as one number in [-1, 1], and of an edge only the first texts of a day count.
Edges choose their names, and few large lies outweigh many small differences. So a verdict must also hold without the
texts of any one API key, which alone decides nothing for others; with two keys, each must show it. And no key has more
than `KEY_LEAD` texts more than the most active other key, so that one among many cannot hold a verdict up for long.
False reports can hold a good version back, or a bad one in place, for a while; no text depends on them.
"""

from __future__ import annotations

import copy
import hashlib
import math
from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from outrider.proto.drafter_format import ON_TRIAL
from outrider.proto.policy.sequential import MAX_SLOWDOWN, PairedTest, SignTest, Verdict, candidate_error
from outrider.proto.types import DrafterHits

MIN_COMPARED = 8  # tokens of a text, for each of both versions
SHARE = 0.1  # of the edges, for candidates and former versions
MIN_EDGES = 2  # that the share should amount to
SLOWDOWN_CLIP = 0.25
MAX_VOTERS = 4096  # of a comparison, a day
KEY_LEAD = 4  # texts that decide nothing
KEY_GROUPS = 8  # whose texts are left out in turn; the ninth key joins the first
UNANSWERED_S = 3600.0  # after which a candidate without any text gives way to one that waits
TRIAL_S = 7 * 86400.0  # after which any other does
MAX_RETIRED = 16  # versions of a name that are remembered though they are no longer in the catalogue
_DAY_S = 86400

Classes = Callable[[str, str], Collection[int]]


class VersionState(StrEnum):
    """State of a version; see the module's docstring."""

    WAITING = "waiting"
    CANDIDATE = "candidate"
    CURRENT = "current"
    FORMER = "former"
    RETIRED = "retired"


class _Evidence:
    """Differences of hit rates and times between two versions in some texts."""

    def __init__(self, test: PairedTest) -> None:
        self.test = test
        self._slower = SignTest()
        self._slowdown = 0.0  # sum

    @property
    def slowdown(self) -> float:
        """Mean time to draft a token over that of the other version; 0: not measured."""
        return self._slowdown / self._slower.count if self._slower.count else 0.0

    def add(self, own: DrafterHits, other: DrafterHits, prompt_class: int) -> None:
        self.test.add(own.hits / own.compared - other.hits / other.compared, prompt_class)
        if own.draft_s and other.draft_s:
            slowdown = min(own.draft_s / other.draft_s, 10.0)
            self._slower.add(min(1.0, max(-1.0, (slowdown - MAX_SLOWDOWN) / SLOWDOWN_CLIP)))
            self._slowdown += slowdown

    def verdict(self, against: str) -> tuple[Verdict, str]:
        """Return the outcome so far, and the reason for it in a few words; empty while it is open."""
        test = self.test
        if self._slower.shows(candidate_error(test.number)):
            return Verdict.WORSE, f"drafting takes {self.slowdown:.2f} times as long as in {against}"
        # A single edge's time says little; half of what retires a version keeps it from becoming current.
        perhaps_slower = 2 * self._slower.log_wealth >= -math.log(candidate_error(test.number))
        if test.verdict is Verdict.OPEN or (test.verdict is Verdict.BETTER and perhaps_slower):
            return Verdict.OPEN, ""
        where = f" of class {test.lost_class}" if test.lost_class is not None else ""
        return test.verdict, f"hits {test.difference:+.3f} against {against} in {test.texts} texts{where}"

    def saved(self) -> dict[str, Any]:
        return {"test": self.test.rows(), "slower": self._slower.row(), "slowdown": self._slowdown}

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> Self:
        made = cls(PairedTest.from_rows(saved["test"]))
        made._slower, made._slowdown = SignTest.from_row(saved["slower"]), float(saved["slowdown"])
        return made


class VersionComparison:
    """A version against the one before it, on texts of edges.

    Attributes:
        against: version that it is compared with.
    """

    def __init__(self, against: str, number: int, kept: Collection[int] = ()) -> None:
        self.against = against
        self._all = _Evidence(PairedTest(number, kept))
        self._without: dict[int, _Evidence] = {}  # texts but those of a group of keys, by group
        self._votes: dict[str, int] = {}  # texts of today by hash of the edge's name
        self._of_keys: dict[str, int] = {}  # texts by hash of the API key's name, in order of the first
        self._day = 0

    @property
    def test(self) -> PairedTest:
        """Test of their hit rates in all texts."""
        return self._all.test

    def admit(self, voter: str, key: str, now_s: float, votes_a_day: int) -> bool:
        """Return whether a text of this edge and API key counts, and if so, note it.

        It does where the edge has had fewer than `votes_a_day` today, and the key, if there is one, is not ahead.
        """
        day = int(now_s // _DAY_S)
        if day != self._day:
            self._day, self._votes = day, {}
        edge, of_key = hashed(voter), hashed(key)
        if self._votes.get(edge, 0) >= votes_a_day or (edge not in self._votes and len(self._votes) >= MAX_VOTERS):
            return False
        if key and self._is_ahead(of_key):
            return False
        self._votes[edge] = self._votes.get(edge, 0) + 1
        if key:
            self._of_keys[of_key] = self._of_keys.get(of_key, 0) + 1
        return True

    def _is_ahead(self, key: str) -> bool:
        """Return whether a key has as many texts more than the most active other key as it may."""
        others = (texts for other, texts in self._of_keys.items() if other != key)
        return self._of_keys.get(key, 0) >= KEY_LEAD + max(others, default=0)

    def add(self, own: DrafterHits, other: DrafterHits, prompt_class: int, key: str) -> None:
        """Count an admitted text with the hits of both versions."""
        group = list(self._of_keys).index(hashed(key)) % KEY_GROUPS if key else -1
        if key and group not in self._without:
            self._without[group] = copy.deepcopy(self._all)
        for each in (self._all, *(without for left_out, without in self._without.items() if left_out != group)):
            each.add(own, other, prompt_class)

    @property
    def verdict(self) -> tuple[Verdict, str]:
        """Outcome that no key's texts alone decide, and the reason in a few words; empty while it is open."""
        verdict, why = self._all.verdict(self.against)
        agreed = all(each.verdict(self.against)[0] is verdict for each in self._without.values())
        return (verdict, why) if agreed else (Verdict.OPEN, "")

    def saved(self) -> dict[str, Any]:
        """Return its state for a JSON file."""
        return {
            "against": self.against,
            **self._all.saved(),
            "without": {group: each.saved() for group, each in self._without.items()},
            "day": self._day,
            "votes": self._votes,
            "of_keys": self._of_keys,
        }

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> Self:
        """Return what was saved.

        Raises:
            KeyError, ValueError, TypeError, AttributeError: it is malformed.
        """
        made = cls(str(saved["against"]), 1)
        made._all, made._day = _Evidence.restored(saved), int(saved["day"])
        made._votes = {str(voter): int(votes) for voter, votes in saved["votes"].items()}
        if "without" in saved:  # older releases counted texts without remembering what each key's had shown
            made._without = {int(group): _Evidence.restored(each) for group, each in saved["without"].items()}
            made._of_keys = {str(key): int(texts) for key, texts in saved["of_keys"].items()}
        return made


@dataclass(slots=True)
class KnownVersion:
    """One version of a drafter.

    Attributes:
        since_s: Unix time at which it got its state.
        why: reason for its state in a few words; empty: it has not been compared yet.
        comparison: that of a candidate, or of a current version with the former one.
    """

    state: VersionState
    since_s: float
    why: str = ""
    comparison: VersionComparison | None = None


@dataclass(frozen=True, slots=True)
class VersionChange:
    """A version that got another state; `against` is the one that it is compared with, empty without one."""

    name: str
    version: str
    state: VersionState
    why: str = ""
    against: str = ""


@dataclass(slots=True)
class _Line:
    """All known versions of one name."""

    name: str
    classes: Classes
    candidates: int = 0  # so far
    versions: dict[str, KnownVersion] = field(default_factory=dict)

    def one(self, state: VersionState) -> str:
        """Return the version in this state; empty: there is none."""
        return next((version for version, known in self.versions.items() if known.state is state), "")

    def set(self, version: str, state: VersionState, now_s: float, why: str = "", against: str = "") -> VersionChange:
        kept = self.classes(self.name, against) if against else ()
        comparison = VersionComparison(against, max(1, self.candidates), kept) if against else None
        self.versions[version] = KnownVersion(state, now_s, why, comparison)
        return VersionChange(self.name, version, state, why, against)

    def look(self, offered: Sequence[tuple[str, int]], now_s: float) -> Iterator[VersionChange]:
        """Take in the catalogue's versions with their sequences, the newest first and at least one."""
        here = [version for version, _ in offered]
        if not self.versions:
            yield from self._begin(offered, now_s)
        for version in here:
            if version not in self.versions:
                yield self.set(version, VersionState.WAITING, now_s)
        yield from self._miss(here, now_s)
        waiting = [version for version in here if self.versions[version].state is VersionState.WAITING]
        if waiting and (why := self._undecided(now_s)):
            yield self.set(self.one(VersionState.CANDIDATE), VersionState.RETIRED, now_s, why)
        if waiting and not self.one(VersionState.CANDIDATE):
            yield self._try(waiting[0], now_s)
            for version in waiting[1:]:
                yield self.set(version, VersionState.RETIRED, now_s, f"{waiting[0]} is newer")
        yield from self._compare_anew(now_s)

    def _begin(self, offered: Sequence[tuple[str, int]], now_s: float) -> Iterator[VersionChange]:
        """Begin with a name that is not known yet: what came first is current, since nothing later is proven."""
        lowest = min(sequence for _, sequence in offered)
        first, *older = (version for version, sequence in offered if sequence == lowest)
        yield self.set(first, VersionState.CURRENT, now_s)
        for version in older:
            yield self.set(version, VersionState.RETIRED, now_s, f"{first} is newer")

    def _miss(self, here: Sequence[str], now_s: float) -> Iterator[VersionChange]:
        """Do without versions that are not in the catalogue any more; one that comes back is new unless retired."""
        gone = [version for version in self.versions if version not in here]
        for version in gone:
            if self.versions[version].state is not VersionState.RETIRED:
                del self.versions[version]
                yield VersionChange(self.name, version, VersionState.RETIRED, "it is no longer in the catalogue")
        for version in [version for version in gone if version in self.versions][:-MAX_RETIRED]:
            del self.versions[version]
        if not self.one(VersionState.CURRENT):
            order = (VersionState.FORMER, VersionState.CANDIDATE, VersionState.WAITING, VersionState.RETIRED)
            best = min(here, key=lambda version: order.index(self.versions[version].state))
            yield self.set(best, VersionState.CURRENT, now_s, "the version before it is gone")

    def _try(self, version: str, now_s: float) -> VersionChange:
        self.candidates += 1
        return self.set(version, VersionState.CANDIDATE, now_s, against=self.one(VersionState.CURRENT))

    def _undecided(self, now_s: float) -> str:
        """Return why the candidate gives way to a newer version that waits; empty: it does not."""
        candidate = self.one(VersionState.CANDIDATE)
        known = self.versions[candidate] if candidate else None
        if known is None or known.comparison is None:
            return ""
        if known.comparison.test.texts == 0 and now_s - known.since_s >= UNANSWERED_S:
            return "no edge has compared it"
        return "nothing shown, and a newer version waits" if now_s - known.since_s >= TRIAL_S else ""

    def _compare_anew(self, now_s: float) -> Iterator[VersionChange]:
        """Compare the candidate with what is current now, and what is current with the former version or nothing."""
        candidate, current = self.one(VersionState.CANDIDATE), self.one(VersionState.CURRENT)
        if candidate and self._against(candidate) != current:
            yield self._try(candidate, now_s)
        if self._against(current) != self.one(VersionState.FORMER):
            self.versions[current].comparison = None

    def _against(self, version: str) -> str:
        comparison = self.versions[version].comparison
        return comparison.against if comparison is not None else ""

    def decide(self, version: str, now_s: float) -> Iterator[VersionChange]:
        """Act on the comparison of a version as soon as it is decided."""
        known = self.versions[version]
        if known.comparison is None:
            return
        verdict, why = known.comparison.verdict
        current, former = self.one(VersionState.CURRENT), self.one(VersionState.FORMER)
        if verdict is Verdict.BETTER and version != current:
            if former:
                yield self.set(former, VersionState.RETIRED, now_s, f"{current} and {version} were better")
            yield self.set(current, VersionState.FORMER, now_s, f"{version} hits more")
            yield self.set(version, VersionState.CURRENT, now_s, why, current)
        elif verdict is Verdict.WORSE:
            yield self.set(version, VersionState.RETIRED, now_s, why)
            if version == current:
                yield self.set(former, VersionState.CURRENT, now_s, f"{version} turned out worse")
        yield from self._compare_anew(now_s)


class DrafterVersions:
    """The versions of all drafters of a catalogue, in one event loop.

    Args:
        classes: returns the common kinds of text of a version by its name, each of which the next version must keep.
    """

    def __init__(self, classes: Classes) -> None:
        self._classes = classes
        self._lines: dict[str, _Line] = {}

    def look(self, offered: Iterable[tuple[str, str, int]], now_s: float) -> list[VersionChange]:
        """Take in the catalogue's names, versions and sequences, the newest of a name first; return what changed."""
        by_name: defaultdict[str, list[tuple[str, int]]] = defaultdict(list)
        for name, version, sequence in offered:
            by_name[name].append((version, sequence))
        changes: list[VersionChange] = []
        for name, versions in by_name.items():
            changes += self._lines.setdefault(name, _Line(name, self._classes)).look(versions, now_s)
        return changes

    def state(self, name: str, version: str) -> VersionState | None:
        """Return the state of a version; None: it has never been in the catalogue."""
        known = self._lines[name].versions.get(version) if name in self._lines else None
        return known.state if known is not None else None

    def share(self, name: str, version: str, edges: int) -> float:
        """Return the share of edges that are offered a version, 0 to 1, where `edges` are known."""
        state = self.state(name, version)
        if state in (None, VersionState.WAITING, VersionState.RETIRED):
            return 0.0
        if state is VersionState.CURRENT:
            return 1.0
        # In steps, since edges load and drop a version whenever its share changes.
        return next(share for share in (SHARE, 0.25, 0.5, 1.0) if share * edges >= MIN_EDGES or share == 1.0)

    def add(
        self,
        hits: Iterable[DrafterHits],
        prompt_class: int,
        voter: str,
        now_s: float,
        votes_a_day: int,
        key: str = "",
    ) -> list[VersionChange]:
        """Count a text of an edge, and return what it has decided.

        Args:
            hits: hits of drafters on its tokens; of several entries for a version the last one counts.
            prompt_class: kind of text.
            voter: name of the edge; empty: unknown, and the text does not count.
            now_s: Unix time.
            votes_a_day: texts of one edge that count.
            key: name of the edge's key, without whose texts a verdict must hold; empty: there is no other.
        """
        if not voter:
            return []
        of = {(each.drafter, each.drafter_version): each for each in hits}
        changes: list[VersionChange] = []
        names = dict.fromkeys(name for name, _ in of)
        for line in [self._lines[name] for name in names if name in self._lines]:
            for version in list(line.versions):
                comparison = line.versions[version].comparison
                if comparison is None:
                    continue
                own, other = of.get((line.name, version)), of.get((line.name, comparison.against))
                if own and other and _paired(own, other) and comparison.admit(voter, key, now_s, votes_a_day):
                    comparison.add(own, other, prompt_class, key)
                    changes += line.decide(version, now_s)
        return changes

    def known(self) -> Iterator[tuple[str, str, KnownVersion]]:
        """Yield name, version and what is known of it."""
        for name, line in sorted(self._lines.items()):
            for version, known in line.versions.items():
                yield name, version, known

    def saved(self) -> dict[str, Any]:
        """Return the state of all for a JSON file."""
        return {
            name: {
                "candidates": line.candidates,
                "versions": {
                    version: {
                        "state": known.state.value,
                        "since_s": known.since_s,
                        "why": known.why,
                        "comparison": known.comparison.saved() if known.comparison else None,
                    }
                    for version, known in line.versions.items()
                },
            }
            for name, line in self._lines.items()
        }

    def take_over(self, saved: dict[str, Any]) -> None:
        """Begin with what was saved.

        Raises:
            KeyError, ValueError, TypeError, AttributeError: it is malformed.
        """
        lines = {}
        for name, line in saved.items():
            if ON_TRIAL in name:  # versions of a single API key, which older releases had
                continue
            restored = lines[str(name)] = _Line(str(name), self._classes, int(line["candidates"]))
            for version, known in line["versions"].items():
                comparison = VersionComparison.restored(known["comparison"]) if known["comparison"] else None
                restored.versions[str(version)] = KnownVersion(
                    VersionState(known["state"]), float(known["since_s"]), str(known["why"]), comparison
                )
        self._lines = lines


def hashed(name: str) -> str:
    """Return a name that a state file may hold in place of an edge's or API key's."""
    return hashlib.sha256(name.encode()).hexdigest()[:16]


def _paired(own: DrafterHits, other: DrafterHits) -> bool:
    """Return whether both were compared with enough tokens, and mostly with the same."""
    fewer, more = sorted((own.compared, other.compared))
    return fewer >= MIN_COMPARED and 2 * fewer >= more
