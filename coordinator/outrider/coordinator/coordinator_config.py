"""Settings of a coordinator and of verifiers at fixed addresses."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.proto.address import split_address
from outrider.proto.errors import ConfigError
from outrider.proto.lease import MIN_SECRET_BYTES
from outrider.proto.plumbing.serving import GrpcServerSettings
from outrider.proto.plumbing.tls import ClientTls
from outrider.proto.settings import REQUIRED, Settings, above, at_least, no_empty_text, option

ACCESS = "access"


@dataclass(frozen=True, slots=True)
class StaticVerifier(Settings):
    """A verifier at a fixed address, for fleets without Ray.

    `tokenizer_json` is the text of the target's `tokenizer.json`, which only Ray could ask the verifier for.
    """

    name: str = option(REQUIRED, "name that leases are bound to", check=no_empty_text)
    address: str = option(REQUIRED, "address that it listens on", metavar="HOST:PORT", check=no_empty_text)
    model: str = option(REQUIRED, "id of its target", check=no_empty_text)
    tokenizer_json: str = option(REQUIRED, "text of the target's tokenizer.json", check=no_empty_text)
    chat_template_json: str = option("", "chat template, or text of its tokenizer_config.json; empty: none")
    tls: bool = option(False, "whether it speaks TLS")
    tls_name: str = option("", "name in its certificate; empty: the host of its address")

    def check_together(self) -> None:
        """Refuse an address without a port."""
        split_address(self.address, "address")


def _long_enough(secret: bytes) -> None:
    if len(secret) < MIN_SECRET_BYTES:
        raise ValueError(f"needs {MIN_SECRET_BYTES} bytes or more")


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorConfig(GrpcServerSettings):
    """Settings of one coordinator.

    Attributes:
        verifier_tls: certificates for verifiers that speak TLS; None: none does.
        verifiers: fixed verifiers instead of a Ray cluster.
    """

    listen: str = "127.0.0.1:50050"
    lease_secret: bytes = option(REQUIRED, "shared with every verifier", check=_long_enough, shown=False)
    verifier_tls: ClientTls | None = None
    api_keys: Path | None = option(
        None, "file of the keys that callers must have (see outrider key); not set: none needed", group=ACCESS
    )
    relay: bool = option(False, "relay decoding streams for edges that cannot reach the verifiers", group=ACCESS)
    relay_streams: int = option(256, "streams relayed at once", check=at_least(1))
    lease_seconds: float = option(600.0, "how long a lease lasts", metavar="S", check=above(0))
    drafters: tuple[Path, ...] = option((), "folder of further drafter packages, up to two levels deep", metavar="DIR")
    votes_a_day: int = option(
        1,
        "texts of one edge that count a day where a new drafter is compared with the old one",
        metavar="N",
        check=at_least(1),
    )
    poll_s: float = option(1.0, "time between polls of verifiers and drafter folders", check=above(0))
    ray_address: str = option(
        "", "Ray cluster of the verifiers; auto: the one on this machine; empty: no Ray", metavar="ADDRESS"
    )
    verifiers: tuple[StaticVerifier, ...] = ()
    state: Path | None = option(
        None, "file that keeps the fleet's statistics and the states of drafters over a restart; not set: they are lost"
    )

    def check_together(self) -> None:
        """Refuse settings that contradict each other."""
        GrpcServerSettings.check_together(self)
        if self.ray_address and self.verifiers:
            raise ConfigError("cannot be given together with ray_address", field="verifiers")
        names = [verifier.name for verifier in self.verifiers]
        if len(set(names)) < len(names):
            raise ConfigError("must be unique", field="verifiers.name")
        if self.verifier_tls is None and any(verifier.tls for verifier in self.verifiers):
            raise ConfigError(
                "must be given where a fixed verifier speaks TLS; name the file of its authority", field="verifier_tls"
            )
