"""Which errors are fine as the answer to hostile input."""

from __future__ import annotations

from outrider.proto.errors import Internal, OutriderError


def check_refusal(error: OutriderError) -> None:
    """Fail for a defect, and for a refusal that does not say why."""
    assert not isinstance(error, Internal), error
    assert error.message, "a refusal says why"
