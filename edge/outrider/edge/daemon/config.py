"""The settings of one daemon."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.proto.address import split_address
from outrider.proto.plumbing.serving import ListeningSettings
from outrider.proto.settings import above, at_least, option


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig(ListeningSettings):
    """How one daemon serves OpenAI's HTTP API."""

    listen: str = "127.0.0.1:8080"
    api_keys: Path | None = option(None, "keys that requests must show one of; not set: whoever reaches the port may")
    max_requests: int = option(256, "requests for texts at once", check=at_least(1))
    request_timeout_s: float = option(600.0, "time for a whole answer", check=above(0))
    grace_s: float = option(10.0, "time for running answers to end on exit", check=at_least(0))

    @property
    def host(self) -> str:
        """The host in `listen`."""
        return split_address(self.listen, "listen")[0]

    @property
    def port(self) -> int:
        """The port in `listen`."""
        return split_address(self.listen, "listen")[1]
