"""Promises of README and docs: links lead somewhere, commands parse, files exist, and the README stays short."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from research import commands as commands_of_research

DOCS = (
    "architecture",
    "exactness",
    "benchmarks",
    "both-ends",
    "trees",
    "steering",
    "selection",
    "learning",
    "python",
    "operations",
    "faults",
    "kubernetes",
)
DOCS += ("load", "models", "drafters", "real-pair", "vllm", "servers", "clients", "tools", "cli", "not-built")
DOCS += ("first-change", "errors", "several-machines")
MAX_README_LINES = 200
RESEARCH = "python -m research"
OLD = "experiments-1"
OUTSIDE = ("http://", "https://")
PLACEHOLDERS = {"N": "2", "HOST:PORT": "127.0.0.1:50050", "http://HEAD:8265": "http://127.0.0.1:8265"}


def pages(root: Path) -> list[Path]:
    top = [root / f"{name}.md" for name in ("README", "SECURITY", "CONTRIBUTING", "CHANGELOG")]
    return [*top, *sorted((root / "docs").glob("*.md"))]


def without_code(text: str) -> str:
    return re.sub(r"^```.*?^```$", "", text, flags=re.MULTILINE | re.DOTALL)


def anchors(page: Path) -> set[str]:
    """Anchors of a page's headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.+)$", without_code(page.read_text(encoding="utf-8")), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def commands(page: Path) -> list[str]:
    """Commands in the page's blocks and inline code; an ellipsis is what a reader fills in.

    Those of the tag `experiments-1` are left out: what they ran is not in this tree.
    """
    text = page.read_text(encoding="utf-8")
    found = re.findall(r"^```\w*\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)
    blocks = "\n".join(block for block in found if OLD not in block).replace("\\\n", " ")
    lines = re.findall(rf"^(?:\.venv/bin/)?((?:outrider|{RESEARCH}) .*)$", blocks, re.MULTILINE)
    inline = [" ".join(code.split()) for code in re.findall(rf"`((?:outrider|{RESEARCH}) [^`]+)`", without_code(text))]
    inline += [f"outrider bench {code}" for code in re.findall(r"`(--rtt \d[^`]*)`", without_code(text))]
    return [command for command in (*lines, *inline) if "…" not in command.replace('"…"', "")]


def arguments(command: str) -> list[str]:
    words = shlex.split(command.removeprefix(f"{RESEARCH} ").removeprefix("outrider "), comments=True)
    ends = [i for i, word in enumerate(words) if word in ("&", "|", ">")]
    return [PLACEHOLDERS.get(word, word) for word in words[: min(ends, default=len(words))]]


def test_every_page_of_the_documentation_is_there_and_the_readme_names_it(root) -> None:
    readme = (root / "README.md").read_text(encoding="utf-8")
    assert {page.stem for page in (root / "docs").glob("*.md")} == set(DOCS)
    assert [name for name in DOCS if f"(docs/{name}.md)" not in readme] == []


def test_the_readme_is_short(root) -> None:
    assert len((root / "README.md").read_text(encoding="utf-8").splitlines()) <= MAX_README_LINES


def test_links_lead_to_files_and_headings_that_exist(root) -> None:
    broken = []
    found = 0
    for page in pages(root):
        for link in re.findall(r"\]\(([^)\s]+)\)", without_code(page.read_text(encoding="utf-8"))):
            if link.startswith(OUTSIDE):
                continue
            found += 1
            name, _, anchor = link.partition("#")
            target = (page.parent / name).resolve() if name else page
            if not target.exists() or (anchor and anchor not in anchors(target)):
                broken.append(f"{page.name}: {link}")
    assert found > 20
    assert broken == []


def test_files_that_the_pages_name_exist(root) -> None:
    missing = []
    for page in pages(root):
        text = page.read_text(encoding="utf-8")
        named = re.findall(r"`((?:proto|edge|cloud|coordinator|deploy|docs|tests)/[\w/.-]+)`", text)
        missing += [f"{page.name}: {name}" for name in named if not (root / name).exists()]
    assert missing == []


def test_commands_of_the_pages_parse(root, monkeypatch, capsys) -> None:
    """A command that is only named, without arguments, is asked for its help."""
    from outrider.deploy.cli import OUTRIDER, parse

    monkeypatch.chdir(root)
    wrong = []
    seen = 0
    for page in pages(root):
        for command in commands(page):
            if not (given := arguments(command)):
                continue
            seen += 1
            program = commands_of_research.RESEARCH if command.startswith(RESEARCH) else OUTRIDER
            try:
                parse(given if any(word.startswith("-") for word in given) else [*given, "--help"], program)
            except SystemExit as end:
                if not end.code:
                    continue
                wrong.append(f"{page.name}: {command}: {capsys.readouterr().err.strip().splitlines()[-1]}")
    assert seen > 40
    assert wrong == []


@pytest.mark.parametrize("wrong", ["outrider bench --no-such-option", "outrider nothing"])
def test_a_command_that_does_not_parse_is_noticed(wrong) -> None:
    from outrider.deploy.cli import parse

    with pytest.raises(SystemExit):
        parse(arguments(wrong))
