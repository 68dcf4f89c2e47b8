"""Which release each side runs."""

from __future__ import annotations

from outrider.edge.doctor.finding import Figure, Finding, ok, warning
from outrider.edge.doctor.visit import Visit
from outrider.proto.release import UNKNOWN, release
from outrider.proto.types import PROTOCOL_VERSION


async def compare(visit: Visit) -> Finding:
    """Of edge, coordinator and verifier. That they speak one protocol is known: else there was no lease, no session."""
    releases = {"edge": release()}
    if visit.lease is not None:
        releases["coordinator"] = visit.lease.release or UNKNOWN
    if visit.opened is not None:
        releases["verifier"] = visit.opened.release or UNKNOWN
    figures: dict[str, Figure] = {"protocol": float(PROTOCOL_VERSION), **releases}
    said = ", ".join(f"{part} {version}" for part, version in releases.items())
    words = f"protocol {PROTOCOL_VERSION} on all sides; {said}"
    if len(set(releases.values())) > 1:
        return warning(
            words, "they understand each other; `pip install --upgrade outrider` makes them alike", **figures
        )
    return ok(words, **figures)
