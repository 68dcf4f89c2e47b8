"""Versions of a drafter that no edge must draft with, though every hash of theirs is right."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np

from outrider.drafters.adapters import write_tensors
from outrider.proto.plumbing.files import sha256_of

HEAD = "model.lm_head.weight"
BAD_VERSION = "bad0bad0bad0"


def without_numbers(good: Path, folder: Path) -> Path:
    """Write an adapter version of `general` as `folder`, whose numbers are not finite, and return that.

    It appears under its name as a whole.
    """
    unfinished = folder.with_name(f".{folder.name}")
    shutil.copytree(good, unfinished)
    path = unfinished / "adapter.safetensors"
    path.unlink()  # it may be linked to the good one
    tensors = {f"{HEAD}.A": np.full((8, 192), np.nan, np.float16), f"{HEAD}.B": np.ones((8192, 8), np.float16)}
    write_tensors(path, tensors)
    manifest = json.loads((unfinished / "manifest.json").read_text()) | {"version": BAD_VERSION}
    manifest["files"][path.name] = {"sha256": sha256_of(path), "bytes": path.stat().st_size}
    (unfinished / "manifest.json").write_text(json.dumps(manifest))
    return unfinished.rename(folder)
