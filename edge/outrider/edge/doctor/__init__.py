"""`outrider doctor`: is everything between this machine and the target as it should be, and if not, what to do.

finding     what one check found: outcome, message, remedy, metrics
connection  the way to a server: name, port, certificate, health
agreement   lease, tokenizer, session, releases, clocks; the visit, which knows what the checks have found
speed       drafter, drafting, round trip, rate, a whole text
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from outrider.edge.config import EdgeConfig
from outrider.edge.doctor import agreement, connection, speed
from outrider.edge.doctor.agreement import Visit
from outrider.edge.doctor.connection import Endpoint
from outrider.edge.doctor.finding import LOG, Finding, Outcome, failed, skipped

__all__ = ["Examined", "Finding", "Outcome", "examine"]

log = logging.getLogger(__name__)

Role = Callable[[Visit], Endpoint | None]


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its name, what it does, and which checks must not have failed before it."""

    name: str
    run: Callable[[Visit], Awaitable[Finding]]
    needs: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Examined:
    """A check that was made, and what it found."""

    check: str
    finding: Finding

    def record(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        found = self.finding
        words = {"check": self.check, "outcome": found.outcome.value, "message": found.message, "remedy": found.remedy}
        return words | {"metrics": dict(found.metrics)}


async def examine(config: EdgeConfig, report: Callable[[Examined], None] = lambda _: None) -> list[Examined]:
    """Make every check, calling `report` after each; a check that needs a failed one is skipped and says so."""
    visit = Visit.begin(config)
    examined: list[Examined] = []
    failures: dict[str, str] = {}  # by check: the failed one that kept it from being made, or itself
    try:
        for check in _checks(visit):
            cause = next((failures[need] for need in check.needs if need in failures), "")
            finding = skipped(f"{cause} failed") if cause else await _run(check, visit)
            if finding.outcome is Outcome.FAILED or cause:
                failures[check.name] = cause or check.name
            examined.append(Examined(check.name, finding))
            report(examined[-1])
    finally:
        await visit.close()
    return examined


async def _run(check: Check, visit: Visit) -> Finding:
    try:
        return await check.run(visit)
    except Exception as error:  # a check's top: its defect must not hide what the others find
        log.exception("the check %r broke", check.name)
        return failed(f"the check itself broke: {type(error).__name__}: {error}", LOG)


def _checks(visit: Visit) -> tuple[Check, ...]:
    if visit.coordinator is None:
        return (*_connection_checks("verifier", _verifier), *_session_checks("verifier answers"))
    return (
        *_connection_checks("coordinator", _coordinator),
        Check("lease", agreement.open_lease, ("coordinator answers",)),
        *_connection_checks("verifier", _verifier, "lease"),
        *_session_checks("verifier answers"),
    )


def _connection_checks(role: str, at: Role, *first: str) -> tuple[Check, ...]:
    """Return the checks from the name to the service, each of which needs the one before."""
    return (
        Check(f"{role} name", _at_endpoint(connection.resolve_name, at), first),
        Check(f"{role} port", _at_endpoint(connection.connect_port, at), (f"{role} name",)),
        Check(f"{role} TLS", _at_endpoint(connection.inspect_tls, at), (f"{role} port",)),
        Check(f"{role} answers", _at_endpoint(connection.check_health, at), (f"{role} TLS",)),
    )


def _session_checks(reached: str) -> tuple[Check, ...]:
    """Return the checks of what edge and cloud do with each other once the verifier is reached."""
    return (
        Check("tokenizer", agreement.compare_tokenizers, (reached,)),
        Check("session opens", agreement.open_session, ("tokenizer",)),
        Check("releases", agreement.compare_releases, ("session opens",)),
        Check("drafter", speed.load_drafter, ("tokenizer",)),
        Check("drafting", speed.time_drafting, ("drafter",)),
        Check("clock", agreement.compare_clocks, (reached,)),
        Check("round trip", _time_round_trips, (reached,)),
        Check("rate", speed.measure_rates, (reached,)),
        Check("text", speed.decode_text, ("session opens", "drafter")),
    )


def _at_endpoint(look: Callable[[Endpoint], Awaitable[Finding]], at: Role) -> Callable[[Visit], Awaitable[Finding]]:
    async def run(visit: Visit) -> Finding:
        endpoint = at(visit)
        if endpoint is None or (at is _verifier and endpoint is visit.coordinator):
            return skipped("the coordinator relays the sessions, so the edge never meets the verifier")
        return await look(endpoint)

    return run


async def _time_round_trips(visit: Visit) -> Finding:
    assert visit.verifier is not None  # noqa: S101 - needed by this check
    return await speed.time_round_trips(visit.verifier)


def _coordinator(visit: Visit) -> Endpoint | None:
    return visit.coordinator


def _verifier(visit: Visit) -> Endpoint | None:
    return visit.verifier
