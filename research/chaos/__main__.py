"""`python -m research.chaos`: run schedules, or replay one with the trace of its events."""

from __future__ import annotations

import argparse
import logging
import sys
from collections.abc import Sequence

from research.chaos.faults import KINDS
from research.chaos.schedule import Schedule, run_in_processes
from research.chaos.world import Violation


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; return 1 where something does not hold, else 0."""
    parser = argparse.ArgumentParser(
        prog="python -m research.chaos",
        description="Let a small fleet on a virtual clock meet faults in every state, and check what must always hold.",
    )
    parser.add_argument("--seed", type=int, help="replay the schedule of this seed, with the trace of its events")
    parser.add_argument("--schedules", type=int, default=1000, help="schedules to run (default: %(default)s)")
    parser.add_argument("--first", type=int, default=0, help="seed of the first (default: %(default)s)")
    parser.add_argument("--processes", type=int, default=1, help="processes to run them in (default: %(default)s)")
    parser.add_argument(
        "--faults", nargs="+", choices=KINDS, default=(), metavar="KIND", help="only faults of these kinds"
    )
    options = parser.parse_args(arguments)
    if options.seed is not None:
        return replay(options.seed, options.faults)
    summary = run_in_processes(options.first, options.schedules, options.faults, processes=options.processes)
    print("\n".join(summary.lines()))
    return 1 if summary.found else 0


def replay(seed: int, kinds: Sequence[str]) -> int:
    """Run one schedule and print its trace; return 1 where something does not hold, else 0."""
    schedule, found = Schedule(seed, kinds, traced=True), None
    try:
        schedule.run()
    except (Exception, Violation) as error:  # whatever shipped code raises is a finding
        found = error
    print("\n".join(schedule.world.trace or ()))
    print(f"seed {seed}: {'all holds' if found is None else f'{type(found).__name__}: {found}'}")
    return 1 if found is not None else 0


if __name__ == "__main__":
    logging.getLogger("outrider").setLevel(logging.CRITICAL)  # the trace says more, on the virtual clock
    sys.exit(main())
