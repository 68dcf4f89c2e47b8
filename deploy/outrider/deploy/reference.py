"""The reference of all commands and options, docs/cli.md: `python -m outrider.deploy.reference > docs/cli.md`."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from outrider.deploy.arguments import PREFIX, Argument, shown_default
from outrider.deploy.cli import COMMANDS, LOGS, Entry
from outrider.proto.settings import REQUIRED

HEAD = f"""# Command line

<!-- Made from the declarations of the options by `make docs`; a test fails where they differ. -->

Every option of a command can be set on the command line, by an environment variable, or by a key in the TOML file that
`--config` or `{PREFIX}CONFIG` names:

    outrider run --max-tokens 64 'def main():'
    {PREFIX}RUN_MAX_TOKENS=64 outrider run 'def main():'

    # outrider.toml
    [run]
    max-tokens = 64

The command line wins over the environment, that over the file, and that over the default. A key that a command does not
have is a mistake. A variable is the command's prefix and the option in capitals, with `_` for `-`. An option that may
be repeated is a list in the file (`stop = ["a", "b"]`), and `[a, b]` in a variable.

Shells complete all of this by one line at the end of their files, with a program that is installed beside `outrider`
([argcomplete](https://kislyuk.github.io/argcomplete/) has more shells):

    # ~/.bashrc
    eval "$(register-python-argcomplete outrider)"
    # ~/.zshrc
    autoload -Uz compinit && compinit && eval "$(register-python-argcomplete outrider)"
    # ~/.config/fish/config.fish
    register-python-argcomplete --shell fish outrider | source
"""
# Unset while the reference is made, since defaults depend on them.
VARIABLES = ("XDG_CACHE_HOME", "RAY_ADDRESS", "RAY_API_SERVER_ADDRESS")


def reference() -> str:
    """Return the whole text, in Markdown."""
    parts = [HEAD, _table("Options of every command", "before the command's name", LOGS)]
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
