"""States of the versions of each drafter: the newest is current at once, and gives way where it turns out worse.

    current     offered to all edges; one of a name
    previous    was current before; offered to a share of the edges too, so that the current one is compared with it
    retired     offered to nobody

Which version is better was decided before: by a trainer's judge on later texts, or by whoever published it. Edges say
how often both versions hit on the same texts, drafted by them or not. `LossTest` looks at these differences alone: a
current version that turns out worse than the previous one is retired, and the previous one returns; so it is where
drafting takes longer than the limit. Where neither shows in `COMPARED_TEXTS`, or within `COMPARED_S`, the previous one
is retired.

Reports come from strangers. A text counts as one number in [-1, 1], and of an edge only the first texts of a day count.
Edges choose their names, and few large lies outweigh many small differences. So a verdict must also hold without the
texts of any one API key, which alone decides nothing for others; with two keys, each must show it. And no key has more
than `KEY_MARGIN` texts more than the most active other key, so that one among many cannot hold a verdict up for long.
False reports can keep a bad version in place for a while, or call a previous one back; no text depends on them.
"""

from __future__ import annotations

import copy
import hashlib
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import Any, Self

from outrider.proto.policy.sequential import MAX_SLOWDOWN, LossTest, SignTest, candidate_error
from outrider.proto.types import DrafterHits

MIN_COMPARED = 8  # tokens of a text, for each of both versions
SHARE = 0.1  # of the edges, for previous versions
MIN_EDGES = 2  # that the share should amount to
SLOWDOWN_CLIP = 0.25
MAX_VOTERS = 4096  # of a comparison, a day
KEY_MARGIN = 4  # texts that decide nothing
KEY_GROUPS = 8  # whose texts are left out in turn; the ninth key joins the first
COMPARED_TEXTS = 500  # after which a previous version is retired, and
COMPARED_S = 7 * 86400.0  # after which it is at the latest
MAX_RETIRED = 16  # versions of a name that are remembered though they are no longer in the catalogue
_DAY_S = 86400


class VersionState(StrEnum):
    """State of a version; see the module's docstring."""

    CURRENT = "current"
    PREVIOUS = "previous"
    RETIRED = "retired"


@dataclass(slots=True)
class _Evidence:
    """Differences of hit rates and times between two versions in some texts."""

    test: LossTest
    slower: SignTest = field(default_factory=SignTest)
    slowdown: float = 0.0  # sum over texts of one version's drafting time over the other's

    def add(self, own: DrafterHits, other: DrafterHits, prompt_class: int) -> None:
        self.test.add(own.hits / own.compared - other.hits / other.compared, prompt_class)
        if own.draft_s and other.draft_s:
            slowdown = min(own.draft_s / other.draft_s, 10.0)
            self.slower.add(min(1.0, max(-1.0, (slowdown - MAX_SLOWDOWN) / SLOWDOWN_CLIP)))
            self.slowdown += slowdown

    def loss(self, against: str) -> str:
        """Return in a few words what is shown to be worse than in the version `against`; empty: nothing is."""
        test = self.test
        if self.slower.shows(candidate_error(test.number)):
            return f"drafting takes {self.slowdown / self.slower.count:.2f} times as long as in {against}"
        if not test.lost:
            return ""
        where = f" of class {test.lost_class}" if test.lost_class is not None else ""
        return f"hits {test.difference:+.3f} against {against} in {test.texts} texts{where}"

    def saved(self) -> dict[str, Any]:
        return {"test": self.test.rows(), "slower": self.slower.row(), "slowdown": self.slowdown}

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> Self:
        slower = SignTest.from_row(saved["slower"])
        return cls(LossTest.from_rows(saved["test"]), slower, float(saved["slowdown"]))


@dataclass(slots=True)
class VersionComparison:
    """A version against the one before it, on texts of edges.

    Attributes:
        against: version that it is compared with.
        evidence: that of all texts.
        without: evidence of the texts but those of a group of keys, by group.
        day: number of the day of the newest text.
        votes: texts of that day by hash of the edge's name.
        of_keys: texts by hash of the API key's name, in order of the first.
    """

    against: str
    evidence: _Evidence
    without: dict[int, _Evidence] = field(default_factory=dict)
    day: int = 0
    votes: dict[str, int] = field(default_factory=dict)
    of_keys: dict[str, int] = field(default_factory=dict)

    @property
    def test(self) -> LossTest:
        """Test of their hit rates in all texts."""
        return self.evidence.test

    def admit(self, voter: str, key: str, now_s: float, votes_a_day: int) -> bool:
        """Return whether a text of this edge and API key counts, and if so, note it.

        It does where the edge has had fewer than `votes_a_day` today, and the key, if there is one, is not ahead.
        """
        day = int(now_s // _DAY_S)
        if day != self.day:
            self.day, self.votes = day, {}
        edge, of_key = hashed(voter), hashed(key)
        if self.votes.get(edge, 0) >= votes_a_day or (edge not in self.votes and len(self.votes) >= MAX_VOTERS):
            return False
        if key and self._is_ahead(of_key):
            return False
        self.votes[edge] = self.votes.get(edge, 0) + 1
        if key:
            self.of_keys[of_key] = self.of_keys.get(of_key, 0) + 1
        return True

    def _is_ahead(self, key: str) -> bool:
        """Return whether a key has as many texts more than the most active other key as it may."""
        others = (texts for other, texts in self.of_keys.items() if other != key)
        return self.of_keys.get(key, 0) >= KEY_MARGIN + max(others, default=0)

    def add(self, own: DrafterHits, other: DrafterHits, prompt_class: int, key: str) -> None:
        """Count an admitted text with the hits of both versions."""
        group = list(self.of_keys).index(hashed(key)) % KEY_GROUPS if key else -1
        if key and group not in self.without:
            self.without[group] = copy.deepcopy(self.evidence)
        for each in (self.evidence, *(without for left_out, without in self.without.items() if left_out != group)):
            each.add(own, other, prompt_class)

    @property
    def loss(self) -> str:
        """Say in a few words in which way it is worse than before, where that holds without the texts of any one key.

        Empty: it is not shown to be.
        """
        agreed = all(each.loss(self.against) for each in self.without.values())
        return self.evidence.loss(self.against) if agreed else ""

    def saved(self) -> dict[str, Any]:
        """Return its state for a JSON file."""
        without = {group: each.saved() for group, each in self.without.items()}
        counts = {"day": self.day, "votes": self.votes, "of_keys": self.of_keys}
        return {"against": self.against, **self.evidence.saved(), "without": without, **counts}

    @classmethod
    def restored(cls, saved: dict[str, Any]) -> Self:
        """Return what was saved.

        Raises:
            KeyError, ValueError, TypeError, AttributeError: it is malformed.
        """
        return cls(
            str(saved["against"]),
            _Evidence.restored(saved),
            {int(group): _Evidence.restored(each) for group, each in saved["without"].items()},
            int(saved["day"]),
            {str(voter): int(votes) for voter, votes in saved["votes"].items()},
            {str(key): int(texts) for key, texts in saved["of_keys"].items()},
        )


@dataclass(slots=True)
class KnownVersion:
    """One version of a drafter.

    Attributes:
        since_s: Unix time at which it got its state.
        why: reason for its state in a few words; empty: it has not been compared yet.
        comparison: that of a current version with the previous one.
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
    comparisons: int = 0  # so far
    versions: dict[str, KnownVersion] = field(default_factory=dict)

    def one(self, state: VersionState) -> str:
        """Return the version in this state; empty: there is none."""
        return next((version for version, known in self.versions.items() if known.state is state), "")

    @property
    def comparison(self) -> VersionComparison | None:
        """That of the current version with the previous one."""
        current = self.versions.get(self.one(VersionState.CURRENT))
        return current.comparison if current is not None else None

    def set(self, version: str, state: VersionState, now_s: float, why: str = "", against: str = "") -> VersionChange:
        comparison = None
        if against:
            self.comparisons += 1
            comparison = VersionComparison(against, _Evidence(LossTest(self.comparisons)))
        self.versions[version] = KnownVersion(state, now_s, why, comparison)
        return VersionChange(self.name, version, state, why, against)

    def look(self, sequences: Mapping[str, int], now_s: float) -> Iterator[VersionChange]:
        """Take in the catalogue's versions with their sequences, the newest first and at least one."""
        yield from self._miss(sequences)
        new = [version for version in sequences if version not in self.versions]
        heir = self.one(VersionState.PREVIOUS) or ("" if new else next(iter(sequences)))
        if heir and not self.one(VersionState.CURRENT):
            yield self.set(heir, VersionState.CURRENT, now_s, "the version before it is gone")
        if new:
            yield from self._follow(new, sequences, now_s)
        yield from self._end(now_s)

    def _miss(self, here: Collection[str]) -> Iterator[VersionChange]:
        """Do without versions that are not in the catalogue any more; one that comes back is new unless retired."""
        gone = [version for version in self.versions if version not in here]
        for version in gone:
            if self.versions[version].state is not VersionState.RETIRED:
                del self.versions[version]
                yield VersionChange(self.name, version, VersionState.RETIRED, "it is no longer in the catalogue")
        for version in [version for version in gone if version in self.versions][:-MAX_RETIRED]:
            del self.versions[version]

    def _follow(self, new: list[str], sequences: Mapping[str, int], now_s: float) -> Iterator[VersionChange]:
        """Let the newest version follow the current one, or where nothing is known yet the one before it."""
        newest, *others = new
        before, previous = self.one(VersionState.CURRENT), self.one(VersionState.PREVIOUS)
        if before and sequences[newest] < sequences[before]:
            newest, others = before, new
        else:
            if previous and self.comparison is not None and not self.comparison.test.texts:
                before, previous = previous, before  # which nobody has drafted with: perhaps it cannot be loaded
            if not before and others:
                before, *others = others
            if previous:
                yield self.set(previous, VersionState.RETIRED, now_s, f"{newest} is newer")
            if before:
                yield self.set(before, VersionState.PREVIOUS, now_s, f"{newest} is newer")
            yield self.set(newest, VersionState.CURRENT, now_s, against=before)
        for version in others:
            yield self.set(version, VersionState.RETIRED, now_s, f"{newest} is newer")

    def _end(self, now_s: float) -> Iterator[VersionChange]:
        """End a comparison that has shown nothing, or whose other version is gone."""
        current, previous, comparison = self.one(VersionState.CURRENT), self.one(VersionState.PREVIOUS), self.comparison
        if previous and comparison is not None:
            test, compared_s = comparison.test, now_s - self.versions[previous].since_s
            if test.texts < COMPARED_TEXTS and compared_s < COMPARED_S:
                return
            self.versions[current].why = f"hits {test.difference:+.3f} against {previous} in {test.texts} texts"
            yield self.set(previous, VersionState.RETIRED, now_s, f"{current} is not shown to be worse")
        self.versions[current].comparison = None

    def decide(self, now_s: float) -> Iterator[VersionChange]:
        """Let the previous version return where the current one is shown to be worse."""
        comparison = self.comparison
        if comparison is not None and (why := comparison.loss):
            current = self.one(VersionState.CURRENT)
            yield self.set(current, VersionState.RETIRED, now_s, why)
            yield self.set(comparison.against, VersionState.CURRENT, now_s, f"{current} turned out worse")


class DrafterVersions:
    """The versions of all drafters of a catalogue, in one event loop."""

    def __init__(self) -> None:
        self._lines: dict[str, _Line] = {}

    def look(self, offered: Iterable[tuple[str, str, int]], now_s: float) -> list[VersionChange]:
        """Take in the catalogue's names, versions and sequences, the newest of a name first; return what changed."""
        by_name: defaultdict[str, dict[str, int]] = defaultdict(dict)
        for name, version, sequence in offered:
            by_name[name].setdefault(version, sequence)
        changes: list[VersionChange] = []
        for name, sequences in by_name.items():
            changes += self._lines.setdefault(name, _Line(name)).look(sequences, now_s)
        return changes

    def state(self, name: str, version: str) -> VersionState | None:
        """Return the state of a version; None: it has never been in the catalogue."""
        known = self._lines[name].versions.get(version) if name in self._lines else None
        return known.state if known is not None else None

    def share(self, name: str, version: str, edges: int) -> float:
        """Return the share of edges that are offered a version, 0 to 1, where `edges` are known."""
        state = self.state(name, version)
        if state is VersionState.PREVIOUS:
            # In steps, since edges load and drop a version whenever its share changes.
            return next(share for share in (SHARE, 0.25, 0.5, 1.0) if share * edges >= MIN_EDGES or share == 1.0)
        return 1.0 if state is VersionState.CURRENT else 0.0

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
            key: name of the edge's key, without whose texts a loss must show, too; empty: there is no other.
        """
        if not voter:
            return []
        of = {(each.drafter, each.drafter_version): each for each in hits}
        changes: list[VersionChange] = []
        names = dict.fromkeys(name for name, _ in of)
        for line in [self._lines[name] for name in names if name in self._lines]:
            if (comparison := line.comparison) is None:
                continue
            current, against = line.one(VersionState.CURRENT), comparison.against
            own, other = of.get((line.name, current)), of.get((line.name, against))
            if own and other and _paired(own, other) and comparison.admit(voter, key, now_s, votes_a_day):
                comparison.add(own, other, prompt_class, key)
                changes += line.decide(now_s)
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
                "comparisons": line.comparisons,
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
            restored = lines[str(name)] = _Line(str(name), int(line["comparisons"]))
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
