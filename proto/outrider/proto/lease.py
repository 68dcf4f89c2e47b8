"""Lease tokens: a claim, its expiry and an HMAC-SHA256 over both. The coordinator signs, the verifier checks.

A token is `claim "." signature`, both base64url without padding; the claim is JSON. It binds one session to one
verifier and one model until a wall-clock time; whoever holds the shared secret can check it without asking anybody.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
from dataclasses import asdict, dataclass, replace

from outrider.proto.errors import ConfigError, LeaseExpired, Unauthenticated

MIN_SECRET_BYTES = 16
CLOCK_SKEW_S = 5.0


@dataclass(frozen=True, slots=True)
class LeaseClaim:
    """What a lease allows. `expires_at_s` is Unix time."""

    verifier: str
    model: str
    session: str
    expires_at_s: float


def sign_lease(claim: LeaseClaim, secret: bytes) -> bytes:
    """The token of `claim`."""
    _check_secret(secret)
    body = base64.urlsafe_b64encode(json.dumps(asdict(claim), sort_keys=True).encode()).rstrip(b"=")
    return body + b"." + _signature(body, secret)


def verify_lease(token: bytes, secret: bytes, *, verifier: str, model: str, session: str, now_s: float) -> LeaseClaim:
    """The claim in `token`, if it is genuine, meant for this use, and not over at Unix time `now_s`.

    Raises:
        Unauthenticated: missing, forged, malformed, or for another verifier, model or session.
        LeaseExpired: genuine but too old.
    """
    _check_secret(secret)
    if not token:
        raise Unauthenticated("is missing; open a lease at the coordinator first", field="open.lease")
    body, _, signature = token.partition(b".")
    if not hmac.compare_digest(signature, _signature(body, secret)):
        raise Unauthenticated("has no valid signature; open a lease at the coordinator", field="open.lease")
    claim = _parse_claim(body)
    for name, wanted in (("verifier", verifier), ("model", model), ("session", session)):
        if getattr(claim, name) != wanted:
            raise Unauthenticated(f"is for {name} {getattr(claim, name)!r}, not {wanted!r}", field="open.lease")
    if now_s > claim.expires_at_s + CLOCK_SKEW_S:
        raise LeaseExpired("has expired; open a new one at the coordinator", field="open.lease")
    return claim


def _parse_claim(body: bytes) -> LeaseClaim:
    try:
        claim = LeaseClaim(**json.loads(base64.urlsafe_b64decode(body + b"=" * (-len(body) % 4))))
        return replace(claim, expires_at_s=_number(claim.expires_at_s))
    except (binascii.Error, ValueError, TypeError) as error:
        raise Unauthenticated("is not a lease token", field="open.lease") from error


def _number(value: object) -> float:
    if not isinstance(value, int | float):
        raise TypeError(f"{value!r} is not a number")
    return float(value)


def _signature(body: bytes, secret: bytes) -> bytes:
    return base64.urlsafe_b64encode(hmac.digest(secret, body, hashlib.sha256)).rstrip(b"=")


def _check_secret(secret: bytes) -> None:
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"must have at least {MIN_SECRET_BYTES} bytes", field="lease_secret")
