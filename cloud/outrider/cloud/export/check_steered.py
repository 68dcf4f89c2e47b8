"""The check of a steered graph: the unsteered export without a vector, and torch's drafter with any.

It makes three comparisons, each of which finds what the others cannot:

    none    with biases of zero it gives the unsteered export's outputs, bit for bit
    loud    with random biases as large as what they are added to it gives torch's logits: a bias in another layer,
            after the gate or at another position shows even where U is still zero
    vectors with those of the drafter's own projection the steering graph gives U c, and both graphs torch's logits
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import torch

from outrider.cloud.export.check import ChunkedText, GraphCheck, LogitsComparison, logits_by_torch, open_session
from outrider.cloud.export.contract import MODEL_FILE, STEERING_GRAPH_FILE, VECTOR, ExportMismatch, steering_names
from outrider.cloud.export.steered import SteeringWeights, biases_by, steered_by, up_projections

LARGEST_BIAS_ERROR = 1e-5  # of the steering graph, in units of the largest bias


@dataclass(frozen=True)
class SteeredCheck:
    """The comparison of a steered package with torch and with its unsteered export.

    Attributes:
        check: drafter in torch, and how its unsteered export is compared.
        steering: steering of its folder.
        package: folder of its two graphs.
        unsteered: graph of the same weights in the same precision, exported without steering.
    """

    check: GraphCheck
    steering: SteeringWeights
    package: Path
    unsteered: Path

    def metrics(self) -> dict[str, float | int]:
        """Return the metrics with vectors; raise ExportMismatch where any comparison fails."""
        texts = self.check.texts()
        session = open_session(self.package / MODEL_FILE)
        self._compare_none(session, texts)
        self._compare_loud(session, texts)
        return self._compare_vectors(session, texts)

    def _compare_none(self, session: onnxruntime.InferenceSession, texts: list[ChunkedText]) -> None:
        """Demand the unsteered export's bits.

        A steered graph has the unsteered one's nodes and a sum a layer; x + 0 is x for any float, and the one that it
        is not in all its bits, -0, no product or sum after it tells from 0. This holds ONNX Runtime to it, which may
        compute a product with a sum in it by another kernel.
        """
        unsteered = open_session(self.unsteered)
        for text in texts:
            wanted = self.check.run(unsteered, text)
            found = self._run(session, text, torch.zeros(self._shape_of_biases(text)))
            if differing := [name for name in wanted if wanted[name].tobytes() != found[name].tobytes()]:
                raise ExportMismatch(
                    f"with steering biases of zero, {', '.join(differing)} differ from the unsteered export's"
                )

    def _compare_loud(self, session: onnxruntime.InferenceSession, texts: list[ChunkedText]) -> None:
        comparison = self.check.comparison()
        generator = torch.Generator().manual_seed(0)
        for text in texts:
            biases = torch.randn(self._shape_of_biases(text), generator=generator) * self._sizes(text)[:, None, None]
            biases[:, 0] = 0
            self._compare(comparison, session, text, biases, biases)
        comparison.accepted_metrics("with random biases")

    def _compare_vectors(
        self, session: onnxruntime.InferenceSession, texts: list[ChunkedText]
    ) -> dict[str, float | int]:
        steering_graph = open_session(self.package / STEERING_GRAPH_FILE)
        comparison = self.check.comparison()
        generator = torch.Generator().manual_seed(0)
        for text in texts:
            vectors = self._vectors(len(text.chunks), generator)
            by_torch = torch.stack(biases_by(self.steering.matrices, vectors))
            by_graph = [steering_graph.run(self._names, {VECTOR: vector}) for vector in vectors.numpy()]
            biases = torch.from_numpy(np.stack(by_graph, axis=1))
            if float((biases - by_torch).abs().max()) > LARGEST_BIAS_ERROR * float(by_torch.abs().max()):
                raise ExportMismatch("the steering graph does not give U c")
            self._compare(comparison, session, text, by_torch, biases)
        return comparison.accepted_metrics("with vectors")

    def _compare(
        self,
        comparison: LogitsComparison,
        session: onnxruntime.InferenceSession,
        text: ChunkedText,
        by_torch: torch.Tensor,
        by_graph: torch.Tensor,
    ) -> None:
        """Add a text with biases [layers, chunks, mlp], a tensor for torch and one for the graph."""
        by_position = by_torch.repeat_interleave(torch.tensor(text.chunks), dim=1)
        with steered_by(self.check.plain, by_position.unbind(0)):
            logits = logits_by_torch(self.check.plain, text.tokens)
        comparison.add(logits, self._run(session, text, by_graph), self.check.candidates)

    def _vectors(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return vectors [count, rank] of the projection; the first is zero: a prompt is not steered."""
        projection = self.steering.projection
        taps = torch.randn(count, len(projection.layers) * projection.hidden, generator=generator)
        with torch.inference_mode():
            vectors: torch.Tensor = projection(taps)
            vectors[0] = 0
        return vectors

    def _sizes(self, text: ChunkedText) -> torch.Tensor:
        """Return [layers] the root mean squares of the up projections' outputs for `text`."""
        outputs: list[torch.Tensor] = []
        hooks = [
            module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
            for module in up_projections(self.check.plain)
        ]
        logits_by_torch(self.check.plain, text.tokens)
        for hook in hooks:
            hook.remove()
        return torch.stack([output.float().square().mean().sqrt() for output in outputs])

    def _run(
        self, session: onnxruntime.InferenceSession, text: ChunkedText, biases: torch.Tensor
    ) -> dict[str, np.ndarray]:
        fed = [dict(zip(self._names, chunk.numpy(), strict=True)) for chunk in biases.unbind(1)]
        return self.check.run(session, text, fed)

    def _shape_of_biases(self, text: ChunkedText) -> tuple[int, int, int]:
        return self.check.shape.layers, len(text.chunks), self.steering.mlp

    @property
    def _names(self) -> list[str]:
        return steering_names(self.check.shape.layers)
