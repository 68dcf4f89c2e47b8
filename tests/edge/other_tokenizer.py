"""A drafter's package with another tokenizer, whose proposals are sense in the wrong tokens, and so hardly any text."""

from __future__ import annotations

import hashlib
import json
import shutil
from pathlib import Path

from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from outrider.drafters.packages import find_package
from outrider.proto.drafter_format import MANIFEST, MODEL
from outrider.proto.tokenizer import TOKENIZER_FILE, tokenizer_hash


def byte_tokenizer() -> str:
    """Return a `tokenizer.json` whose tokens are single bytes."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={character: token for token, character in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    written: str = tokenizer.to_str()
    return written


def with_tokenizer(folder: Path, tokenizer: str) -> Path:
    """Write the embedded drafter `general` with the text of another `tokenizer.json` as its own; return `folder`."""
    package = find_package("general")
    folder.mkdir(parents=True)
    shutil.copyfile(package.model_path, folder / MODEL)
    content = tokenizer.encode()
    (folder / TOKENIZER_FILE).write_bytes(content)
    manifest = json.loads((package.folder / MANIFEST).read_text(encoding="utf-8"))
    manifest["tokenizer_sha256"] = tokenizer_hash(tokenizer)
    manifest["files"][TOKENIZER_FILE] = {"sha256": hashlib.sha256(content).hexdigest(), "bytes": len(content)}
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder
