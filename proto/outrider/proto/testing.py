"""Fakes for tests: files of API keys, and a tokenizer whose tokens are words, so that text shows its tokens."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.proto.plumbing.access import Key


def word(token: int) -> str:
    """Return how the tokenizer of `word_tokenizer` writes a token: `w7` for 7."""
    return f"w{token}"


def word_tokenizer(vocab_size: int) -> str:
    """Return a `tokenizer.json` whose token i is the word `wi`; words are separated by white space.

    What is no such word becomes token 0.
    """
    vocabulary = {word(token): token for token in range(vocab_size)}
    model = {"type": "WordLevel", "vocab": vocabulary, "unk_token": word(0)}
    return json.dumps({"version": "1.0", "pre_tokenizer": {"type": "Whitespace"}, "model": model})


def write_keys(path: Path, *keys: Key) -> Path:
    """Write a file of API keys that nobody else can read, and return its path."""
    path.touch(0o600)
    path.write_text("\n".join(key.toml() for key in keys))
    return path
