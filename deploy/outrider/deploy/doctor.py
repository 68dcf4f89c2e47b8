"""`outrider doctor`: checks of everything between here and the target, with remedies."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace

from rich.console import Console
from rich.markup import escape

from outrider.deploy.arguments import Given
from outrider.deploy.commands.edge_options import DoctorSettings, ServerSettings
from outrider.deploy.credentials import api_key
from outrider.edge import EdgeConfig
from outrider.edge.examination import Finding, Outcome, examine, failed_by, ok, warning
from outrider.proto.errors import OutriderError
from outrider.proto.release import release

STYLES = {Outcome.OK: "green", Outcome.WARNING: "yellow", Outcome.FAILED: "bold red", Outcome.SKIPPED: "dim"}
OUTCOME_WIDTH = max(len(outcome.value) for outcome in Outcome)
CHECK_WIDTH = 20


def doctor(given: Given) -> int:
    """Run `outrider doctor` and return 1 if a check failed."""
    if given(DoctorSettings).json:
        findings = asyncio.run(_examined(given))
        print(
            json.dumps(
                {
                    "release": release(),
                    "checks": [asdict(found) | {"outcome": found.outcome.value} for found in findings],
                }
            )
        )
    else:
        console = Console(highlight=False)
        findings = asyncio.run(_examined(given, lambda found: _show(console, found)))
        counts = Counter(found.outcome for found in findings)
        console.print(", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts[outcome]))
    return int(any(found.outcome is Outcome.FAILED for found in findings))


async def _examined(given: Given, report: Callable[[Finding], None] = lambda _: None) -> list[Finding]:
    """Return what there is to say, and report each finding as it comes."""
    asked = given(ServerSettings)
    if not asked.server:
        return await examine(given(EdgeConfig, api_key=api_key(given)), report)
    from outrider.deploy.local.server_here import verifier_here

    try:
        async with verifier_here(asked, given.fields(EdgeConfig)["tokenizer"], wait=False) as (facts, where):
            words = facts.words
            lacks = f"start it with {' and '.join(flag.partition(':')[0] for flag in facts.lacking)}"
            found = [warning(words, lacks, "server") if facts.lacking else ok(words, check="server")]
            report(found[0])
            return found + await examine(given(EdgeConfig, api_key=api_key(given), **where), report)
    except OutriderError as error:
        remedy = "start it, or mend that option; docs/servers.md has the flags of each server"
        found = [replace(failed_by(error), remedy=remedy, check="server")]
        report(found[0])
        return found


def _show(console: Console, found: Finding) -> None:
    """Print a line of the table, and the remedy under it."""
    words = f"[dim]{escape(found.message)}[/]" if found.outcome is Outcome.SKIPPED else escape(found.message)
    outcome = f"[{STYLES[found.outcome]}]{found.outcome.value:<{OUTCOME_WIDTH}}[/]"
    console.print(f"{outcome}  {found.check:<{CHECK_WIDTH}}", words, soft_wrap=True)
    if found.remedy:
        console.print(" " * (OUTCOME_WIDTH + 2 + CHECK_WIDTH), f"→ {escape(found.remedy)}", soft_wrap=True)
