"""A command line made from declared settings.

`outrider run --max-tokens 64`, OUTRIDER_RUN_MAX_TOKENS=64, and `max-tokens = 64` under `[run]` in the file that
`--config` or OUTRIDER_CONFIG names mean the same. The command line wins over the environment, that over the file, and
that over the default.
"""

from __future__ import annotations

import argparse
import itertools
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from outrider.proto.errors import ConfigError, OutriderError, did_you_mean
from outrider.proto.settings import REQUIRED, Declared, declared

T = TypeVar("T")
PREFIX = "OUTRIDER_"
CONFIG_VARIABLE = f"{PREFIX}CONFIG"
_MADE_BY = "_made_by"  # in the namespace that a parser makes: the parser, its command and table


class Parser(argparse.ArgumentParser):
    """A parser whose errors are one line that names the help."""

    def parse_args(  # type: ignore[override]
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> argparse.Namespace:
        """Parse a command line; an option that the command does not have ends the process, and a near one is named."""
        line, unknown = self.parse_known_args(args, namespace)
        if unknown:
            parser, command, _ = getattr(line, _MADE_BY)
            options = (f"--{argument.flag}" for argument in command.arguments if not argument.field.option.positional)
            near = did_you_mean(unknown[0].partition("=")[0], options) if unknown[0].startswith("-") else ""
            parser.error(f"unrecognized arguments: {' '.join(unknown)}{near}")
        return line

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        """Refuse a command that there is not by naming a near one, rather than all."""
        if isinstance(action, argparse._SubParsersAction) and value not in action.choices:
            near = did_you_mean(str(value), action.choices)
            raise argparse.ArgumentError(None, f"there is no command {value!r}{near}")
        super()._check_value(action, value)

    def error(self, message: str) -> NoReturn:
        """Print the message to standard error and end the process with status 2."""
        sys.stderr.write(f"{self.prog}: {message} (see {self.prog} --help)\n")
        sys.exit(2)


@dataclass(frozen=True, slots=True)
class Argument:
    """A declared field of the settings class `kind` as one command takes it; `default` may be a function."""

    kind: type[Any]
    field: Declared
    flag: str
    default: Any

    @property
    def name(self) -> str:
        """Name of the option among the values and in the environment."""
        return self.flag.replace("-", "_")

    @property
    def value(self) -> Any:
        """Default value, made by its function if it has one; `REQUIRED` where there is none."""
        return self.default() if callable(self.default) and self.default is not REQUIRED else self.default

    @property
    def help(self) -> str:
        """Help text with notes on repetition and default."""
        notes = ["repeatable"] if self.field.several and self.field.option.many == "repeat" else []
        if not self.field.option.positional:
            notes += ["required"] if self.default is REQUIRED else shown_default(self.value)
        return self.field.option.help + (f" ({'; '.join(notes)})" if notes else "")

    @property
    def placeholder(self) -> str:
        """Placeholder of the value in help texts; empty for switches."""
        return self.field.metavar or ("{" + ",".join(self.field.choices) + "}" if self.field.choices else "")

    @property
    def usage(self) -> str:
        """The argument in a line of usage."""
        words = self.placeholder if self.field.option.positional else f"--{self.flag} {self.placeholder}".rstrip()
        return f"{words} ..." if self.field.several and self.field.option.many in ("repeat", "words") else words

    def variable(self, table: str) -> str:
        """Return the environment variable of a command with that table."""
        return f"{PREFIX}{table}_{self.name}".upper()

    def add_to(self, parser: argparse._ActionsContainer) -> None:
        """Have `parser` take it; a value that is not given leaves no trace."""
        option, metavar = self.field.option, self.placeholder or None
        how: dict[str, Any] = {"help": self.help.replace("%", "%%"), "default": argparse.SUPPRESS}
        if self.field.kind is bool:
            how |= {"action": "store_true"}
        elif self.field.several and option.many == "rest":
            how |= {"nargs": argparse.REMAINDER, "metavar": metavar}
        else:
            how |= {"type": self._typed, "metavar": metavar}
            if self.field.several and option.many == "repeat":
                how["action"] = "append"
            elif self.field.several and option.many == "words":
                how["nargs"] = "+"
            elif option.positional and self.default is not REQUIRED:
                how["nargs"] = "?"
        action = parser.add_argument(*([self.name] if option.positional else [f"--{self.flag}"]), **how)
        if self.field.choices and not self.field.several:
            action.choices = _Choices(self.field.choices)

    def from_line(self, value: Any) -> Any:
        """Return the field's value from that of argparse."""
        return tuple(value) if isinstance(value, list) else value

    def from_text(self, text: str) -> Any:
        """Return the field's value from an environment variable; raises `ValueError`."""
        listed = self.field.several and self.field.option.many != "commas"
        if listed and text.startswith("[") and text.endswith("]"):
            return tuple(self._parsed(entry.strip()) for entry in text[1:-1].split(",") if entry.strip())
        return (self._parsed(text),) if listed else self._parsed(text)

    def from_toml(self, value: Any) -> Any:
        """Return the field's value from a TOML file's; raises `ValueError`."""
        if isinstance(value, list):
            if not self.field.several:
                raise ValueError("is a list where one value belongs")
            return tuple(self.field.parse(str(entry)) for entry in value)
        return self.from_text(str(value))

    def _parsed(self, text: str) -> Any:
        if self.field.several and self.field.option.many == "commas":
            return tuple(self.field.parse(entry.strip()) for entry in text.split(",") if text.strip())
        return self.field.parse(text)

    def _typed(self, text: str) -> Any:
        try:
            return self._parsed(text)
        except ValueError as error:
            raise argparse.ArgumentTypeError(message_of(error)) from error


class _Choices(tuple[str, ...]):
    """Words that completion offers; argparse need not check them, since `_typed` has."""

    def __contains__(self, value: object) -> bool:
        return True


Part = tuple[Argument, ...]
"""Fields of one settings class that a command takes; `part` makes it."""


def part(
    kind: type[Any],
    *names: str,
    required: Sequence[str] = (),
    flags: Mapping[str, str] | None = None,
    defaults: Mapping[str, Any] | None = None,
    helps: Mapping[str, str] | None = None,
) -> Part:
    """Choose the fields of a settings class that a command takes.

    Args:
        kind: settings class.
        names: fields, or groups of them; none: all.
        required: fields without which the command does not run.
        flags: flags that replace the declared ones, by field.
        defaults: defaults that replace the declared ones, or functions that make them, by field.
        helps: help texts that replace the declared ones, by field.
    """
    return tuple(
        Argument(
            kind,
            replace(field, option=replace(field.option, help=(helps or {}).get(field.name, field.option.help))),
            (flags or {}).get(field.name, field.flag),
            REQUIRED if field.name in required else (defaults or {}).get(field.name, field.default),
        )
        for field in declared(kind).values()
        if not names or field.name in names or field.option.group in names
    )


@dataclass(frozen=True, slots=True)
class Command:
    """A command: the function `module:name` that runs it on `Given`, and the arguments that it takes."""

    run: str
    parts: tuple[Part, ...] = ()

    @property
    def arguments(self) -> tuple[Argument, ...]:
        """All options and positional arguments of the command."""
        return tuple(itertools.chain(*self.parts))


@dataclass(frozen=True, slots=True)
class Given:
    """Values that command line, environment and config file give a command.

    `run` names the function, `module:name`, and `parse` parses another command line, for commands that run commands.
    """

    command: str
    run: str
    arguments: tuple[Argument, ...]
    values: Mapping[str, Any]
    parse: Callable[[Sequence[str]], Given]

    def __call__(self, kind: type[T], /, **more: Any) -> T:
        """Build settings of a class from the options and from `more` fields; raises `ConfigError`."""
        return kind(**self.fields(kind) | more)

    def fields(self, kind: type[Any]) -> dict[str, Any]:
        """Return the values of a settings class's fields that the command takes."""
        return {a.field.name: self.values[a.name] for a in self.arguments if a.kind is kind}

    @property
    def logging(self) -> dict[str, Any]:
        """Log settings of this process, for those that it starts."""
        return {name: self.values[name] for name in ("log_level", "log_format")}

    def flag_of(self, field: str) -> str:
        """Return the option, without its dashes, that sets the field an error names."""
        name = field.rpartition(".")[2]
        flag = name.replace("_", "-")
        flags = [argument.flag for argument in self.arguments if argument.field.name == name]
        return flag if flag in flags else next(iter(flags), flag)


def fill(parser: Parser, command: Command, table: str) -> None:
    """Have `parser` take the arguments of a command, whose config-file table is `table`."""
    needed = [a.usage for a in command.arguments if a.default is REQUIRED and not a.field.option.positional]
    places = [a for a in command.arguments if a.field.option.positional]
    words = [a.usage if a.default is REQUIRED else f"[{a.usage}]" for a in places]
    parser.usage = " ".join(["%(prog)s", "[OPTION ...]", *needed, *words])
    parser.add_argument(
        "--config", type=Path, metavar="FILE", help=f"TOML file whose [{table}] sets options (or {CONFIG_VARIABLE})"
    )
    parser.epilog = (
        f"Every option can also be set by an environment variable, {PREFIX}{table.upper()}_ and its name in capitals, "
        f"or by a key in the config file. The command line wins over the environment, and that over the file."
    )
    groups: dict[str, argparse._ActionsContainer] = {"": parser}
    for argument in command.arguments:
        group = argument.field.option.group
        if group not in groups:
            groups[group] = parser.add_argument_group(group)
        argument.add_to(groups[group])
    parser.set_defaults(**{_MADE_BY: (parser, command, table)})


def resolve(line: argparse.Namespace, environment: Mapping[str, str]) -> tuple[Command, dict[str, Any]]:
    """Return the command that `line` names, and its values from line, environment, config file and defaults.

    A mistake in them ends the process with one line on standard error, and status 2.
    """
    parser, command, table = getattr(line, _MADE_BY)
    given = vars(line)
    path = given.get("config") or environment.get(CONFIG_VARIABLE)
    written = _read_table(parser, Path(path), table, command) if path else {}
    values, missing = {}, []
    for argument in command.arguments:
        variable = argument.variable(table)
        try:
            if argument.name in given:
                values[argument.name] = argument.from_line(given[argument.name])
            elif not argument.field.option.positional and variable in environment:
                origin = variable
                values[argument.name] = argument.from_text(environment[variable])
            elif argument.flag in written:
                origin = f"{path}: {argument.flag}"
                values[argument.name] = argument.from_toml(written[argument.flag])
            elif argument.value is not REQUIRED:
                values[argument.name] = argument.value
            else:
                missing.append(f"--{argument.flag}")
        except ValueError as error:
            parser.error(f"{origin}: {message_of(error)}")
    if missing:
        parser.error(f"the following arguments are required: {', '.join(missing)}")
    return command, values


def _read_table(parser: Parser, path: Path, table: str, command: Command) -> dict[str, Any]:
    """Return the keys of `[table]`, with dashes, each of which is an option of the command."""
    try:
        content = tomllib.loads(path.expanduser().read_text(encoding="utf-8"))
    except OSError as error:
        parser.error(f"cannot read {path}: {error.strerror}")
    except ValueError as error:
        parser.error(f"{path} is not TOML: {error}")
    keys = content.get(table, {})
    if not isinstance(keys, dict):
        parser.error(f"{path}: {table} is not a table")
    known = [argument.flag for argument in command.arguments if not argument.field.option.positional]
    written = {key.replace("_", "-"): value for key, value in keys.items()}
    for key in written:
        if key not in known:
            parser.error(f"{path}: [{table}] has no option {key}{did_you_mean(key, known)}")
    return written


def read_stdin(field: str) -> str:
    """Return all of standard input; raises `ConfigError` about `field`, the option that names it."""
    try:
        return sys.stdin.buffer.read().decode()
    except UnicodeDecodeError as error:
        raise ConfigError("cannot read standard input: it is not UTF-8", field=field) from error


def split_pair(text: str, form: str, field: str) -> tuple[str, str]:
    """Return both sides of the `=` in an option of the given form; raises `ConfigError`."""
    name, _, value = text.partition("=")
    if not (name and value):
        raise ConfigError(f"{text!r} is not {form}", field=field)
    return name, value


def message_of(error: ValueError) -> str:
    """Return an error's message without its field, since the option is named before it."""
    return error.message if isinstance(error, OutriderError) else str(error)


def shown_default(value: Any) -> list[str]:
    """Return the note on a default; none for one that sets nothing, which the help text explains."""
    if value is None or value is False or value in ("", ()):
        return []
    if isinstance(value, Enum):
        value = value.name.lower()
    elif isinstance(value, tuple):
        value = ",".join(f"{entry:g}" if isinstance(entry, float) else str(entry) for entry in value)
    elif isinstance(value, float):
        value = f"{value:g}"
    return [f"default: {value}"]
