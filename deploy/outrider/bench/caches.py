"""Bytes read and time a token of drafters, by context and type of KV cache: `python -m outrider.bench.caches`.

The drafter has random weights, a cache that is full, and drafts the token after it, again and again; the types of the
cache take turns. Bytes are those of all weights and of all keys and values, each once.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import numpy as np
import onnxruntime

from outrider.bench.built_drafters import CANDIDATES, SHAPE, MeasuredDrafter, add_numbers, bytes_read, write_drafter
from outrider.cloud.export.check import open_session
from outrider.cloud.export.contract import OUTPUTS, cache_names
from outrider.drafters.packages import DrafterPackage
from outrider.proto.drafter_format import CACHE_DTYPES

HEADINGS = f"{'context':>8}  {'cache':9}{'weights MB':>11}{'cache MB':>9}{'share':>7}{'ms':>9}{'ratio':>7}"


def runner(package: DrafterPackage, context: int, threads: int) -> Callable[[], None]:
    """Return a function that runs a drafter's graph for the last of `context` tokens."""
    session = open_session(package.model_path, threads)
    binding, shape = session.io_binding(), package.cache
    cache = (np.random.default_rng(0).normal(size=(1, shape.kv_heads, context, shape.head_dim)) * 10).astype(
        shape.dtype
    )
    fed = {
        "tokens": np.ones((1, 1), dtype=np.int64),
        "logit_rows": np.zeros(1, dtype=np.int64),
        "candidate_count": np.array([CANDIDATES]),
        "last_position": np.array([context - 1], dtype=np.int32),
        "length": np.array(context, dtype=np.int32),
    }
    caches = {name: cache.copy() for name in cache_names("past", shape.layers)}
    for name, value in (fed | caches).items():
        binding.bind_input(name, "cpu", 0, value.dtype.type, value.shape, value.ctypes.data)
    for name in OUTPUTS:
        binding.bind_output(name, "cpu")
    for name, value in zip(cache_names("present", shape.layers), caches.values(), strict=True):
        binding.bind_output(name, "cpu", 0, value.dtype.type, value.shape, value.ctypes.data)
    return partial(_run, session, binding, fed, caches)


def _run(session: onnxruntime.InferenceSession, binding: onnxruntime.IOBinding, *_bound: object) -> None:
    """Run with what is bound, which a caller keeps in memory: the binding has its addresses alone."""
    session.run_with_iobinding(binding)


def rows(given: argparse.Namespace) -> Iterator[str]:
    """Build the drafter with each type of cache, time them in turn, and yield the lines of the table."""
    with tempfile.TemporaryDirectory() as folder:
        drafters = [
            MeasuredDrafter(given.bits, rank=given.head_rank or None, kv=kv, context=max(given.contexts))
            for kv in CACHE_DTYPES
        ]
        packages = [write_drafter(given, each, given.vocabulary, Path(folder) / each.kv) for each in drafters]
        weights = bytes_read(packages[0].model_path)
        for context in given.contexts:
            runs = [runner(package, context, given.threads) for package in packages]
            taken: list[list[float]] = [[] for _ in runs]
            for _ in range(given.rounds):
                for run, times in zip(runs, taken, strict=True):
                    began = time.perf_counter()
                    run()
                    times.append((time.perf_counter() - began) * 1e3)
            for package, times in zip(packages, taken, strict=True):
                read = package.cache.bytes_of(context)
                yield (
                    f"{context:8,}  {package.cache.dtype:9}{weights / 1e6:11.1f}{read / 1e6:9.1f}"
                    f"{read / (read + weights):7.0%}{min(times):9.2f}{min(times) / min(taken[0]):7.2f}"
                )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(prog="python -m outrider.bench.caches", description=__doc__)
    parser.add_argument("contexts", nargs="*", type=int, default=[256, 2048, 8192, 32_768])
    add_numbers(
        parser,
        *SHAPE,
        ("vocabulary", 151_936, "tokens of the vocabulary"),
        ("head-rank", 128, "rank of the head; 0: a whole one"),
        ("bits", 8, "bits of the weights, 8 or 4"),
        ("threads", 2, "threads of ONNX Runtime"),
        ("rounds", 20, "tokens at each context"),
    )
    print(HEADINGS, flush=True)
    for row in rows(parser.parse_args()):
        print(row, flush=True)


if __name__ == "__main__":
    main()
