"""Settings of one edge, and how they are checked."""

from __future__ import annotations

import functools
import re
import secrets
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from outrider.edge.link.security import Security
from outrider.proto.address import address_of_server, without_http
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.files import DEFAULT_CACHE
from outrider.proto.plumbing.tls import ClientTls
from outrider.proto.settings import Settings, above, at_least, between, option
from outrider.proto.tracing import trace_endpoint_option
from outrider.proto.types import ServiceGoal

if TYPE_CHECKING:
    from outrider.proto.policy.steering_rate import SteeringPolicy
    from outrider.proto.policy.suspicion import SilenceRules
    from outrider.proto.session import RetryRules
    from outrider.proto.types import Patience

ADDRESS = "HOST:PORT"
ADAPTIVE = "adaptive"
DRAFTING, RULES, CONNECTION, SHARING = "drafting", "rules of drafting", "connection", "sharing"


# Modules with numpy are imported where a value is checked, so that declaring an option costs nothing.
def _check_selector(name: str) -> None:
    from outrider.edge.selectors import selector_named

    selector_named(name)


def _number_or_adaptive(text: str) -> int | None:
    if text == ADAPTIVE:
        return None
    try:
        return int(text)
    except ValueError:
        raise ValueError(f"{text!r} is neither {ADAPTIVE} nor a whole number") from None


def _check_window(window: int) -> None:
    if not window >= 1:
        raise ValueError(f"{window} is below 1; use --drafter none for no drafting")


def _check_edge(name: str) -> None:
    if not re.fullmatch(r"[\w.-]{0,64}", name, re.ASCII):
        raise ValueError("must be at most 64 of A-Z a-z 0-9 . - _")


def _retry_rules() -> RetryRules:
    from outrider.proto.session import RetryRules

    return RetryRules()


def _silence_rules() -> SilenceRules:
    from outrider.proto.policy.suspicion import SilenceRules

    return SilenceRules()


@dataclass(frozen=True, slots=True, kw_only=True)
class EdgeConfig(Settings):
    """Settings of one edge: where it decodes, and its drafters.

    `patience` is a request to the verifier (None: it decides), `retry` how long lost streams are reopened,
    `silence` when a silent one is left, and `api_key` the secret for the coordinator.
    """

    coordinator: str = option(
        "", "address of the coordinator, which assigns a verifier", metavar=ADDRESS, parse=without_http
    )
    verifier: str = option(
        "", "address of a fixed verifier, without a coordinator", metavar=ADDRESS, parse=without_http
    )
    model: str = option("", "target; empty: the one that the coordinator offers", metavar="NAME")
    tokenizer: Path | None = option(
        None, "the target's tokenizer.json, for --verifier and a drafter whose package lacks it"
    )
    chat_template: Path | None = option(
        None, "the target's chat template, or tokenizer_config.json; not set: the coordinator's"
    )
    cache: Path = option(DEFAULT_CACHE, "folder for downloaded drafters and tokenizers", metavar="DIR")
    drafter: str = option(
        "auto",
        "auto (all that fit, none but the first steered), all, none, or names, package folders and ngram, with commas; "
        "from several one is selected for each chain of drafts",
        metavar="LIST",
        group=DRAFTING,
    )
    selector: str = option(
        "leader",
        "rule that selects among several drafters: leader, static, hedge or metasd-bd",
        metavar="RULE",
        group=RULES,
        check=_check_selector,
    )
    drafter_memory_mb: float = option(
        256.0,
        "memory for several drafters, in 10^6 bytes; the first that fit are loaded",
        group=DRAFTING,
        check=above(0),
    )
    window: int | None = option(
        None,
        "limit of unverified tokens; adaptive: as many as pay; not set: adaptive",
        metavar="N|adaptive",
        group=RULES,
        parse=_number_or_adaptive,
        check=_check_window,
    )
    battery: float | None = option(
        None,
        "remaining charge, 0 to 1; the less, the fewer likely misses are drafted; not set: this machine's, 1 on mains",
        check=between(0, 1),
    )
    draft_from: tuple[Path, ...] = option(
        (),
        "file, or folder of files, that the text may repeat: drafts are copied from it; read again when it changes",
        metavar="PATH",
        group=DRAFTING,
    )
    draft_answers: Path | None = option(
        None,
        "keep answers in this folder, as tokens that only this user can read, and copy drafts from them; not set: none",
        metavar="DIR",
        group=DRAFTING,
    )
    threads: int = option(1, "threads of ONNX Runtime", flag="drafter-threads", group=DRAFTING, check=at_least(1))
    steering: str = option(
        "auto",
        "steer the drafter by the target's states: as often as it pays, with every commit, or never",
        flag="steer",
        group=DRAFTING,
        choices=("auto", "on", "off"),
    )
    patience: Patience | None = None
    drafts_here: int | None = option(
        None,
        "drafts that the verifier's own drafter makes before every step, and none during one; 0: none at all; not set: "
        "the verifier decides",
        metavar="N",
        group=DRAFTING,
        check=at_least(0),
    )
    max_drafts: int = option(0, "limit of drafts verified in one step; 0: the verifier's", check=at_least(0))
    chains: bool = option(
        False,
        "have steps verify chains of drafts alone, without likely misses beside them, which take 6 bytes each of "
        "the uplink",
        group=RULES,
    )
    service: ServiceGoal | None = option(
        None,
        'when tokens should come: interactive, batch, or figures, \'{"gap_ms": 75, "first_token_ms": 500}\'; a '
        "request may ask for another; not set: that of the API key at the coordinator, if it has one",
        metavar="CLASS|JSON",
        parse=ServiceGoal.parse,
        check=ServiceGoal.parse,
    )
    share_texts: bool = option(
        False,
        "let verifiers keep prompts and texts in memory for a day, to train drafters for everybody; where they and "
        "the API key say so too",
        group=SHARING,
    )
    logprobs: bool = option(True, "ask for the log probability of every token, 4 bytes each on the downlink")
    send_q: bool = option(False, "send the drafter's probability of each token, 2 bytes, to earn rewards in commits")
    open_timeout_s: float = option(30.0, "time limit of a lease and of a verifier's answer", check=above(0))
    retry: RetryRules = field(default_factory=_retry_rules)
    silence: SilenceRules = field(default_factory=_silence_rules)
    tls_ca: Path | None = option(
        None, "certificate of the servers' authority; turns on TLS; public: the public ones", group=CONNECTION
    )
    tls_cert: Path | None = option(None, "client certificate, for servers that ask for one", group=CONNECTION)
    tls_key: Path | None = option(None, "private key of the client certificate", group=CONNECTION)
    tls_server_name: str = option(
        "", "name in the server's certificate; empty: the host", metavar="NAME", group=CONNECTION
    )
    api_key: str = field(default="", repr=False)
    plaintext: bool = option(False, "allow API key and text to cross a network unencrypted", group=CONNECTION)
    quiet_wire: bool = option(
        False,
        "send messages of one size at times of a clock, so that an observer of encrypted traffic learns little of the "
        "text (docs/operations.md)",
        group=CONNECTION,
    )
    edge: str = option("", "name in reports of sessions; empty: a random one", check=_check_edge)
    trace_endpoint: str = trace_endpoint_option()
    trace_ratio: float = option(1.0, "share of sessions to trace", check=between(0, 1))

    def check_together(self) -> None:
        """Raise `ConfigError` for settings that contradict each other."""
        if bool(self.coordinator) == bool(self.verifier):
            raise ConfigError("give either a coordinator or a verifier, as host:port", field="coordinator")
        if self.service is not None:
            object.__setattr__(self, "service", ServiceGoal.parse(self.service))  # code may name it, as requests do
        for name in ("coordinator", "verifier"):
            address = address_of_server(getattr(self, name), name, has_tls=self.tls_ca is not None)
            object.__setattr__(self, name, address)  # as it is used, however it was written
            if getattr(self, name) and ":" not in getattr(self, name):
                raise ConfigError(f"{getattr(self, name)!r} is not host:port", field=name)
        if self.verifier and not self.model:
            raise ConfigError("must be named where there is no coordinator to ask", field="model")
        if not self.drafter:
            raise ConfigError("is empty; use `none` for no drafter", field="drafter")
        if len(self.drafters) > 1:
            check_drafters(self.drafters)
        if self.coordinator:
            self.security.check_coordinator(self.coordinator)

    @property
    def drafters(self) -> tuple[str, ...]:
        return tuple(name.strip() for name in self.drafter.split(","))

    @property
    def security(self) -> Security:
        """TLS and the API key; raises `ConfigError` where they do not fit together."""
        tls = ClientTls.from_options(self.tls_ca, self.tls_cert, self.tls_key, self.tls_server_name)
        return Security(tls, self.api_key, self.plaintext)

    def steering_policy(self, rank: int, gain: tuple[tuple[int, float], ...]) -> SteeringPolicy | None:
        """Return which vectors of `rank` numbers to request, by their `gain` at each age; None: none."""
        from outrider.proto.policy.steering_rate import FixedSteering, PricedSteering

        if self.steering == "off" or self.quiet_wire:  # a vector fills more than a cell
            return None
        return FixedSteering() if self.steering == "on" else PricedSteering(rank, gain)


def check_drafters(names: tuple[str, ...]) -> None:
    """Raise `ConfigError` for an empty name, a name twice, or one among others that stands for all."""
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
    """Return a random name of this process, by which operators tell edges apart without knowing them."""
    return secrets.token_hex(4)
