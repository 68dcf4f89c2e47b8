"""From a transformers folder to the ONNX package that an edge runs.

contract        inputs and outputs of an exported graph
model           the model to export, run with attention and rotation replaced
steered         the steering in a drafter's folder, and the drafter steered in torch
graph           the traced graph, and what is joined in it afterwards
steering_graph  the graph that turns a steering vector into biases
quantised       the traced graph with 8-bit weights
check           ONNX Runtime against torch
check_steered   the same with biases, and without against the unsteered export
package         the folder with its manifest: `export_drafter`
errors          errors of an export
"""

from __future__ import annotations

from outrider.cloud.export.errors import ExportMismatch
from outrider.cloud.export.package import export_drafter

__all__ = ["ExportMismatch", "export_drafter"]
