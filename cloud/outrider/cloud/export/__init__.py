"""From a transformers folder to the ONNX package that an edge runs."""

from __future__ import annotations

from outrider.cloud.export.graph import ExportMismatch
from outrider.cloud.export.package_writing import export_drafter

__all__ = ["ExportMismatch", "export_drafter"]
