"""The protocol of a fleet of verifiers, and the simplest fleet: verifiers at fixed addresses."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import json
import logging
import time
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from enum import StrEnum
from typing import Any, Protocol, Self, get_type_hints

import grpc
import grpc.aio

from outrider.coordinator.coordinator_config import StaticVerifier
from outrider.proto.channel import LEASE_METADATA, REPORT_METHOD
from outrider.proto.cluster_status import TrainerStatus, VerifierStatus
from outrider.proto.errors import InvalidArgument, NotFound
from outrider.proto.lease import sign_coordinator, text_name
from outrider.proto.plumbing.tls import ClientCredentials, ClientTls, explain, open_channel
from outrider.proto.tokenizer import tokenizer_hash

logger = logging.getLogger(__name__)

# What the settings say of a verifier at a fixed address, whatever it says itself, which may be behind another address.
CONFIGURED = ("name", "address", "model", "tokenizer_sha256", "tls", "tls_name")
SendAway = Mapping[str, frozenset[str]]  # texts, each by `text_name`, by the name of their verifier


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
        fenced: reports of earlier starts that were refused.
        admitted: epochs of the sessions that it has admitted lately, by `text_name`.
        texts_of_keys: seconds that each has gone on for, by key and session.
    """

    state: VerifierState
    tokenizer_sha256: str = field(kw_only=True)
    tls: bool = False
    tls_name: str = ""
    incarnation: str = ""
    fenced: int = 0
    admitted: dict[str, int] = field(default_factory=dict)
    texts_of_keys: dict[str, dict[str, float]] = field(default_factory=dict)

    @classmethod
    def from_report(cls, report: Mapping[str, Any]) -> Self:
        """Read a verifier's own report, ignoring unknown keys; raises `InvalidArgument`."""
        try:
            return cls(**known_fields(cls, report))
        except (ValueError, TypeError, AttributeError) as error:
            raise InvalidArgument(f"cannot be read: {error!r}", field="verifier.info") from error

    def admitted_epoch(self, key: str, session: str) -> int:
        """Return the epoch of a session that it has admitted lately; -1: it has not."""
        return self.admitted.get(text_name(key, session), -1)

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
        """Ask the sessions of verifier `name` to move, admit no more, and return their number; raises `NotFound`."""

    async def send_away(self, sessions: SendAway) -> None:
        """Have verifiers, by name, end these texts; whether they return is a matter of leases."""

    async def tokenizer_json(self, name: str) -> str:
        """Return the text of `tokenizer.json` of the target at verifier `name`; raises `NotFound`."""

    async def chat_template_json(self, name: str) -> str:
        """Return the chat template of that target, a JSON object; empty: it has none. Raises `NotFound`."""

    async def allow_learning(self, keys: frozenset[bytes]) -> None:
        """Let trainers drop the texts of API keys, named by their salts, that were among these earlier and are not."""

    async def retire_versions(self, versions: frozenset[tuple[str, str]]) -> None:
        """Let trainers delete these versions, each by its drafter's name and itself."""

    async def close(self) -> None:
        """Close connections; the verifiers go on."""


class StaticCluster:
    """Verifiers at fixed addresses, which report to whoever has the lease secret.

    There are no trainers, which are Ray actors.
    """

    trainers: tuple[TrainerStatus, ...] = ()

    def __init__(
        self,
        verifiers: tuple[StaticVerifier, ...],
        *,
        secret: bytes,
        tls: ClientTls | None = None,
        probe_timeout_s: float = 1.0,
    ) -> None:
        self._secret = secret
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
        infos = await asyncio.gather(*(self._probe(name) for name in names))
        for name, info in zip(names, infos, strict=True):
            self._infos[name] = self._next(self._infos[name], info)
        return tuple(self._infos[name] for name in names)

    async def drain(self, name: str) -> int:
        """Give the verifier no more leases until it restarts, and return 0, since its sessions stay."""
        self._require(name)
        self._draining.add(name)
        return 0

    async def send_away(self, sessions: SendAway) -> None:
        """Tell the verifiers, and ignore who does not answer, since the next poll shows what goes on."""
        for name, those in sessions.items():
            with contextlib.suppress(grpc.aio.AioRpcError):
                await self._ask(name, {"send_away": sorted(those)})

    async def tokenizer_json(self, name: str) -> str:
        return self._require(name).tokenizer_json

    async def chat_template_json(self, name: str) -> str:
        return self._require(name).chat_template_json

    async def allow_learning(self, keys: frozenset[bytes]) -> None:
        """Do nothing, without trainers."""

    async def retire_versions(self, versions: frozenset[tuple[str, str]]) -> None:
        """Do nothing, without trainers."""

    async def close(self) -> None:
        channels, self._channels = self._channels, {}
        for channel in channels.values():
            await channel.close()

    def _require(self, name: str) -> StaticVerifier:
        if name not in self._verifiers:
            raise NotFound(f"there is no verifier {name!r}; there are {sorted(self._verifiers)}", field="verifier")
        return self._verifiers[name]

    def _next(self, before: VerifierInfo, now: VerifierInfo) -> VerifierInfo:
        restarts = before.restarts
        if now.state is VerifierState.DOWN:
            return before.down()
        if before.state is VerifierState.DOWN:
            self._draining.discard(before.name)
            restarts += before.name in self._seen_ready
            self._seen_ready.add(before.name)
        state = VerifierState.DRAINING if before.name in self._draining else now.state
        return replace(now, state=state, restarts=restarts)

    async def _probe(self, name: str) -> VerifierInfo:
        """Return what a verifier reports; `down` where nothing answers that has the lease secret and this name."""
        configured = self._infos[name]
        try:
            said = VerifierInfo.from_report(json.loads(await self._ask(name, {})))
        except grpc.aio.AioRpcError as error:
            await self._channels.pop(name).close()  # the next probe sees certificates as they are then
            self._note(name, self._why(name, error))
            return configured.down()
        except (ValueError, RecursionError, InvalidArgument) as error:
            self._note(name, f"answers with no report: {error}")
            return configured.down()
        self._note(name, "")
        return replace(said, **{field: getattr(configured, field) for field in CONFIGURED})

    async def _ask(self, name: str, request: dict[str, list[str]]) -> bytes:
        token = sign_coordinator(name, self._secret, now_s=time.time())
        method: Any = self._channel(name).unary_unary(REPORT_METHOD)
        answer: bytes = await method(
            json.dumps(request).encode(), timeout=self._probe_timeout_s, metadata=((LEASE_METADATA, token),)
        )
        return answer

    def _channel(self, name: str) -> grpc.aio.Channel:
        if name not in self._channels:
            # A local subchannel pool and a short backoff show a verifier that came back at the next poll.
            options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_reconnect_backoff_ms", 1000)]
            verifier = self._verifiers[name]
            credentials = self._credentials.current() if verifier.tls and self._credentials is not None else None
            self._channels[name] = open_channel(verifier.address, options, credentials, verifier.tls_name)
        return self._channels[name]

    def _why(self, name: str, error: grpc.aio.AioRpcError) -> str:
        """Say what keeps a verifier from answering, where that is a mistake of the settings; empty: it is away."""
        details = error.details() or ""
        if error.code() is grpc.StatusCode.UNAUTHENTICATED:
            return "has another --name or --lease-secret-file"
        if error.code() is grpc.StatusCode.UNIMPLEMENTED:
            return "is no verifier, or of another release"
        wrong = explain(details) if self._verifiers[name].tls or "handshake" in details else ""
        return f"cannot be reached: {wrong}" if wrong else ""

    def _note(self, name: str, trouble: str) -> None:
        """Warn once of each trouble with a verifier."""
        if trouble and trouble != self._trouble.get(name):
            logger.warning("verifier %s %s", name, trouble)
        self._trouble[name] = trouble
