"""Write a trimmed drafter as a model over the whole vocabulary, which other systems load as a draft model.

    python research/systems/whole_drafter.py DRAFTER --model MODEL --output FOLDER

DRAFTER is a folder of `outrider train drafter --vocabulary N`. A token that its head lacks has the logit 0 here.
"""

from __future__ import annotations

import argparse
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import nn

from outrider.cloud.models.heads import HEAD, load_with_small_head


def whole(drafter: Path, model: Path, output: Path) -> None:
    """Write the drafter of `drafter` to `output`, in bfloat16, with the tokenizer of `model`."""
    made: Any = load_with_small_head(drafter, dtype="float32", attention=None)
    vocab, rows, known = made.config.vocab_size, made.lm_head.up.weight.detach(), made.lm_head.tokens
    embedding = made.model.embed_tokens(torch.arange(vocab)).detach()
    made.model.embed_tokens = nn.Embedding.from_pretrained(embedding)
    made.lm_head = nn.Linear(rows.shape[1], vocab, bias=False)
    made.lm_head.weight = nn.Parameter(torch.zeros_like(embedding).index_copy(0, known, rows))
    delattr(made.config, HEAD)
    made.to(torch.bfloat16).save_pretrained(output)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(model / name, output)


def main() -> None:
    """Read the options, and write the model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("drafter", type=Path)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    whole(options.drafter, options.model, options.output)


if __name__ == "__main__":
    main()
