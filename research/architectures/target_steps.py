"""Steps of one target: `python -m research.architectures.target_steps FOLDER [--dtype TYPE] [--context N]`.

Prints, from one run, what drafts that are cut back cost beside drafts that are all accepted, a plain step, the same
step with transformers' own cache, and the model's own `generate`. Each is a mean; the ways take turns.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Sequence

import torch

from outrider.cloud.target.own_cache import OwnCacheTarget
from outrider.cloud.target.target import SessionRows, Target
from outrider.cloud.target.target_loading import load_target

DRAFTS, ROUNDS, STEPS = 8, 6, 8  # rounds of so many steps
_GROWTH = ROUNDS * STEPS * (DRAFTS + 1) * 3  # more than a session writes
_PIECE = 64  # tokens of a prompt in a pass


class Timed:
    """Sessions of a target that take steps of `DRAFTS` drafts, or of none."""

    def __init__(self, target: Target, sessions: int, context: int) -> None:
        self._target = target
        self._caches = [target.pool.allocate(context + _GROWTH) for _ in range(sessions)]
        self._seed = 0
        for cache in self._caches:
            for begin in range(0, context, _PIECE):
                target.forward([SessionRows(cache, self._tokens(min(_PIECE, context - begin)), 1)])

    def steps(self, drafts: int, accepted: int) -> float:
        """Return the mean seconds of a step of `drafts` drafts, of which `accepted` are kept."""
        started = time.perf_counter()
        for _ in range(STEPS):
            lengths = [cache.length for cache in self._caches]
            rows = [SessionRows(cache, self._tokens(1 + drafts), 1 + drafts, drafts) for cache in self._caches]
            self._target.forward(rows)
            for cache, length in zip(self._caches, lengths, strict=True):
                cache.truncate(length + 1 + accepted)
        return (time.perf_counter() - started) / STEPS

    def _tokens(self, count: int) -> tuple[int, ...]:
        self._seed += 1
        generator = torch.Generator().manual_seed(self._seed)
        return tuple(torch.randint(3, self._target.vocab_size, (count,), generator=generator).tolist())


@torch.inference_mode()
def main(argv: Sequence[str] | None = None) -> None:
    """Time a target."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("target")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--context", type=int, default=100, help="tokens of each text at first")
    given = parser.parse_args(argv)
    torch.set_num_threads(given.threads)
    kv_tokens = 5 * (given.context + _GROWTH + 16)
    target = load_target(given.target, dtype=given.dtype, kv_tokens=kv_tokens)
    one, four = Timed(target, 1, given.context), Timed(target, 4, given.context)
    ways: dict[str, Callable[[], float]] = {
        "a plain step": lambda: one.steps(0, 0),
        f"{DRAFTS} drafts, all accepted": lambda: one.steps(DRAFTS, DRAFTS),
        f"{DRAFTS} drafts, half of them cut back": lambda: one.steps(DRAFTS, DRAFTS // 2),
        f"{DRAFTS} drafts, all cut back": lambda: one.steps(DRAFTS, 0),
        "4 sessions, a plain step": lambda: four.steps(0, 0),
        f"4 sessions, {DRAFTS} drafts each, all cut back": lambda: four.steps(DRAFTS, 0),
    }
    if not isinstance(target, OwnCacheTarget):
        own = OwnCacheTarget(target.model, target.tokenizer_json, kv_tokens=kv_tokens, page_size=16)
        own.most_rows = 64
        alone = Timed(own, 1, given.context)
        ways[f"transformers' cache, {DRAFTS} drafts, all cut back"] = lambda: alone.steps(DRAFTS, 0)
    found: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(ROUNDS + 1):
        for name, way in ways.items():
            target.model.set_attn_implementation(OwnCacheTarget.attention if "cache," in name else target.attention)
            seconds = way()
            if turn:  # the first warms up
                found[name].append(seconds)
    plain = statistics.mean(found["a plain step"])
    print(f"{given.target}, {given.dtype}, {given.threads} threads; a row keeps {target.passes.guarantee.name}")
    for name, times in found.items():
        mean = statistics.mean(times)
        print(f"{name:55} {1e3 * mean:8.1f} ms {mean / plain:6.2f} of a plain step")


if __name__ == "__main__":
    main()
