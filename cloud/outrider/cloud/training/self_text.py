"""Text the target writes itself, continuing corpus prefixes: the text a drafter is judged on.

A share of the rows is greedy (T = 0), the others are sampled at T = 1. All rows of a batch share one prefix length, so
no row is padded; rows that end are dropped from the batch once they are many.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import AttentionInterface, PreTrainedModel

from outrider.cloud.training.corpus import Documents, save_arrays
from outrider.cloud.training.report import Reporter

ATTENTION = "outrider_self_text"


@dataclass(frozen=True)
class SelfText:
    """Rows of one domain, end to end: prefix, then what the target wrote.

    Attributes:
        domain: name.
        tokens: uint32 [total].
        starts: int64 [rows + 1].
        prefix_lengths: int64 [rows].
        greedy: bool [rows]; True where the row was written at T = 0, False at T = 1.
    """

    domain: str
    tokens: np.ndarray
    starts: np.ndarray
    prefix_lengths: np.ndarray
    greedy: np.ndarray

    def __len__(self) -> int:
        return len(self.prefix_lengths)

    def row(self, index: int) -> np.ndarray:
        """Prefix and continuation, uint32 [length]."""
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    @property
    def written(self) -> int:
        """Tokens the target wrote (prefixes left out)."""
        return len(self.tokens) - int(self.prefix_lengths.sum())

    def between(self, first: int, last: int) -> SelfText:
        """Rows `first` to `last - 1`."""
        starts = self.starts[first : last + 1]
        return SelfText(
            self.domain,
            self.tokens[starts[0] : starts[-1]],
            starts - starts[0],
            self.prefix_lengths[first:last],
            self.greedy[first:last],
        )

    def save(self, path: Path) -> None:
        """Write to `path`, whole or not at all."""
        save_arrays(
            path, tokens=self.tokens, starts=self.starts, prefix_lengths=self.prefix_lengths, greedy=self.greedy
        )

    @staticmethod
    def load(domain: str, path: Path) -> SelfText:
        """What `save` wrote."""
        with np.load(path, allow_pickle=False) as stored:
            return SelfText(domain, stored["tokens"], stored["starts"], stored["prefix_lengths"], stored["greedy"])


@dataclass(frozen=True)
class SelfTextPlan:
    """How much to write and in what portions. Lengths in tokens; `greedy`: share of the rows written at T = 0."""

    tokens: int
    rows: int
    new_tokens: int
    shortest_prefix: int
    longest_prefix: int
    greedy: float = 0.5


def embedding_weight(model: PreTrainedModel) -> torch.Tensor:
    """[vocab, hidden], detached."""
    weight = model.get_input_embeddings().weight
    if not isinstance(weight, torch.Tensor):
        raise TypeError("the model's input embedding is not a plain matrix")
    return weight.detach()


def stored_self_text(
    target: PreTrainedModel,
    documents: Documents,
    plan: SelfTextPlan,
    *,
    cache: Path,
    frame: tuple[int, int],
    seed: int,
    told: Reporter,
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
    told.stage(f"self-text {documents.name}")
    began, written = time.monotonic(), 0

    def report(added: int) -> None:
        nonlocal written
        written += added
        speed = written / (time.monotonic() - began)
        told.advance(written / plan.tokens, f"{written:,} tokens {speed:,.0f} tokens/s")

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

    `report` is called with the number of tokens each batch added.
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
        batch = continue_rows(
            target,
            torch.from_numpy(prefixes),
            torch.from_numpy(is_greedy),
            new_tokens=plan.new_tokens,
            eos=eos,
            generator=torch.Generator().manual_seed(int(choose.integers(2**62))),
        )
        rows += batch
        prefix_lengths += [prefixes.shape[1]] * len(batch)
        greedy += is_greedy.tolist()
        added = sum(len(row) for row in batch) - prefixes.size
        written += added
        report(added)
    starts = np.zeros(len(rows) + 1, dtype=np.int64)
    np.cumsum([len(row) for row in rows], out=starts[1:])
    return SelfText(
        documents.name,
        np.concatenate(rows).astype(np.uint32),
        starts,
        np.array(prefix_lengths, dtype=np.int64),
        np.array(greedy),
    )


def choose_prefixes(
    documents: Documents, rows: int, length: int, new_tokens: int, bos: int, choose: np.random.Generator
) -> np.ndarray:
    """Prefixes `<bos>` + window of a document, int64 [rows, length].

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


@torch.inference_mode()
def continue_rows(
    target: PreTrainedModel,
    prefixes: torch.Tensor,
    is_greedy: torch.Tensor,
    *,
    new_tokens: int,
    eos: int,
    generator: torch.Generator,
) -> list[np.ndarray]:
    """Continue every prefix with the target's own choice until it ends or `new_tokens` are written.

    Args:
        target: the model that writes.
        prefixes: int64 [rows, length].
        is_greedy: bool [rows]; argmax where True, a sample at T = 1 elsewhere.
        new_tokens: the most that are written a row.
        eos: the token that ends a row.
        generator: of the samples.

    Returns:
        for each row prefix and continuation (its end token included), int64 [length + written].
    """
    rows, length = prefixes.shape
    device = target.device
    tokens = torch.cat([prefixes, torch.full((rows, new_tokens), eos)], dim=1)
    lengths = torch.full((rows,), length + new_tokens)
    cache = _RowCache(length + new_tokens)
    alive = torch.arange(rows)
    AttentionInterface.register(ATTENTION, _attend)
    implementation = target.config._attn_implementation
    target.set_attn_implementation(ATTENTION)
    try:
        step_tokens = prefixes.to(device)
        for position in range(length, length + new_tokens):
            positions = torch.arange(cache.length, position, device=device)[None]
            logits_by_target = target(
                input_ids=step_tokens,
                position_ids=positions,
                use_cache=False,
                logits_to_keep=1,
                outrider_rows=cache,
            ).logits[:, -1]
            cache.length = position
            chosen = _choose(logits_by_target.float().cpu(), is_greedy[alive], generator)
            tokens[alive, position] = chosen
            ended = chosen == eos
            lengths[alive[ended]] = torch.minimum(lengths[alive[ended]], torch.tensor(position + 1))
            running = lengths[alive] > position + 1
            if running.sum() == 0:
                break
            if running.float().mean() < 0.8:
                kept = running.nonzero()[:, 0]
                cache.keep(kept.to(device))
                alive, chosen = alive[kept], chosen[kept]
            step_tokens = chosen[:, None].to(device)
    finally:
        target.set_attn_implementation(implementation)
    return [row[:length].numpy() for row, length in zip(tokens, lengths.tolist(), strict=True)]


def _choose(logits: torch.Tensor, is_greedy: torch.Tensor, generator: torch.Generator) -> torch.Tensor:
    """Argmax of the greedy rows of `logits` (float32 [rows, vocab]), a sample at T = 1 of the others: int64 [rows]."""
    chosen = logits.argmax(-1)
    cumulative = logits[~is_greedy].softmax(-1).cumsum(-1)
    level = torch.rand(len(cumulative), 1, generator=generator) * cumulative[:, -1:]
    chosen[~is_greedy] = torch.searchsorted(cumulative, level, right=True)[:, 0].clamp_(max=logits.shape[1] - 1)
    return chosen


class _RowCache:
    """Keys and values of every layer in buffers of full length: [rows, kv_heads, capacity, head_dim]."""

    def __init__(self, capacity: int):
        self.capacity = capacity
        self.length = 0
        self.layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}

    def append(self, layer: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Add [rows, kv_heads, n, head_dim] and return all so far, [rows, kv_heads, length + n, head_dim]."""
        last = self.length + key.shape[2]
        if layer not in self.layers:
            rows, kv_heads, _, head_dim = key.shape
            shape = (rows, kv_heads, self.capacity, head_dim)
            self.layers[layer] = (key.new_empty(shape), value.new_empty(shape))
        keys, values = self.layers[layer]
        keys[:, :, self.length : last] = key
        values[:, :, self.length : last] = value
        return keys[:, :, :last], values[:, :, :last]

    def keep(self, rows: torch.Tensor) -> None:
        """Forget all rows but `rows` (int64 [kept])."""
        self.layers = {layer: (keys[rows], values[rows]) for layer, (keys, values) in self.layers.items()}


def _attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    _mask: torch.Tensor | None,
    *,
    outrider_rows: _RowCache,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: object,
) -> tuple[torch.Tensor, None]:
    """Attention over the row cache, query heads grouped by the key head they share (nothing is repeated).

    `query` is [rows, heads, n, head_dim]; `key` and `value`, of the new positions, are [rows, kv_heads, n, head_dim].
    The result is [rows, n, heads, head_dim].
    """
    past = outrider_rows.length
    keys, values = outrider_rows.append(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    rows, heads, n, head_dim = query.shape
    kv_heads, total = keys.shape[1], keys.shape[2]
    shared = query.reshape(rows * kv_heads, heads // kv_heads * n, head_dim)
    scale = head_dim**-0.5 if scaling is None else scaling
    scores = torch.bmm(shared, keys.flatten(0, 1).transpose(1, 2)).mul_(scale)
    if softcap is not None:
        scores = scores.div_(softcap).tanh_().mul_(softcap)
    distance = (past + torch.arange(n, device=query.device))[:, None] - torch.arange(total, device=query.device)
    hidden = distance < 0
    window = sliding_window if sliding_window is not None else getattr(module, "sliding_window", None)
    if window is not None:
        hidden = hidden | (distance >= window)
    if n > 1 or window is not None:
        scores = scores.view(rows * kv_heads, -1, n, total).masked_fill_(hidden, float("-inf")).view_as(scores)
    mixed = torch.bmm(scores.softmax(-1), values.flatten(0, 1))
    return mixed.view(rows, heads, n, head_dim).transpose(1, 2), None
