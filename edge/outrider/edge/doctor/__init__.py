"""`outrider doctor`: checks of everything between this machine and the target, and what to do about what they find.

finding           what one check found: outcome, message, remedy, metrics
connection_check  the way to a server: name, port, certificate, health
agreement         lease, tokenizer, session, releases, clocks; the visit, which knows what the checks have found
speed             drafter, drafting, round trip, rate, a whole text
"""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace

from outrider.edge.doctor import agreement, connection_check, speed
from outrider.edge.doctor.agreement import Visit
from outrider.edge.doctor.connection_check import Endpoint
from outrider.edge.doctor.finding import LOG, Finding, Outcome, failed, skipped
from outrider.edge.edge_config import EdgeConfig

__all__ = ["Finding", "Outcome", "examine"]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Check:
    """One check: its name, what it does, and which checks must not have failed before it."""

    name: str
    run: Callable[[Visit], Awaitable[Finding]]
    needs: tuple[str, ...] = ()


async def examine(config: EdgeConfig, report: Callable[[Finding], None] = lambda _: None) -> list[Finding]:
    """Make every check, calling `report` after each; a check that needs a failed one is skipped and says so."""
    visit = Visit.begin(config)
    findings: list[Finding] = []
    failures: dict[str, str] = {}  # by check: the failed one that kept it from being made, or itself
    try:
        for check in _checks("coordinator" in visit.endpoints):
            cause = next((failures[need] for need in check.needs if need in failures), "")
            finding = skipped(f"{cause} failed") if cause else await _run(check, visit)
            if finding.outcome is Outcome.FAILED or cause:
                failures[check.name] = cause or check.name
            findings.append(replace(finding, check=check.name))
            report(findings[-1])
    finally:
        await visit.close()
    return findings


async def _run(check: Check, visit: Visit) -> Finding:
    try:
        return await check.run(visit)
    except Exception as error:  # a check's top: its defect must not hide what the others find
        log.exception("the check %r broke", check.name)
        return failed(f"the check itself broke: {type(error).__name__}: {error}", LOG)


def _checks(coordinated: bool) -> tuple[Check, ...]:
    reached = ("verifier answers",)
    to_the_verifier = _connection_checks("verifier")
    if coordinated:
        to_the_verifier = (
            *_connection_checks("coordinator"),
            Check("lease", agreement.open_lease, ("coordinator answers",)),
            *_connection_checks("verifier", "lease"),
        )
    return (
        *to_the_verifier,
        Check("tokenizer", agreement.compare_tokenizers, reached),
        Check("session opens", agreement.open_session, ("tokenizer",)),
        Check("releases", agreement.compare_releases, ("session opens",)),
        Check("drafter", speed.load_drafter, ("tokenizer",)),
        Check("drafting", speed.time_drafting, ("drafter",)),
        Check("clock", agreement.compare_clocks, reached),
        Check("round trip", speed.time_round_trips, reached),
        Check("rate", speed.measure_rates, reached),
        Check("text", speed.decode_text, ("session opens", "drafter")),
    )


def _connection_checks(role: str, *first: str) -> tuple[Check, ...]:
    """Return the checks from the name to the service, each of which needs the one before."""

    def at_endpoint(look: Callable[[Endpoint], Awaitable[Finding]]) -> Callable[[Visit], Awaitable[Finding]]:
        async def run(visit: Visit) -> Finding:
            endpoint = visit.endpoints[role]
            if endpoint.role != role:
                return skipped("the coordinator relays the sessions, so the edge never meets the verifier")
            return await look(endpoint)

        return run

    return (
        Check(f"{role} name", at_endpoint(connection_check.resolve_name), first),
        Check(f"{role} port", at_endpoint(connection_check.connect_port), (f"{role} name",)),
        Check(f"{role} TLS", at_endpoint(connection_check.inspect_tls), (f"{role} port",)),
        Check(f"{role} answers", at_endpoint(connection_check.check_health), (f"{role} TLS",)),
    )
