"""Models that the package carries, found by name, without torch."""

from __future__ import annotations

import json
import lzma
import shutil
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from outrider.proto.errors import ModelRefused, NotFound
from outrider.proto.tokenizer import TOKENIZER_FILE, shipped_tokenizer

_FAMILY = Path(__file__).parent / "family"
_DRAFTERS = Path(__file__).parent / "drafters"
_WEIGHTS = "model.safetensors"


def embedded_targets() -> tuple[str, ...]:
    """Return the names of the targets."""
    return tuple(sorted(folder.name for folder in _FAMILY.iterdir() if (folder / "config.json").is_file()))


def target_folder(name: str) -> Path:
    """Return the folder of the embedded target `name`."""
    return _FAMILY / name


def tokenizer_file(source: str | Path) -> Path | None:
    """Return the tokenizer.json of a target's folder; None: it has none, or `source` is a hub name.

    An embedded target's manifest names its tokenizer by hash.
    """
    folder = Path(source)
    if folder.parent == _FAMILY:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        return shipped_tokenizer(manifest["tokenizer_sha256"])
    own = folder / TOKENIZER_FILE
    return own if own.is_file() else None


def load_tokenizer(source: str) -> Any:
    """Return the transformers tokenizer of a folder or hub name; raise what `from_pretrained` does."""
    from transformers import AutoTokenizer

    file = tokenizer_file(source)
    found = {} if file is None else {"tokenizer_file": str(file)}
    return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **found)


def drafter_folder(name: str) -> Path | None:
    """Return a folder with the weights of the embedded drafter `name` for transformers; None: it is not embedded.

    The folder is unpacked once and is there as long as this process.
    """
    return Path(_unpacked(name).name) if (_DRAFTERS / name / f"{_WEIGHTS}.xz").is_file() else None


@cache
def _unpacked(name: str) -> TemporaryDirectory[str]:
    folder = TemporaryDirectory(prefix=f"outrider-{name}-")
    for path in (_DRAFTERS / name).glob("*.json"):
        shutil.copy(path, folder.name)
    with lzma.open(_DRAFTERS / name / f"{_WEIGHTS}.xz") as packed, (Path(folder.name) / _WEIGHTS).open("wb") as plain:
        shutil.copyfileobj(packed, plain)
    return folder


def resolve_target(target: str) -> str:
    """Return the folder or hub name that `target` stands for: an embedded name, an existing folder, or a hub name.

    Raises:
        NotFound: it looks like a folder, but there is none.
        ModelRefused: the folder has no safetensors weights.
    """
    if target in embedded_targets():
        return str(target_folder(target))
    folder = Path(target).expanduser()
    if folder.is_dir():
        if not any(folder.glob("*.safetensors")):
            raise ModelRefused(f"{target} holds no *.safetensors; convert the weights first", field="target")
        return str(folder)
    if target.startswith((".", "/", "~")) or target.count("/") > 1:
        raise NotFound(f"there is no folder {target}", field="target")
    return target
