"""What to do about each error of the tree, as far as the error does not say so itself."""

from __future__ import annotations

from outrider.edge.doctor.finding import Finding, failed
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


def remedy_of(error: OutriderError) -> str:
    """A sentence that names an option or a command."""
    found = next((remedy for kind, remedy in _REMEDIES if isinstance(error, kind)), LOG)
    return f"{found} (retry in {error.retry_after_s:g} s)" if error.retry_after_s else found


def failed_by(error: OutriderError) -> Finding:
    """The finding that `error` stands for."""
    option = f"--{error.field.rpartition('.')[2].replace('_', '-')}" if isinstance(error, ConfigError) else error.field
    message = str(error.message).strip().splitlines()[0]
    return failed(f"{option}: {message}" if option.strip("-") else message, remedy_of(error), kind=type(error).__name__)
