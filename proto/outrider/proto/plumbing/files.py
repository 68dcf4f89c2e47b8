"""The folder of fetched files, and the hash by which a file is known."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

DEFAULT_CACHE = Path("~/.cache/outrider")


def cache_folder() -> Path:
    """Return the folder for what is fetched or made once, in XDG_CACHE_HOME if that is set; `~` may stand in it."""
    home = os.environ.get("XDG_CACHE_HOME")
    return Path(home) / "outrider" if home else DEFAULT_CACHE


def sha256_of(path: Path) -> str:
    """Return the hash of a file, in hexadecimal digits."""
    with path.open("rb") as content:
        return hashlib.file_digest(content, "sha256").hexdigest()
