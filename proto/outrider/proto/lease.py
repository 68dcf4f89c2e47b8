"""Lease tokens: a claim with its expiry under an HMAC-SHA256, signed by the coordinator and checked by the verifier.

A token is `claim "." signature`, both base64url without padding; the claim is JSON. It binds one session to one
verifier and one model until a wall-clock time. The shared secret suffices to check it.

A token lets its bearer decode as its session until it expires, so it travels under TLS and is never logged. Clocks of
coordinator and verifiers may differ by `CLOCK_SKEW_S`: a lease stays valid for that much longer, and if a verifier's
clock is ahead by more, leases end early by the difference. Run NTP.
"""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import json
import math
from dataclasses import MISSING, asdict, dataclass, fields

from outrider.proto.errors import ConfigError, LeaseExpired, Unauthenticated

MIN_SECRET_BYTES = 16
CLOCK_SKEW_S = 5.0
COORDINATOR_S = 60.0


@dataclass(frozen=True, slots=True)
class LeaseClaim:
    """Permissions of a lease.

    Attributes:
        verifier, model, session: whom it is for; no other may use it.
        expires_at_s: expiry, in Unix seconds.
        key: name of the API key that it was given to; empty: none was needed.
        tokens_per_minute: limit on what the verifier reads and generates for that key, in all its sessions; 0: none.
        max_sessions: most sessions of that key whose texts go on at the verifier; 0: no limit.
        learning: whether the key allows learning from its texts, where its edge does too.
        epoch: streams that the session had before, which its Open repeats.
        incarnation: start of the verifier's process that the lease is for; empty: any.
    """

    verifier: str
    model: str
    session: str
    expires_at_s: float
    key: str = ""
    tokens_per_minute: int = 0
    learning: bool = False
    max_sessions: int = 0
    epoch: int = 0
    incarnation: str = ""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            kind = {"float": int | float, "int": int, "bool": bool}.get(str(field.type), str)
            if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
                raise TypeError(f"{field.name} is {value!r}")
        if not (math.isfinite(self.expires_at_s) and min(self.tokens_per_minute, self.max_sessions, self.epoch) >= 0):
            raise ValueError("a number is out of range")


def text_name(key: str, session: str) -> str:
    """Return the name of a session's text among those of all API keys, since edges name sessions; empty key: none."""
    return f"{key}/{session}" if key else session


def sign_lease(claim: LeaseClaim, secret: bytes) -> bytes:
    """Return the token of `claim`."""
    _check_secret(secret)
    defaults = {field.name: field.default for field in fields(claim) if field.default is not MISSING}
    stated = {name: value for name, value in asdict(claim).items() if value != defaults.get(name)}
    body = base64.urlsafe_b64encode(json.dumps(stated, sort_keys=True).encode()).rstrip(b"=")
    return body + b"." + _signature(body, secret)


def verify_lease(
    token: bytes,
    secret: bytes,
    *,
    verifier: str,
    model: str,
    session: str,
    now_s: float,
    epoch: int = 0,
    incarnation: str = "",
) -> LeaseClaim:
    """Return the claim in `token`, if it is genuine, meant for this use, and valid at Unix time `now_s`.

    Raises:
        Unauthenticated: the token is missing, forged, malformed, or for another verifier, model, session or epoch.
        LeaseExpired: it is genuine but too old, or for another start of the verifier.
    """
    claim = _genuine(token, secret)
    if incarnation and claim.incarnation not in ("", incarnation):
        raise LeaseExpired("is for another start of the verifier; open a new one", field="open.lease")
    for name, expected in (("verifier", verifier), ("model", model), ("session", session), ("epoch", epoch)):
        if getattr(claim, name) != expected:
            message = f"is for {name} {getattr(claim, name)!r}, not {expected!r}"
            raise Unauthenticated(message, field="open.lease", code="OUT-203")
    _check_expiry(claim, now_s)
    return claim


def sign_coordinator(verifier: str, secret: bytes, *, now_s: float) -> bytes:
    """Return a token by which a coordinator shows verifier `verifier` for a minute that it has `secret`; no lease."""
    return sign_lease(LeaseClaim(verifier, model="", session="", expires_at_s=now_s + COORDINATOR_S), secret)


def check_coordinator(token: bytes, secret: bytes, *, verifier: str, now_s: float) -> None:
    """Raise `Unauthenticated` or `LeaseExpired` unless `token` is a coordinator's for this verifier."""
    verify_lease(token, secret, verifier=verifier, model="", session="", now_s=now_s)


def read_lease(token: bytes, secret: bytes, *, now_s: float) -> LeaseClaim:
    """Return the claim in `token`, if it is genuine and valid; a relay leaves the other checks to the verifier.

    Raises:
        Unauthenticated, LeaseExpired: as `verify_lease`.
    """
    claim = _genuine(token, secret)
    _check_expiry(claim, now_s)
    return claim


def _genuine(token: bytes, secret: bytes) -> LeaseClaim:
    _check_secret(secret)
    if not token:
        raise Unauthenticated("is missing; open a lease at the coordinator first", field="open.lease", code="OUT-203")
    body, _, signature = token.partition(b".")
    if not hmac.compare_digest(signature, _signature(body, secret)):
        message = "has no valid signature; open a lease at the coordinator"
        raise Unauthenticated(message, field="open.lease", code="OUT-203")
    return _parse_claim(body)


def _check_expiry(claim: LeaseClaim, now_s: float) -> None:
    if now_s > claim.expires_at_s + CLOCK_SKEW_S:
        raise LeaseExpired("has expired; open a new one at the coordinator", field="open.lease")


def _parse_claim(body: bytes) -> LeaseClaim:
    try:
        return LeaseClaim(**json.loads(base64.urlsafe_b64decode(body + b"=" * (-len(body) % 4))))
    except (binascii.Error, ValueError, TypeError) as error:
        raise Unauthenticated("is not a lease token", field="open.lease") from error


def _signature(body: bytes, secret: bytes) -> bytes:
    return base64.urlsafe_b64encode(hmac.digest(secret, body, hashlib.sha256)).rstrip(b"=")


def _check_secret(secret: bytes) -> None:
    if len(secret) < MIN_SECRET_BYTES:
        raise ConfigError(f"must have at least {MIN_SECRET_BYTES} bytes", field="lease_secret")
