"""Checks that several messages share."""

from __future__ import annotations

import re
from numbers import Integral
from typing import Any

from outrider.proto.errors import InvalidArgument

MAX_TOKEN_ID = (1 << 31) - 1
MAX_CHAIN = (1 << 31) - 1  # the verifier numbers a chain of its own after it, where a branch is taken
PROMPT_CLASSES = 16  # 0 included: unknown
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
SHA256 = re.compile(r"[0-9a-f]{64}")


def require(holds: bool, field: str, message: str) -> None:
    """Raise `InvalidArgument` with `message` about `field` unless the condition `holds`."""
    if not holds:
        raise InvalidArgument(message, field=field)


def require_chain(chain: int, field: str) -> None:
    """Refuse chain numbers that no edge reaches."""
    require(0 <= chain <= MAX_CHAIN, field, f"is {chain}; chains are numbered 0 to {MAX_CHAIN}")


def require_text(text: Any, field: str) -> None:
    """Refuse what is no string, and a string that UTF-8 cannot hold."""
    require(isinstance(text, str), field, f"is {type(text).__name__}, not str")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        message = f"holds half a surrogate pair at character {error.start}; give both halves, or leave it out"
        raise InvalidArgument(message, field=field) from error


def require_tokens(tokens: tuple[int, ...], field: str) -> None:
    """Refuse what is no token id of any vocabulary."""
    if not all(issubclass(kind, Integral) and not issubclass(kind, bool) for kind in set(map(type, tokens)) - {int}):
        raise InvalidArgument("holds something other than token ids, which are whole numbers", field=field)
    if tokens and not (min(tokens) >= 0 and max(tokens) <= MAX_TOKEN_ID):
        raise InvalidArgument(f"holds a token id that is not in 0..{MAX_TOKEN_ID}", field=field)
