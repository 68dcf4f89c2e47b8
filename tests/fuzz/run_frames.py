"""Send damaged frames to codec, session machines and a verifier, and check what becomes of them; see `--help`."""

from __future__ import annotations

import argparse
import asyncio
import gc
import json
import platform
import random
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT), *(str(ROOT / "tests" / name) for name in ("fuzz", "end_to_end", "proto"))]

import codec_door  # noqa: E402 - found by the path above
import psutil  # noqa: E402
from command_processes import Command, free_port, without_progress  # noqa: E402
from decoded_by_hand import decode_by_hand  # noqa: E402
from hostile_streams import Canary, HostileStreams  # noqa: E402
from http_streams import metric_value  # noqa: E402
from machines_under_fire import Fire  # noqa: E402
from recorded_streams import PROMPT, TURN  # noqa: E402

from outrider.cloud.testing import save_tiny_target  # noqa: E402
from outrider.proto.tokenizer import tokenizer_hash  # noqa: E402

SHARES = {"codec": 0.5, "machines": 0.35, "verifier": 0.15}
MAX_GROWTH_MIB = 32.0
WARM_FRAMES = 0.2  # share of a part's frames before its memory is looked at
CANARIES, TOKENS = 6, 60
PROGRESS_S = 10.0


@dataclass
class Part:
    """Frames that one part was sent, and its memory in MiB when warm and at the end."""

    name: str
    frames: int
    seconds: float
    warm_mib: float
    end_mib: float
    outcomes: dict[str, int]
    honest_texts: int
    wrong: list[str]

    def check(self) -> list[str]:
        """Return what must not be, one line each."""
        wrong = [f"{self.name}: {line}" for line in self.wrong]
        if self.end_mib - self.warm_mib > MAX_GROWTH_MIB:
            wrong.append(f"{self.name} has grown from {self.warm_mib:.0f} to {self.end_mib:.0f} MiB")
        return wrong


def fire_at_codec(frames: int, seed: int) -> Part:
    """Read damaged messages of every kind."""
    rng, seeds, own = random.Random(seed), codec_door.seeds(), psutil.Process()
    began, warm = time.monotonic(), 0.0
    for number in range(frames):
        if number == int(frames * WARM_FRAMES):
            warm = _mib(own)
        codec_door.try_input(codec_door.mutate(rng, rng.choice(seeds)))
    return Part("codec", frames, time.monotonic() - began, warm, _mib(own), {}, 0, [])


def fire_at_machines(frames: int, seed: int) -> Part:
    """Feed both session machines damaged streams, beside an honest session."""
    fire, own = Fire(seed), psutil.Process()
    began, warm = time.monotonic(), 0.0
    while fire.frames < frames:
        if not warm and fire.frames > frames * WARM_FRAMES:
            warm = _mib(own)
        fire.one_stream()
    seconds = time.monotonic() - began
    return Part("machines", fire.frames, seconds, warm, _mib(own), dict(fire.outcomes), fire.honest.texts, [])


def hostile_streams(folder: Path, seed: int, address: str = "") -> HostileStreams:
    """Return damaged streams, and honest texts beside them, to a verifier of a tiny target that is made in `folder`."""
    save_tiny_target(folder)
    prompts = [[3 + number, 4, 5] for number in range(CANARIES)]
    seeds = [1000 + number for number in range(CANARIES)]  # with the noise of hostile texts they might become alike
    texts, _ = decode_by_hand(folder, prompts, seeds, TOKENS)
    known = zip(prompts, seeds, texts, strict=True)
    canaries = [Canary(tuple(prompt), number, tuple(text)) for prompt, number, text in known]
    (own,), _ = decode_by_hand(folder, [PROMPT], [TURN.seed], TURN.max_tokens)
    sha256 = tokenizer_hash((folder / "tokenizer.json").read_text())
    return HostileStreams(address, str(folder), sha256, canaries, tuple(own), seed)


async def fire_at_verifier(frames: int, seed: int, folder: Path) -> Part:
    """Send damaged streams to a verifier in a process of its own, beside honest texts."""
    address, metrics = f"127.0.0.1:{free_port()}", free_port()
    streams = hostile_streams(folder, seed, address)
    target = ("--target", str(folder), "--dtype", "float32", "--target-threads", "1", "--kv-tokens", "32768")
    listening = ("--listen", address, "--metrics-listen", f"127.0.0.1:{metrics}", "--log-level", "error")
    command = Command(*listening[4:], "verifier", *target, *listening[:4], log=folder / "verifier.log")
    command.start()
    try:
        await asyncio.to_thread(command.line)
        began = time.monotonic()
        progress = asyncio.create_task(_tell(streams, frames))
        await streams.run(int(frames * WARM_FRAMES))
        warm = command.resident_mib
        await streams.run(frames)
        seconds = time.monotonic() - began
        progress.cancel()
        streams.wrong += await _slots_kept(metrics)
        end = command.resident_mib
        if (status := command.terminate()) != 0:
            streams.wrong.append(f"it ended with status {status}")
        if logged := "\n".join(without_progress(command.errors)):
            streams.wrong.append(f"it logged {logged[-2000:]}")
    finally:
        command.end()
    return Part("verifier", streams.frames, seconds, warm, end, dict(streams.ends), streams.whole, streams.wrong)


async def _tell(streams: HostileStreams, frames: int) -> None:
    while True:
        await asyncio.sleep(PROGRESS_S)
        print(f"verifier: {streams.frames} of {frames} frames, {streams.whole} honest texts", flush=True)


async def _slots_kept(metrics: int) -> list[str]:
    """Return the gauges that do not come back to 0 when all streams are over."""
    kept = []
    for name in ("outrider:num_requests_running", "outrider:kv_cache_usage_perc"):
        for _ in range(600):
            if await metric_value(metrics, name) == 0:
                break
            await asyncio.sleep(0.1)
        else:
            kept.append(f"{name} does not come back to 0")
    return kept


def _mib(process: psutil.Process) -> float:
    gc.collect()
    resident: int = process.memory_info().rss
    return resident / (1 << 20)


def record_of(parts: list[Part], seed: int) -> dict[str, Any]:
    """Return the record of a run, for a file of some kB."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    return {
        "command": f"make frames FRAMES={sum(part.frames for part in parts)} SEED={seed}",
        "revision": subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip(),
        "platform": platform.platform(),
        "parts": [
            {
                "part": part.name,
                "frames": part.frames,
                "seconds": round(part.seconds, 1),
                "frames_per_s": round(part.frames / part.seconds),
                "mib_warm_and_at_the_end": [round(part.warm_mib, 1), round(part.end_mib, 1)],
                "honest_texts": part.honest_texts,
                "streams": part.outcomes,
                "violations": part.check(),
            }
            for part in parts
        ],
    }


def main() -> int:
    """Run the command; 1: something was violated."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--frames", type=int, default=1_000_000, help="in all (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=1, help="of the damage (default: %(default)s)")
    parser.add_argument("--output", type=Path, help="JSON record")
    given = parser.parse_args()
    count = {name: int(given.frames * share) for name, share in SHARES.items()}
    parts = []
    for name, fire in (("codec", fire_at_codec), ("machines", fire_at_machines)):
        parts.append(fire(count[name], given.seed))
        print(f"{name}: {parts[-1].frames} frames in {parts[-1].seconds:.0f} s", flush=True)
    with tempfile.TemporaryDirectory(prefix="outrider-frames-") as folder:
        parts.append(asyncio.run(fire_at_verifier(count["verifier"], given.seed, Path(folder))))
    record = record_of(parts, given.seed)
    for part in record["parts"]:
        print(json.dumps(part))
    if given.output is not None:
        given.output.write_text(json.dumps(record, indent=1) + "\n")
    return bool(sum(len(part.check()) for part in parts))


if __name__ == "__main__":
    sys.exit(main())
