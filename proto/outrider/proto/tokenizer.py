"""The identity of a tokenizer: one hash that the edge, the verifier and every drafter must share."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from outrider.proto.types import SHA256

# These decide how text becomes ids and back; padding, truncation and the file's layout do not.
DECIDING_PARTS = ("added_tokens", "normalizer", "pre_tokenizer", "post_processor", "decoder", "model")
TOKENIZER_FILE = "tokenizer.json"
# By the hash of the whole file: drafters of one target share it, and parsing takes a hundred times as long as hashing.
_HASHES: dict[bytes, str] = {}
_SHIPPED = Path(__file__).parent / "tokenizers"


def tokenizer_hash(tokenizer_json: str) -> str:
    """Return the SHA-256, 64 hexadecimal digits, of the deciding parts of a `tokenizer.json`, however it is laid out.

    Two tokenizers of equal vocabulary size can still map text to different ids, so sizes are never compared.
    """
    content = hashlib.sha256(tokenizer_json.encode()).digest()
    if content not in _HASHES:
        _HASHES[content] = _hash_of_parts(tokenizer_json)
    return _HASHES[content]


def _hash_of_parts(tokenizer_json: str) -> str:
    parsed = json.loads(tokenizer_json)
    deciding = {part: parsed.get(part) for part in DECIDING_PARTS}
    canonical = json.dumps(deciding, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return hashlib.sha256(canonical.encode()).hexdigest()


def shipped_tokenizer(tokenizer_sha256: str) -> Path | None:
    """Return the tokenizer file that ships with Outrider under this hash, or None.

    The embedded target and its drafters share it, so it lies here once instead of in the folder of each.
    """
    file = _SHIPPED / f"{tokenizer_sha256}.json"
    return file if SHA256.fullmatch(tokenizer_sha256) and file.is_file() else None
