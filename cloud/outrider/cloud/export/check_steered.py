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
from transformers import PreTrainedModel

from outrider.cloud.export.check import (
    Comparison,
    check_sequences,
    chunk_lengths,
    logits_by_torch,
    open_session,
    run_in_chunks,
)
from outrider.cloud.export.contract import MODEL_FILE, STEERING_GRAPH_FILE, VECTOR, ExportMismatch, steering_names
from outrider.cloud.export.model import CacheShape
from outrider.cloud.export.steered import DrafterSteering, biases_by, steered_by, up_projections

LARGEST_BIAS_ERROR = 1e-5  # of the steering graph, in units of the largest bias


@dataclass(frozen=True)
class _Text:
    """A text of `tokens` (int64 [length]), fed in `chunks` that sum to its length, each with biases of its own."""

    tokens: np.ndarray
    chunks: list[int]


@dataclass(frozen=True)
class SteeredCheck:
    """A comparison of a steered package with torch and with its unsteered export.

    Attributes:
        plain: drafter in torch.
        shape: shape of its cache.
        steering: steering of its folder.
        package: folder of its two graphs.
        unsteered: graph of the same weights in the same precision, exported without steering.
        precision: precision of the weights.
        candidates: number of candidates to ask the graphs for.
    """

    plain: PreTrainedModel
    shape: CacheShape
    steering: DrafterSteering
    package: Path
    unsteered: Path
    precision: str
    candidates: int

    def metrics(self) -> dict[str, float | int]:
        """Return `check_graph`'s metrics with vectors; raise ExportMismatch where any comparison fails."""
        sequences = enumerate(check_sequences(self.plain))
        texts = [_Text(tokens, chunk_lengths(len(tokens), seed=index)) for index, tokens in sequences]
        session = open_session(self.package / MODEL_FILE)
        self._compare_none(session, texts)
        self._compare_loud(session, texts)
        return self._compare_vectors(session, texts)

    def _compare_none(self, session: onnxruntime.InferenceSession, texts: list[_Text]) -> None:
        """Demand the unsteered export's bits.

        A steered graph has the unsteered one's nodes and a sum a layer; x + 0 is x for any float, and the one that it
        is not in all its bits, -0, no product or sum after it tells from 0. This holds ONNX Runtime to it, which may
        compute a product with a sum in it by another kernel.
        """
        unsteered = open_session(self.unsteered)
        for text in texts:
            wanted = self._run(unsteered, text)
            found = self._run(session, text, torch.zeros(self.shape.layers, len(text.chunks), self.steering.mlp))
            if differing := [name for name in wanted if wanted[name].tobytes() != found[name].tobytes()]:
                raise ExportMismatch(f"biases of zero change {', '.join(differing)} of the unsteered export")

    def _compare_loud(self, session: onnxruntime.InferenceSession, texts: list[_Text]) -> None:
        comparison = Comparison(self.precision)
        generator = torch.Generator().manual_seed(0)
        for text in texts:
            sizes = self._sizes(text)
            biases = torch.randn(self.shape.layers, len(text.chunks), self.steering.mlp, generator=generator)
            biases *= sizes[:, None, None]
            biases[:, 0] = 0
            comparison.add(self._logits_by_torch(text, biases), self._run(session, text, biases), self.candidates)
        comparison.accepted_metrics("with random biases")

    def _compare_vectors(self, session: onnxruntime.InferenceSession, texts: list[_Text]) -> dict[str, float | int]:
        steering_graph = open_session(self.package / STEERING_GRAPH_FILE)
        names = steering_names(self.shape.layers)
        comparison = Comparison(self.precision)
        generator = torch.Generator().manual_seed(0)
        for text in texts:
            vectors = self._vectors(len(text.chunks), generator)
            by_torch = torch.stack(biases_by(self.steering.matrices, vectors))
            by_graph = [steering_graph.run(names, {VECTOR: vector}) for vector in vectors.numpy()]
            biases = torch.from_numpy(np.stack(by_graph, axis=1))
            if float((biases - by_torch).abs().max()) > LARGEST_BIAS_ERROR * float(by_torch.abs().max()):
                raise ExportMismatch("the steering graph does not give U c")
            comparison.add(self._logits_by_torch(text, by_torch), self._run(session, text, biases), self.candidates)
        return comparison.accepted_metrics("with vectors")

    def _vectors(self, count: int, generator: torch.Generator) -> torch.Tensor:
        """Return vectors [count, rank] of the projection; the first is zero: a prompt is not steered."""
        projection = self.steering.projection
        taps = torch.randn(count, len(projection.layers) * projection.hidden, generator=generator)
        with torch.inference_mode():
            vectors: torch.Tensor = projection(taps)
            vectors[0] = 0
        return vectors

    def _sizes(self, text: _Text) -> torch.Tensor:
        """Return [layers] the root mean squares of the up projections' outputs for `text`."""
        outputs: list[torch.Tensor] = []
        hooks = [
            module.register_forward_hook(lambda _module, _inputs, output: outputs.append(output))
            for module in up_projections(self.plain)
        ]
        logits_by_torch(self.plain, text.tokens)
        for hook in hooks:
            hook.remove()
        return torch.stack([output.float().square().mean().sqrt() for output in outputs])

    def _logits_by_torch(self, text: _Text, biases: torch.Tensor) -> np.ndarray:
        """Return logits float32 [length, vocab] with the `biases` [layers, chunks, mlp] of each chunk."""
        by_position = biases.repeat_interleave(torch.tensor(text.chunks), dim=1)
        with steered_by(self.plain, by_position.unbind(0)):
            return logits_by_torch(self.plain, text.tokens)

    def _run(
        self, session: onnxruntime.InferenceSession, text: _Text, biases: torch.Tensor | None = None
    ) -> dict[str, np.ndarray]:
        """Return all outputs, with the `biases` [layers, chunks, mlp] of a steered graph."""
        names = steering_names(self.shape.layers)
        fed = [] if biases is None else [dict(zip(names, chunk.numpy(), strict=True)) for chunk in biases.unbind(1)]
        return run_in_chunks(session, text.tokens, text.chunks, self.shape, self.candidates, fed)
