"""What one check found."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

Figure = float | str | bool


class Outcome(Enum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line for people, and figures for programs.

    Attributes:
        outcome: of the check.
        message: what was found, in a sentence; of a skipped check, why.
        remedy: what to do about it, naming an option or a command; warnings and failures have one.
        figures: by name, units in the name.
    """

    outcome: Outcome
    message: str
    remedy: str = ""
    figures: Mapping[str, Figure] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.outcome in (Outcome.WARNING, Outcome.FAILED) and not self.remedy:
            raise ValueError(f"nothing is said against {self.message!r}")


def ok(message: str, **figures: Figure) -> Finding:
    """All is well."""
    return Finding(Outcome.OK, message, figures=figures)


def warning(message: str, remedy: str, **figures: Figure) -> Finding:
    """It works, and could be better."""
    return Finding(Outcome.WARNING, message, remedy, figures)


def failed(message: str, remedy: str, **figures: Figure) -> Finding:
    """It does not work."""
    return Finding(Outcome.FAILED, message, remedy, figures)


def skipped(why: str) -> Finding:
    """It was not looked at."""
    return Finding(Outcome.SKIPPED, why)
