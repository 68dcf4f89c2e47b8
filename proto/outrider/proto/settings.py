"""Options, declared once on the settings that they set.

    @dataclass(frozen=True, slots=True, kw_only=True)
    class CacheSettings(Settings):
        '''How one cache is kept.'''

        kv_tokens: int = option(32768, "positions in the KV cache", check=at_least(16))
        keep_s: float = option(300.0, "how long an idle conversation is kept; 0: never", check=at_least(0))

The name, type, default, help and check of a field make `--kv-tokens N` and `--keep S`, their environment variables,
their keys in a config file and their rows in docs/cli.md (`outrider.deploy.arguments`). `CacheSettings(kv_tokens=1)` in
code raises `ConfigError` with the same message and `field`. A subclass that changes a default alone writes that alone.
"""

from __future__ import annotations

import dataclasses
import inspect
import math
import sys
import types
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import Enum
from numbers import Integral, Real
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from outrider.proto.errors import ConfigError, OutriderError, did_you_mean

REQUIRED: Any = dataclasses.MISSING
Check = Callable[[Any], object]
"""Raises `ValueError` or `OutriderError` that says what is wrong with a value; its result is ignored."""
Many = Literal["repeat", "commas", "words", "rest"]
"""Forms of a tuple: `--x A --x B`, `--x A,B`, `--x A B`, or the remainder of the line."""

UNITS = {"_s": "S", "_ms": "MS", "_mb": "MB"}
METAVARS = {int: "N", float: "X", str: "TEXT", Path: "FILE"}
_METADATA = "outrider.option"
_DECLARED: dict[type[Any], Mapping[str, Declared]] = {}


@dataclass(frozen=True, slots=True)
class Option:
    """Declaration of a field beside its name, type and default; `option` makes it."""

    help: str
    metavar: str = ""
    flag: str = ""
    group: str = ""
    choices: tuple[str, ...] = ()
    check: Check | None = None
    parse: Callable[[str], Any] | None = None
    many: Many = "repeat"
    positional: bool = False


def option(
    default: Any,
    help: str,  # noqa: A002 - as in argparse
    *,
    metavar: str = "",
    flag: str = "",
    group: str = "",
    choices: tuple[str, ...] = (),
    check: Check | None = None,
    parse: Callable[[str], Any] | None = None,
    many: Many = "repeat",
    positional: bool = False,
    shown: bool = True,
) -> Any:
    """Declare a field that an option sets.

    Args:
        default: default value; `REQUIRED`: none.
        help: effect of the option, for people; its type, unit and default are added.
        metavar: placeholder of the value in help texts; empty: from the field's type, or its unit as in `keep_s`.
        flag: option without its dashes; empty: the field's name without its unit.
        group: heading in the help text.
        choices: allowed words.
        check: check of the value, or of each entry of a tuple.
        parse: conversion from text; None: from the field's type.
        many: how a tuple is written.
        positional: whether it is an argument without a flag.
        shown: whether the settings' `repr` has it; False keeps a secret out.
    """
    made = Option(help, metavar, flag, group, choices, check, parse, many, positional)
    return dataclasses.field(default=default, metadata={_METADATA: made}, repr=shown)


@dataclass(frozen=True, slots=True)
class Declared:
    """A field that an option sets.

    Attributes:
        kind: type of the value, or of each entry of a tuple; `object` where the option parses by itself.
        optional, several: whether it may be None, and whether it is a tuple.
    """

    name: str
    kind: type[Any]
    optional: bool
    several: bool
    default: Any
    option: Option

    @property
    def flag(self) -> str:
        unit = next((unit for unit in UNITS if self.name.endswith(unit)), "")
        return self.option.flag or self.name.removesuffix(unit).replace("_", "-")

    @property
    def metavar(self) -> str:
        """Placeholder of the value in help texts; empty for switches and choices."""
        if self.option.metavar or self.choices:
            return self.option.metavar
        unit = next((word for unit, word in UNITS.items() if self.name.endswith(unit)), "")
        return unit or METAVARS.get(self.kind, "")

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed words; empty: any text."""
        return tuple(_words(self.kind)) if issubclass(self.kind, Enum) else self.option.choices

    def parse(self, text: str) -> Any:
        """Make the value, or one entry of a tuple, from `text`; raise `ValueError` that says what is wrong."""
        value = self._parsed(text)
        if not (value is None and self.optional):
            self._check_one(value)
        return value

    def check(self, value: Any) -> None:
        """Raise `ConfigError` that names the field unless `value` is allowed."""
        if value is None and self.optional:
            return
        try:
            if self.several and (isinstance(value, str) or not isinstance(value, tuple)):
                raise ValueError("must be a tuple")
            for one in value if self.several else (value,):
                self._check_one(one)
        except ValueError as error:
            message = error.message if isinstance(error, OutriderError) else str(error)
            raise ConfigError(message, field=self.name) from error

    def _parsed(self, text: str) -> Any:
        if self.option.parse is not None:
            return self.option.parse(text)
        if self.choices and text not in self.choices:
            raise ValueError(f"{text!r} is none of {', '.join(self.choices)}{did_you_mean(text, self.choices)}")
        if issubclass(self.kind, Enum):
            return _words(self.kind)[text]
        if self.kind is bool:
            return _switch(text)
        try:
            return self.kind(text)
        except ValueError:
            raise ValueError(f"{text!r} is not {_name(self.kind)}") from None

    def _check_one(self, value: Any) -> None:
        if not _fits(value, self.kind):
            raise ValueError(f"{value!r} is not {_name(self.kind)}")
        if self.kind is float and not math.isfinite(value):
            raise ValueError(f"{value} is not a finite number")
        if self.option.choices and value not in self.option.choices:
            raise ValueError(f"{value!r} is none of {', '.join(self.option.choices)}")
        if self.option.check is not None:
            self.option.check(value)


class Settings:
    """Base of frozen dataclasses whose fields `option` declares; a wrong value raises `ConfigError` with its field."""

    __slots__ = ()

    def __post_init__(self) -> None:
        for name, field in declared(type(self)).items():
            field.check(getattr(self, name))
        self.check_together()

    def check_together(self) -> None:
        """Raise `ConfigError` where fields that are right alone contradict each other."""


def declared(kind: type[Any]) -> Mapping[str, Declared]:
    """Return the fields of a dataclass that options set, by name."""
    if kind not in _DECLARED:
        _DECLARED[kind] = _declared(kind)
    return _DECLARED[kind]


def _declared(kind: type[Any]) -> Mapping[str, Declared]:
    options: dict[str, Option] = {}
    hints: dict[str, Any] = {}
    for base in reversed([base for base in kind.__mro__ if dataclasses.is_dataclass(base)]):
        options |= {f.name: f.metadata[_METADATA] for f in dataclasses.fields(base) if _METADATA in f.metadata}
        written = {name: hint for name, hint in inspect.get_annotations(base).items() if name in options}
        hints |= get_type_hints(type("Hints", (), {"__annotations__": written}), vars(sys.modules[base.__module__]))
    return {
        f.name: Declared(f.name, *_read(hints[f.name], options[f.name]), f.default, options[f.name])
        for f in dataclasses.fields(kind)
        if f.name in options
    }


def at_least(low: float) -> Check:
    """Return a check that refuses numbers below `low`."""

    def check(value: float) -> None:
        if not value >= low:
            raise ValueError(f"{value} is below {low}")

    return check


def above(low: float) -> Check:
    """Return a check that refuses `low` and numbers below it."""

    def check(value: float) -> None:
        if not value > low:
            raise ValueError(f"{value} is not above {low}")

    return check


def between(low: float, high: float) -> Check:
    """Return a check that refuses numbers outside of `low` to `high`."""

    def check(value: float) -> None:
        if not low <= value <= high:
            raise ValueError(f"{value} is not in {low}..{high}")

    return check


def no_empty_text(value: str) -> None:
    """Refuse an empty text."""
    if not value:
        raise ValueError("is empty")


_NAMES = {int: "a whole number", float: "a number", str: "text", bool: "true or false", Path: "a path"}
_SWITCHES = {"true": True, "yes": True, "on": True, "1": True, "false": False, "no": False, "off": False, "0": False}


def _name(kind: type[Any]) -> str:
    return _NAMES.get(kind, f"a {kind.__name__}")


def _switch(text: str) -> bool:
    if text.lower() not in _SWITCHES:
        raise ValueError(f"{text!r} is not {_NAMES[bool]}")
    return _SWITCHES[text.lower()]


def _words(kind: type[Enum]) -> dict[str, Enum]:
    return {member.name.lower(): member for member in kind}


def _fits(value: Any, kind: type) -> bool:
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool)
    return isinstance(value, kind)


def _read(hint: Any, option: Option) -> tuple[type[Any], bool, bool]:
    """Return the type that `hint` names, whether None is allowed, and whether it is the type of a tuple's entries."""
    members = get_args(hint) if get_origin(hint) in (Union, types.UnionType) else (hint,)
    kinds = [member for member in members if member is not types.NoneType]
    several = len(kinds) == 1 and get_origin(kinds[0]) is tuple
    kind = get_args(kinds[0])[0] if several else kinds[0]
    return object if option.parse is not None or len(kinds) > 1 else kind, len(kinds) < len(members), several
