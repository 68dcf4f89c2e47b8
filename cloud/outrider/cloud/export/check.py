"""The check of exported graphs against torch, which comes before they are published."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from transformers import PreTrainedModel

from outrider.cloud.export.graph import OUTPUTS, VECTOR, ExportMismatch, cache_names, steering_names
from outrider.cloud.export.model import drawn_texts
from outrider.cloud.export.steered import SteeringWeights, biases_by, steered_by, up_projections
from outrider.cloud.models.heads import tokens_of
from outrider.proto.drafter_format import MODEL, STEERING_GRAPH, CacheShape

LARGEST_FLOAT32_ERROR = 1e-3  # in units of the standard deviation of torch's logits
# Limits where weights or cache are of 8 bits.
TIE = 0.1  # nats; two best tokens this close may change places, since either is as good a proposal
MIN_AGREEMENT = 0.97  # least share of the same argmax where there is no tie
LARGEST_KL = 0.01  # nats a token from torch's distributions
LARGEST_BIAS_ERROR = 1e-5  # of the steering graph, in units of the largest bias
EMPTY = {"float32": np.nan, "int8": 127}  # content of a cache's room that no position may see


def open_session(graph: Path) -> onnxruntime.InferenceSession:
    """Open a CPU session of one thread that does not spin between calls."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = 1
    options.inter_op_num_threads = 1
    options.log_severity_level = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    return onnxruntime.InferenceSession(graph, options, providers=["CPUExecutionProvider"])


@dataclass(frozen=True)
class ChunkedText:
    """A text of `tokens` (int64 [length]), fed in `chunks` that sum to its length."""

    tokens: np.ndarray
    chunks: list[int]


@dataclass(frozen=True)
class GraphCheck:
    """The comparison of an exported graph with torch, of which `plain` is the model, with transformers' own attention.

    The graph has weights of `precision` and a cache of `shape`, and is asked for `candidates` candidates.
    """

    plain: PreTrainedModel
    shape: CacheShape
    precision: str
    candidates: int

    def metrics(self, graph: Path) -> dict[str, float | int]:
        """Run the graph in uneven chunks and single steps, and hold every output against torch's plain whole forward.

        Returns:
            The metrics, in units of the standard deviation of torch's logits where they are errors.
        """
        session = open_session(graph)
        comparison = self.comparison()
        for text in self.texts():
            comparison.add(logits_by_torch(self.plain, text.tokens), self.run(session, text), self.candidates)
        return comparison.accepted_metrics()

    def comparison(self) -> LogitsComparison:
        """Return empty totals for this model and precision."""
        tokens = tokens_of(self.plain)
        exact = self.precision == self.shape.dtype == "float32"
        return LogitsComparison(slice(None) if tokens is None else tokens.numpy(), exact=exact)

    def texts(self) -> list[ChunkedText]:
        """Return the texts to compare on, half of them random tokens, half written by the model."""
        sequences = drawn_texts(self.plain, seed=0).numpy()
        lengths = [_chunk_lengths(len(tokens), seed=index) for index, tokens in enumerate(sequences)]
        return [ChunkedText(tokens, chunks) for tokens, chunks in zip(sequences, lengths, strict=True)]

    def run(
        self, session: onnxruntime.InferenceSession, text: ChunkedText, biases: Sequence[Mapping[str, np.ndarray]] = ()
    ) -> dict[str, np.ndarray]:
        return run_in_chunks(session, text.tokens, text.chunks, self.shape, self.candidates, biases)


def logits_by_torch(plain: PreTrainedModel, tokens: np.ndarray) -> np.ndarray:
    """Return float32 logits [length, vocab] of one whole forward pass over `tokens` (int64 [length])."""
    with torch.inference_mode():
        logits: np.ndarray = plain(input_ids=torch.from_numpy(tokens)[None]).logits[0].float().numpy()
    return logits


def run_in_chunks(
    session: onnxruntime.InferenceSession,
    tokens: np.ndarray,
    chunks: Sequence[int],
    shape: CacheShape,
    candidates: int,
    biases: Sequence[Mapping[str, np.ndarray]] = (),
) -> dict[str, np.ndarray]:
    """Return all outputs for `tokens` (int64 [length]), fed in `chunks` that sum to its length.

    `OUTPUTS` are joined along positions, and the caches are those after the last chunk. Past and present share their
    memory, and `EMPTY` fills the room that no position may see. `biases`: those of a steered graph, for every chunk.
    """
    caches = {
        name: np.full((1, shape.kv_heads, len(tokens) + 3, shape.head_dim), EMPTY[shape.dtype], dtype=shape.dtype)
        for name in cache_names("past", shape.layers)
    }
    presents = dict(zip(cache_names("present", shape.layers), caches.values(), strict=True))
    outputs: dict[str, list[np.ndarray]] = {name: [] for name in OUTPUTS}
    binding = session.io_binding()
    first = 0
    for index, n in enumerate(chunks):
        end = first + n
        fed = {
            "tokens": tokens[None, first:end],
            "logit_rows": np.arange(n),
            "candidate_count": np.array([candidates]),
            "last_position": np.array([end - 1], dtype=np.int32),
            "length": np.array(end, dtype=np.int32),
        }
        for name, value in (fed | caches | dict(biases[index] if biases else {})).items():
            binding.bind_input(name, "cpu", 0, value.dtype.type, value.shape, value.ctypes.data)
        for name in OUTPUTS:
            binding.bind_output(name, "cpu")
        for name, value in presents.items():
            binding.bind_output(name, "cpu", 0, value.dtype.type, value.shape, value.ctypes.data)
        session.run_with_iobinding(binding)
        for name, value in zip(OUTPUTS, binding.get_outputs(), strict=False):
            outputs[name].append(value.numpy())
        first = end
    return {name: np.concatenate(values) for name, values in outputs.items()} | presents


class LogitsComparison:
    """Running totals of how ONNX Runtime's logits differ from torch's."""

    def __init__(self, predicted: np.ndarray | slice, *, exact: bool):
        """Begin with none.

        Args:
            predicted: tokens that the head has; candidates are the largest of theirs.
            exact: whether weights and cache are float32, so that nothing but the order of sums may differ.
        """
        self.predicted = predicted
        self.exact = exact
        self.largest_error = 0.0
        self.normalizer_error = 0.0
        self.candidate_faults = 0
        self.kl = 0.0
        self.agreed = self.agreed_beyond_ties = self.beyond_ties = self.positions = 0

    def add(self, logits_by_torch: np.ndarray, outputs: dict[str, np.ndarray], candidates: int) -> None:
        """Add a text: `logits_by_torch` float32 [length, vocab]; `outputs` as in `OUTPUTS`, m = length."""
        logits_by_onnx = outputs["logits"]
        of_predicted = logits_by_onnx[:, self.predicted]
        spread = float(logits_by_torch[:, self.predicted].std())
        if not np.isfinite(logits_by_onnx).all():
            raise ExportMismatch("ONNX Runtime returned logits that are not finite")
        self.largest_error = max(self.largest_error, float(np.abs(logits_by_onnx - logits_by_torch).max()) / spread)
        two_best = np.partition(logits_by_torch, -2)[:, -2:]
        tie = (0.0 if self.exact else TIE) + 2 * LARGEST_FLOAT32_ERROR * spread
        clear = two_best[:, 1] - two_best[:, 0] > tie
        same = logits_by_onnx.argmax(-1) == logits_by_torch.argmax(-1)
        self.positions += len(same)
        self.agreed += int(same.sum())
        self.beyond_ties += int(clear.sum())
        self.agreed_beyond_ties += int((same & clear).sum())
        log_p, log_q = _log_softmax(logits_by_torch), _log_softmax(logits_by_onnx)
        self.kl += float((np.exp(log_p) * (log_p - log_q)).sum())
        tokens, values = outputs["candidate_tokens"], outputs["candidate_logits"]
        largest = -np.sort(-of_predicted, axis=-1)[:, :candidates]
        self.candidate_faults += int((np.take_along_axis(logits_by_onnx, tokens, -1) != values).sum())
        self.candidate_faults += int((values != largest).sum())
        normalizer = of_predicted[:, 0] - _log_softmax(of_predicted)[:, 0]
        self.normalizer_error = max(
            self.normalizer_error, float(np.abs(normalizer - outputs["log_normalizer"]).max()) / spread
        )

    def accepted_metrics(self, case: str = "") -> dict[str, float | int]:
        """Return the metrics; raise ExportMismatch, which names the `case`, where one is out of its limit."""
        metrics: dict[str, float | int] = {
            "positions": self.positions,
            "largest_error": self.largest_error,
            "agreement": self.agreed / self.positions,
            "agreement_beyond_ties": self.agreed_beyond_ties / max(1, self.beyond_ties),
            "mean_kl": self.kl / self.positions,
        }
        limits: dict[str, bool] = {
            "candidates are not the largest logits in order": self.candidate_faults == 0,
            "log_normalizer is wrong": self.normalizer_error <= LARGEST_FLOAT32_ERROR,
        }
        if self.exact:
            limits["logits differ"] = metrics["largest_error"] <= LARGEST_FLOAT32_ERROR
            limits["argmax differs"] = metrics["agreement_beyond_ties"] == 1.0
        else:
            limits["argmax differs"] = metrics["agreement_beyond_ties"] >= MIN_AGREEMENT
            limits["distributions differ"] = metrics["mean_kl"] <= LARGEST_KL
        if failed := [what for what, holds in limits.items() if not holds]:
            what = f"what torch does {case}".rstrip()
            raise ExportMismatch(f"ONNX Runtime does not compute {what}: {', '.join(failed)}; {metrics}")
        return metrics


@dataclass(frozen=True)
class SteeredCheck:
    """The comparison of a steered package with torch and with its unsteered export.

    It makes three comparisons, each of which finds what the others cannot:

        none    with biases of zero it gives the unsteered export's outputs, bit for bit
        loud    with random biases as large as what they are added to it gives torch's logits: a bias in another layer,
                after the gate or at another position shows even where U is still zero
        vectors with those of the drafter's own projection the steering graph gives U c, and both graphs torch's logits

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
        session, texts = open_session(self.package / MODEL), self.check.texts()
        self._compare_none(session, texts)
        self._compare(session, texts, self._loud, "with random biases")
        steering_graph = open_session(self.package / STEERING_GRAPH)
        return self._compare(session, texts, partial(self._by_vectors, steering_graph), "with vectors")

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

    def _compare(
        self,
        session: onnxruntime.InferenceSession,
        texts: list[ChunkedText],
        biases_of: Callable[[ChunkedText, torch.Generator], tuple[torch.Tensor, torch.Tensor]],
        case: str,
    ) -> dict[str, float | int]:
        """Compare logits; `biases_of` gives a text's biases [layers, chunks, mlp], for torch and for the graph."""
        plain, comparison, generator = self.check.plain, self.check.comparison(), torch.Generator().manual_seed(0)
        for text in texts:
            by_torch, by_graph = biases_of(text, generator)
            by_position = by_torch.repeat_interleave(torch.tensor(text.chunks), dim=1)
            with steered_by(plain, by_position.unbind(0)):
                logits = logits_by_torch(plain, text.tokens)
            comparison.add(logits, self._run(session, text, by_graph), self.check.candidates)
        return comparison.accepted_metrics(case)

    def _loud(self, text: ChunkedText, generator: torch.Generator) -> tuple[torch.Tensor, torch.Tensor]:
        biases = torch.randn(self._shape_of_biases(text), generator=generator) * self._sizes(text)[:, None, None]
        biases[:, 0] = 0
        return biases, biases

    def _by_vectors(
        self, steering_graph: onnxruntime.InferenceSession, text: ChunkedText, generator: torch.Generator
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return U c by torch and by the steering graph; the first vector is zero: a prompt is not steered."""
        projection = self.steering.projection
        taps = torch.randn(len(text.chunks), len(projection.layers) * projection.hidden, generator=generator)
        with torch.inference_mode():
            vectors: torch.Tensor = projection(taps)
            vectors[0] = 0
        by_torch = torch.stack(biases_by(self.steering.matrices, vectors))
        by_graph = [steering_graph.run(self._names, {VECTOR: vector}) for vector in vectors.numpy()]
        biases = torch.from_numpy(np.stack(by_graph, axis=1))
        if float((biases - by_torch).abs().max()) > LARGEST_BIAS_ERROR * float(by_torch.abs().max()):
            raise ExportMismatch("the steering graph does not give U c")
        return by_torch, biases

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


def _log_softmax(logits: np.ndarray) -> np.ndarray:
    """Return the log softmax over the last axis, in float64."""
    shifted = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    normalised: np.ndarray = shifted - np.log(np.exp(shifted).sum(-1, keepdims=True))
    return normalised


def _chunk_lengths(total: int, seed: int) -> list[int]:
    """Return uneven chunks and single steps that sum to `total`."""
    choose = np.random.default_rng(seed)
    lengths: list[int] = []
    while (left := total - sum(lengths)) > 0:
        lengths.append(min(left, int(choose.choice([1, 1, 1, 2, 5, 17, 33]))))
    return lengths
