"""What the checks of one visit know so far: each adds what later ones need."""

from __future__ import annotations

import time
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.edge.client import Client
from outrider.edge.config import EdgeConfig
from outrider.edge.doctor.endpoint import Endpoint
from outrider.proto import codec
from outrider.proto.session import RetryRules
from outrider.proto.types import Lease, Opened

PATIENT_S = 5.0  # with whatever does not answer, or is full


@dataclass(slots=True)
class Visit:
    """Begun with a config; `close` gives back what the checks have opened.

    Attributes:
        config: of the edge, with the patience of a doctor.
        coordinator: None without one.
        verifier: None before a lease has named it.
        lease: granted by the coordinator, with the times around the call: Unix s before and after.
        tokenizer: the file that was found.
        opened: the verifier's answer to a session.
        client: with the drafter of the config, prepared.
    """

    config: EdgeConfig
    coordinator: Endpoint | None
    verifier: Endpoint | None
    lease: Lease | None = None
    leased_between: tuple[float, float] = (0.0, 0.0)
    tokenizer: Path | None = None
    opened: Opened | None = None
    client: Client | None = None
    began_wall_s: float = field(default_factory=time.time)
    began_s: float = field(default_factory=time.monotonic)

    @classmethod
    def begin(cls, config: EdgeConfig) -> Visit:
        """What the config alone tells."""
        patient = replace(config, retry=RetryRules(give_up_s=PATIENT_S), open_timeout_s=PATIENT_S)
        security = config.security
        tls_name = security.tls.server_name if security.tls is not None else None
        if config.coordinator:
            at = Endpoint("coordinator", config.coordinator, "--coordinator", codec.CONTROL_SERVICE, security, tls_name)
            return cls(patient, at, None)
        at = Endpoint("verifier", config.verifier, "--verifier", codec.DECODING_SERVICE, security, tls_name)
        return cls(patient, None, at)

    async def close(self) -> None:
        """End the client, if there is one."""
        if self.client is not None:
            await self.client.close()
