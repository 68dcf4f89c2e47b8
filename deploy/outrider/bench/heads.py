"""Bytes read and time a token of drafters, by vocabulary and output head: `python -m outrider.bench.heads --threads 2`.

Every drafter has random weights in the layers of one configuration, and runs as an edge runs it. The heads of a
vocabulary take turns.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path

from outrider.bench.built_drafters import SHAPE, MeasuredDrafter, add_numbers, bytes_read, write_drafter
from outrider.drafters.onnx import OnnxDrafter, OnnxState
from outrider.drafters.packages import DrafterPackage
from outrider.drafters.proposals import ProposalRule
from outrider.proto.types import Sampling

PROMPT, DRAFTS = 32, 8
HEADINGS = f"{'vocabulary':>10}  {'head':24}{'file MB':>9}{'read MB':>9}{'ratio':>7}{'ms':>9}{'ratio':>7}"


def heads(rank: int, tokens: int) -> tuple[MeasuredDrafter, ...]:
    """Return the heads of a table, the whole one first, with which the others are compared."""
    return (
        MeasuredDrafter(8),
        MeasuredDrafter(8, rank=rank),
        MeasuredDrafter(8, tokens=tokens),
        MeasuredDrafter(4),
        MeasuredDrafter(4, rank=rank),
    )


def opened(package: DrafterPackage, threads: int) -> OnnxState:
    """Load a drafter and read a prompt with it."""
    state = OnnxDrafter(package, threads=threads).open(ProposalRule(Sampling(temperature=0.0)))
    state.extend(range(PROMPT))
    state.propose(DRAFTS)
    state.truncate(PROMPT)
    return state


def milliseconds(states: Sequence[OnnxState], rounds: int) -> list[float]:
    """Return each drafter's time of a draft in its fastest turn of `DRAFTS` drafts, in ms."""
    taken: list[list[float]] = [[] for _ in states]
    for _ in range(rounds):
        for state, times in zip(states, taken, strict=True):
            began = time.perf_counter()
            state.propose(DRAFTS)
            times.append((time.perf_counter() - began) / DRAFTS * 1e3)
            state.truncate(PROMPT)
    return [min(times) for times in taken]


def rows(given: argparse.Namespace, vocabulary: int) -> Iterator[str]:
    """Build the drafters of a vocabulary, time them in turn, and yield the lines of the table."""
    tokens = min(given.head_tokens, vocabulary // 2)
    compared = heads(given.head_rank, tokens)
    with tempfile.TemporaryDirectory() as folder:
        packages = [write_drafter(given, head, vocabulary, Path(folder) / str(n)) for n, head in enumerate(compared)]
        read = [bytes_read(package.model_path) for package in packages]
        sizes = [package.model_path.stat().st_size for package in packages]
        states = [opened(package, given.threads) for package in packages]
    times = milliseconds(states, given.rounds)
    for head, size, count, ms in zip(compared, sizes, read, times, strict=True):
        yield (
            f"{vocabulary:10,}  {head.name:24}{size / 1e6:9.1f}{count / 1e6:9.1f}{count / read[0]:7.2f}{ms:9.2f}"
            f"{ms / times[0]:7.2f}"
        )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.heads", description=__doc__)
    parser.add_argument("vocabularies", nargs="*", type=int, default=[32_000, 128_256, 151_936, 262_144])
    add_numbers(
        parser,
        *SHAPE,
        ("head-rank", 128, "rank of the low-rank head"),
        ("head-tokens", 32_768, "tokens that the trimmed drafter knows, half of the vocabulary at most"),
        ("threads", 2, "threads of ONNX Runtime"),
        ("rounds", 20, f"turns of {DRAFTS} drafts each"),
    )
    given = parser.parse_args()
    print(HEADINGS, flush=True)
    for vocabulary in given.vocabularies:
        for row in rows(given, vocabulary):
            print(row, flush=True)


if __name__ == "__main__":
    main()
