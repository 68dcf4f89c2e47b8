"""docs/cli.md matches the declarations of the options."""

from __future__ import annotations

import re

import pytest

from outrider.deploy.cli import COMMANDS
from outrider.deploy.reference import VARIABLES, reference


@pytest.fixture
def text(monkeypatch: pytest.MonkeyPatch) -> str:
    for name in VARIABLES:
        monkeypatch.delenv(name, raising=False)
    return reference()


def test_the_page_matches_the_declarations(root, text) -> None:
    written = (root / "docs" / "cli.md").read_text(encoding="utf-8")
    assert written == text, "run `make docs`"


def test_every_command_and_option_is_in_it(text) -> None:
    own, _, rest = text.partition("## Options of several commands")
    sections = {part.partition("\n")[0]: part for part in own.split("## outrider ")[1:]}
    shared = {part.partition("\n")[0].lower().replace(" ", "-"): part for part in rest.split("### ")[1:]}
    assert set(sections) == {name for name, entry in COMMANDS.items() if entry.declared}
    for name, section in sections.items():
        section += "".join(shared[link] for link in re.findall(r"\]\(#([a-z-]+)\)", section))
        for argument in COMMANDS[name].load().arguments:
            shown = argument.field.metavar if argument.field.option.positional else f"`--{argument.flag}"
            assert shown in section, f"{name} {argument.flag}"
    assert "| `--kv-tokens N` | `0` |" in sections["verifier"]
    assert "[connection](#connection)" in sections["status"]
    assert "| `--coordinator HOST:PORT` | required |" in sections["status"]
