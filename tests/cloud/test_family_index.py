"""Models that ship with Outrider are found by name, whole."""

from __future__ import annotations

from tokenizers import Tokenizer

from outrider.cloud.models.family_index import load_tokenizer, resolve_target, tokenizer_file


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
