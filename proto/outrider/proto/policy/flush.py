"""When the edge sends what it has drafted: one message just in time for a step, not one for every token."""

from __future__ import annotations

import math

MESSAGE_BYTES = 45  # of a small Draft on the wire: HTTP/2 framing, a window update, gRPC's prefix, the message
_MIN_TOKENS = 0.2  # replayed: 40 % fewer bytes at round trips of 30 to 120 ms for 0.2 % of speed


def due_to_flush(now: float, *, commit_at: float, round_trip_s: float, step_s: float, next_s: float) -> bool:
    """Whether drafts must leave now to be in time for the next step that they can reach.

    The step of the last commit ended about round_trip_s / 2 before the commit came, and a verifier that runs ahead
    begins one every step_s; a message is round_trip_s / 2 on its way. So there is a deadline every step_s, at
    commit_at - round_trip_s + j step_s, and drafts may be held while the next look at them comes before it.

    Args:
        now: on the edge's clock, seconds.
        commit_at: when the last commit came, same clock.
        round_trip_s: of a small message and its answer.
        step_s: of the verifier; 0: not known, which is always due.
        next_s: until the next look.
    """
    if not step_s:
        return True
    since = now - (commit_at - round_trip_s)
    deadline = math.ceil(since / step_s) * step_s
    return since + next_s > deadline


def worth_a_message(expected_tokens: float, *, step_s: float, byte_s: float) -> bool:
    """Whether drafts that go on a chain already sent are worth a message of their own now.

    Args:
        expected_tokens: of them that will probably be accepted; each saves a step.
        step_s: of the verifier; 0: not known.
        byte_s: a byte on the uplink, seconds.
    """
    return expected_tokens >= _MIN_TOKENS and expected_tokens * step_s >= MESSAGE_BYTES * byte_s
