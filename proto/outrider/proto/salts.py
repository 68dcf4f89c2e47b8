"""Salted hashes by which lessons name a session or an API key, without its name."""

from __future__ import annotations

import hashlib
import hmac

SALT_BYTES = 16


def salted(secret: bytes, name: str) -> bytes:
    """Return the [16] bytes that stand for a name.

    All parts of a fleet share `secret`, that of their leases, so a name has the same salt at each.
    """
    return hmac.digest(secret or b"outrider", f"lessons:{name}".encode(), hashlib.sha256)[:SALT_BYTES]


def key_salt(secret: bytes, api_key: str) -> bytes:
    """Return the [16] bytes that stand for the API key of this name; empty: texts without one."""
    return salted(secret, f"key {api_key}")
