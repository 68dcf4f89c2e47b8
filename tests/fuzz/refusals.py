"""Which errors are fine as the answer to hostile input."""

from __future__ import annotations

from outrider.proto.errors import Internal, InvalidArgument, OutriderError


def check_refusal(error: OutriderError) -> None:
    """Fail for a defect, and for a refusal that does not say why, or of what."""
    assert not isinstance(error, Internal), error
    assert error.message, "a refusal says why"
    assert error.field or not isinstance(error, InvalidArgument), f"a refusal names no field: {error}"
