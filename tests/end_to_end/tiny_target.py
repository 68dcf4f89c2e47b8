"""A target that costs next to nothing, and what it has to say, worked out by transformers and the rule alone."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from outrider.proto.noise import gumbel

VOCAB = 61
CONTEXT = 1024
_FIRST_WORD = 3  # 0 to 2 are special to the model
_LEAST_MARGIN = 1e-4  # float32 may round otherwise in another batch, by a hundredth of that at most
_PROMPT_WORDS = 4


@dataclass(frozen=True)
class Question:
    """A prompt with its seed, and the text that follows it at temperature 1: no other prompt's is like it."""

    prompt: str
    seed: int
    text: str

    def asks(self, model: str) -> dict[str, object]:
        """The body of a streamed completion."""
        return {
            "model": model,
            "prompt": self.prompt,
            "seed": self.seed,
            "max_tokens": len(self.text.split()),
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": True,
        }


def save_tiny_target(folder: Path) -> Path:
    """Write a random Llama of one layer, with a tokenizer of words; the folder."""
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(3)
    config = LlamaConfig(
        vocab_size=VOCAB,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=CONTEXT,
        bos_token_id=1,
        eos_token_id=2,
    )
    model = LlamaForCausalLM(config).eval()
    with torch.no_grad():
        model.lm_head.weight.mul_(60)  # else every word is as likely as any other, whatever came before
    model.save_pretrained(folder)
    tokenizer = {
        "version": "1.0",
        "pre_tokenizer": {"type": "Whitespace"},
        "model": {"type": "WordLevel", "vocab": {_word(i): i for i in range(VOCAB)}, "unk_token": _word(0)},
    }
    (folder / "tokenizer.json").write_text(json.dumps(tokenizer))
    return folder


def questions(folder: Path, count: int, tokens: int) -> list[Question]:
    """`count` prompts with texts of `tokens` tokens, each decoded without any part of Outrider but its noise."""
    candidates = count + count // 4 + 8
    prompts = [_prompt(i) for i in range(candidates)]
    seeds = [1000 + i for i in range(candidates)]
    texts, margins = _decode(folder, prompts, seeds, tokens)
    sure = [i for i in range(candidates) if margins[i] > _LEAST_MARGIN][:count]
    assert len(sure) == count, "too many texts hang on the last bit of a float"
    made = [Question(_say(prompts[i]), seeds[i], _say(texts[i])) for i in sure]
    assert len({question.text for question in made}) == count
    return made


@torch.inference_mode()
def _decode(
    folder: Path, prompts: list[list[int]], seeds: list[int], tokens: int
) -> tuple[list[list[int]], np.ndarray]:
    """The tokens after every prompt, and [prompts] by how much the closest of their choices was won."""
    from transformers import LlamaForCausalLM

    model = LlamaForCausalLM.from_pretrained(folder).eval()
    said = torch.tensor(prompts)
    margins = np.full(len(prompts), np.inf)
    cache = None
    texts: list[list[int]] = [[] for _ in prompts]
    every_token = np.arange(VOCAB)
    for position in range(_PROMPT_WORDS, _PROMPT_WORDS + tokens):
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


def _prompt(index: int) -> list[int]:
    words = VOCAB - _FIRST_WORD
    return [_FIRST_WORD + digit for digit in (index % words, index // words, 7 * index % words, 11)]


def _say(tokens: list[int]) -> str:
    return " ".join(map(_word, tokens))


def _word(token: int) -> str:
    return f"w{token}"
