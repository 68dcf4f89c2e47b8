"""Tokenizers of the kinds that models have, trained on the project's own prompts, and the bytes of their tokens."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property, lru_cache

from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers, trainers

from outrider.cloud.models.family_index import target_folder, tokenizer_file
from outrider.deploy.built_in_prompts import HELD_OUT, read_prompts

SPECIAL = ["<s>", "</s>", "<unk>"]
EOS = 1
_BYTE = re.compile(r"<0x([0-9A-F]{2})>")


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer.

    Attributes:
        json: text of its `tokenizer.json`.
        spells: function from a token's name to its bytes.
    """

    json: str
    spells: Callable[[str], bytes] = field(repr=False)

    @cached_property
    def tokenizer(self) -> Tokenizer:
        """The tokenizer."""
        return Tokenizer.from_str(self.json)

    @cached_property
    def size(self) -> int:
        """Number of its tokens."""
        return self.tokenizer.get_vocab_size()

    @cached_property
    def bytes_of(self) -> tuple[bytes | None, ...]:
        """Bytes of each token; None: it is special and has none."""
        special = {token for token, added in self.tokenizer.get_added_tokens_decoder().items() if added.special}
        names = [self.tokenizer.id_to_token(token) for token in range(self.size)]
        return tuple(None if token in special else self.spells(name) for token, name in enumerate(names))

    def token_of(self, spelling: bytes) -> int:
        """Return the token of some bytes."""
        return self.bytes_of.index(spelling)


def _texts() -> Iterator[str]:
    for path in sorted(HELD_OUT.glob("*.jsonl")):
        yield from (prompt.text for prompt in read_prompts(path, 12))
    yield "żółw, naïve café, 日本語のテキスト, 🦊🐢 — «où»\n\tdef f(x):\r\n"


def _byte_letters() -> dict[str, int]:
    """Return the byte of each letter in which byte-level tokenizers write."""
    plain = [*range(ord("!"), ord("~") + 1), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + i): byte for i, byte in enumerate(others)}


_LETTERS = _byte_letters()


def _byte_level_bytes(name: str) -> bytes:
    return bytes(_LETTERS[letter] for letter in name)


def _fallback_bytes(name: str) -> bytes:
    found = _BYTE.fullmatch(name)
    return bytes([int(found[1], 16)]) if found else name.replace("▁", " ").encode()


def _byte_level(size: int) -> Vocabulary:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=size, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(_texts(), trainer)
    return Vocabulary(tokenizer.to_str(), _byte_level_bytes)


def _with_fallback(*, unigram: bool = False, strips: bool = False) -> Vocabulary:
    """Spell in bytes what has no token, as Llama 2 does, and so a newline too; `strips` the first blank of a text."""
    trained = Tokenizer(models.BPE())
    trained.normalizer = normalizers.Replace(" ", "▁")
    lines = (line for text in _texts() for line in text.split("\n") if line.isascii() and line.isprintable())
    trained.train_from_iterator(lines, trainers.BpeTrainer(vocab_size=180, show_progress=False))
    words = [name for name, _ in sorted(trained.get_vocab().items(), key=lambda each: each[1])]
    names = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    if unigram:
        scores = [(name, -20.0 if name not in words else 1.0 - len(name)) for name in names]
        made = Tokenizer(models.Unigram(scores, unk_id=2, byte_fallback=True))
    else:
        vocab = {name: token for token, name in enumerate(names)}
        made = Tokenizer(models.BPE(vocab=vocab, merges=[], byte_fallback=True, unk_token="<unk>"))
    made.normalizer = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    made.decoder = decoders.Sequence([*steps, *([decoders.Strip(" ", 1, 0)] if strips else [])])
    made.add_special_tokens(SPECIAL)
    return Vocabulary(made.to_str(), _fallback_bytes)


def _embedded() -> Vocabulary:
    return Vocabulary(tokenizer_file(target_folder("reference")).read_text(encoding="utf-8"), _byte_level_bytes)


VOCABULARIES: dict[str, Callable[[], Vocabulary]] = {
    "byte level": lru_cache(lambda: _byte_level(420)),
    "byte level, short lists": lru_cache(lambda: _byte_level(1100)),
    "byte fallback": lru_cache(_with_fallback),
    "byte fallback, stripped": lru_cache(lambda: _with_fallback(strips=True)),
    "unigram with byte fallback": lru_cache(lambda: _with_fallback(unigram=True)),
    "embedded": lru_cache(_embedded),
}
