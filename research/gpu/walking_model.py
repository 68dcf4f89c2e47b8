"""Write a model of 8 B parameters whose greedy text is known, for timing a server with drafts that hold or do not.

    python research/gpu/walking_model.py --tokenizer DIR --output /dev/shm/walking --prompts walks.jsonl

It has the shape of Qwen3-8B and random weights, but what a layer adds is small, and a token's row of the last matrix is
the embedding of the token before it on a walk over whole words. Half of the prompts lead onto walks that come round
again after `ROUND` words, which n-grams find; the others onto one that does not.
"""

from __future__ import annotations

import argparse
import json
import random
import re
import shutil
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Tokenizer
from transformers import Qwen3Config, Qwen3ForCausalLM

SHAPE: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": False,
    "dtype": "bfloat16",
}
ROUND, ROUNDS = 24, 40
SMALL = 1e-3  # of what layers add, to embeddings of 1
SHARPNESS = 0.25 / 16  # of the last matrix: the next word has a logit of 64, of others the deviation is 1


def words_of(tokenizer: Tokenizer) -> list[int]:
    """Return tokens that are a space and a word, so that a text of them is read again as the same tokens."""
    return [token for piece, token in sorted(tokenizer.get_vocab().items()) if re.fullmatch("Ġ[a-z]{3,}", piece)]


def walks(words: list[int], random_: random.Random) -> dict[int, int]:
    """Return the word after each: `ROUNDS` walks of `ROUND` words that come round again, and one of all others."""
    order = random_.sample(words, len(words))
    parts = [order[first : first + ROUND] for first in range(0, ROUND * ROUNDS, ROUND)] + [order[ROUND * ROUNDS :]]
    return {word: part[(place + 1) % len(part)] for part in parts for place, word in enumerate(part)}


def prompts_of(
    after: dict[int, int], tokenizer: Tokenizer, count: int, tokens: int, random_: random.Random
) -> list[str]:
    """Return lines of JSON: prompts of so many words, of which the last begins a walk, in two domains in turns."""
    words = list(after)
    lines = []
    for number in range(count):
        comes_round = number % 2 == 0
        last = words[number * ROUND // 2] if comes_round else words[ROUND * ROUNDS + 200 * number]
        prompt = tokenizer.decode([*random_.sample(words, tokens - 1), last])
        domain = "round" if comes_round else "new"
        lines.append(json.dumps({"id": f"{domain}/{number}", "domain": domain, "prompt": prompt}))
    return lines


def walking_model(after: dict[int, int], shape: dict[str, Any], device: str) -> Any:
    """Return the model whose greedy text follows `after`."""
    torch.manual_seed(0)
    with torch.device(device):
        model: Any = Qwen3ForCausalLM(Qwen3Config(**shape))
    model.to(torch.bfloat16)
    generator = torch.Generator(device).manual_seed(0)
    with torch.inference_mode():
        for name, weight in model.named_parameters():
            if weight.dim() == 2 and "embed" not in name:
                weight.normal_(0, SMALL if "down_proj" in name or "o_proj" in name else 0.02, generator=generator)
        embedding = model.model.embed_tokens.weight.normal_(0, 1, generator=generator)
        last = model.lm_head.weight.zero_()
        before = torch.tensor(list(after), device=device)
        last[torch.tensor(list(after.values()), device=device)] = SHARPNESS * embedding[before]
    return model


def main() -> None:
    """Write model, tokenizer and prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokenizer", type=Path, required=True, help="folder of a tokenizer, such as SmolLM2's")
    parser.add_argument("--output", type=Path, required=True, help="folder to write the model to")
    parser.add_argument("--prompts", type=Path, required=True, help="file to write prompts to")
    parser.add_argument("--count", type=int, default=16, help="prompts")
    parser.add_argument("--tokens", type=int, default=200, help="words of a prompt")
    parser.add_argument("--layers", type=int, default=SHAPE["num_hidden_layers"], help="fewer, to try it")
    parser.add_argument("--hidden", type=int, default=SHAPE["hidden_size"], help="smaller, to try it")
    parser.add_argument("--device", default="cuda", help="what makes the weights")
    options = parser.parse_args()
    tokenizer, random_ = Tokenizer.from_file(str(options.tokenizer / "tokenizer.json")), random.Random(0)
    after = walks(words_of(tokenizer), random_)
    shape = SHAPE | {"num_hidden_layers": options.layers, "hidden_size": options.hidden}
    model = walking_model(after, shape, options.device)
    options.output.mkdir(parents=True, exist_ok=True)
    for file in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        shutil.copy(options.tokenizer / file, options.output)
    model.config.eos_token_id = tokenizer.get_vocab_size() - 1
    model.config.architectures = ["Qwen3ForCausalLM"]
    model.config.save_pretrained(options.output)
    weights = {name: weight.detach().contiguous().cpu() for name, weight in model.named_parameters()}
    save_file(weights, options.output / "model.safetensors", {"format": "pt"})
    lines = prompts_of(after, tokenizer, options.count, options.tokens, random_)
    options.prompts.write_text("\n".join(lines) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
