"""The members of a cluster of restartable verifiers: their last reports, losses and replacements. Pure."""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

from outrider.coordinator.cluster import VerifierInfo, VerifierState
from outrider.proto.errors import InvalidArgument

logger = logging.getLogger(__name__)

FIRST_BACKOFF_S = 1.0
LONGEST_BACKOFF_S = 60.0


@dataclass(frozen=True, slots=True)
class _Member:
    info: VerifierInfo
    incarnation: str = ""
    earlier: frozenset[str] = frozenset()  # incarnations before this one, whose reports come too late
    leaving: bool = False  # this incarnation drains
    lost: bool = False  # given up by Ray
    respawns: int = 0
    respawn_at_s: float = 0.0


class Roster:
    """Remembers verifiers across polls. Times are seconds of a monotonic clock."""

    def __init__(self) -> None:
        self._members: dict[str, _Member] = {}

    @property
    def infos(self) -> tuple[VerifierInfo, ...]:
        """All verifiers, sorted by name."""
        return tuple(self._members[name].info for name in sorted(self._members))

    @property
    def leaving(self) -> tuple[str, ...]:
        """Names of the verifiers that drain, whose end is intended."""
        return tuple(name for name, member in sorted(self._members.items()) if member.leaving)

    def observe(self, listed: Collection[str], reports: Mapping[str, Mapping[str, Any]]) -> None:
        """Take in one poll.

        A listed verifier without a report is down, and comes back by itself. A verifier that is no longer listed is
        dead for good: lost, unless it was draining, since then it was taken away on purpose.

        Args:
            listed: names that the cluster knows.
            reports: reports of the verifiers that answered, by name, with their `incarnation`.
        """
        for name in sorted({*listed, *self._members}):
            member = self._members.get(name)
            if name in listed:
                self._members[name] = _with_report(name, member, reports.get(name))
            elif member is not None and member.leaving:
                logger.info("verifier %s was drained and is gone", name)
                del self._members[name]
            elif member is not None and not member.lost:
                logger.warning("verifier %s is dead for good", name)
                # `respawn_at_s` stays, so that a verifier that dies while it starts is not started again at once.
                self._members[name] = replace(member, info=member.info.down(), lost=True)

    def to_respawn(self, now_s: float) -> tuple[str, ...]:
        """Return the lost verifiers to replace at time `now_s`, each less and less often until it answers."""
        due = [name for name, m in sorted(self._members.items()) if m.lost and now_s >= m.respawn_at_s]
        for name in due:
            member = self._members[name]
            wait_s = min(FIRST_BACKOFF_S * 2**member.respawns, LONGEST_BACKOFF_S)
            self._members[name] = replace(member, respawns=min(member.respawns + 1, 16), respawn_at_s=now_s + wait_s)
        return tuple(due)

    def drained(self, name: str) -> None:
        """Treat verifier `name` as draining from now on, even if its last report denies it."""
        member = self._members.get(name)
        if member is not None and member.info.state is VerifierState.READY:
            info = replace(member.info, state=VerifierState.DRAINING)
            self._members[name] = replace(member, info=info, leaving=True)


def _with_report(name: str, member: _Member | None, report: Mapping[str, Any] | None) -> _Member:
    before = member or _Member(
        VerifierInfo(name=name, address="", model="", tokenizer_sha256="", state=VerifierState.DOWN)
    )
    if report is None:
        return _silent(before)
    try:
        said = VerifierInfo.from_report(report)
    except InvalidArgument as error:
        logger.warning("verifier %s: %s", name, error)
        return _silent(before)
    if said.name != name:
        # A verifier refuses leases for another name than its own.
        logger.warning("the verifier listed as %s calls itself %s and gets no sessions", name, said.name)
        return _silent(before)
    if said.incarnation in before.earlier:
        logger.warning("verifier %s was replaced, and what its earlier process says comes too late", name)
        return replace(before, info=replace(before.info, fenced=before.info.fenced + 1))
    # A verifier that came back listens elsewhere, so the address can stand for a missing incarnation.
    incarnation = said.incarnation or said.address
    restarted = before.incarnation not in ("", incarnation)
    earlier = before.earlier | {before.incarnation} if restarted and said.incarnation else before.earlier
    if restarted:
        logger.warning("verifier %s was restarted and is at %s", name, said.address)
    # A drain is never taken back, so an answer that denies it is from before.
    leaving = said.state is VerifierState.DRAINING or (before.leaving and not restarted)
    said = replace(said, restarts=before.info.restarts + restarted, fenced=before.info.fenced)
    return _Member(said, incarnation, earlier, leaving)


def _silent(before: _Member) -> _Member:
    if before.info.state is not VerifierState.DOWN:
        logger.warning("verifier %s does not answer", before.info.name)
    # It is listed, hence not lost; `respawns` stays until it answers, or a crash at start would loop fast.
    return replace(before, info=before.info.down(), lost=False)
