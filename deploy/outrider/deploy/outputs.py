"""Where results go, looked at before the work that makes them."""

from __future__ import annotations

from pathlib import Path

from outrider.proto.errors import ConfigError


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
