"""Leases: genuine ones pass, all others are refused with a reason."""

from __future__ import annotations

import base64
import json
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.proto import lease as module
from outrider.proto.errors import ConfigError, LeaseExpired, Unauthenticated
from outrider.proto.lease import CLOCK_SKEW_S, LeaseClaim, _signature, read_lease, sign_lease, verify_lease

SECRET = b"0123456789abcdef"
CLAIM = LeaseClaim("verifier-1", "model-a", "session-x", 1000.0)


def check(token, *, secret=SECRET, verifier="verifier-1", model="model-a", session="session-x", now_s=999.0):
    return verify_lease(token, secret, verifier=verifier, model=model, session=session, now_s=now_s)


def signed(body):
    """A genuine signature over any body, as only the coordinator could make it."""
    body = base64.urlsafe_b64encode(body).rstrip(b"=")
    return body + b"." + _signature(body, SECRET)


names = st.text(min_size=1, max_size=30)


@settings(deadline=None, derandomize=True, max_examples=60)
@given(claim=st.builds(LeaseClaim, names, names, names, st.floats(0, 1e12)), secret=st.binary(min_size=16))
def test_a_signed_claim_comes_back_whole(claim, secret):
    checked = verify_lease(
        sign_lease(claim, secret),
        secret,
        verifier=claim.verifier,
        model=claim.model,
        session=claim.session,
        now_s=claim.expires_at_s,
    )
    assert checked == claim


def test_a_lease_is_for_one_stream_of_its_session_and_one_start_of_its_verifier() -> None:
    token = sign_lease(replace(CLAIM, epoch=2, incarnation="second"), SECRET)
    use = {"verifier": "verifier-1", "model": "model-a", "session": "session-x", "now_s": 999.0, "epoch": 2}
    assert verify_lease(token, SECRET, **use, incarnation="second").epoch == 2
    assert verify_lease(token, SECRET, **use).incarnation == "second"
    with pytest.raises(Unauthenticated, match="is for epoch 2, not 1"):
        verify_lease(token, SECRET, **use | {"epoch": 1}, incarnation="second")
    with pytest.raises(LeaseExpired, match="another start of the verifier"):
        verify_lease(token, SECRET, **use, incarnation="first")
    assert verify_lease(sign_lease(CLAIM, SECRET), SECRET, **use | {"epoch": 0}, incarnation="any") == CLAIM


@pytest.mark.parametrize("part", ["verifier", "model", "session"])
def test_a_lease_for_another_use_is_refused_and_says_which(part):
    with pytest.raises(Unauthenticated, match=f"is for {part}") as caught:
        check(sign_lease(CLAIM, SECRET), **{part: "another"})
    assert type(caught.value) is Unauthenticated
    assert caught.value.field == "open.lease"


def test_a_lease_ends_at_its_time_and_some_clock_skew():
    token = sign_lease(CLAIM, SECRET)
    assert check(token, now_s=1000.0 + CLOCK_SKEW_S) == CLAIM
    with pytest.raises(LeaseExpired) as caught:
        check(token, now_s=1000.1 + CLOCK_SKEW_S)
    assert caught.value.field == "open.lease"


def test_every_single_flipped_bit_of_a_token_is_noticed():
    token = sign_lease(CLAIM, SECRET)
    for i in range(8 * len(token)):
        forged = bytearray(token)
        forged[i // 8] ^= 1 << (i % 8)
        with pytest.raises(Unauthenticated):
            check(bytes(forged))


def test_a_missing_lease_says_that_it_is_missing():
    with pytest.raises(Unauthenticated, match="missing"):
        check(b"")


@settings(deadline=None, derandomize=True, max_examples=200)
@given(st.binary(max_size=80))
def test_random_bytes_are_no_lease(token):
    with pytest.raises(Unauthenticated):
        check(token)


@pytest.mark.parametrize(
    "body", [b"", b"not json", b"[]", b"null", b"{}", b'"x"', b'{"verifier": "v"}', b"\xff\xfe", b"[" * 100]
)
def test_a_signed_body_that_is_no_claim_is_refused(body):
    with pytest.raises(Unauthenticated):
        check(signed(body))


@pytest.mark.parametrize("secret", [b"", b"short", b"fifteen bytes!!"])
def test_a_short_secret_is_refused_on_both_sides(secret):
    with pytest.raises(ConfigError) as caught:
        sign_lease(CLAIM, secret)
    assert caught.value.field == "lease_secret"
    with pytest.raises(ConfigError):
        check(sign_lease(CLAIM, SECRET), secret=secret)


@pytest.mark.parametrize(
    "wrong",
    [
        *({"verifier": 7}, {"model": None}, {"session": ["session-x"]}, {"key": 1}),
        *({"tokens_per_minute": wrong} for wrong in ("9", -1, 1.5, True)),
        *({"learning": wrong} for wrong in ("yes", 1, None)),
        *({"expires_at_s": wrong} for wrong in ("soon", "9", None, [1], float("nan"), float("inf"), True)),
        {"admin": True},
    ],
)
def test_a_signed_claim_with_a_field_of_the_wrong_kind_or_an_unknown_one_is_refused(wrong):
    body = {"verifier": "verifier-1", "model": "model-a", "session": "session-x", "expires_at_s": 1e9} | wrong
    with pytest.raises(Unauthenticated, match="is not a lease token"):
        check(signed(json.dumps(body).encode()))


def test_the_key_and_its_rate_travel_in_the_lease_and_cannot_be_taken_out():
    limited = replace(CLAIM, key="alice", tokens_per_minute=600, learning=True)
    assert check(sign_lease(limited, SECRET)) == limited
    _, _, signature = sign_lease(limited, SECRET).partition(b".")
    body, _, _ = sign_lease(CLAIM, SECRET).partition(b".")
    with pytest.raises(Unauthenticated, match="signature"):
        check(body + b"." + signature)


def test_a_lease_without_a_key_is_no_longer_than_it_was():
    body, _, _ = sign_lease(CLAIM, SECRET).partition(b".")
    said = json.loads(base64.urlsafe_b64decode(body + b"=" * (-len(body) % 4)))
    assert set(said) == {"verifier", "model", "session", "expires_at_s"}


def test_a_relay_reads_any_genuine_lease_that_is_not_over_and_no_other():
    token = sign_lease(CLAIM, SECRET)
    assert read_lease(token, SECRET, now_s=999.0) == CLAIM
    with pytest.raises(LeaseExpired):
        read_lease(token, SECRET, now_s=1000.1 + CLOCK_SKEW_S)
    for forged in (b"", token[:-1], token + b"A", sign_lease(CLAIM, b"another secret of enough bytes")):
        with pytest.raises(Unauthenticated):
            read_lease(forged, SECRET, now_s=999.0)


def test_signatures_are_compared_in_constant_time(monkeypatch):
    compared = []

    def compare(a, b):
        compared.append((a, b))
        return a == b

    monkeypatch.setattr(module.hmac, "compare_digest", compare)
    check(sign_lease(CLAIM, SECRET))
    assert len(compared) == 1
