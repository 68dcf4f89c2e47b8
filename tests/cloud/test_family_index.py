"""Models that ship with Outrider are found by name, whole."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

from safetensors import safe_open
from tokenizers import Tokenizer

from outrider.cloud.family_index import drafter_folder, load_tokenizer, resolve_target, tokenizer_file

UNPACK = "from outrider.cloud.family_index import drafter_folder; print(drafter_folder('general'))"


def test_the_weights_of_an_embedded_drafter_are_unpacked_for_transformers() -> None:
    folder = drafter_folder("general")
    assert folder is not None
    config = json.loads((folder / "config.json").read_text())
    with safe_open(folder / "model.safetensors", "pt") as weights:
        shape = weights.get_slice("model.embed_tokens.weight").get_shape()
    assert shape == [config["vocab_size"], config["hidden_size"]]
    assert drafter_folder("general") == folder
    assert drafter_folder("nobody") is None


def test_unpacked_weights_go_with_their_process() -> None:
    ended = subprocess.run([sys.executable, "-c", UNPACK], capture_output=True, text=True, check=True)
    assert ended.stdout.strip()
    assert not Path(ended.stdout.strip()).exists()


def test_the_embedded_target_has_its_tokenizer_and_a_folder_its_own(tmp_path) -> None:
    embedded = resolve_target("reference")
    file = tokenizer_file(embedded)
    assert file is not None
    text = "def main(argv):\n    return 0<|end|>"
    expected = Tokenizer.from_file(str(file)).encode(text).ids
    assert load_tokenizer(embedded).encode(text) == expected
    load_tokenizer(embedded).save_pretrained(tmp_path)
    assert tokenizer_file(tmp_path) == tmp_path / "tokenizer.json"
    assert load_tokenizer(str(tmp_path)).encode(text) == expected
    assert tokenizer_file("hub/name") is None
