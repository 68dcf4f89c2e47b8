"""Text that the target writes itself after corpus prefixes, like a verifier: the text that a drafter is verified on."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from outrider.cloud.target import Target
from outrider.cloud.text_writer import TextRequest, TextWriter
from outrider.cloud.training.corpus import Documents, join_documents
from outrider.cloud.training.report import Reporter
from outrider.proto.types import Sampling

PAGE = 16  # positions a page of the KV cache


@dataclass(frozen=True)
class SelfText(Documents):
    """Rows of one domain in place of documents: prefix, then what the target wrote.

    Attributes:
        prefix_lengths: int64 [rows].
        greedy: bool [rows]; True where the row was written at T = 0, False at T = 1.
    """

    prefix_lengths: np.ndarray
    greedy: np.ndarray


@dataclass(frozen=True)
class SelfTextPlan:
    """The amount to write and its portions; lengths in tokens; `greedy`: share of the rows written at T = 0."""

    tokens: int
    rows: int
    new_tokens: int
    shortest_prefix: int
    longest_prefix: int
    greedy: float = 0.5


def embedding_weight(model: PreTrainedModel) -> torch.Tensor:
    """Return the input embedding [vocab, hidden], detached."""
    return model.get_input_embeddings().get_parameter("weight").detach()


def stored_self_text(
    target: PreTrainedModel,
    documents: Documents,
    plan: SelfTextPlan,
    *,
    cache: Path,
    frame: tuple[int, int],
    seed: int,
    reporter: Reporter,
) -> SelfText:
    """Take the text from `cache` if target, documents, plan and seed are the same, else write it there.

    `frame` holds the ids of the tokens that open and close a document.
    """
    mark = hashlib.sha256(documents.tokens.tobytes())
    mark.update(repr((asdict(plan), frame, seed)).encode())
    mark.update(embedding_weight(target).float().cpu().numpy().tobytes())
    path = cache / f"self-text-{documents.name}-{mark.hexdigest()[:16]}.npz"
    if path.exists():
        return SelfText.load(documents.name, path)
    reporter.stage(f"self-text {documents.name}")
    began = time.monotonic()

    def report(written: int) -> None:
        speed = written / (time.monotonic() - began)
        reporter.advance(written / plan.tokens, f"{written:,} tokens {speed:,.0f} tokens/s")

    text = write_self_text(target, documents, plan, bos=frame[0], eos=frame[1], seed=seed, report=report)
    text.save(path)
    return text


def write_self_text(
    target: PreTrainedModel,
    documents: Documents,
    plan: SelfTextPlan,
    *,
    bos: int,
    eos: int,
    seed: int,
    report: Callable[[int], None],
) -> SelfText:
    """Let the target continue prefixes of `documents` until it has written `plan.tokens`.

    `report` is called with the number of tokens written after each batch.
    """
    choose = np.random.default_rng([seed, 1])
    rows: list[np.ndarray] = []
    prefix_lengths: list[int] = []
    greedy: list[bool] = []
    written = 0
    while written < plan.tokens:
        length = int(choose.integers(plan.shortest_prefix, plan.longest_prefix + 1))
        prefixes = choose_prefixes(documents, plan.rows, length, plan.new_tokens, bos, choose)
        is_greedy = np.floor(np.arange(1, len(prefixes) + 1) * plan.greedy) > np.floor(
            np.arange(len(prefixes)) * plan.greedy
        )
        seeds = choose.integers(2**62, size=len(prefixes))
        batch = continue_rows(target, prefixes, is_greedy, new_tokens=plan.new_tokens, eos=eos, seeds=seeds)
        rows += batch
        prefix_lengths += [prefixes.shape[1]] * len(batch)
        greedy += is_greedy.tolist()
        written += sum(len(row) for row in batch) - prefixes.size
        report(written)
    joined = join_documents(documents.name, rows)
    return SelfText(
        joined.name, joined.tokens, joined.starts, np.array(prefix_lengths, dtype=np.int64), np.array(greedy)
    )


def choose_prefixes(
    documents: Documents, rows: int, length: int, new_tokens: int, bos: int, choose: np.random.Generator
) -> np.ndarray:
    """Choose prefixes `<bos>` + window of a document, int64 [rows, length].

    A document shorter than one whole row (`length + new_tokens`) is continued from its beginning, a longer one from
    anywhere inside it. Documents too short for the prefix are passed over; if all are, the prefix is shortened.
    """
    inner = np.diff(documents.starts) - 2
    length = min(length, int(inner.max()) + 1)
    eligible = np.flatnonzero(inner >= length - 1)
    weights = np.where(inner[eligible] < length + new_tokens, length + new_tokens, inner[eligible]).astype(float)
    picked = choose.choice(eligible, size=rows, p=weights / weights.sum())
    prefixes = np.full((rows, length), bos, dtype=np.int64)
    for row, index in enumerate(picked):
        room = inner[index] - (length - 1)
        first = 0 if inner[index] < length + new_tokens else int(choose.integers(room + 1))
        prefixes[row, 1:] = documents[int(index)][1 + first : first + length]
    return prefixes


def continue_rows(
    model: PreTrainedModel, prefixes: np.ndarray, is_greedy: np.ndarray, *, new_tokens: int, eos: int, seeds: np.ndarray
) -> list[np.ndarray]:
    """Continue every prefix like a verifier, until it ends or `new_tokens` are written.

    Args:
        model: model that writes; it attends afterwards as it did before.
        prefixes: int64 [rows, length].
        is_greedy: bool [rows]; True: at T = 0, False: at T = 1.
        new_tokens: number of tokens to write in a row.
        eos: token that ends a row.
        seeds: int64 [rows], seeds of the noise.

    Returns:
        Prefix and continuation of each row (its end token included), int64 [length + written].
    """
    requests = [
        TextRequest(
            tuple(prefix.tolist()),
            Sampling(temperature=0.0 if greedy else 1.0, seed=int(seed), max_tokens=new_tokens),
        )
        for prefix, greedy, seed in zip(prefixes, is_greedy, seeds, strict=True)
    ]
    attention = model.config._attn_implementation
    try:
        target = Target(model, "{}", kv_tokens=len(requests) * (prefixes.shape[1] + new_tokens + PAGE), page_size=PAGE)
        texts = TextWriter(target, at_once=len(requests), eos_tokens={eos}).write(requests)
    finally:
        model.set_attn_implementation(attention)
    return [np.array(text.transcript, dtype=np.int64) for text in texts]
