"""Checks that several messages share."""

from __future__ import annotations

import re

from outrider.proto.errors import InvalidArgument

MAX_TOKEN_ID = (1 << 31) - 1
PROMPT_CLASSES = 16  # 0 included: unknown
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
SHA256 = re.compile(r"[0-9a-f]{64}")


def require(holds: bool, field: str, message: str) -> None:
    """Raise `InvalidArgument` with `message` about `field` unless the condition `holds`."""
    if not holds:
        raise InvalidArgument(message, field=field)


def require_tokens(tokens: tuple[int, ...], field: str) -> None:
    """Refuse token ids that no vocabulary has."""
    if tokens and not (min(tokens) >= 0 and max(tokens) <= MAX_TOKEN_ID):
        raise InvalidArgument(f"holds a token id that is not in 0..{MAX_TOKEN_ID}", field=field)
