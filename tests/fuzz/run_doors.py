"""Fuzz the doors by coverage, each for a while, with atheris; see `--help`."""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
HERE = Path(__file__).parent
DOORS = ("codec_door", "grammar_door", "template_door", "calls_door", "http_door")
ANSWER_S = 120  # a single input that takes longer is a finding
MAX_MIB = 4096
_PROGRESS = re.compile(r"#(\d+)\s.*cov: (\d+) ft: (\d+) corp: (\d+)")
_FOUND = re.compile(r"Test unit written to (\S+)")


def fuzz(door: str, seconds: float, seed: int) -> dict[str, Any]:
    """Fuzz one door; return the inputs tried, the edges of Outrider's code that they reached, and what failed."""
    with tempfile.TemporaryDirectory(prefix=f"outrider-{door}-") as folder:
        corpus = Path(folder, "corpus")
        corpus.mkdir()
        limits = (f"-max_total_time={seconds:g}", f"-timeout={ANSWER_S}", f"-rss_limit_mb={MAX_MIB}", f"-seed={seed}")
        command = [
            sys.executable,
            str(HERE / "fuzz_door.py"),
            door,
            *limits,
            f"-artifact_prefix={folder}/",
            str(corpus),
        ]
        began = time.monotonic()
        ran = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            check=False,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
        )
        output = ran.stdout.decode(errors="replace")
        seen = _PROGRESS.findall(output)
        inputs, edges, features, kept = map(int, seen[-1]) if seen else (0, 0, 0, 0)
        found = [Path(name).read_bytes().hex() for name in _FOUND.findall(output)]
        failed = ran.returncode != 0
        return {
            "door": door,
            "seconds": round(time.monotonic() - began, 1),
            "inputs": inputs,
            "edges_at_first": int(seen[0][1]) if seen else 0,
            "edges": edges,
            "features": features,
            "corpus": kept,
            "failed": output[-4000:] if failed else "",
            "found": found,
        }


def main() -> int:
    """Run the command; 1: something was found."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("doors", nargs="*", default=DOORS, help=f"of {', '.join(DOORS)}; not given: all")
    parser.add_argument("--seconds", type=float, default=120, help="for each (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of libFuzzer (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON record")
    given = parser.parse_args()
    if importlib.util.find_spec("atheris") is None:
        print("skipped: atheris is not installed; pip install --group fuzz")
        return 0
    results = []
    for door in given.doors:
        result = fuzz(door, given.seconds, given.seed)
        results.append(result)
        print(f"{door}: {result['inputs']} inputs in {result['seconds']} s, {result['edges']} edges", flush=True)
        if result["failed"]:
            print(result["failed"], *result["found"], sep="\n", flush=True)
    if given.output is not None:
        git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
        revision = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
        command = f"make fuzz FUZZ_S={given.seconds:g} SEED={given.seed}"
        record = {"command": command, "revision": revision, "platform": platform.platform(), "doors": results}
        given.output.write_text(json.dumps(record, indent=1) + "\n")
    return int(any(result["failed"] for result in results))


if __name__ == "__main__":
    sys.exit(main())
