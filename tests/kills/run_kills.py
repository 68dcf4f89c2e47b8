"""Kill and stop the processes of a fleet while texts are decoded, and check every text; see `--help`."""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import platform
import random
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from itertools import islice
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path += [str(ROOT / "tests" / "kills"), str(ROOT / "tests" / "end_to_end")]

from kill_check import KillRun, Row, Sent, ends_of, held_by, lines_of, read_logs  # noqa: E402 - found by the path above
from kill_plan import KINDS, Act, acts  # noqa: E402
from killed_fleet import KilledFleet, killed_fleet  # noqa: E402
from killed_texts import Clients  # noqa: E402
from questions import questions  # noqa: E402

from outrider.cloud.testing import save_tiny_target  # noqa: E402

SPARED = frozenset({"coordinator", "daemon-a", "verifier-a", "link-a"})  # in the second half, to see whether they grow
PROGRESS_EVERY = 25
MAX_DOWN = 2  # processes that may be down, starting or stopped when the next one is hit
WARM_TEXTS = 8  # for each text at once, before anything is measured


@dataclass(frozen=True)
class KillOptions:
    """Number of signals, their seed and mean distance in seconds, texts at once of each daemon, and their tokens."""

    kills: int = 1000
    seed: int = 1
    every_s: float = 0.7
    at_once: int = 2
    tokens: int = 240
    minutes: float = 0.0


async def run_kills(folder: Path, options: KillOptions) -> KillRun:
    """Run a fleet in `folder`, and send so many signals to its processes; all that was seen comes back unjudged."""
    save_tiny_target(folder)
    asked = questions(folder, 40, options.tokens)
    run = KillRun()
    offset_s = time.monotonic() - time.time()
    async with killed_fleet(folder) as fleet:
        rng = random.Random(options.seed)
        clients = Clients(fleet.of("daemon"), asked, str(folder), options.at_once, rng)
        run.runs = clients.runs
        clients.start()
        while len(clients.runs) < WARM_TEXTS * options.at_once:  # noqa: ASYNC110 - texts end in other tasks
            await asyncio.sleep(0.05)
        until = time.monotonic() + 60 * options.minutes if options.minutes else float("inf")
        members = {kind: [member.name for member in fleet.of(kind)] for kind in KINDS}
        half = options.kills // 2
        for number, spared in ((half, frozenset()), (options.kills - half, SPARED)):
            plan = acts(options.seed + len(run.sent), members, options.every_s, frozenset(spared))
            await _carry_out(fleet, islice(plan, number), run, clients, until)
            await fleet.until_ready()
            seen = len(clients.runs)
            while len(clients.runs) < seen + WARM_TEXTS * options.at_once:  # noqa: ASYNC110
                await asyncio.sleep(0.05)
            await clients.stop()
            await fleet.until_quiet()
            run.before, run.after = run.after, held_by(fleet)
            clients.start()
        await clients.stop()
        await fleet.until_quiet()
        run.left = await fleet.end()
        run.unexpected = {name: member.unexpected for name, member in fleet.members.items()}
        run.killed = set().union(*(member.killed for member in fleet.members.values()))
        run.logged, run.reopened = read_logs([fleet.forks.errors(name) for name in fleet.members], offset_s)
    return run


async def _carry_out(fleet: KilledFleet, plan: Any, run: KillRun, clients: Clients, until: float) -> None:
    waking: set[asyncio.Task[None]] = set()
    for act in plan:
        await asyncio.sleep(act.after_s)
        member = fleet.members[act.member]
        while len(waking) + fleet.down() > MAX_DOWN or not member.pid:  # noqa: ASYNC110 - processes are started
            await asyncio.sleep(0.02)
        if time.monotonic() > until:
            break
        process = member.pid
        if not member.signal(signal.SIGKILL if act.signal == "KILL" else signal.SIGSTOP):
            continue
        now = time.monotonic()
        run.sent.append(Sent(act.member, member.kind, act.signal, process, now, now + act.for_s))
        if act.signal == "STOP":
            stopped = asyncio.create_task(_wake(process, act))
            waking.add(stopped)
            stopped.add_done_callback(waking.discard)
        if len(run.sent) % PROGRESS_EVERY == 0:
            ends = ", ".join(f"{count} {end}" for end, count in ends_of(clients.runs).items())
            print(f"{len(run.sent)} signals; texts: {ends}; refused {clients.refusals}", flush=True)
    await asyncio.gather(*waking)


async def _wake(process: int, act: Act) -> None:
    await asyncio.sleep(act.for_s)
    try:
        os.kill(process, signal.SIGCONT)
    except ProcessLookupError:
        return  # it was killed while it stood


def record_of(run: KillRun, options: KillOptions, took_s: float, rows: list[Row]) -> dict[str, Any]:
    """Return the record of a run, for a file of some kB."""
    git = ["git", "-C", str(ROOT), "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"]
    revision = subprocess.run(git, capture_output=True, text=True, check=False).stdout.strip()
    return {
        "command": f"make chaos KILLS={options.kills} SEED={options.seed}",
        "revision": revision,
        "platform": platform.platform(),
        "cores": os.cpu_count(),
        "options": asdict(options),
        "took_s": round(took_s, 1),
        "signals": len(run.sent),
        "texts": dict(ends_of(run.runs)),
        "streams_reopened": len(run.reopened),
        "violations": run.violations(),
        "table": [asdict(row) | {"worst_gap_s": round(row.worst_gap_s, 3)} for row in rows],
        "held_in_the_middle": {name: asdict(held) for name, held in run.before.items()},
        "held_at_the_end": {name: asdict(held) for name, held in run.after.items()},
    }


def main() -> int:
    """Run the command; 1: something was violated."""
    parser = argparse.ArgumentParser(description=__doc__)
    defaults = KillOptions()
    parser.add_argument("--kills", type=int, default=defaults.kills, help="signals to send (default: %(default)s)")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of the plan (default: %(default)s)")
    parser.add_argument("--every-s", type=float, default=defaults.every_s, help="mean time between two signals")
    parser.add_argument("--at-once", type=int, default=defaults.at_once, help="texts at once of each daemon")
    parser.add_argument("--tokens", type=int, default=defaults.tokens, help="tokens of a text")
    parser.add_argument("--minutes", type=float, default=defaults.minutes, help="end sooner after this time; 0: never")
    parser.add_argument("--output", type=Path, help="JSON record")
    given = vars(parser.parse_args())
    output = given.pop("output")
    options = KillOptions(**given)
    began = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="outrider-kills-") as folder:
        run = asyncio.run(run_kills(Path(folder), options))
    took_s = time.monotonic() - began
    rows, violations = run.table(), run.violations()
    print("\n".join(lines_of(rows)))
    print(f"{len(run.sent)} signals and {len(run.runs)} texts in {took_s:.0f} s, {len(run.reopened)} streams reopened")
    if output is not None:
        output.write_text(json.dumps(record_of(run, options, took_s, rows), indent=1) + "\n")
    for line in violations:
        print(f"VIOLATED: {line}")
    return bool(violations)


if __name__ == "__main__":
    sys.exit(main())
