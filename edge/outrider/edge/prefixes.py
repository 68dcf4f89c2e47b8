"""Hashes by which a coordinator recognises texts that begin alike, to place them where the beginning is cached.

With a lease's request an edge sends a 64-bit hash of the first 16, 22, 32, 45, ... tokens of the text so far: so few
that a long text has some twenty, and so dense that two texts which share n tokens have a hash of 0.7 n of them in
common. All are keyed by the edge's API key, whoever a daemon with keys of its own decodes for, the model and its
tokenizer, so that hashes of two keys have nothing in common, as their KV pages have not. Where no key is asked for, all
edges hash alike.

What this reveals to a coordinator: which texts of one key begin alike, to within these lengths, and by the number of
hashes about how long a text is. No token can be computed from a hash. But whoever has the key, and the coordinator is
shown it with each call, can try a guessed beginning, whose first 16 tokens must be right, the next 6, and so on; a
system prompt that is public is recognised so. The file of keys at a coordinator holds other hashes of them, which do
not help. Against all of it an edge can decode without a coordinator.
"""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import blake2b

import numpy as np

from outrider.proto.types import MAX_PREFIXES

PREFIX_LENGTHS = tuple(int(16 * 2 ** (i / 2)) for i in range(MAX_PREFIXES))  # tokens


def prefix_key(api_key: str, model: str, tokenizer_sha256: str, isolation: bytes = b"") -> bytes:
    """Return the key of the hashes, 32 bytes, for texts whose Open has this `isolation`; an API key may be empty."""
    parts = "\0".join((api_key, model, tokenizer_sha256, *([isolation.hex()] if isolation else [])))
    return blake2b(parts.encode(), digest_size=32, person=b"outrider prefix").digest()


def text_prefixes(transcript: Sequence[int], key: bytes) -> tuple[int, ...]:
    """Return the hashes of the beginnings of `transcript` [n] that have one of `PREFIX_LENGTHS`, the shortest first."""
    data = np.asarray(transcript[: PREFIX_LENGTHS[-1]], dtype="<u4").tobytes()
    running = blake2b(digest_size=8, key=key)
    found, done = [], 0
    for length in PREFIX_LENGTHS:
        if length > len(transcript):
            break
        running.update(data[4 * done : 4 * length])
        found.append(int.from_bytes(running.copy().digest(), "little"))
        done = length
    return tuple(found)
