"""The protocol of a fleet of verifiers, and the simplest fleet: verifiers at fixed addresses."""

from __future__ import annotations

import asyncio
import functools
import logging
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol, Self, get_type_hints

import grpc
import grpc.aio
from grpc_health.v1 import health_pb2

from outrider.coordinator.config import StaticVerifier
from outrider.proto.channel import ENGINE_SERVICE, HEALTH_METHOD
from outrider.proto.errors import InvalidArgument, NotFound
from outrider.proto.plumbing.tls import ClientCredentials, ClientTls, explain, open_channel
from outrider.proto.tokenizer import tokenizer_hash
from outrider.proto.types import TrainerStatus, VerifierStatus

logger = logging.getLogger(__name__)


class VerifierState(StrEnum):
    """Whether a verifier takes sessions."""

    READY = "ready"
    SICK = "sick"
    DRAINING = "draining"
    DOWN = "down"


@dataclass(frozen=True, slots=True)
class VerifierInfo(VerifierStatus):
    """The state of one verifier at one moment; the model is empty until it answers for the first time.

    Attributes:
        tokenizer_sha256: identity of the target's tokenizer.
        tls: whether the verifier speaks TLS.
        tls_name: name in its certificate; empty: the host of `address`.
        incarnation: name of this start of its process; empty: unknown.
        fenced: reports of former starts that were refused.
    """

    state: VerifierState
    tokenizer_sha256: str = field(kw_only=True)
    tls: bool = False
    tls_name: str = ""
    incarnation: str = ""
    fenced: int = 0

    @classmethod
    def from_report(cls, report: Mapping[str, Any]) -> Self:
        """Read a verifier's own report, ignoring unknown keys.

        Raises:
            InvalidArgument: a field is missing or cannot be read.
        """
        try:
            return cls(**known_fields(cls, report))
        except (ValueError, TypeError) as error:
            raise InvalidArgument(f"cannot be read: {error!r}", field="verifier.info") from error

    def down(self) -> VerifierInfo:
        """Return this verifier in the state that it has while it does not answer."""
        return replace(self, state=VerifierState.DOWN, sessions=0, kv_pages_free=0)

    def status(self) -> VerifierStatus:
        """Return the view of operators and edges, which hides the address of a verifier that is down."""
        return replace(self, address="") if self.state is VerifierState.DOWN else self


def known_fields(kind: type, report: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a report says of the fields of a dataclass; raises `ValueError` or `TypeError`."""
    kinds = _kinds(kind)
    return {name: kinds[name](value) for name, value in report.items() if name in kinds}


@functools.cache
def _kinds(kind: type) -> dict[str, Any]:
    return get_type_hints(kind)


class Cluster(Protocol):
    """A fleet of verifiers; every method may raise `Unavailable` if the fleet itself does not answer."""

    @property
    def trainers(self) -> tuple[TrainerStatus, ...]:
        """State of all trainers at the last refresh, sorted by model."""

    async def refresh(self) -> tuple[VerifierInfo, ...]:
        """Return the present state of all verifiers, sorted by name; those that do not answer are `down`."""

    async def drain(self, name: str) -> int:
        """Ask the sessions of verifier `name` to move, admit no more, and return their number.

        Raises:
            NotFound: there is no such verifier.
        """

    async def tokenizer_json(self, name: str) -> str:
        """Return the text of `tokenizer.json` of the target at verifier `name`; raises `NotFound`."""

    async def chat_template_json(self, name: str) -> str:
        """Return the chat template of that target, a JSON object; empty: it has none. Raises `NotFound`."""

    async def allow_own_versions(self, owners: frozenset[bytes]) -> None:
        """Let trainers learn for the edges of these API keys alone, named by their salts, and forget all others."""

    async def retire_versions(self, versions: frozenset[tuple[str, str]]) -> None:
        """Let trainers delete these versions: owner, or drafter where there is none, and version."""

    async def close(self) -> None:
        """Close connections; the verifiers go on."""


class StaticCluster:
    """Verifiers at fixed addresses, probed by the standard gRPC health service.

    Sessions and step time, which the health service does not report, stay 0; granted leases spread the load. There are
    no trainers, which are Ray actors.
    """

    trainers: tuple[TrainerStatus, ...] = ()

    def __init__(
        self,
        verifiers: tuple[StaticVerifier, ...],
        *,
        tls: ClientTls | None = None,
        probe_timeout_s: float = 1.0,
    ) -> None:
        self._credentials = ClientCredentials(tls) if tls is not None else None
        self._verifiers = {verifier.name: verifier for verifier in verifiers}
        self._probe_timeout_s = probe_timeout_s
        self._channels: dict[str, grpc.aio.Channel] = {}
        self._draining: set[str] = set()
        self._infos = {
            v.name: VerifierInfo(
                name=v.name,
                address=v.address,
                model=v.model,
                tokenizer_sha256=tokenizer_hash(v.tokenizer_json),
                state=VerifierState.DOWN,
                max_sessions=v.max_sessions,
                tls=v.tls,
                tls_name=v.tls_name,
            )
            for v in verifiers
        }
        self._seen_ready: set[str] = set()
        self._trouble: dict[str, str] = {}

    async def refresh(self) -> tuple[VerifierInfo, ...]:
        """Probe all verifiers at once, and count a restart of each one that is ready again after it was down."""
        names = sorted(self._verifiers)
        states = await asyncio.gather(*(self._probe(name) for name in names))
        for name, state in zip(names, states, strict=True):
            self._infos[name] = self._next(self._infos[name], state)
        return tuple(self._infos[name] for name in names)

    async def drain(self, name: str) -> int:
        """Give the verifier no more leases until it restarts, and return 0, since its sessions stay."""
        self._require(name)
        self._draining.add(name)
        return 0

    async def tokenizer_json(self, name: str) -> str:
        """Return the tokenizer in the verifier's settings."""
        return self._require(name).tokenizer_json

    async def chat_template_json(self, name: str) -> str:
        """Return the chat template in the verifier's settings."""
        return self._require(name).chat_template_json

    async def allow_own_versions(self, owners: frozenset[bytes]) -> None:
        """Do nothing, without trainers."""

    async def retire_versions(self, versions: frozenset[tuple[str, str]]) -> None:
        """Do nothing, without trainers."""

    async def close(self) -> None:
        """Close the probing channels."""
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    def _require(self, name: str) -> StaticVerifier:
        if name not in self._verifiers:
            raise NotFound(f"there is no verifier {name!r}; there are {sorted(self._verifiers)}", field="verifier")
        return self._verifiers[name]

    def _next(self, before: VerifierInfo, state: VerifierState) -> VerifierInfo:
        restarts = before.restarts
        if state is VerifierState.DOWN:
            return before.down()
        if before.state is VerifierState.DOWN:
            self._draining.discard(before.name)
            restarts += before.name in self._seen_ready
            self._seen_ready.add(before.name)
        if before.name in self._draining:
            state = VerifierState.DRAINING
        return replace(before, state=state, restarts=restarts)

    async def _probe(self, name: str) -> VerifierState:
        if name not in self._channels:
            # A local subchannel pool and a short backoff show a verifier that came back at the next poll.
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 1000)]
            verifier = self._verifiers[name]
            credentials = self._credentials.current() if verifier.tls and self._credentials is not None else None
            self._channels[name] = open_channel(verifier.address, options, credentials, verifier.tls_name)
        check = self._channels[name].unary_unary(
            HEALTH_METHOD,
            request_serializer=health_pb2.HealthCheckRequest.SerializeToString,
            response_deserializer=health_pb2.HealthCheckResponse.FromString,
        )
        try:
            reply = await check(health_pb2.HealthCheckRequest(), timeout=self._probe_timeout_s)
            if reply.status == health_pb2.HealthCheckResponse.SERVING:
                state = VerifierState.READY
            else:
                state = await self._why_not(check)
        except grpc.aio.AioRpcError as error:
            await self._channels.pop(name).close()  # the next probe sees certificates as they are then
            self._note_silence(name, error)
            return VerifierState.DOWN
        self._trouble.pop(name, None)
        return state

    async def _why_not(self, check: Any) -> VerifierState:
        """Return the state of a verifier that serves nobody: its engine is sick, or it drains."""
        try:
            of_engine = health_pb2.HealthCheckRequest(service=ENGINE_SERVICE)
            reply = await check(of_engine, timeout=self._probe_timeout_s)
        except grpc.aio.AioRpcError as error:
            if error.code() is not grpc.StatusCode.NOT_FOUND:
                raise
            return VerifierState.DRAINING  # something else than a verifier, before it
        sick = reply.status == health_pb2.HealthCheckResponse.NOT_SERVING
        return VerifierState.SICK if sick else VerifierState.DRAINING

    def _note_silence(self, name: str, error: grpc.aio.AioRpcError) -> None:
        """Log why a probe failed: a warning once for a wrong certificate, debug for a verifier that is away."""
        details = error.details() or ""
        trouble = explain(details) if self._verifiers[name].tls or "handshake" in details else ""
        if trouble and trouble != self._trouble.get(name):
            logger.warning("verifier %s cannot be reached: %s", name, trouble)
        else:
            logger.debug("verifier %s does not answer: %s", name, error.code().name)
        self._trouble[name] = trouble
