"""The coordinator's one frozen configuration, checked when built."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Self

from outrider.proto.address import is_loopback, split_address
from outrider.proto.channel import MOST_MESSAGE_BYTES
from outrider.proto.errors import ConfigError
from outrider.proto.figures_server import check_metrics_listen
from outrider.proto.lease import MIN_SECRET_BYTES
from outrider.proto.plumbing.tls import ClientTls, ServerTls

MIB = 1 << 20


def _require(holds: bool, field_name: str, message: str) -> None:
    if not holds:
        raise ConfigError(message, field=field_name)


@dataclass(frozen=True, slots=True)
class StaticVerifier:
    """A verifier at a fixed address, for fleets without Ray.

    `tokenizer_json` is the text of the target's `tokenizer.json`: without Ray there is nobody to ask for it.
    `chat_template_json` is its chat template, or the text of its `tokenizer_config.json`; empty: it has none.
    `tls`: it speaks TLS; its certificate has the name `tls_name`, empty: the host of `address`.
    """

    name: str
    address: str
    model: str
    tokenizer_json: str
    max_sessions: int = 64
    chat_template_json: str = ""
    tls: bool = False
    tls_name: str = ""

    def __post_init__(self) -> None:
        for name in ("name", "address", "model", "tokenizer_json"):
            _require(bool(getattr(self, name)), f"verifiers.{name}", "is empty")
        split_address(self.address, "verifiers.address")
        _require(self.max_sessions >= 1, "verifiers.max_sessions", "must be 1 or more")


@dataclass(frozen=True, slots=True)
class CoordinatorConfig:
    """How one coordinator runs. Raises `ConfigError` that names the option.

    Attributes:
        lease_secret: shared with every verifier, at least 16 bytes; never printed.
        listen: host:port; port 0 takes a free one.
        insecure_listen: allows a plain-text port beyond this machine. Whoever can see the network then sees lease
            tokens, API keys and, where it relays, prompts and texts.
        tls: certificate and key, and whose certificates clients must show; None: plain text.
        verifier_tls: how to speak to verifiers that speak TLS; None: they do not, or are never spoken to.
        api_keys: file of the keys that callers must have (`outrider.proto.plumbing.access`); None: none is asked for.
        remote_drain: without API keys, let other machines drain verifiers too.
        relay: pass decoding streams on to the verifiers, for edges that cannot reach them.
        relay_streams: so many at once, at most.
        lease_seconds: how long a lease lasts; a verifier sends a stream that outlives its own for a new one.
        drafters: folders of drafter packages, up to two levels deep.
        poll_s: between two looks at the verifiers and the drafter folders.
        ray_address: of the Ray cluster whose verifiers to place on (`auto`: the one on this machine); empty: no Ray.
        verifiers: fixed ones, instead of Ray.
        drain_grace_s: how long a drained verifier lets its sessions move.
        state: file in which the fleet's statistics survive a restart; None: they do not.
        max_request_bytes: largest message taken from an edge.
        max_reply_bytes: largest message sent to one; an edge takes no more than the default.
        metrics_listen: host:port of figures for Prometheus, in plain text; empty: none.
        insecure_metrics: let that be an address that is not loopback.
    """

    lease_secret: bytes
    listen: str = "127.0.0.1:50050"
    insecure_listen: bool = False
    tls: ServerTls | None = None
    verifier_tls: ClientTls | None = None
    api_keys: Path | None = None
    remote_drain: bool = False
    relay: bool = False
    relay_streams: int = 256
    lease_seconds: float = 600.0
    drafters: tuple[Path, ...] = ()
    poll_s: float = 1.0
    ray_address: str = ""
    verifiers: tuple[StaticVerifier, ...] = ()
    drain_grace_s: float = 10.0
    state: Path | None = None
    max_request_bytes: int = 1 * MIB
    max_reply_bytes: int = MOST_MESSAGE_BYTES
    metrics_listen: str = ""
    insecure_metrics: bool = False

    def __post_init__(self) -> None:
        _require(len(self.lease_secret) >= MIN_SECRET_BYTES, "lease_secret", f"needs {MIN_SECRET_BYTES} bytes or more")
        for name in ("lease_seconds", "poll_s"):
            value = getattr(self, name)
            _require(math.isfinite(value) and value > 0, name, "must be a finite number of seconds above 0")
        _require(math.isfinite(self.drain_grace_s) and self.drain_grace_s >= 0, "drain_grace_s", "must be 0 or more")
        _require(self.max_request_bytes >= 64 << 10, "max_request_bytes", f"must be {64 << 10} or more")
        # One chunk of a drafter file is 256 KiB; a smaller limit would make every download fail late.
        _require(self.max_reply_bytes >= 1 * MIB, "max_reply_bytes", f"must be {MIB} or more")
        _require(not (self.ray_address and self.verifiers), "verifiers", "cannot stand beside ray_address")
        check_metrics_listen(self.metrics_listen, insecure=self.insecure_metrics)
        names = [verifier.name for verifier in self.verifiers]
        _require(len(set(names)) == len(names), "verifiers.name", "stands twice")
        _require(self.relay_streams >= 1, "relay_streams", "must be 1 or more")
        _require(
            self.verifier_tls is not None or not any(verifier.tls for verifier in self.verifiers),
            "verifier_tls",
            "must be given where a fixed verifier speaks TLS; name the file of its authority",
        )
        host, _ = split_address(self.listen, "listen")
        _require(
            self.insecure_listen or self.tls is not None or is_loopback(host),
            "listen",
            f"{self.listen!r} is reachable from other machines in plain text; give a certificate "
            "(`outrider certs` makes one), set insecure_listen = true if the network is trusted, "
            "or listen on 127.0.0.1",
        )

    def __repr__(self) -> str:
        shown = (f"{f.name}={getattr(self, f.name)!r}" for f in fields(self) if f.name != "lease_secret")
        return f"CoordinatorConfig(lease_secret=<hidden>, {', '.join(shown)})"

    @classmethod
    def from_mapping(cls, mapping: Mapping[str, Any]) -> Self:
        """Build it from a parsed TOML or JSON table; an unknown or missing key is a `ConfigError`."""
        _check_keys(cls, mapping, "")
        values = dict(mapping)
        if isinstance(values["lease_secret"], str):
            values["lease_secret"] = values["lease_secret"].encode()
        if "drafters" in values:
            values["drafters"] = tuple(Path(folder) for folder in values["drafters"])
        for name in ("state", "api_keys"):
            if values.get(name) is not None:
                values[name] = Path(values[name])
        for name, kind in (("tls", ServerTls), ("verifier_tls", ClientTls)):
            if values.get(name) is not None:
                values[name] = _tls(kind, values[name], name)
        for table in values.get("verifiers", ()):
            _check_keys(StaticVerifier, table, "verifiers.")
        values["verifiers"] = tuple(StaticVerifier(**table) for table in values.get("verifiers", ()))
        try:
            return cls(**values)
        except TypeError as error:
            raise ConfigError(f"a value has the wrong type: {error}") from error


def _tls(kind: type[ServerTls] | type[ClientTls], table: Mapping[str, Any], name: str) -> ServerTls | ClientTls:
    _require(isinstance(table, Mapping), name, "must be a table of files")
    known = [f.name for f in fields(kind)]
    for key in table:
        _require(key in known, f"{name}.{key}", f"is not an option; there are {', '.join(known)}")
    try:
        values: dict[str, Any] = {key: value if key == "server_name" else Path(value) for key, value in table.items()}
        return kind(**values)
    except TypeError as error:
        raise ConfigError(f"a file is missing: {error}", field=name) from error


def _check_keys(kind: type, mapping: Mapping[str, Any], prefix: str) -> None:
    known = {f.name: f for f in fields(kind)}
    for key in mapping:
        _require(key in known, f"{prefix}{key}", f"is not an option; there are {', '.join(sorted(known))}")
    needed = ("lease_secret",) if kind is CoordinatorConfig else ("name", "address", "model", "tokenizer_json")
    for key in needed:
        _require(key in mapping, f"{prefix}{key}", "is missing")
