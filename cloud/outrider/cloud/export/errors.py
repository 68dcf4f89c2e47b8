"""Errors of an export."""

from __future__ import annotations

from outrider.proto.errors import OutriderError


class ExportMismatch(OutriderError):
    """ONNX Runtime and torch disagree about the exported model; nothing was published."""
