"""The reference of all commands and options: `python -m outrider.deploy.reference` prints docs/cli.md anew."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from outrider.deploy.arguments import PREFIX, Argument, shown_default
from outrider.deploy.cli import COMMANDS, LOGS, Entry
from outrider.proto.settings import REQUIRED

PAGE = Path(__file__).parents[3] / "docs" / "cli.md"  # of a checkout
FIRST = "Options of every command"
# Unset while the reference is made, since defaults depend on them.
VARIABLES = ("XDG_CACHE_HOME", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")


def reference() -> str:
    """Return the page: its introduction as it is, and all commands and options in Markdown."""
    introduction, _, _ = PAGE.read_text(encoding="utf-8").partition(f"**{FIRST}**")
    parts = [introduction.removesuffix("\n"), _table(FIRST, "before the command's name", LOGS)]
    parts += [
        "## Commands\n",
        *(
            f"- [`outrider {name}`](#outrider-{name.replace(' ', '-')}): {entry.help}"
            for name, entry in COMMANDS.items()
            if entry.declared
        ),
        "",
    ]
    shared = _shared()
    for name, entry in COMMANDS.items():
        if entry.declared:
            parts += _command(name, entry, shared)
    parts += ["## Options of several commands\n"]
    for group, rows in shared.items():
        title, _, note = group.partition(" (")
        parts += [f"### {_heading(title)}\n", *([f"{_heading(note.removesuffix(')'))}.\n"] if note else ()), rows]
    return "\n".join(parts).rstrip() + "\n"


def _shared() -> dict[str, str]:
    """Return the tables of the groups of options that several commands have alike, by the group."""
    tables = Counter(
        (group, _table("", "", options))
        for entry in COMMANDS.values()
        if entry.declared
        for group, options in _groups(entry).items()
        if group
    )
    return {group: rows for (group, rows), count in reversed(tables.most_common()) if count > 1}


def _groups(entry: Entry) -> dict[str, list[Argument]]:
    """Return the options of a command by their group."""
    groups: dict[str, list[Argument]] = {}
    for argument in entry.load().arguments:
        if not argument.field.option.positional:
            groups.setdefault(argument.field.option.group, []).append(argument)
    return groups


def _heading(group: str) -> str:
    return f"{group[0].upper()}{group[1:]}"


def _command(name: str, entry: Entry, shared: Mapping[str, str]) -> Iterator[str]:
    table = entry.table or name
    arguments = entry.load().arguments
    positional = [argument for argument in arguments if argument.field.option.positional]
    yield f"## outrider {name}\n"
    yield f"{entry.help[0].upper()}{entry.help[1:]}.\n"
    yield f"    outrider {name} [OPTION ...] {' '.join(argument.usage for argument in positional)}".rstrip() + "\n"
    yield f"Variables: `{PREFIX}{table.upper()}_…`; table: `[{table}]`.\n"
    if positional:
        rows = [(f"`{_escaped(argument.usage)}`", _escaped(argument.field.option.help)) for argument in positional]
        yield _rows(("Argument", "Meaning"), rows)
    also = []
    for group, options in _groups(entry).items():
        if shared.get(group) == _table("", "", options):
            title = group.partition(" (")[0]
            also.append(f"[{title}](#{title.lower().replace(' ', '-')})")
        else:
            yield _table(group, "", options)
    if also:
        yield f"It also has the options of {', '.join(also)}.\n"


def _table(heading: str, note: str, arguments: Sequence[Argument]) -> str:
    rows = _rows(
        ("Option", "Default", "Meaning"),
        [
            (f"`{_escaped(argument.usage)}`", _default(argument), _escaped(argument.field.option.help))
            for argument in arguments
        ],
    )
    title = f"**{_heading(heading)}**{f', {note}' if note else ''}\n\n" if heading else ""
    return title + rows


def _default(argument: Argument) -> str:
    if argument.default is REQUIRED:
        return "required"
    return "".join(f"`{note.removeprefix('default: ')}`" for note in shown_default(argument.value))


def _rows(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines) + "\n"


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").replace("<", "&lt;")


if __name__ == "__main__":
    for variable in VARIABLES:
        os.environ.pop(variable, None)
    print(reference(), end="")
