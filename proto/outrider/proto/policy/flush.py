"""When the edge sends its drafts: one message just in time for a step, not one for every token."""

from __future__ import annotations

import math

MESSAGE_BYTES = 45  # a small Draft on the wire: HTTP/2 framing, a window update, gRPC's prefix, the message
_MIN_TOKENS = 0.2  # replayed: 40 % fewer bytes at round trips of 30 to 120 ms for 0.2 % of speed


def due_to_flush(now: float, *, commit_at: float, round_trip_s: float, step_s: float, next_s: float) -> bool:
    """Return whether drafts must leave now to be in time for the next step that they can reach.

    The step of the last commit ended about round_trip_s / 2 before the commit came, and a verifier that runs ahead
    begins one every step_s; a message is round_trip_s / 2 on its way. So there is a deadline every step_s, at
    commit_at - round_trip_s + j step_s, and drafts may be held while the next look at them comes before it.

    Args:
        now: present time on the edge's clock, in seconds.
        commit_at: arrival of the last commit on that clock, in seconds.
        round_trip_s: round-trip time of a small message, in seconds.
        step_s: duration of the verifier's step, in seconds; 0: unknown, and drafts are always due.
        next_s: time until the next look, in seconds.
    """
    if not step_s:
        return True
    since = now - (commit_at - round_trip_s)
    deadline = math.ceil(since / step_s) * step_s
    return since + next_s > deadline


def worth_a_message(expected_tokens: float, *, step_s: float, byte_s: float) -> bool:
    """Return whether further drafts of a chain already sent are worth a message of their own now.

    Args:
        expected_tokens: expected number of accepted drafts; each saves a step.
        step_s: duration of the verifier's step, in seconds; 0: unknown.
        byte_s: time of a byte on the uplink, in seconds.
    """
    return expected_tokens >= _MIN_TOKENS and expected_tokens * step_s >= MESSAGE_BYTES * byte_s
