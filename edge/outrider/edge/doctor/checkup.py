"""Which checks there are, what each needs, and all of them in order."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from outrider.edge.config import EdgeConfig
from outrider.edge.doctor import (
    admission,
    answers,
    certificates,
    clocks,
    drafters,
    leases,
    names,
    ports,
    rates,
    releases,
    round_trips,
    texts,
    tokenizers,
)
from outrider.edge.doctor.endpoint import Endpoint
from outrider.edge.doctor.finding import Finding, Outcome, failed, skipped
from outrider.edge.doctor.remedies import LOG
from outrider.edge.doctor.visit import Visit

log = logging.getLogger(__name__)

Role = Callable[[Visit], Endpoint | None]


@dataclass(frozen=True, slots=True)
class Check:
    """One check: what it is called, what it does, and which checks must not have failed before it."""

    name: str
    run: Callable[[Visit], Awaitable[Finding]]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Examined:
    """A check that was made, and what it found."""

    check: str
    finding: Finding

    def record(self) -> dict[str, Any]:
        """As a JSON object."""
        found = self.finding
        words = {"check": self.check, "outcome": found.outcome.value, "message": found.message, "remedy": found.remedy}
        return words | {"figures": dict(found.figures)}


async def examine(config: EdgeConfig, tell: Callable[[Examined], None] = lambda _: None) -> list[Examined]:
    """Make every check; `tell` hears of each as it is done. A check that needs a failed one is skipped and says so."""
    visit = Visit.begin(config)
    examined: list[Examined] = []
    failures: dict[str, str] = {}  # by check: the failed one that kept it from being made, or itself
    try:
        for check in _checks(visit):
            cause = next((failures[need] for need in check.needs if need in failures), "")
            finding = skipped(f"{cause} failed") if cause else await _made(check, visit)
            if finding.outcome is Outcome.FAILED or cause:
                failures[check.name] = cause or check.name
            examined.append(Examined(check.name, finding))
            tell(examined[-1])
    finally:
        await visit.close()
    return examined


async def _made(check: Check, visit: Visit) -> Finding:
    try:
        return await check.run(visit)
    except Exception as error:  # a check's top: its defect must not hide what the others find
        log.exception("the check %r broke", check.name)
        return failed(f"the check itself broke: {type(error).__name__}: {error}", LOG)


def _checks(visit: Visit) -> tuple[Check, ...]:
    if visit.coordinator is None:
        return (*_on_the_way("verifier", _verifier), *_together("verifier answers"))
    return (
        *_on_the_way("coordinator", _coordinator),
        Check("lease", leases.lease, ("coordinator answers",)),
        *_on_the_way("verifier", _verifier, "lease"),
        *_together("verifier answers"),
    )


def _on_the_way(role: str, at: Role, *first: str) -> tuple[Check, ...]:
    """From the name to the service, each step on the one before."""
    return (
        Check(f"{role} name", _looking(names.resolve, at), first),
        Check(f"{role} port", _looking(ports.connect, at), (f"{role} name",)),
        Check(f"{role} TLS", _looking(certificates.inspect, at), (f"{role} port",)),
        Check(f"{role} answers", _looking(answers.answer, at), (f"{role} TLS",)),
    )


def _together(reached: str) -> tuple[Check, ...]:
    """What edge and cloud do with each other once the verifier is reached."""
    return (
        Check("tokenizer", tokenizers.compare, (reached,)),
        Check("session opens", admission.admit, ("tokenizer",)),
        Check("releases", releases.compare, ("session opens",)),
        Check("drafter", drafters.load, ("tokenizer",)),
        Check("drafting", drafters.draft, ("drafter",)),
        Check("clock", clocks.compare, (reached,)),
        Check("round trip", _measuring, (reached,)),
        Check("rate", rates.measure, (reached,)),
        Check("text", texts.decode, ("session opens", "drafter")),
    )


def _looking(look: Callable[[Endpoint], Awaitable[Finding]], at: Role) -> Callable[[Visit], Awaitable[Finding]]:
    async def run(visit: Visit) -> Finding:
        endpoint = at(visit)
        if endpoint is None or (at is _verifier and endpoint is visit.coordinator):
            return skipped("the coordinator relays the sessions, so the edge never meets the verifier")
        return await look(endpoint)

    return run


async def _measuring(visit: Visit) -> Finding:
    assert visit.verifier is not None  # noqa: S101 - needed by this check
    return await round_trips.measure(visit.verifier)


def _coordinator(visit: Visit) -> Endpoint | None:
    return visit.coordinator


def _verifier(visit: Visit) -> Endpoint | None:
    return visit.verifier
