"""Findings of checks, and what to do about each error of the tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from outrider.proto import errors
from outrider.proto.errors import ConfigError, OutriderError

Metric = float | str | bool

LOG = "the logs say more: `outrider --log-level info`, on both sides"
_REMEDIES = {
    errors.UnsupportedProtocol: "bring both sides to one release, which `outrider --version` shows on each",
    errors.TokenizerMismatch: (
        "leave out --tokenizer and give `--drafter auto`, or the files of the target's own tokenizer"
    ),
    errors.ModelRefused: "export the drafter again with this release: `outrider export`, or give --drafter ngram",
    errors.LeaseExpired: (
        "set both clocks by NTP (`timedatectl`); leases last `outrider coordinator --lease-seconds` long"
    ),
    errors.PermissionDenied: "use another key with --api-key-file, or have this one allowed more at the coordinator",
    errors.Unauthenticated: (
        "give --coordinator, which grants the leases, and --api-key-file if it wants a key; "
        "--lease-secret-file must be the same for `outrider coordinator` and `outrider verifier`"
    ),
    errors.NotFound: (
        "`outrider status --coordinator HOST:PORT` lists what there is; name that with --model or --drafter"
    ),
    errors.ResourceExhausted: (
        "try again later, start another verifier (`outrider verifier`), or raise its --max-sessions"
    ),
    errors.DataLoss: "the files are damaged: fetch or `outrider export` them again, or delete the folder of --cache",
    errors.Unavailable: "start a verifier (`outrider verifier`), or see `outrider status --coordinator HOST:PORT`",
    errors.DeadlineExceeded: "`outrider status --coordinator HOST:PORT` shows whether the verifier is busy or down",
    errors.ConfigError: "mend that option; `outrider doctor --help` lists them",
}


class Outcome(Enum):
    """Outcome of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line for people, and metrics for programs.

    Attributes:
        message: sentence about what was found, or why the check was skipped.
        remedy: sentence that names an option or a command; warnings and failures have one.
        metrics: values by name, with the unit in the name.
        check: name of the check.
    """

    outcome: Outcome
    message: str
    remedy: str = ""
    metrics: Mapping[str, Metric] = field(default_factory=dict)
    check: str = ""

    def __post_init__(self) -> None:
        if self.outcome in (Outcome.WARNING, Outcome.FAILED) and not self.remedy:
            raise ValueError(f"there is no remedy for {self.message!r}")

    def record(self) -> dict[str, Any]:
        """Return it as a JSON object."""
        words = {"check": self.check, "outcome": self.outcome.value, "message": self.message, "remedy": self.remedy}
        return words | {"metrics": dict(self.metrics)}


def ok(message: str, **metrics: Metric) -> Finding:
    """Return a finding that all is well."""
    return Finding(Outcome.OK, message, metrics=metrics)


def warning(message: str, remedy: str, **metrics: Metric) -> Finding:
    """Return a finding that something works and could be better."""
    return Finding(Outcome.WARNING, message, remedy, metrics)


def failed(message: str, remedy: str, **metrics: Metric) -> Finding:
    """Return a finding that something does not work."""
    return Finding(Outcome.FAILED, message, remedy, metrics)


def skipped(reason: str) -> Finding:
    """Return a finding that nothing was looked at."""
    return Finding(Outcome.SKIPPED, reason)


def failed_by(error: OutriderError) -> Finding:
    """Return the finding that an error stands for."""
    option = f"--{error.field.rpartition('.')[2].replace('_', '-')}" if isinstance(error, ConfigError) else error.field
    message = str(error.message).strip().splitlines()[0]
    return failed(f"{option}: {message}" if option.strip("-") else message, remedy_of(error), kind=type(error).__name__)


def remedy_of(error: OutriderError) -> str:
    """Return a sentence that names an option or a command."""
    found = next((_REMEDIES[kind] for kind in type(error).__mro__ if kind in _REMEDIES), LOG)
    return f"{found} (retry in {error.retry_after_s:g} s)" if error.retry_after_s else found
