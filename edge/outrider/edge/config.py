"""What an edge is told when it starts; checked here, fixed afterwards."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

from outrider.edge.drafters.cache import DEFAULT_ROOT
from outrider.proto.errors import ConfigError
from outrider.proto.policy import FixedWindow, SurvivalWindow, WindowPolicy
from outrider.proto.session import RetryRules
from outrider.proto.types import Patience


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeConfig:
    """Frozen and validated.

    Attributes:
        coordinator: host:port to ask for leases; or
        verifier: host:port to decode on without a coordinator, and then
        tokenizer: the file `tokenizer.json` of the target, unless the drafter's package carries it.
        model: the target's id; empty: whatever the coordinator has.
        drafter: a name, a package folder, `ngram`, `none`, or `auto`: the first that fits, else `ngram`.
        window: unverified tokens in flight at most; None: from what is measured.
        threads: of ONNX Runtime.
        cache: folder of downloaded drafters and tokenizers.
        patience: wish to the verifier; None: it decides.
        max_drafts: judged in one step at most; 0: the verifier's limit.
        logprobs: ask for the log probability of every token (4 bytes each on the downlink).
        send_q: send the drafter's probability of each token (2 bytes), which earns rewards in the commits.
        open_timeout_s: to get a lease, and for a verifier to answer.
        retry: how long lost streams are reopened.
    """

    coordinator: str = ""
    verifier: str = ""
    tokenizer: Path | None = None
    model: str = ""
    drafter: str = "auto"
    window: int | None = None
    threads: int = 1
    cache: Path = DEFAULT_ROOT
    patience: Patience | None = None
    max_drafts: int = 0
    logprobs: bool = True
    send_q: bool = False
    open_timeout_s: float = 30.0
    retry: RetryRules = field(default_factory=RetryRules)

    def __post_init__(self) -> None:
        if bool(self.coordinator) == bool(self.verifier):
            raise ConfigError("give either a coordinator or a verifier, as host:port", field="coordinator")
        for name in ("coordinator", "verifier"):
            if getattr(self, name) and ":" not in getattr(self, name):
                raise ConfigError(f"{getattr(self, name)!r} is not host:port", field=name)
        if self.verifier and not self.model:
            raise ConfigError("must be named where there is no coordinator to ask", field="model")
        if not self.drafter:
            raise ConfigError("is empty; use `none` for no drafter", field="drafter")
        if self.window is not None and self.window < 1:
            raise ConfigError("must be 1 or more; use --drafter none for no drafting", field="window")
        if self.threads < 1:
            raise ConfigError("must be 1 or more", field="threads")
        if self.open_timeout_s <= 0:
            raise ConfigError("must be above 0 seconds", field="open_timeout_s")

    @property
    def window_policy(self) -> WindowPolicy:
        """How far ahead to draft."""
        return SurvivalWindow() if self.window is None else FixedWindow(self.window)
