"""Whether this machine's clock agrees with the coordinator's, and runs evenly."""

from __future__ import annotations

import time

from outrider.edge.doctor.finding import Finding, ok, skipped, warning
from outrider.edge.doctor.visit import Visit
from outrider.proto.errors import Unauthenticated
from outrider.proto.lease import CLOCK_SKEW_S, expiry_s

STEP_S = 0.5  # that a clock may move against the monotonic one during a visit


async def compare(visit: Visit) -> Finding:
    """No protocol message carries a time of day, but a lease says when it ends and how long it lasts.

    Texts need no clock of the edge. Certificates do, and a wrong one here often means a wrong one elsewhere.
    """
    step_s = (time.time() - visit.began_wall_s) - (time.monotonic() - visit.began_s)
    if abs(step_s) > STEP_S:
        return warning(
            f"this machine's clock was moved by {step_s:+.1f} s during these checks",
            "something sets it in steps: `timedatectl timesync-status`, or see `chronyc tracking`",
            step_s=step_s,
        )
    if visit.lease is None:
        return skipped("it runs evenly; a verifier says nothing of its own clock, and texts need none")
    try:
        issued_s = expiry_s(visit.lease.token) - visit.lease.expires_in_s
    except Unauthenticated as error:
        return skipped(f"it runs evenly; the coordinator's cannot be told, since the lease {error.message}")
    before, after = visit.leased_between
    ahead_s = max(0.0, before - issued_s) or min(0.0, after - issued_s)  # 0: within the time that the call took
    words = f"within {max(after - before, 0.001):.3f} s of the coordinator's, and it runs evenly"
    if abs(ahead_s) > CLOCK_SKEW_S:
        return warning(
            f"this machine's clock is {abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the coordinator's",
            "set both by NTP: `timedatectl set-ntp true`",
            ahead_s=ahead_s,
        )
    if ahead_s:
        words = (
            f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the coordinator's, which does not matter"
        )
    return ok(words, ahead_s=ahead_s)
