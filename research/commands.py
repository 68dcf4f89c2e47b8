"""The command line of what measures the project, `python -m research`."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.deploy import cli
from outrider.deploy.arguments import Given
from outrider.deploy.cli import Entry, Program

SETTINGS = "research.research_settings"

RESEARCH = Program(
    "python -m research",
    "What measures Outrider, from a checkout; `python -m research` runs it.",
    {
        "lines": Entry("count the lines of every room beside its budget", f"{SETTINGS}:LINES"),
        "probes": Entry(
            "time texts of a stock vLLM server over links: its stream, its speculation, and ours", f"{SETTINGS}:PROBES"
        ),
        "eavesdropper": Entry(
            "guess prompts from sizes and times of TLS records, with and without --quiet-wire",
            f"{SETTINGS}:EAVESDROPPER",
        ),
        "tables": Entry("take figures of README and docs again, and say which moved", f"{SETTINGS}:TABLES"),
        "cluster": Entry(
            "run a Ray cluster of several nodes in namespaces, under texts and faults", f"{SETTINGS}:CLUSTER"
        ),
        "fleet": Entry("simulate many sessions on many verifiers, by scheme"),
        "fleet capacity": Entry("find the most sessions that one verifier holds", f"{SETTINGS}:CAPACITY"),
        "fleet edges": Entry("run thousands of edges whose texts arrive as in a public trace", f"{SETTINGS}:FLEET"),
        "fleet check": Entry("simulate benchmarks of many real sessions again", f"{SETTINGS}:CHECK"),
        "crowd": Entry("thousands of live edges against real coordinators, until these break", f"{SETTINGS}:CROWD"),
        "traces": Entry("record which drafts would hit, and replay them over any link"),
        "traces record": Entry(
            "record a target's texts, and where drafters propose the same tokens", f"{SETTINGS}:RECORD", "traces_record"
        ),
        "traces replay": Entry(
            "simulate recorded drafters over any link, on a virtual clock", f"{SETTINGS}:REPLAY", "traces_replay"
        ),
    },
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status."""
    return cli.main(argv, RESEARCH)


def parse(argv: Sequence[str]) -> Given:
    """Parse a command line; a mistake ends the process with status 2."""
    return cli.parse(argv, RESEARCH)
