"""Getting a job's artefacts: part by part, each checked; what is already here is not fetched again."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable
from pathlib import Path

from outrider.deploy.submit.artefacts import FOLDER, MANIFEST, PART_BYTES, Manifest, PackedFile, part_hashes
from outrider.proto.errors import ConfigError, DataLoss, NotFound, Unavailable

ATTEMPTS = 4
RETRY_S = 0.5
PACKED_WITHIN_S = 20.0

Read = Callable[[str], bytes]  # of a path below the folder of the logs


def read_manifest(read: Read, job_id: str, within_s: float = PACKED_WITHIN_S) -> Manifest:
    """What the job hands back. A job that was stopped is packed after its end, so this may wait.

    Raises:
        NotFound: it packed nothing within `within_s` seconds.
        Unavailable: its node, or the server, does not answer.
    """
    until = time.monotonic() + within_s
    while True:
        try:
            return Manifest.from_json(read(f"{FOLDER}/{job_id}/{MANIFEST}"))
        except NotFound:
            if time.monotonic() > until:
                raise
        time.sleep(RETRY_S)


def fetch_file(read: Read, job_id: str, file: PackedFile, output: Path, got: Callable[[int], None]) -> Path:
    """One file into `output`; there whole or not at all. After an interruption the next call goes on.

    Args:
        read: of the job server.
        job_id: whose artefact it is.
        file: of the manifest.
        output: folder.
        got: is told the bytes of each part, fetched or found.

    Raises:
        ConfigError: another file is in its place.
        DataLoss: what the server hands out does not have the hash.
        Unavailable, NotFound: it hands out nothing.
    """
    target = output / file.path
    if target.exists():
        if [sha256 for sha256, _ in part_hashes(target)] != list(file.parts):
            raise ConfigError(f"{target} is there already and differs; choose another folder", field="output")
        got(file.bytes)
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    partial = target.with_name(f".{target.name}.partial")
    found = _parts_found(partial, file)
    with partial.open("r+b" if partial.exists() else "w+b") as writer:
        writer.truncate(found * PART_BYTES)
        writer.seek(found * PART_BYTES)
        got(min(found * PART_BYTES, file.bytes))
        for sha256 in file.parts[found:]:
            part = _read_part(read, f"{FOLDER}/{job_id}/{sha256}", sha256)
            writer.write(part)
            got(len(part))
    os.replace(partial, target)
    return target


def _parts_found(partial: Path, file: PackedFile) -> int:
    """Whole parts at the beginning of an earlier, interrupted download."""
    if not partial.exists():
        return 0
    found = 0
    for (sha256, part), wanted in zip(part_hashes(partial), file.parts, strict=False):
        if sha256 != wanted or len(part) != PART_BYTES:
            break
        found += 1
    return found


def _read_part(read: Read, path: str, sha256: str) -> bytes:
    for attempt in range(ATTEMPTS):
        try:
            part = read(path)
        except Unavailable:
            if attempt == ATTEMPTS - 1:
                raise
        else:
            if hashlib.sha256(part).hexdigest() == sha256:
                return part
        time.sleep(RETRY_S * attempt)
    raise DataLoss("a part does not have the hash of the manifest; fetch again with --follow", field="artefacts")
