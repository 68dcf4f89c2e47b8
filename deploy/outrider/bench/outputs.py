"""Where results go, looked at before the work that makes them."""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, TypeVar

from rich.console import Console, RenderableType

from outrider.proto.errors import ConfigError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

Made = TypeVar("Made", bound="DataclassInstance")


def hand_out(
    options: argparse.Namespace,
    make: Callable[[], Made],
    table: Callable[[Made], RenderableType],
    draw: Callable[[Made, Path], object],
) -> None:
    """Print what `make` gives as a table; write it to --json and draw it into --plot, where these are given.

    Raises:
        ConfigError: before anything is made, that one of them cannot be written; afterwards, that it could not.
    """
    if options.json:
        check_file(options.json, "json")
    if options.plot:
        check_pictures(options.plot, "plot")
    made = make()
    Console(width=100, highlight=False).print(table(made))
    if options.json:
        _save(made, options.json)
    if options.plot:
        draw(made, options.plot)


def _save(made: DataclassInstance, path: Path) -> None:
    try:
        path.write_text(json.dumps(asdict(made), indent=1, allow_nan=False) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", field="json") from error


def check_file(path: Path, field: str) -> None:
    """Make the folder of `path`, and see that the file can be written; what it holds stays.

    Raises:
        ConfigError: it cannot.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        was_there = path.exists()
        with path.open("a", encoding="utf-8"):
            pass
        if not was_there:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file", field=field) from error


def check_drawing(field: str) -> None:
    """See that pictures can be drawn.

    Raises:
        ConfigError: matplotlib is not installed.
    """
    try:
        import matplotlib  # noqa: F401, ICN001 - only whether it is there
    except ImportError as error:
        raise ConfigError(f"needs {error.name}; pip install 'outrider[bench]', or leave it out", field=field) from error


def check_pictures(folder: Path, field: str) -> None:
    """Make the folder, and see that pictures can be drawn into it.

    Raises:
        ConfigError: it cannot be written, or matplotlib is not installed.
    """
    check_drawing(field)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"cannot make {folder}: {error.strerror}; name another folder", field=field) from error
    check_file(folder / "speed.png", field)
