"""The drafters of one text, and its prefixes in them; when a kept session takes others."""

from __future__ import annotations

import time
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import Self

import numpy as np

from outrider.drafters.proposals import ProposalRule
from outrider.drafters.protocol import Drafter, DraftState
from outrider.drafters.shelf import ComingPrefix
from outrider.proto.session import (
    CatchUpJob,
    CaughtUp,
    Drafted,
    DrafterName,
    DrafterSteering,
    DraftJob,
    Selection,
    TeacherForced,
)
from outrider.proto.types import MAX_TOKEN_ID, DraftToken, SteeringRequest

_IDS = {int, np.int32, np.int64, np.uint32}
_NUMBERS = {float, int, np.float32, np.float64}


@dataclass(frozen=True, slots=True)
class TextDrafters:
    """Drafters that a text begins with.

    Attributes:
        drafters: in the order of `selection`.
        selection: selection among them; None: there are none.
        offered: name and version of each drafter that the edge had then, loaded or not.
        steering: steering of the one that takes vectors; None: none does.
        steering_request: request for these vectors.
    """

    drafters: tuple[Drafter, ...]
    selection: Selection | None
    offered: tuple[DrafterName, ...]
    steering: DrafterSteering | None = None
    steering_request: SteeringRequest | None = None

    def with_those_of(self, previous: tuple[Drafter, ...]) -> Self:
        """Return these with the drafters of `previous` in the place of equal versions: they have read the text."""
        known = {name_of(drafter): drafter for drafter in previous}
        return replace(self, drafters=tuple([known.get(name_of(drafter), drafter) for drafter in self.drafters]))


def name_of(drafter: Drafter) -> DrafterName:
    """Return name and version of a drafter."""
    return drafter.name, drafter.version


class DrafterStates:
    """States of a text's drafters, by name and version, each opened by its first job; all in the drafting thread.

    Attributes:
        rule: rule that all of them follow from their next jobs on; any thread may set it.
    """

    def __init__(self, rule: ProposalRule) -> None:
        self.rule = rule
        self._states: dict[DrafterName, tuple[DraftState, ProposalRule]] = {}  # and the rule that each follows

    def do(self, job: DraftJob | CatchUpJob, drafter: Drafter) -> Drafted | CaughtUp:
        """Do a job of this drafter; raises whatever a drafter may, and `TypeError` for what are no proposals."""
        state = self._state(drafter, wait=not isinstance(job, DraftJob) or job.teacher_forced > 0)
        began = time.monotonic()
        state.truncate(job.truncate_to)
        if isinstance(job, DraftJob):
            return _propose(state, job, began)
        return _catch_up(state, job, began)

    def close(self, kept: Collection[DrafterName] = ()) -> None:
        """Close the states of all drafters but those `kept`."""
        for name in [name for name in self._states if name not in kept]:
            self._states.pop(name)[0].close()

    def _state(self, drafter: Drafter, *, wait: bool) -> DraftState:
        """Return the drafter's state; while it loads a prefix that proposes nothing, unless told to `wait`."""
        rule, name = self.rule, name_of(drafter)
        if name not in self._states:
            self._states[name] = drafter.open(rule), rule
        state, followed = self._states[name]
        if followed is not rule:
            state.follow(rule)
        if isinstance(state, ComingPrefix):
            state = state.read(wait=wait)
        self._states[name] = state, rule
        return state


def _propose(state: DraftState, job: DraftJob, began: float) -> Drafted:
    if job.steer is not None:
        state.steer(job.steer.vector, job.steer.since)
    end = job.skip + job.teacher_forced
    state.extend(job.extend_with[: job.skip])
    forced = state.propose_forced(job.extend_with[job.skip : end]) if job.teacher_forced else ()
    state.extend(job.extend_with[end:])
    drafts = state.propose(job.count) if job.count else ()
    _check(forced, job.teacher_forced, job.teacher_forced)
    _check(drafts, 0, job.count)
    return Drafted(job, drafts, time.monotonic() - began, TeacherForced(forced))


def _catch_up(state: DraftState, job: CatchUpJob, began: float) -> CaughtUp:
    state.extend(job.tokens[: job.skip])
    scored = job.skip + job.score
    log_q = tuple(state.score(job.tokens[job.skip : scored]).tolist()) if job.score else ()
    drafts = state.propose_forced(job.tokens[scored:]) if job.tokens[scored:] else ()
    if len(log_q) != len(job.tokens[job.skip : scored]) or not {*map(type, log_q)} <= _NUMBERS:
        raise TypeError("the drafter's scores are not one number a token")
    _check(drafts, len(job.tokens[scored:]), len(job.tokens[scored:]))
    return CaughtUp(job, TeacherForced(drafts, log_q), time.monotonic() - began)


def _check(drafts: tuple[DraftToken, ...], least: int, most: int) -> None:
    """Refuse what a drafter, which may be anybody's code, gives for proposals; raises `TypeError`."""
    if not isinstance(drafts, tuple) or not least <= len(drafts) <= most:
        raise TypeError(f"the drafter did not propose a tuple of {least} to {most} tokens")
    for draft in drafts:
        if not isinstance(draft, DraftToken) or not isinstance(draft.runners_up, tuple):
            raise TypeError("the drafter's proposals are not all of type DraftToken")
        if not {type(draft.id), *map(type, draft.runners_up)} <= _IDS or not -1 <= draft.id <= MAX_TOKEN_ID:
            raise TypeError("the drafter's proposals are not all token ids")
        if not {*map(type, draft[1:3])} <= _NUMBERS:
            raise TypeError("the drafter's probabilities are not all numbers")
