"""Train a small drafter on plain text, with any tokenizer: the comparison of tokenizers in docs/models.md.

    python tests/drafters/train_on_text.py FOLDER --corpus FILE ... --tokenizer target|bpe|bytes --megabytes 6

`outrider train drafter` distils, for which target and drafter need one vocabulary. Here the loss is cross-entropy on
the corpus, so that drafters of several tokenizers learn from the same texts in the same order, and only their tokens
differ.
`outrider export FOLDER` makes a package of the result.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from itertools import chain
from pathlib import Path

import numpy as np
import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import LlamaConfig, LlamaForCausalLM

from outrider.cloud.training.drafter_training import matrices_and_others
from outrider.cloud.training.optimizers import Muon, adam
from outrider.drafters import find_package

BLOCKS = 4
WARM_UP = 40
SPECIAL = ["<|begin|>", "<|stop|>"]


def main() -> None:
    """Train and save."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("folder", type=Path)
    parser.add_argument("--corpus", type=Path, nargs="+", required=True)
    parser.add_argument("--tokenizer", choices=("target", "bpe", "bytes"), required=True)
    parser.add_argument("--megabytes", type=float, default=6.0)
    parser.add_argument("--block-bytes", type=int, default=2048, help="text of a row; less: more steps (2048)")
    options = parser.parse_args()
    torch.manual_seed(0)
    texts = list(_texts(options.corpus, int(options.megabytes * 1e6)))
    tokenizer = _tokenizer(options.tokenizer, texts)
    bos, eos = (0, 1)
    encoded = tokenizer.encode_batch(texts, add_special_tokens=False)
    tokens = np.fromiter(chain.from_iterable((bos, *each.ids, eos) for each in encoded), dtype=np.int64)
    length = round(options.block_bytes * len(tokens) / sum(len(text.encode()) for text in texts))
    blocks = torch.from_numpy(tokens[: len(tokens) // length * length].reshape(-1, length))
    model = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=tokenizer.get_vocab_size(),
            hidden_size=160,
            num_hidden_layers=2,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=32,
            intermediate_size=448,
            max_position_embeddings=8192 if options.tokenizer == "bytes" else 2048,
            tie_word_embeddings=True,
            bos_token_id=bos,
            eos_token_id=eos,
        )
    )
    _train(model, blocks, options.block_bytes)
    model.save_pretrained(options.folder)
    tokenizer.save(str(options.folder / "tokenizer.json"))


def _train(model: LlamaForCausalLM, blocks: torch.Tensor, block_bytes: int) -> None:
    matrices, others = matrices_and_others(model)
    optimizers = [Muon(matrices, lr=0.02), adam(others, 3e-3)]
    peaks = [group["lr"] for optimizer in optimizers for group in optimizer.param_groups]
    order = torch.randperm(len(blocks))
    steps, began, losses = len(blocks) // BLOCKS, time.monotonic(), []
    for step in range(steps):
        rate = min(1.0, (step + 1) / WARM_UP, (steps - step) / (0.4 * steps))
        groups = (group for optimizer in optimizers for group in optimizer.param_groups)
        for group, peak in zip(groups, peaks, strict=True):
            group["lr"] = peak * rate
        rows = blocks[order[step * BLOCKS : (step + 1) * BLOCKS]]
        loss = model(input_ids=rows, labels=rows, use_cache=False).loss
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        losses.append(float(loss.detach()) * rows.shape[1] / block_bytes)
        if step % 50 == 49 or step == steps - 1:
            mean = sum(losses[-50:]) / len(losses[-50:])
            print(f"step {step + 1} of {steps}: {mean:.3f} nats a byte, {time.monotonic() - began:.0f} s", flush=True)


def _texts(files: list[Path], total: int) -> Iterator[str]:
    """Yield documents of all files in turn until they hold `total` bytes."""
    readers = [(json.loads(line)["text"] for line in path.open(encoding="utf-8")) for path in files]
    for turn in zip(*readers, strict=False):
        for text in turn:
            piece = text[:8000]
            yield piece
            total -= len(piece.encode())
        if total <= 0:
            return


def _tokenizer(kind: str, texts: list[str]) -> Tokenizer:
    if kind == "target":
        return Tokenizer.from_file(str(find_package("general").tokenizer_path))
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=kind == "bpe")
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    size = len(alphabet) + len(SPECIAL) if kind == "bytes" else 4096
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(texts if kind == "bpe" else [], trainer)
    return tokenizer


if __name__ == "__main__":
    main()
