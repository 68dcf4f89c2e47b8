"""Targets for tests that cost next to nothing."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

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
