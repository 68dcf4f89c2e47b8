"""Cost and yield of a round: draft, send, be verified, begin again (Leviathan et al. 2023)."""

from __future__ import annotations

import itertools
import operator

from outrider.proto.policy.window import TOKEN_BYTES, EdgeView


def waiting_s(view: EdgeView) -> float:
    """Return seconds of a round without drafts: the round trip, and a step with the row of the committed token."""
    return view.round_trip_s + view.step_s + view.row_s


def draft_s(view: EdgeView) -> float:
    """Return seconds that each draft adds to a round: drafting it, its row in a step, its bytes on the uplink."""
    return view.drafting_s + view.row_s + TOKEN_BYTES * view.byte_s


def expected_in_flight(view: EdgeView) -> float:
    """Return the mean number of drafts in flight that will be accepted, the sum of the chances of all up to each.

    Where only the chance of all is known, s for n drafts, the one up to draft j is taken as s^(j/n).
    """
    if len(view.chances) == view.in_flight:
        return sum(itertools.accumulate(view.chances, operator.mul))
    return sum(view.survival ** (j / view.in_flight) for j in range(1, view.in_flight + 1))
