"""One door under atheris, which changes inputs so that they reach more of the code; begun by `run_doors.py`."""

from __future__ import annotations

import importlib
import random
import sys
from pathlib import Path

import atheris

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT), *(str(ROOT / "tests" / name) for name in ("fuzz", "end_to_end", "proto"))]
OWN_SHARE = 0.5  # of the changes; the others are libFuzzer's, which knows no format


def main() -> None:
    """Fuzz the door named first with libFuzzer's arguments that follow; the last is the folder of its corpus."""
    name, *arguments = sys.argv[1:]
    with atheris.instrument_imports(include=["outrider"], enable_loader_override=False):
        door = importlib.import_module(name)
    corpus = Path(arguments[-1])
    for number, data in enumerate(door.seeds()):
        (corpus / f"seed-{number}").write_bytes(data)

    def change(data: bytes, max_size: int, seed: int) -> bytes:
        rng = random.Random(seed)
        if rng.random() < OWN_SHARE:
            return bytes(door.mutate(rng, data)[:max_size])
        return bytes(atheris.Mutate(data, max_size))

    atheris.Setup([name, f"-max_len={door.MAX_LENGTH}", *arguments], door.try_input, custom_mutator=change)
    atheris.Fuzz()


if __name__ == "__main__":
    main()
