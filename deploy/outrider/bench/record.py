"""Results in JSON: pydantic dataclasses, with one clear line for a wrong field.

Every record is `@dataclass(frozen=True, slots=True, config=RECORD)` of pydantic, so results are checked before they are
written as strictly as when they are read.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, TypeVar

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError

from outrider.proto.errors import ConfigError, OutriderError

if TYPE_CHECKING:
    from _typeshed import DataclassInstance

RECORD = ConfigDict(strict=True, extra="forbid")

# Times, counts, rates and shares: finite and not negative.
Metric = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]

RecordT = TypeVar("RecordT")

_UNKNOWN = ("unexpected_keyword_argument", "extra_forbidden")
_WORDS = {
    "a valid integer": "a whole number",
    "a valid boolean": "true or false",
    "a valid array": "a list",
    "a valid": "a",
    "greater than or equal to 0": "0 or more",
}


def one_of(*names: str) -> AfterValidator:
    """Return a validator that accepts only these names."""

    def check(value: str) -> str:
        if value not in names:
            raise ValueError(f"{value!r} is none of {', '.join(names)}")
        return value

    return AfterValidator(check)


def to_json(record: DataclassInstance) -> str:
    """Return the JSON text of a record, without spaces: recordings with a number per token are long."""
    return json.dumps(asdict(record), separators=(",", ":"), allow_nan=False) + "\n"


def from_json(kind: type[RecordT], text: str, field: str, *, prefix: str = "", remedy: str = "") -> RecordT:
    """Return the record of `kind` in a JSON text.

    Args:
        kind: a pydantic dataclass, or any type that pydantic can check.
        text: the JSON.
        field: name of the whole in an error.
        prefix: put before the path of a wrong field (`costs.` gives `costs.target.step_s`).
        remedy: what to do about a wrong field, the end of the error's sentence.

    Raises:
        ConfigError: it is no JSON, or a field is missing, unknown or wrong; the path is named (`runs[3].link.rtt_ms`).
    """
    try:
        return TypeAdapter(kind).validate_json(text)
    except ValidationError as error:
        wrong = error.errors(include_url=False)[0]
        cause = wrong.get("ctx", {}).get("error")
        if isinstance(cause, OutriderError):  # a check that knows the field better
            raise ConfigError(cause.message, field=cause.field) from error
        message = _message(wrong)
        if remedy or wrong["type"] in _UNKNOWN:
            message += f"; {remedy or 'remove it, or read the file with a newer outrider'}"
        raise ConfigError(message, field=prefix + path_of(wrong["loc"]) if wrong["loc"] else field) from error


def check_file(path: Path, field: str) -> None:
    """Make the folder of `path` and check that the file can be written; its content stays. Raises `ConfigError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        was_there = path.exists()
        path.open("a", encoding="utf-8").close()
        if not was_there:
            path.unlink()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}; name another file", field=field) from error


def save(record: DataclassInstance, path: Path, field: str = "json") -> None:
    """Write the JSON file; raises `ConfigError` where the file cannot be written."""
    text = to_json(record)
    write(path, lambda: path.write_text(text, encoding="utf-8"), field)


def write(path: Path, how: Callable[[], object], field: str) -> None:
    """Make the folder of `path`, and write the file by calling `how`; raises `ConfigError`."""
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        how()
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", field=field) from error


def path_of(location: Sequence[int | str]) -> str:
    """Return `runs[3].link` of ("runs", 3, "link")."""
    path = "".join(f"[{step}]" if isinstance(step, int) else f".{step}" for step in location)
    return path.removeprefix(".")


def _message(wrong: Any) -> str:
    match wrong["type"]:
        case "missing" | "missing_argument":
            return "is missing"
        case unknown if unknown in _UNKNOWN:
            return "is unknown"
        case "value_error":
            return str(wrong["ctx"]["error"])
        case "json_invalid":
            return f"is not JSON: {wrong['ctx']['error']}"
    wanted = wrong["msg"].removeprefix("Input should be ")
    for pydantics, plain in _WORDS.items():
        wanted = wanted.replace(pydantics, plain)
    return f"must be {wanted}, not {json.dumps(wrong['input'], default=str)[:40]}"
