"""Copies and canonical forms of the states of a small world, whose measurements stand still."""

from __future__ import annotations

import enum
import marshal
from collections import deque
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from functools import cache
from typing import Any

from outrider.proto.session import DraftJob
from outrider.proto.session.both_ends import BothEnds
from outrider.proto.types import DraftToken, Open, Opened, Sampling

# Classes that decide nothing here: constants, counts, and what has been measured.
UNSEEN = frozenset(
    """Rules VerifierRules Measurements Smoothed Acceptance Calibration TextCalibration MissShares OtherShares
    Window EdgeStatistics Timing RetryRules VerifierArm Owner DraftingHere AtOnce Future AnyDrafter
    StaticSelector TargetFacts Report SentMessages Interned""".split()  # noqa: SIM905 - a list to read
)
UNSEEN_FIELDS = {
    "EdgeStream": "opened_at _retries _losses _losing_since",  # too many losses for a small world
    "Meter": "idle_s _has_commit _round_trip _mine _calibrations",
    "Selection": "_num_decided _new_hits _scored _new_scores _view _due",
    "EdgeSession": "_last_job_s _job_tokens _allowed _allowed_to _worth _committed",
    "DraftTree": "epoch _job_s",
    "Commit": "verified verified_here verified_beside cached_tokens accepted_here accepted",
    "Verified": "beside",
    "VerifierSession": "ready_since _plan _newest_arrival _messages_received cached_tokens _recent_tokens _recent_s",
    "ReceivedDrafts": "since_miss missed_at _commits branched branch_drafts",
    "BothEnds": "_idle _kept _view _division seconds _missed _epoch",
    "LocalJob": "chance survival min_survival",
    "Slot": "ready_since began masks_by",
    "GrammarMatcher": "_fresh _threads _left_s",
    "SmallEdge": "now",
}
TIMES = frozenset({"_failing_since", "commit_at"})


# --- copies ---


def clone(value: Any, met: dict[int, Any]) -> Any:
    """Return a copy of a part of a world; what cannot change is shared with it. `met` holds the copies so far."""
    how = copier_of(value.__class__)
    if how is None:
        return value
    copy = met.get(id(value))
    return copy if copy is not None else how(value, met)


def _list(value: list[Any], met: dict[int, Any]) -> Any:
    copy = met[id(value)] = [clone(each, met) for each in value]
    return copy


def _tuple(value: tuple[Any, ...], met: dict[int, Any]) -> Any:
    return tuple([clone(each, met) for each in value])


def _dict(value: dict[Any, Any], met: dict[int, Any]) -> Any:
    copy = met[id(value)] = {clone(key, met): clone(each, met) for key, each in value.items()}
    return copy


def _shallow(value: Any, met: dict[int, Any]) -> Any:
    copy = met[id(value)] = value.copy()
    return copy


@cache
def copier_of(kind: type) -> Callable[[Any, dict[int, Any]], Any] | None:
    """Return how objects of a class are copied; None: they are shared."""
    known = {list: _list, tuple: _tuple, dict: _dict, set: _shallow, deque: _shallow}
    if kind in known:
        return known[kind]
    fixed = kind.__module__ in ("builtins", "numpy") or issubclass(kind, (enum.Enum, tuple, BaseException))
    frozen = is_dataclass(kind) and kind.__dataclass_params__.frozen
    if fixed or frozen or kind.__name__ in UNSEEN:
        return None
    slots = names_in(kind)

    def copy_of(value: Any, met: dict[int, Any]) -> Any:
        copy = met[id(value)] = object.__new__(kind)
        if hasattr(value, "__dict__"):
            held = copy.__dict__
            for name, each in value.__dict__.items():
                held[name] = clone(each, met)
        else:
            for name in slots:
                object.__setattr__(copy, name, clone(getattr(value, name), met))
        return copy

    return copy_of


def names_in(kind: type) -> tuple[str, ...]:
    """Return the names of what objects of a class with fields or slots hold."""
    if is_dataclass(kind):
        return tuple(each.name for each in fields(kind))
    return tuple(name for base in reversed(kind.__mro__) for name in getattr(base, "__slots__", ()))


# --- canonical forms ---


class Canon:
    """The form that equal states share: times count from now, chains from the newest of their maker."""

    def __init__(self, part: Any) -> None:
        edge = getattr(part, "edge", None)
        self._now = getattr(part, "now", 0.0)
        self._epochs = [edge._tree.epoch if edge is not None else 0]
        self._met: dict[int, int] = {}

    def of(self, value: Any) -> Any:
        """Return plain tuples, strings and numbers."""
        kind = value.__class__
        if kind in (int, str, bool, bytes) or value is None:
            return value
        if kind is float:
            return value if value == value else "nan"
        if kind is tuple or kind is list:
            return tuple([self.of(each) for each in value])
        if kind is dict:
            return tuple([(self.of(key), self.of(each)) for key, each in value.items()])
        how = form_of(kind)
        return None if how is None else how(self, value)

    def object(self, value: Any, names: tuple[str, ...]) -> Any:
        """Return what an object holds; of one that was met before, where."""
        met = self._met.setdefault(id(value), len(self._met))
        if met < len(self._met) - 1:
            return "met", met
        form = [self._now - getattr(value, name) if name in TIMES else self.of(getattr(value, name)) for name in names]
        return value.__class__.__name__, tuple(form)

    def job(self, job: DraftJob) -> Any:
        """Return a job, and whether its chain lives."""
        return tuple([self.of(getattr(job, name)) for name in JOB]), job.epoch == self._epochs[-1]

    def draft(self, draft: DraftToken) -> Any:
        """Return a draft, whose probabilities nobody knows here."""
        return draft.id, draft.runners_up, draft.other

    def frozen(self, value: Any) -> Any:
        """Return the form of something that never changes, found once."""
        known = FROZEN.get(id(value))
        if known is None:
            held = tuple(getattr(value, name) for name in names_in(value.__class__))
            known = FROZEN[id(value)] = value, (value.__class__.__name__, self.of(held))
        return known[1]

    def local(self, local: BothEnds) -> Any:
        """Return the chain of a verifier's own drafter."""
        self._epochs.append(local._epoch)
        found = _by_dict(BothEnds)(self, local)
        self._epochs.pop()
        return found


FROZEN: dict[int, tuple[Any, Any]] = {}  # what never changes, so that it lives on, and its form
JOB = tuple(name for name in names_in(DraftJob) if name != "epoch")


def _by_dict(kind: type) -> Callable[[Canon, Any], Any]:
    unseen = UNSEEN_FIELDS.get(kind.__name__, "").split()
    return lambda canon, value: canon.object(value, tuple([name for name in value.__dict__ if name not in unseen]))


@cache
def form_of(kind: type) -> Callable[[Canon, Any], Any] | None:
    """Return how objects of a class are read; None: they do not count."""
    special: dict[type, Callable[[Canon, Any], Any]] = {
        DraftToken: Canon.draft,
        Open: Canon.frozen,
        Opened: Canon.frozen,
        Sampling: Canon.frozen,
        DraftJob: Canon.job,
        BothEnds: Canon.local,
    }
    if kind in special:
        return special[kind]
    if kind.__name__ in UNSEEN or (kind.__module__ == "builtins" and kind not in (set, frozenset)):
        return None
    if issubclass(kind, (set, frozenset)):
        return lambda canon, value: tuple(sorted(map(canon.of, value)))
    if issubclass(kind, deque | tuple):
        return lambda canon, value: tuple([canon.of(each) for each in value])
    if issubclass(kind, enum.Enum | BaseException):
        return lambda _, value: repr(value)
    if kind.__module__ == "numpy":
        return lambda _, value: value.tobytes()
    unseen = UNSEEN_FIELDS.get(kind.__name__, "").split()
    if names := tuple(name for name in names_in(kind) if name not in unseen):
        return lambda canon, value: canon.object(value, names)
    return _by_dict(kind)


class Interned:
    """Things by number; those of one form have one number."""

    def __init__(self) -> None:
        self._numbers: dict[bytes, int] = {}
        self._things: list[Any] = []

    def __len__(self) -> int:
        return len(self._things)

    def __getitem__(self, number: int) -> Any:
        return self._things[number]

    def number(self, thing: Any) -> int:
        """Return the number of a thing."""
        form = marshal.dumps(Canon(thing).of(thing), 2)
        number = self._numbers.setdefault(form, len(self._things))
        if number == len(self._things):
            self._things.append(thing)
        return number
