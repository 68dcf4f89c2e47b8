"""Finding of one check, and what to do about each error of the tree."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import Enum

from outrider.proto.errors import (
    ConfigError,
    DataLoss,
    DeadlineExceeded,
    LeaseExpired,
    ModelRefused,
    NotFound,
    OutriderError,
    PermissionDenied,
    ResourceExhausted,
    TokenizerMismatch,
    Unauthenticated,
    Unavailable,
    UnsupportedProtocol,
)

Metric = float | str | bool

LOG = "the logs say more: `outrider --log-level info`, on both sides"
# The first that fits counts, so leaves of the tree stand before what they belong to.
_REMEDIES: tuple[tuple[type[OutriderError], str], ...] = (
    (UnsupportedProtocol, "bring both sides to one release: `pip install --upgrade outrider` on the older one"),
    (TokenizerMismatch, "leave out --tokenizer and give `--drafter auto`, or the files of the target's own tokenizer"),
    (ModelRefused, "export the drafter again with this release: `outrider export`, or give --drafter ngram"),
    (LeaseExpired, "set both clocks by NTP (`timedatectl`); leases last `outrider coordinator --lease-seconds` long"),
    (PermissionDenied, "use another key with --api-key-file, or have this one allowed more at the coordinator"),
    (Unauthenticated, "give --coordinator, which grants the leases, and --api-key-file if it wants a key; "
     "--lease-secret-file must be the same for `outrider coordinator` and `outrider verifier`"),
    (NotFound, "`outrider status --coordinator HOST:PORT` lists what there is; name that with --model or --drafter"),
    (ResourceExhausted, "try again later, start another verifier (`outrider verifier`), or raise its --max-sessions"),
    (DataLoss, "the files are damaged: fetch or `outrider export` them again, or delete the folder of --cache"),
    (Unavailable, "start a verifier (`outrider verifier`), or see `outrider status --coordinator HOST:PORT`"),
    (DeadlineExceeded, "`outrider status --coordinator HOST:PORT` shows whether the verifier is busy or down"),
    (ConfigError, "mend that option; `outrider doctor --help` lists them"),
)  # fmt: skip


class Outcome(Enum):
    """How a check ended."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line for people, and metrics for programs.

    Attributes:
        outcome: how the check ended.
        message: what was found, in a sentence, or why the check was skipped.
        remedy: what to do about it, naming an option or a command; warnings and failures have one.
        metrics: values by name, with the unit in the name.
    """

    outcome: Outcome
    message: str
    remedy: str = ""
    metrics: Mapping[str, Metric] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.outcome in (Outcome.WARNING, Outcome.FAILED) and not self.remedy:
            raise ValueError(f"there is no remedy for {self.message!r}")


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
    found = next((remedy for kind, remedy in _REMEDIES if isinstance(error, kind)), LOG)
    return f"{found} (retry in {error.retry_after_s:g} s)" if error.retry_after_s else found
