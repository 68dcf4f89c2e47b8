"""Steering vectors: their rounding, refusals that name the field, and when a verifier's session wants one."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest
from checked_simulation import open_frame, rules
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from outrider.proto.errors import InvalidArgument
from outrider.proto.session.verifier import Verified, VerifierSession
from outrider.proto.steering_vector import decode, encode
from outrider.proto.types import (
    CommittedToken,
    Continue,
    Draft,
    DraftToken,
    FinishReason,
    Report,
    Sampling,
    Steering,
    SteeringPrecision,
)
from outrider.proto.types import SteeringRequest as Request

FLOAT16, INT8 = SteeringPrecision.FLOAT16, SteeringPrecision.INT8
MINE, OTHER = "0123456789ab", "ba9876543210"
HALF_TINY = 2.0**-25  # half the distance of neighbours among the smallest float16

quick = settings(max_examples=100, deadline=None, derandomize=True)
finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
vectors = st.integers(0, 96).flatmap(
    lambda rank: arrays(np.float32, rank, elements=finite | st.floats(-4, 4, width=32))
)


# === numbers and bytes ==========================================================================================


@quick
@given(vectors)
def test_int8_is_off_by_half_a_step_at_most(vector):
    steering = encode(vector, INT8)
    error = np.abs(decode(steering, len(vector)).astype(float) - vector)
    steps = np.abs(np.frombuffer(steering.values, np.int8))
    assert (error <= steering.scale / 2 * (1 + 1e-5)).all()
    assert len(steering.values) == len(vector)
    if len(vector) and np.abs(vector).max() > 1e-30:
        assert steps.max() == 127, "the whole range is used"


@quick
@given(vectors)
def test_float16_is_off_by_its_own_rounding_at_most(vector):
    steering = encode(vector, FLOAT16)
    error = np.abs(decode(steering, len(vector)).astype(float) - vector)
    assert (error <= np.abs(vector) * (2.0**-11 + 2.0**-22) + HALF_TINY * steering.scale).all()
    assert steering.scale == 1 or np.abs(vector).max() > np.finfo(np.float16).max
    assert len(steering.values) == 2 * len(vector)


@pytest.mark.parametrize("precision", SteeringPrecision)
@pytest.mark.parametrize("vector", [np.zeros(5), np.full(5, 1e-45), np.zeros(0)])
def test_a_vector_of_nothing_stays_nothing(vector, precision):
    steering = encode(vector.astype(np.float32), precision)
    assert steering.scale == 1
    assert not decode(steering, len(vector)).any()


@pytest.mark.parametrize("precision", SteeringPrecision)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_refused(bad, precision):
    with pytest.raises(InvalidArgument) as caught:
        encode(np.array([1.0, bad, 2.0], np.float32), precision)
    assert caught.value.field == "steering.values"


def test_two_rows_are_no_vector():
    with pytest.raises(InvalidArgument, match="2 dimensions") as caught:
        encode(np.zeros((2, 3), np.float32), INT8)
    assert caught.value.field == "steering.values"


@pytest.mark.parametrize(
    ("steering", "rank", "field"),
    [
        (Steering(1.0, b"abc", INT8), 4, "steering.values"),
        (Steering(1.0, b"abcd", FLOAT16), 4, "steering.values"),
        (Steering(1.0, b"", INT8), 1, "steering.values"),
        (Steering(1.0, np.array([1, np.nan], "<f2").tobytes(), FLOAT16), 2, "steering.values"),
        (Steering(1.0, np.array([np.inf, 1], "<f2").tobytes(), FLOAT16), 2, "steering.values"),
        (Steering(3e38, b"\x00\x02", INT8), 2, "steering.scale"),
        (Steering(1e300, b"\x00\x02", INT8), 2, "steering.scale"),
    ],
)
def test_a_vector_that_does_not_fit_or_is_not_finite_is_refused_by_name(steering, rank, field):
    with pytest.raises(InvalidArgument) as caught:
        decode(steering, rank)
    assert caught.value.field == field


@quick
@given(st.binary(max_size=40), finite.filter(lambda x: x > 0), st.sampled_from(SteeringPrecision), st.integers(0, 20))
def test_random_bytes_are_a_finite_vector_or_refused_by_name(values, scale, precision, rank):
    field, vector = "", np.empty(rank)
    try:
        vector = decode(Steering(scale, values, precision), rank)
    except InvalidArgument as error:
        field = error.field
    assert field in ("", "steering.values", "steering.scale")
    assert field or (vector.shape == (rank,) and np.isfinite(vector).all())


# === when a verifier's session wants one ========================================================================


def session_of(request: Request | None, *, kept: tuple[str, ...] = (MINE,), **changes) -> VerifierSession:
    frame = open_frame(**{"sampling": Sampling(max_tokens=40), "steering": request} | changes)
    return VerifierSession(frame, rules(projections=frozenset(kept)), 0.0)


def commit_of(session: VerifierSession, *tokens: int, block: tuple[DraftToken, ...] = ()):
    """A step as the engine makes it: a vector where one is wanted."""
    request = session.wanted_vector
    vector = encode(np.arange(4.0), request.precision) if request is not None else None
    return session.on_verified(
        Verified(block, tuple(map(CommittedToken, tokens, (-1.0,) * len(tokens))), steering=vector), 1.0
    )


def which_have_vectors(session: VerifierSession, count: int) -> list[bool]:
    return [commit_of(session, 6).steering is not None for _ in range(count)]


@pytest.mark.parametrize(
    ("wanted", "kept", "steered"),
    [
        (None, (MINE,), False),
        (Request(MINE), (), False),
        (Request(MINE), (OTHER,), False),
        (Request(MINE), (OTHER, MINE), True),
    ],
)
def test_a_session_is_steered_where_the_verifier_has_the_requested_projection(wanted, kept, steered):
    session = session_of(wanted, kept=kept)
    assert session.opened().steered is steered
    assert which_have_vectors(session, 3) == [steered] * 3


@pytest.mark.parametrize(
    ("every", "wanted"),
    [(0, [0, 0, 0, 0, 0]), (1, [1, 1, 1, 1, 1]), (2, [1, 0, 1, 0, 1]), (3, [1, 0, 0, 1, 0]), (9, [1, 0, 0, 0, 0])],
)
def test_vectors_come_with_every_nth_commit_from_the_first_on(every, wanted):
    assert which_have_vectors(session_of(Request(MINE, every=every)), 5) == [bool(x) for x in wanted]


def test_a_report_changes_the_request_and_one_without_leaves_it():
    session = session_of(Request(MINE, every=0))
    assert session.opened().steered, "none for now is not never"
    session.on_report(Report(True))
    assert which_have_vectors(session, 1) == [False]
    session.on_report(Report(True, steering=Request(MINE, FLOAT16, every=2)))
    assert session.wanted_vector == Request(MINE, FLOAT16, every=2)
    assert which_have_vectors(session, 3) == [True, False, True]
    session.on_report(Report(True, steering=Request(MINE)))
    assert which_have_vectors(session, 2) == [True, True]
    session.on_report(Report(False))
    assert which_have_vectors(session, 1) == [True]


def test_a_request_for_another_projection_is_met_at_once_or_not_at_all():
    session = session_of(Request(MINE, every=8), kept=(MINE, OTHER))
    assert which_have_vectors(session, 2) == [True, False]
    session.on_report(Report(True, steering=Request(OTHER, every=8)))
    assert which_have_vectors(session, 2) == [True, False]
    session.on_report(Report(True, steering=Request("0" * 12)))
    assert which_have_vectors(session, 1) == [False]


def test_a_session_may_request_vectors_later():
    session = session_of(None)
    session.on_report(Report(True, steering=Request(MINE)))
    assert which_have_vectors(session, 1) == [True]


def test_the_commit_that_ends_a_text_has_no_vector():
    session = session_of(Request(MINE), sampling=Sampling(max_tokens=2))
    commits = [commit_of(session, 6), commit_of(session, 6)]
    assert [commit.steering is not None for commit in commits] == [True, False]
    assert commits[-1].finish is FinishReason.LENGTH


def test_a_cancelled_text_ends_without_a_vector():
    assert session_of(Request(MINE)).on_cancel().steering is None


def test_the_request_of_the_stream_stays_as_last_reported_in_its_next_turn():
    session = session_of(Request(MINE, every=5), sampling=Sampling(max_tokens=2), keep_s=9.0)
    session.on_report(Report(True, steering=Request(MINE, FLOAT16, every=2)))
    which_have_vectors(session, 2)
    later = session.continued(Continue(5, (6,), Sampling(max_tokens=9)), 2.0)
    assert later.steered
    assert later.wanted_vector == Request(MINE, FLOAT16, every=2)
    assert which_have_vectors(later, 3) == [True, False, True]


def test_a_resumed_session_gets_a_vector_with_its_first_commit():
    assert which_have_vectors(session_of(Request(MINE, every=3), committed=(4, 5)), 2) == [True, False]


def test_steering_changes_nothing_else_that_a_session_says_or_plans():
    steered, plain = session_of(Request(MINE)), session_of(None)
    drafts = tuple(map(DraftToken, (1, 2, 3)))
    for k in range(8):
        for session in (steered, plain):
            session.on_draft(Draft(k, len(session.transcript), drafts), k / 10)
        assert steered.block() == plain.block()
        assert steered.ready_at(0.03, 0.001) == plain.ready_at(0.03, 0.001)
        agreed = (1, 2, 3)[: k % 4]
        tokens = (*agreed, *(5,) * (4 - len(agreed)))
        mine, theirs = (commit_of(session, *tokens, block=drafts) for session in (steered, plain))
        assert mine.steering is not None
        assert replace(mine, steering=None) == theirs
