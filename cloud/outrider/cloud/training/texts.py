"""The inputs of a training run: the frozen target, the corpus and the text that the target writes itself."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from transformers import PreTrainedModel

from outrider.cloud.family_index import load_causal_lm, load_tokenizer
from outrider.cloud.training.acceptance import HeldOutText
from outrider.cloud.training.corpus import Documents, Source, load_domain, split_held_out
from outrider.cloud.training.report import Reporter
from outrider.cloud.training.self_text import SelfText, SelfTextPlan, stored_self_text
from outrider.cloud.training.settings import Training
from outrider.proto.errors import InvalidArgument

HELD_OUT_ROWS, HELD_OUT_NEW_TOKENS = 32, 128


def load_target(config: Training) -> PreTrainedModel:
    """Load the target, frozen."""
    refusal = f"{config.target!r} is no causal language model with safetensors weights"
    target = load_causal_lm(config.target, refusal, field="target", dtype=config.dtype, device=config.device)
    target.eval().requires_grad_(False)
    return target


@dataclass(frozen=True)
class Texts:
    """The texts of a run: sources to train on, and rows to measure on by name.

    The target's own rows of T = 0 are apart, after all others.
    """

    sources: list[Source]
    held_out: Mapping[str, tuple[list[HeldOutText], list[HeldOutText]]]


def gather_texts(config: Training, target: PreTrainedModel, reporter: Reporter) -> Texts:
    """Tokenise the corpus, let the target write its own text, and set some of both aside."""
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
        sources.append(Source(f"corpus/{domain.name}", training.tokens, weight * (1 - config.self_text_fraction)))
        rows[f"corpus/{domain.name}"] = _held_out_rows(held_out, config.block, config.held_out_tokens), []
        if not (config.self_text_tokens and weight):
            continue
        written, kept = _self_text(config, target, training, held_out, len(domains), (bos, eos), reporter)
        sources.append(Source(f"self/{domain.name}", written.tokens, weight * config.self_text_fraction))
        sampled, greedy = (
            [HeldOutText(kept[i], first=int(kept.prefix_lengths[i])) for i in np.flatnonzero(of_kind).tolist()]
            for of_kind in (~kept.greedy, kept.greedy)
        )
        rows[f"self/{domain.name}"] = sampled, greedy
    return Texts(sources, rows)


def _frame(tokenizer: Any, target: PreTrainedModel) -> tuple[int, int]:
    """Return the ids of the tokens that open and close a document; each may stand in for the other."""
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else bos
    if bos is None:
        raise InvalidArgument("its tokenizer names neither a first nor a last token of a document", field="target")
    if max(bos, eos, len(tokenizer) - 1) >= target.config.vocab_size:
        raise InvalidArgument("its tokenizer has more tokens than the model", field="target")
    return bos, eos


def _self_text(
    config: Training,
    target: PreTrainedModel,
    training: Documents,
    held_out: Documents,
    domains: int,
    frame: tuple[int, int],
    reporter: Reporter,
) -> list[SelfText]:
    """Return text to train on, and text to measure on, which continues held-out documents."""
    longest = min(128, config.block // 2)
    plan = SelfTextPlan(
        config.self_text_tokens // domains,
        config.self_text_rows,
        config.self_text_new_tokens,
        min(32, longest),
        longest,
        config.self_text_greedy,
    )
    small = replace(
        plan,
        tokens=1,
        rows=min(HELD_OUT_ROWS, plan.rows),
        new_tokens=min(HELD_OUT_NEW_TOKENS, plan.new_tokens),
        greedy=0.5,
    )
    cache = config.output / "cache"
    return [
        stored_self_text(
            target, documents, part, cache=cache, frame=frame, seed=config.seed + offset, reporter=reporter
        )
        for offset, (documents, part) in enumerate([(training, plan), (held_out, small)])
    ]


def _held_out_rows(held_out: Documents, block: int, tokens: int) -> list[HeldOutText]:
    """Return blocks of the held-out documents, up to `tokens` tokens, but at least one row."""
    documents = (held_out[index] for index in range(len(held_out)))
    pieces = [document[first : first + block] for document in documents for first in range(0, len(document), block)]
    pieces = [piece for piece in pieces if len(piece) > 1]
    return [HeldOutText(piece) for piece in pieces[: max(1, tokens // block)]]
