"""`outrider doctor`: checks of everything between here and the target, with remedies."""

from __future__ import annotations

import asyncio
import json
import shlex
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace

from rich.console import Console
from rich.markup import escape

from outrider.deploy.arguments import Given
from outrider.deploy.commands.edge_options import DoctorSettings, KeySettings, ServerSettings
from outrider.deploy.credentials import api_key
from outrider.edge import EdgeConfig
from outrider.edge.examination import Finding, Outcome, examine, failed_by, ok, warning
from outrider.proto.error_codes import REMEDIES, code_in
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
                    "checks": [
                        asdict(found) | {"outcome": found.outcome.value, "code": code_in(found.message)}
                        for found in findings
                    ],
                    "next": _next(given, findings),
                }
            )
        )
    else:
        console = Console(highlight=False)
        findings = asyncio.run(_examined(given, lambda found: _show(console, found)))
        counts = Counter(found.outcome for found in findings)
        console.print(", ".join(f"{counts[outcome]} {outcome.value}" for outcome in Outcome if counts[outcome]))
        console.print(f"next: {escape(_next(given, findings))}", soft_wrap=True)
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
        found = [replace(failed_by(error), remedy=REMEDIES["OUT-503"], check="server")]
        report(found[0])
        return found


def _next(given: Given, findings: list[Finding]) -> str:
    """Return the remedy of the first failed check, which others wait for; where none failed, the command to type."""
    failure = next((found for found in findings if found.outcome is Outcome.FAILED), None)
    if failure is not None:
        code = code_in(failure.message)
        return f"{failure.remedy} (`outrider explain {code}`)" if code else failure.remedy
    words = ["outrider", "edge" if given(ServerSettings).server else "chat"]
    for argument in given.arguments:
        value = given.values[argument.name]
        if argument.kind in (EdgeConfig, ServerSettings, KeySettings) and value != argument.value:
            words += [f"--{argument.flag}", *([] if value is True else [shlex.quote(str(value))])]
    return " ".join(words)


def _show(console: Console, found: Finding) -> None:
    """Print a line of the table, and the remedy under it."""
    words = f"[dim]{escape(found.message)}[/]" if found.outcome is Outcome.SKIPPED else escape(found.message)
    outcome = f"[{STYLES[found.outcome]}]{found.outcome.value:<{OUTCOME_WIDTH}}[/]"
    console.print(f"{outcome}  {found.check:<{CHECK_WIDTH}}", words, soft_wrap=True)
    if found.remedy:
        console.print(" " * (OUTCOME_WIDTH + 2 + CHECK_WIDTH), f"→ {escape(found.remedy)}", soft_wrap=True)
