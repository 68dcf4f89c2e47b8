"""Texts of a target, worked out without any part of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from outrider.proto.noise import gumbel


def decode_by_hand(
    folder: Path, prompts: Sequence[Sequence[int]], seeds: Sequence[int], max_tokens: int
) -> tuple[list[list[int]], np.ndarray]:
    """Continue prompts at temperature 1 by transformers and the documented rule alone: argmax of log p + noise.

    Args:
        folder: folder of a model that transformers loads.
        prompts: token lists of one length, [prompts, prompt tokens].
        seeds: seed of each prompt.
        max_tokens: tokens of each text; an end-of-text token does not end it.

    Returns:
        The tokens after each prompt, [prompts, max_tokens], and the margins, [prompts]: how much the closest choice of
        each text was won by. A text whose margin is near float32's rounding may differ in another batch.
    """
    import torch
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder).eval()
    said = torch.tensor(prompts)
    every_token = np.arange(model.config.vocab_size)
    margins = np.full(len(prompts), np.inf)
    cache = None
    texts: list[list[int]] = [[] for _ in prompts]
    start = said.shape[1]
    with torch.inference_mode():
        for position in range(start, start + max_tokens):
            out = model(said, past_key_values=cache, use_cache=True)
            cache = out.past_key_values
            logp = torch.log_softmax(out.logits[:, -1].double(), -1).numpy()
            score = logp + np.stack([gumbel(seed, position, every_token) for seed in seeds])
            second, first = np.partition(score, -2)[:, -2:].T
            margins = np.minimum(margins, first - second)
            chosen = score.argmax(-1)
            for text, token in zip(texts, chosen, strict=True):
                text.append(int(token))
            said = torch.from_numpy(chosen)[:, None]
    return texts, margins
