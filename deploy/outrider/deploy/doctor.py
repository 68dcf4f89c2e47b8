"""`outrider doctor`: checks of everything between here and the target, with remedies."""

from __future__ import annotations

import asyncio
import json

from rich.console import Console
from rich.markup import escape

from outrider.deploy.arguments import Given
from outrider.deploy.commands.edge import DoctorSettings
from outrider.deploy.credentials import api_key
from outrider.edge import EdgeConfig
from outrider.edge.doctor import Examined, Outcome, examine
from outrider.proto.release import release

STYLES = {Outcome.OK: "green", Outcome.WARNING: "yellow", Outcome.FAILED: "bold red", Outcome.SKIPPED: "dim"}
OUTCOME_WIDTH = max(len(outcome.value) for outcome in Outcome)
CHECK_WIDTH = 20


def doctor(given: Given) -> int:
    """Run `outrider doctor` and return 1 if a check failed."""
    config = given(EdgeConfig, api_key=api_key(given))
    if given(DoctorSettings).json:
        examined = asyncio.run(examine(config))
        print(json.dumps({"release": release(), "checks": [one.record() for one in examined]}))
    else:
        console = Console(highlight=False)
        examined = asyncio.run(examine(config, lambda one: _show(console, one)))
        console.print(_verdict(examined))
    return int(any(one.finding.outcome is Outcome.FAILED for one in examined))


def _show(console: Console, one: Examined) -> None:
    """Print a line of the table, and the remedy under it."""
    found = one.finding
    colour = STYLES[found.outcome]
    words = escape(found.message)
    if found.outcome is Outcome.SKIPPED:
        words = f"[dim]{words}[/]"
    console.print(
        f"[{colour}]{found.outcome.value:<{OUTCOME_WIDTH}}[/]  {one.check:<{CHECK_WIDTH}}", words, soft_wrap=True
    )
    if found.remedy:
        console.print(f"{'':<{OUTCOME_WIDTH}}  {'':<{CHECK_WIDTH}}", f"→ {escape(found.remedy)}", soft_wrap=True)


def _verdict(examined: list[Examined]) -> str:
    outcomes = [one.finding.outcome for one in examined]
    counts = {outcome: outcomes.count(outcome) for outcome in Outcome if outcome in outcomes}
    return ", ".join(f"{count} {outcome.value}" for outcome, count in counts.items())
