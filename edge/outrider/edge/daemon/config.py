"""What the daemon is told when it starts; checked here, fixed afterwards."""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path

from outrider.proto.address import is_loopback, split_address
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.tls import ServerTls


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig:
    """Frozen and validated; raises `ConfigError` that names the option.

    Attributes:
        listen: host:port; port 0 takes a free one.
        insecure_listen: allows plain text beyond loopback.
        tls: certificate and key; None: plain text.
        api_keys: file of keys of which requests must show one; None: whoever reaches the port may use it.
        max_requests: for texts, at once.
        request_timeout_s: for a whole answer.
        grace_s: that running answers have to end when the daemon is told to go.
    """

    listen: str = "127.0.0.1:8080"
    insecure_listen: bool = False
    tls: ServerTls | None = None
    api_keys: Path | None = None
    max_requests: int = 256
    request_timeout_s: float = 600.0
    grace_s: float = 10.0

    def __post_init__(self) -> None:
        split_address(self.listen, "listen")
        if not (self.insecure_listen or self.tls or is_loopback(self.host)):
            raise ConfigError(
                f"{self.listen!r} is reachable from other machines in plain text; give --tls-cert and --tls-key, "
                "or --insecure-listen if the network is trusted",
                field="listen",
            )
        if self.max_requests < 1:
            raise ConfigError("must be 1 or more", field="max_requests")
        if not (math.isfinite(self.request_timeout_s) and self.request_timeout_s > 0):
            raise ConfigError("must be a finite number of seconds above 0", field="request_timeout")
        if not (math.isfinite(self.grace_s) and self.grace_s >= 0):
            raise ConfigError("must be a finite number of seconds, 0 or more", field="grace")

    @property
    def host(self) -> str:
        """Of `listen`."""
        return split_address(self.listen, "listen")[0]

    @property
    def port(self) -> int:
        """Of `listen`."""
        return split_address(self.listen, "listen")[1]
