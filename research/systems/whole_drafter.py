"""Write a trimmed drafter as a model over the whole vocabulary, which other systems load as a draft model.

    python research/systems/whole_drafter.py DRAFTER --model MODEL --output FOLDER

DRAFTER is a folder of `outrider train drafter --vocabulary N`. A token that its head lacks has the logit 0 here.
"""

from __future__ import annotations

import argparse
import json
import shutil
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file


def whole(drafter: Path, model: Path, output: Path) -> None:
    """Write the drafter of `drafter` to `output`, in bfloat16, with the tokenizer of `model`."""
    weights = load_file(drafter / "model.safetensors")
    rows, known = weights.pop("lm_head.up.weight"), weights.pop("lm_head.tokens")
    of_token = weights.pop("model.embed_tokens.rows").long()
    weights["model.embed_tokens.weight"] = rows[of_token]
    weights["lm_head.weight"] = torch.zeros(len(of_token), rows.shape[1]).index_copy(0, known, rows)
    output.mkdir(parents=True, exist_ok=True)
    kept = {name: tensor.to(torch.bfloat16).contiguous() for name, tensor in weights.items()}
    save_file(kept, output / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((drafter / "config.json").read_text(encoding="utf-8"))
    del config["outrider_head"]
    (output / "config.json").write_text(json.dumps(config | {"dtype": "bfloat16"}), encoding="utf-8")
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
