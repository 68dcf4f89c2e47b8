"""The texts that a drafter learns from: one domain a file, tokenised once, kept on disk and read in blocks."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Self

import numpy as np
from tokenizers import Tokenizer

from outrider.proto.errors import InvalidArgument

DOCUMENTS_PER_BATCH = 256


@dataclass(frozen=True)
class Documents:
    """Framed documents `<bos> text <eos>`, end to end.

    Attributes:
        name: name of the domain.
        tokens: uint32 [total].
        starts: int64 [documents + 1]; document `i` is `tokens[starts[i]:starts[i + 1]]`.
    """

    name: str
    tokens: np.ndarray
    starts: np.ndarray

    @classmethod
    def load(cls, name: str, path: Path) -> Self:
        """Read the file of `save`."""
        with np.load(path, allow_pickle=False) as stored:
            return cls(name, **stored)

    def save(self, path: Path) -> None:
        """Write all but the name to an `.npz`, which is there whole or not at all."""
        path.parent.mkdir(parents=True, exist_ok=True)
        unfinished = path.with_name(path.name + ".unfinished")
        with unfinished.open("wb") as file:
            np.savez(file, **{each.name: getattr(self, each.name) for each in fields(self) if each.name != "name"})
        os.replace(unfinished, path)

    def __len__(self) -> int:
        return len(self.starts) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    def select(self, indices: np.ndarray) -> Documents:
        """Return the documents at `indices` (int64 [n]), in that order."""
        return join_documents(self.name, [self[int(index)] for index in indices])


def join_documents(name: str, documents: list[np.ndarray]) -> Documents:
    """Lay framed documents (each uint32 [length]) end to end."""
    starts = np.zeros(len(documents) + 1, dtype=np.int64)
    np.cumsum([len(document) for document in documents], out=starts[1:])
    tokens = np.concatenate(documents) if documents else np.zeros(0)
    return Documents(name, tokens.astype(np.uint32), starts)


def load_domain(path: Path, tokenizer: Tokenizer, *, bos: int, eos: int, cache: Path) -> Documents:
    """Read and tokenise one file, or take its tokens from `cache` where neither file nor tokenizer changed."""
    content = hashlib.sha256(path.read_bytes())
    content.update(tokenizer.to_str().encode())
    content.update(f"{bos},{eos}".encode())
    cached = cache / f"tokens-{domain_name(path)}-{content.hexdigest()[:16]}.npz"
    if cached.exists():
        return Documents.load(domain_name(path), cached)
    documents = [
        np.array([bos, *ids, eos], dtype=np.uint32) for ids in _tokenised(list(_read_texts(path)), tokenizer) if ids
    ]
    if not documents:
        raise InvalidArgument(f"{path} holds no text", field="corpus")
    joined = join_documents(domain_name(path), documents)
    joined.save(cached)
    return joined


def domain_name(path: Path) -> str:
    """Return the domain of a file: `code` for `train.code.jsonl`."""
    return path.name.removesuffix(path.suffix).removeprefix("train.")


def split_held_out(documents: Documents, held_out_tokens: int, seed: int) -> tuple[Documents, Documents]:
    """Set whole documents aside until they hold `held_out_tokens`, or a tenth of all tokens if that is less.

    The last document is set aside whole, whatever its length. A domain of one document is cut in two, and its last
    tenth is held out.

    Returns:
        The documents to train on, and the held-out documents.
    """
    if len(documents) == 1:
        cut = max(1, len(documents.tokens) * 9 // 10)
        whole = documents.tokens
        return join_documents(documents.name, [whole[:cut]]), join_documents(documents.name, [whole[cut:]])
    order = np.random.default_rng([seed, 0]).permutation(len(documents))
    allowance = min(held_out_tokens, len(documents.tokens) // 10)
    lengths = np.diff(documents.starts)[order]
    held = min(len(order) - 1, int(np.searchsorted(np.cumsum(lengths), allowance)) + 1)
    return documents.select(np.sort(order[held:])), documents.select(order[:held])


@dataclass(frozen=True)
class Source:
    """One stream of tokens (uint32 [total]) and the share of blocks it gives."""

    name: str
    tokens: np.ndarray
    weight: float


def most_frequent(
    sources: Sequence[Source], vocab: int, count: int, always: Collection[int], *, among: np.ndarray | None = None
) -> np.ndarray:
    """Return `count` tokens of a vocabulary, ascending int64: `always`, then those most read of `sources`.

    Among tokens that no text has the lower ids come first, which byte-pair encodings merged earlier. With `among`
    (int64) there are these alone.
    """
    shares = np.zeros(vocab)
    for source in sources:
        if source.weight and len(source.tokens):
            shares += source.weight * np.bincount(source.tokens, minlength=vocab) / len(source.tokens)
    shares[sorted(always)] = np.inf
    if among is not None:
        shares[np.setdiff1d(np.arange(vocab), among)] = -1
    return np.sort(np.argsort(-shares, kind="stable")[:count])


class BlockSampler:
    """A sampler of contiguous blocks; every epoch reads each source in a new order, from a new offset.

    A block is a pure function of the seed, of `taken` (blocks read of each source) and of `drawn` (blocks in all).
    """

    def __init__(self, sources: list[Source], block: int, seed: int):
        for source in sources:
            if len(source.tokens) < 2 * block:
                raise InvalidArgument(
                    f"{source.name} has {len(source.tokens)} tokens to train on, fewer than two blocks of {block}; "
                    "give more text or shorter blocks",
                    field="block",
                )
        total = sum(source.weight for source in sources)
        if total <= 0:
            raise InvalidArgument("at least one domain needs a weight above zero", field="domain_weights")
        self.sources = sources
        self.block = block
        self.seed = seed
        self.shares = np.array([source.weight / total for source in sources])
        self.taken = [0] * len(sources)
        self.drawn = 0

    def draw(self, blocks: int) -> np.ndarray:
        """Return the next blocks, int64 [blocks, block]."""
        rows = np.empty((blocks, self.block), dtype=np.int64)
        for row in rows:
            index = int(np.random.default_rng([self.seed, 2, self.drawn]).choice(len(self.sources), p=self.shares))
            row[:] = self._block(index, self.taken[index])
            self.taken[index] += 1
            self.drawn += 1
        return rows

    def _block(self, index: int, number: int) -> np.ndarray:
        tokens = self.sources[index].tokens
        blocks_an_epoch = len(tokens) // self.block - 1
        epoch, place = divmod(number, blocks_an_epoch)
        order = np.random.default_rng([self.seed, 3, index, epoch])
        offset = int(order.integers(self.block))
        first = offset + self.block * int(order.permutation(blocks_an_epoch)[place])
        return tokens[first : first + self.block]


def _read_texts(path: Path) -> Iterator[str]:
    if path.suffix != ".jsonl":
        yield path.read_text(encoding="utf-8")
        return
    with path.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, start=1):
            if not line.strip():
                continue
            try:
                text = json.loads(line)["text"]
            except (json.JSONDecodeError, KeyError, TypeError) as error:
                raise InvalidArgument(
                    f'{path} line {number} is not {{"id", "text"}}: {error!r}', field="corpus"
                ) from error
            if not isinstance(text, str):
                raise InvalidArgument(f"{path} line {number}: text is not a string", field="corpus")
            yield text


def _tokenised(texts: list[str], tokenizer: Tokenizer) -> Iterator[list[int]]:
    for first in range(0, len(texts), DOCUMENTS_PER_BATCH):
        batch = texts[first : first + DOCUMENTS_PER_BATCH]
        yield from (encoding.ids for encoding in tokenizer.encode_batch(batch, add_special_tokens=False))
