"""What an edge is told when it starts; checked here, fixed afterwards."""

from __future__ import annotations

import functools
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path

from outrider.edge.drafters.cache import DEFAULT_ROOT
from outrider.edge.policies.length import rule_by_name
from outrider.edge.policies.selection import selector_named
from outrider.edge.security import Security
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.tls import ClientTls
from outrider.proto.policy import (
    FixedCodes,
    FixedWindow,
    PricedCodes,
    SteeringPolicy,
    SurvivalWindow,
    WindowPolicy,
)
from outrider.proto.session import RetryRules
from outrider.proto.tracing import check_tracing
from outrider.proto.types import Patience

STEERING = ("auto", "on", "off")


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeConfig:
    """Frozen and validated.

    Attributes:
        coordinator: host:port to ask for leases; or
        verifier: host:port to decode on without a coordinator, and then
        tokenizer: the file `tokenizer.json` of the target, unless the drafter's package carries it.
        chat_template: the target's, as a `.jinja` file or its `tokenizer_config.json`; None: the coordinator's.
        model: the target's id; empty: whatever the coordinator has.
        drafter: a name, a package folder, `ngram`, `none`, or `auto`: the first that fits, else `ngram`. Several with
            commas between them, or `all`: whatever fits, `ngram` included; then one is selected where a chain begins.
        selector: by which, one of `outrider.edge.policies.selection.SELECTORS`.
        drafter_memory_mb: that several drafters may take together, beside their sessions' caches; they are loaded on
            demand, and those that were wanted least recently give way. One megabyte is 10^6 bytes.
        window: unverified tokens in flight at most, or a length rule by name, as `rule_by_name` takes it; None: from
            what is measured.
        battery: share that is left, 0 to 1, for rules that price energy; None: as this machine says, 1 on mains.
        threads: of ONNX Runtime.
        cache: folder of downloaded drafters and tokenizers.
        patience: wish to the verifier; None: it decides.
        max_drafts: judged in one step at most; 0: the verifier's limit.
        logprobs: ask for the log probability of every token (4 bytes each on the downlink).
        send_q: send the drafter's probability of each token (2 bytes), which earns rewards in the commits.
        steering: of a steered drafter by codes in the commits: `auto`: as many and as precise as pay on the downlink,
            `on`: one in every commit, `off`: none.
        open_timeout_s: to get a lease, and for a verifier to answer.
        retry: how long lost streams are reopened.
        tls_ca: file of the authorities to trust, or `public` for those that gRPC brings; None: plain text.
        tls_cert: file of the edge's own certificate, for servers that ask for one, with
        tls_key: the file of its private key.
        tls_server_name: that the coordinator's certificate must have (or that of `verifier`); empty: the host.
        edge: under which reports of sessions go, such as a host's name; empty: a random one of this process.
        api_key: secret for the coordinator; empty: none. Never printed.
        plaintext: allow key, prompts and texts to cross a network unencrypted.
        trace_endpoint: of an OpenTelemetry collector (OTLP over gRPC), as http://HOST:PORT or https:; empty: no spans.
        trace_ratio: share of the sessions that are traced, 0 to 1.
    """

    coordinator: str = ""
    verifier: str = ""
    tokenizer: Path | None = None
    chat_template: Path | None = None
    model: str = ""
    drafter: str = "auto"
    selector: str = "leader"
    drafter_memory_mb: float = 256.0
    window: int | str | None = None
    battery: float | None = None
    threads: int = 1
    cache: Path = DEFAULT_ROOT
    patience: Patience | None = None
    max_drafts: int = 0
    logprobs: bool = True
    send_q: bool = False
    steering: str = "auto"
    open_timeout_s: float = 30.0
    retry: RetryRules = field(default_factory=RetryRules)
    tls_ca: Path | None = None
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_server_name: str = ""
    edge: str = ""
    api_key: str = field(default="", repr=False)
    plaintext: bool = False
    trace_endpoint: str = ""
    trace_ratio: float = 1.0

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
        if len(self.drafters) > 1:
            check_drafters(self.drafters)
        selector_named(self.selector)
        if not self.drafter_memory_mb > 0:
            raise ConfigError("must be above 0 megabytes", field="drafter_memory_mb")
        if isinstance(self.window, str):
            rule_by_name(self.window)
        elif self.window is not None and self.window < 1:
            raise ConfigError("must be 1 or more; use --drafter none for no drafting", field="window")
        if self.battery is not None and not 0 <= self.battery <= 1:
            raise ConfigError("must be a share, 0 to 1", field="battery")
        if self.threads < 1:
            raise ConfigError("must be 1 or more", field="threads")
        if self.steering not in STEERING:
            raise ConfigError(f"{self.steering!r} is none of {', '.join(STEERING)}", field="steering")
        if not re.fullmatch(r"[\w.-]{0,64}", self.edge, re.ASCII):
            raise ConfigError("must be at most 64 of A-Z a-z 0-9 . - _", field="edge")
        if self.open_timeout_s <= 0:
            raise ConfigError("must be above 0 seconds", field="open_timeout_s")
        check_tracing(self.trace_endpoint, self.trace_ratio)
        if self.coordinator:
            self.security.check_coordinator(self.coordinator)

    @property
    def drafters(self) -> tuple[str, ...]:
        """The names in `drafter`."""
        return tuple(name.strip() for name in self.drafter.split(","))

    @property
    def security(self) -> Security:
        """TLS and the API key; raises `ConfigError` where they do not fit together."""
        tls = ClientTls.from_options(self.tls_ca, self.tls_cert, self.tls_key, self.tls_server_name)
        return Security(tls, self.api_key, self.plaintext)

    @property
    def window_policy(self) -> WindowPolicy:
        """How far ahead to draft; a new one each time, since some learn from their text."""
        if isinstance(self.window, str):
            return rule_by_name(self.window)
        return SurvivalWindow() if self.window is None else FixedWindow(self.window)

    def steering_policy(self, rank: int, gain: tuple[tuple[int, float], ...]) -> SteeringPolicy | None:
        """Which codes of `rank` numbers to ask for, where the drafter has that `gain` by their age; None: none ever."""
        match self.steering:
            case "off":
                return None
            case "on":
                return FixedCodes()
            case _:
                return PricedCodes(rank, gain)


def check_drafters(names: tuple[str, ...]) -> None:
    """Refuse a list of drafters that says nothing, or the same twice; ConfigError."""
    if "" in names:
        raise ConfigError("has an empty name between commas", field="drafter")
    alone = next((name for name in names if name in ("auto", "all", "none")), None)
    if alone is not None:
        raise ConfigError(f"{alone!r} stands alone; leave it out, or leave all others out", field="drafter")
    twice = next((name for name in names if names.count(name) > 1), None)
    if twice is not None:
        raise ConfigError(f"names {twice!r} twice; give each drafter once", field="drafter")


@functools.cache
def edge_of_this_process() -> str:
    """A random name, the same as long as this process lives: operators can tell edges apart, and not who they are."""
    return secrets.token_hex(4)
