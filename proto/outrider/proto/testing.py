"""A tokenizer for tests whose tokens are words, so that text and tokens can be read from each other."""

from __future__ import annotations

import json


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
