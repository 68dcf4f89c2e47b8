"""TLS and API key of an edge."""

from __future__ import annotations

import re
from dataclasses import dataclass, field

from outrider.proto.address import is_local_address
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.tls import ClientTls

_KEY = re.compile(r"[!-~]{1,512}")


@dataclass(frozen=True, slots=True)
class Security:
    """TLS and API key of an edge; `ConfigError` names the option at fault.

    Attributes:
        tls: certificates of TLS; None: plain text.
        api_key: secret for the coordinator; empty: none. Never printed.
        plaintext: whether key, prompts and texts may cross a network unencrypted.
    """

    tls: ClientTls | None = None
    api_key: str = field(default="", repr=False)
    plaintext: bool = False

    def __post_init__(self) -> None:
        if self.api_key and not _KEY.fullmatch(self.api_key):
            raise ConfigError("holds spaces or characters beyond ASCII; give the secret alone", field="api_key")

    @property
    def server_name(self) -> str:
        """Name that a server's certificate must have; empty: the host, or no TLS."""
        return self.tls.server_name if self.tls is not None else ""

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        return (("authorization", f"Bearer {self.api_key}"),) if self.api_key else ()

    def check_coordinator(self, address: str) -> None:
        """Raise `ConfigError` where the key would cross a network unencrypted."""
        if self.api_key and self.tls is None and not self.plaintext and not is_local_address(address, "coordinator"):
            message = f"would go to {address} in plain text; give --tls-ca, or --plaintext to accept that"
            raise ConfigError(message, field="api_key", code="OUT-106")

    def check_verifier(self, address: str, tls_name: str | None) -> None:
        """Raise `ConfigError` where a verifier that speaks TLS or not (None) is not what this edge expects."""
        if tls_name is not None and self.tls is None:
            raise ConfigError(f"must be given: the verifier at {address} speaks TLS", field="tls_ca", code="OUT-103")
        unexpected = tls_name is None and self.tls is not None and not self.plaintext
        if unexpected and not is_local_address(address, "verifier"):
            message = (
                f"the verifier at {address} would get the text unencrypted; start it with --tls-cert, "
                "or give --plaintext to accept that"
            )
            raise ConfigError(message, field="plaintext", code="OUT-106")
