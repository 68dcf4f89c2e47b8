"""The inputs of a training run: the frozen target, and a corpus or what the target has said."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from transformers import PreTrainedModel

from outrider.cloud.models.family_index import load_causal_lm, load_tokenizer
from outrider.cloud.training.corpus import Documents, Source, load_domain, split_held_out
from outrider.cloud.training.measured_acceptance import HeldOutText
from outrider.cloud.training.teacher import TeacherFolder, TeacherRows
from outrider.cloud.training.training_settings import Training
from outrider.proto.errors import InvalidArgument

HELD_OUT_ROWS = 64  # of a teacher's, a tenth at most


def load_target(config: Training) -> PreTrainedModel:
    """Load the target, frozen."""
    refusal = f"{config.target!r} is no causal language model with safetensors weights"
    target = load_causal_lm(config.target, refusal, field="target", dtype=config.dtype, device=config.device)
    target.eval().requires_grad_(False)
    return target


@dataclass(frozen=True)
class Texts:
    """The texts of a run: sources to train on, and rows to measure on by name.

    What the target wrote at T = 0 is apart, after all else. Of a teacher's rows the source has places, not tokens.
    """

    sources: list[Source]
    held_out: Mapping[str, tuple[list[HeldOutText], list[HeldOutText]]]
    rows: TeacherRows | None = None

    def tokens_of(self, blocks: torch.Tensor) -> torch.Tensor:
        """Return the tokens of blocks of a source, int64 [rows, block]."""
        return blocks if self.rows is None else self.rows.tokens[blocks.cpu()].long().to(blocks.device)

    def read(self) -> list[Source]:
        """Return the sources with their tokens."""
        if self.rows is None:
            return self.sources
        tokens = self.rows.tokens.numpy()
        return [Source(source.name, tokens[source.tokens], source.weight) for source in self.sources]


def gather_texts(config: Training, target: PreTrainedModel) -> Texts:
    """Tokenise the corpus or read a teacher's rows, and set some aside."""
    if config.teacher is not None:
        folder = TeacherFolder(config.teacher)
        folder.check_target(target)
        return _teacher_texts(folder.rows(), config.seed)
    tokenizer = load_tokenizer(config.target)
    if not tokenizer.is_fast:
        raise InvalidArgument("its tokenizer has no tokenizer.json", field="target")
    bos, eos = _frame(tokenizer, target)
    cache = config.output / "cache"
    domains = [load_domain(path, tokenizer.backend_tokenizer, bos=bos, eos=eos, cache=cache) for path in config.corpus]
    names = {domain.name for domain in domains}
    if unknown := set(config.domain_weights) - names:
        raise InvalidArgument(f"no such domain: {sorted(unknown)}; there are {sorted(names)}", field="domain_weights")
    sources: list[Source] = []
    rows: dict[str, tuple[list[HeldOutText], list[HeldOutText]]] = {}
    for domain in domains:
        weight = config.domain_weights.get(domain.name, 1.0 if not config.domain_weights else 0.0)
        training, held_out = split_held_out(domain, config.held_out_tokens, config.seed)
        sources.append(Source(f"corpus/{domain.name}", training.tokens, weight))
        rows[f"corpus/{domain.name}"] = _held_out_rows(held_out, config.block, config.held_out_tokens), []
    return Texts(sources, rows)


def _teacher_texts(rows: TeacherRows, seed: int) -> Texts:
    """Return places in the rows to train on, and some rows to measure on, drawn by `seed`."""
    drawn = np.random.default_rng([seed, 0]).permutation(len(rows))
    held = np.sort(drawn[: max(1, min(HELD_OUT_ROWS, len(rows) // 10))])
    trained = np.setdiff1d(drawn, held)
    starts = rows.starts.numpy()
    places = np.concatenate([np.arange(starts[i], starts[i + 1], dtype=np.uint32) for i in trained])
    measured: tuple[list[HeldOutText], list[HeldOutText]] = ([], [])
    for index in held.tolist():
        text = HeldOutText(rows[index].numpy().astype(np.uint32), first=int(rows.firsts[index]))
        measured[bool(rows.greedy[index])].append(text)
    return Texts([Source("teacher", places, 1.0)], {"teacher": measured}, rows)


def _frame(tokenizer: Any, target: PreTrainedModel) -> tuple[int, int]:
    """Return the ids of the tokens that open and close a document; each may stand in for the other."""
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else bos
    if bos is None:
        raise InvalidArgument("its tokenizer names neither a first nor a last token of a document", field="target")
    if max(bos, eos, len(tokenizer) - 1) >= target.config.vocab_size:
        raise InvalidArgument("its tokenizer has more tokens than the model", field="target")
    return bos, eos


def _held_out_rows(held_out: Documents, block: int, tokens: int) -> list[HeldOutText]:
    """Return blocks of the held-out documents, up to `tokens` tokens, but at least one row."""
    documents = (held_out[index] for index in range(len(held_out)))
    pieces = [document[first : first + block] for document in documents for first in range(0, len(document), block)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    return [HeldOutText(piece) for piece in pieces[: max(1, tokens // block)]]
