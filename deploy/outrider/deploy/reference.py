"""The reference of all commands and options, docs/cli.md: `python -m outrider.deploy.reference > docs/cli.md`."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

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

`outrider completion` writes what makes a shell complete all of this, by one line at the end of the shell's file:

    eval "$(outrider completion bash)"    # ~/.bashrc
    eval "$(outrider completion zsh)"     # ~/.zshrc
    outrider completion fish | source     # ~/.config/fish/config.fish
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
    for name, entry in COMMANDS.items():
        if entry.declared:
            parts += _command(name, entry)
    return "\n".join(parts).rstrip() + "\n"


def _command(name: str, entry: Entry) -> Iterator[str]:
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
    options = [argument for argument in arguments if not argument.field.option.positional]
    for group in dict.fromkeys(argument.field.option.group for argument in options):
        yield _table(group, "", [argument for argument in options if argument.field.option.group == group])


def _table(heading: str, note: str, arguments: Sequence[Argument]) -> str:
    rows = _rows(
        ("Option", "Default", "Meaning"),
        [
            (f"`{_escaped(argument.usage)}`", _default(argument), _escaped(argument.field.option.help))
            for argument in arguments
        ],
    )
    title = f"**{heading[0].upper()}{heading[1:]}**{f', {note}' if note else ''}\n\n" if heading else ""
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
