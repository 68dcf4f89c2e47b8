"""Options declared on settings: what a declaration says, and how a wrong value is refused."""

from __future__ import annotations

from dataclasses import FrozenInstanceError, dataclass, replace
from enum import Enum
from pathlib import Path
from typing import Any

import pytest

from outrider.proto.errors import ConfigError
from outrider.proto.settings import REQUIRED, Settings, above, at_least, between, declared, option


class Goal(Enum):
    SPEED = 1
    COST = 2


def short(value: str) -> None:
    if len(value) > 3:
        raise ConfigError(f"{value!r} is too long", field="elsewhere")


@dataclass(frozen=True, slots=True, kw_only=True)
class Base(Settings):
    name: str = option(REQUIRED, "of it", check=short)
    rows: int = option(4, "rows at once", check=at_least(1))
    keep_s: float = option(2.5, "how long", check=at_least(0))
    share: float | None = option(None, "a share", check=between(0, 1))
    memory_mb: float = option(1.0, "memory", check=above(0), flag="most")
    loud: bool = option(False, "say all")
    goal: Goal = option(Goal.SPEED, "what for")
    kind: str = option("a", "which", choices=("a", "b"))
    state: Path | None = option(None, "kept there", metavar="DIR")
    sizes: tuple[int, ...] = option((), "sizes", check=at_least(1), many="commas")
    window: int | None = option(None, "N", check=at_least(1), parse=lambda text: None if text == "any" else int(text))
    inner: object = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Changed(Base):
    rows: int = 8
    extra: int = option(0, "one more")

    def check_together(self) -> None:
        if self.loud and self.extra:
            raise ConfigError("is too much", field="extra")


def test_a_declaration_says_what_the_option_is() -> None:
    fields = declared(Base)
    assert list(fields) == [name for name in Base.__slots__ if name != "inner"]
    assert {name: field.flag for name, field in fields.items() if field.flag != name} == {
        "keep_s": "keep",
        "memory_mb": "most",
    }
    assert [(fields[name].metavar, fields[name].kind) for name in ("rows", "keep_s", "memory_mb", "share")] == [
        ("N", int),
        ("S", float),
        ("MB", float),
        ("X", float),
    ]
    assert (fields["state"].metavar, fields["state"].kind, fields["state"].optional) == ("DIR", Path, True)
    assert (fields["sizes"].kind, fields["sizes"].several) == (int, True)
    assert (fields["goal"].choices, fields["kind"].choices) == (("speed", "cost"), ("a", "b"))


def test_a_subclass_that_only_changes_a_default_keeps_the_rest_of_the_declaration() -> None:
    assert list(declared(Changed)) == [*declared(Base), "extra"]
    assert (declared(Changed)["rows"].default, declared(Base)["rows"].default) == (8, 4)
    assert declared(Changed)["rows"].option is declared(Base)["rows"].option
    with pytest.raises(ConfigError, match="0 is below 1"):
        Changed(name="x", rows=0)


@pytest.mark.parametrize(
    ("field", "value", "says"),
    [
        ("name", "long name", "'long name' is too long"),
        ("name", 3, "3 is not text"),
        ("rows", 0, "0 is below 1"),
        ("rows", 1.5, "1.5 is not a whole number"),
        ("rows", True, "True is not a whole number"),
        ("rows", None, "None is not a whole number"),
        ("keep_s", -0.1, "-0.1 is below 0"),
        ("keep_s", float("nan"), "nan is not a finite number"),
        ("keep_s", float("inf"), "inf is not a finite number"),
        ("keep_s", "long", "'long' is not a number"),
        ("share", 1.1, "1.1 is not in 0..1"),
        ("memory_mb", 0, "0 is not above 0"),
        ("loud", 1, "1 is not true or false"),
        ("goal", "speed", "'speed' is not a Goal"),
        ("kind", "c", "'c' is none of a, b"),
        ("state", "here", "'here' is not a path"),
        ("sizes", 3, "must be a tuple"),
        ("sizes", "3", "must be a tuple"),
        ("sizes", (1, 0), "0 is below 1"),
    ],
)
def test_a_wrong_value_in_code_names_the_field_and_says_what_is_wrong(field: str, value: Any, says: str) -> None:
    with pytest.raises(ConfigError) as refusal:
        Base(**{"name": "x", field: value})
    assert (refusal.value.field, refusal.value.message) == (field, says)


def test_right_values_are_kept_as_they_are_and_frozen() -> None:
    made = Base(name="x", keep_s=3, share=None, sizes=(1, 2), state=Path("s"), window=3, inner={})
    assert (made.keep_s, made.sizes, made.window, made.inner) == (3, (1, 2), 3, {})
    assert replace(made, rows=2).rows == 2
    with pytest.raises(ConfigError):
        replace(made, rows=0)
    with pytest.raises(FrozenInstanceError):
        made.rows = 5  # type: ignore[misc]


def test_what_does_not_go_together_is_refused_after_each_field_is_right() -> None:
    with pytest.raises(ConfigError, match="extra: is too much"):
        Changed(name="x", loud=True, extra=1)
    with pytest.raises(ConfigError, match="rows"):
        Changed(name="x", loud=True, extra=1, rows=0)


def test_a_missing_value_is_a_type_error_as_for_every_dataclass() -> None:
    with pytest.raises(TypeError, match="name"):
        Base()  # type: ignore[call-arg,unused-ignore]


@pytest.mark.parametrize(
    ("field", "text", "value"),
    [
        ("rows", "7", 7),
        ("keep_s", "1e2", 100.0),
        ("loud", "yes", True),
        ("loud", "0", False),
        ("goal", "cost", Goal.COST),
        ("kind", "b", "b"),
        ("state", "a/b", Path("a/b")),
        ("sizes", "3", 3),
        ("window", "12", 12),
        ("window", "any", None),
    ],
)
def test_text_becomes_the_value_or_one_of_several(field: str, text: str, value: Any) -> None:
    assert declared(Base)[field].parse(text) == value


@pytest.mark.parametrize(
    ("field", "text", "says"),
    [
        ("rows", "many", "'many' is not a whole number"),
        ("rows", "0", "0 is below 1"),
        ("keep_s", "warm", "'warm' is not a number"),
        ("keep_s", "nan", "nan is not a finite number"),
        ("loud", "loud", "'loud' is not true or false"),
        ("goal", "fun", "'fun' is none of speed, cost"),
        ("kind", "c", "'c' is none of a, b"),
        ("sizes", "0", "0 is below 1"),
        ("window", "0", "0 is below 1"),
    ],
)
def test_text_that_makes_no_value_is_refused(field: str, text: str, says: str) -> None:
    with pytest.raises(ValueError) as refusal:
        declared(Base)[field].parse(text)
    assert str(refusal.value) == says
