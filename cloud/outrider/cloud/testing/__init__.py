"""A target for tests that costs next to nothing, and its texts, worked out without any part of the engine."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from outrider.proto.noise import gumbel
from outrider.proto.testing import word_tokenizer

if TYPE_CHECKING:
    from tokenizers import Tokenizer
    from transformers import LlamaForCausalLM

VOCAB = 61
CONTEXT = 1024
TINY: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": CONTEXT,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def tiny_llama(*, seed: int = 3, sharpness: float = 1.0, **config: Any) -> LlamaForCausalLM:
    """Make a random Llama of one layer, in memory; no training makes it say anything sensible.

    Args:
        seed: seed of torch's generator, for the weights.
        sharpness: factor of the output layer's weights. At 1 each token is almost as likely as any other, whatever
            came before; at 60 a text depends on all of its prompt.
        config: fields of `transformers.LlamaConfig` that differ from `TINY`.
    """
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(seed)
    model: LlamaForCausalLM = LlamaForCausalLM(LlamaConfig(**(TINY | config))).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(sharpness)
    return model


def save_tiny_target(
    folder: Path, *, tokenizer: str = "", seed: int = 3, sharpness: float = 60.0, **config: Any
) -> Path:
    """Write a `tiny_llama` and its tokenizer as a folder that `outrider verifier --target` serves; return it.

    `tokenizer` is the text of `tokenizer.json`; empty: `word_tokenizer` of the model's vocabulary.
    """
    tiny_llama(seed=seed, sharpness=sharpness, **config).save_pretrained(folder)
    vocab_size = (TINY | config)["vocab_size"]
    (folder / "tokenizer.json").write_text(tokenizer or word_tokenizer(vocab_size), encoding="utf-8")
    return folder


def save_byte_tokenizer(folder: Path) -> Tokenizer:
    """Write a tokenizer of 258 tokens, `<bos>`, `<eos>` and the 256 bytes, as transformers saves one; return it."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocabulary = {"<bos>": 0, "<eos>": 1} | {letter: 2 + index for index, letter in enumerate(alphabet)}
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    special = {"bos_token": "<bos>", "eos_token": "<eos>"}
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **special).save_pretrained(folder)
    return tokenizer


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
