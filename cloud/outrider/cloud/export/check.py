"""The check of an exported graph against torch, which comes before it is published."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import onnxruntime
import torch
from transformers import PreTrainedModel

from outrider.cloud.export.contract import OUTPUTS, ExportMismatch, cache_names
from outrider.cloud.export.model import context_length
from outrider.cloud.models.heads import tokens_of
from outrider.proto.drafter_format import CacheShape

# Limits of the check. Errors are in units of the standard deviation of torch's logits.
LARGEST_FLOAT32_ERROR = 1e-3
CHECK_LENGTH = 96
CHECK_SEQUENCES = 4
EMPTY = {"float32": np.nan, "int8": 127}  # content of a cache's room that no position may see


@dataclass(frozen=True)
class PrecisionLimits:
    """Limits for weights of a precision.

    Attributes:
        tie: nats; two best tokens this close may change places, since either is as good a proposal.
        min_agreement: least share of the same argmax where there is no tie.
        largest_kl: nats a token from torch's distributions.
    """

    tie: float
    min_agreement: float
    largest_kl: float


LIMITS = {
    "float32": PrecisionLimits(0.0, 1.0, 0.0),
    "int8": PrecisionLimits(0.1, 0.97, 0.01),
}


def open_session(graph: Path, threads: int = 1) -> onnxruntime.InferenceSession:
    """Open a CPU session that computes on `threads` threads and does not spin between calls."""
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
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
    """The comparison of an exported graph with torch.

    Attributes:
        plain: model in torch, with transformers' own attention.
        shape: shape of its cache.
        precision: precision of the graph's weights.
        candidates: number of candidates to ask the graph for.
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
        rounded = self.precision == "float32" and self.shape.dtype != "float32"
        return LogitsComparison(
            "int8" if rounded else self.precision, slice(None) if tokens is None else tokens.numpy()
        )

    def texts(self) -> list[ChunkedText]:
        """Return the texts to compare on, half of them random tokens, half written by the model."""
        sequences = drawn_texts(self.plain, seed=0).numpy()
        lengths = [_chunk_lengths(len(tokens), seed=index) for index, tokens in enumerate(sequences)]
        return [ChunkedText(tokens, chunks) for tokens, chunks in zip(sequences, lengths, strict=True)]

    def run(
        self, session: onnxruntime.InferenceSession, text: ChunkedText, biases: Sequence[Mapping[str, np.ndarray]] = ()
    ) -> dict[str, np.ndarray]:
        """Return `run_in_chunks` for the text."""
        return run_in_chunks(session, text.tokens, text.chunks, self.shape, self.candidates, biases)


@torch.inference_mode()
def drawn_texts(plain: PreTrainedModel, *, seed: int) -> torch.Tensor:
    """Return int64 [2 * CHECK_SEQUENCES, length]: texts of random tokens, then texts that the model writes."""
    generator = torch.Generator().manual_seed(seed)
    vocabulary = plain.config.vocab_size
    length = min(CHECK_LENGTH, context_length(plain))
    random = torch.randint(vocabulary, (CHECK_SEQUENCES, length), generator=generator)
    written = torch.randint(vocabulary, (CHECK_SEQUENCES, 2), generator=generator)
    while written.shape[1] < length:
        p = plain(input_ids=written, logits_to_keep=1).logits[:, -1].float().softmax(-1)
        written = torch.cat([written, torch.multinomial(p, 1, generator=generator)], dim=1)
    return torch.cat([random, written])


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

    def __init__(self, precision: str, predicted: np.ndarray | slice = slice(None)):
        """Begin with none. `predicted` are the tokens that the head has: candidates are the largest of theirs."""
        self.precision = precision
        self.predicted = predicted
        # Two best logits at most this far apart, in nats, are a tie; float32 rounding is added to it.
        self.tie = LIMITS[precision].tie
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
        clear = two_best[:, 1] - two_best[:, 0] > self.tie + 2 * LARGEST_FLOAT32_ERROR * spread
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
        if self.precision == "float32":
            limits["logits differ"] = metrics["largest_error"] <= LARGEST_FLOAT32_ERROR
            limits["argmax differs"] = metrics["agreement_beyond_ties"] == 1.0
        else:
            limits["argmax differs"] = metrics["agreement_beyond_ties"] >= LIMITS[self.precision].min_agreement
            limits["distributions differ"] = metrics["mean_kl"] <= LIMITS[self.precision].largest_kl
        if failed := [what for what, holds in limits.items() if not holds]:
            what = f"what torch does {case}".rstrip()
            raise ExportMismatch(f"ONNX Runtime does not compute {what}: {', '.join(failed)}; {metrics}")
        return metrics


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
