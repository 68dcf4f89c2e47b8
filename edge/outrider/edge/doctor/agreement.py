"""Checks of the agreement of both sides: the lease, the tokenizer, a session, their releases and their clocks."""

from __future__ import annotations

import asyncio
import json
import time
import uuid
from dataclasses import dataclass, field, replace
from pathlib import Path

from outrider.drafters import DrafterCache, find_package
from outrider.edge.client import Client
from outrider.edge.decoding import Observer
from outrider.edge.doctor.connection_check import TIMEOUT_S, Endpoint
from outrider.edge.doctor.finding import Finding, Metric, failed, failed_by, ok, skipped, warning
from outrider.edge.edge_config import EdgeConfig
from outrider.edge.link.control_client import CoordinatorClient
from outrider.edge.pool.preparation import leased_tokenizer
from outrider.proto import codec
from outrider.proto.errors import ConfigError, OutriderError, TokenizerMismatch, Unauthenticated
from outrider.proto.lease import CLOCK_SKEW_S, expiry_s
from outrider.proto.release import UNKNOWN, release
from outrider.proto.session import RetryRules
from outrider.proto.tokenizer import tokenizer_hash
from outrider.proto.types import PROTOCOL_VERSION, CloudFrame, Lease, LeaseRequest, Opened

PROMPT = "The"
NO_PACKAGE = ("auto", "all", "ngram", "retrieval", "none")
MAX_STEP_S = 0.5  # of a clock against the monotonic one during a visit


@dataclass(slots=True)
class Visit:
    """State of the checks so far: each adds what later ones need, and `close` ends what they opened.

    Attributes:
        config: the edge's config, with short timeouts.
        endpoints: servers under examination, by role; a lease adds `verifier`, which is the coordinator where that
            relays.
        leased_between: Unix seconds before and after the call for the lease.
        tokenizer: file that was found.
        opened: the verifier's answer to a session.
        client: prepared, with the drafter of the config.
        began_wall_s: Unix seconds at the beginning of the visit.
        began_s: seconds of the monotonic clock at that moment.
    """

    config: EdgeConfig
    endpoints: dict[str, Endpoint]
    lease: Lease | None = None
    leased_between: tuple[float, float] = (0.0, 0.0)
    tokenizer: Path | None = None
    opened: Opened | None = None
    client: Client | None = None
    began_wall_s: float = field(default_factory=time.time)
    began_s: float = field(default_factory=time.monotonic)

    @classmethod
    def begin(cls, config: EdgeConfig) -> Visit:
        """Return a visit with the endpoint that the config names."""
        hasty = replace(config, retry=RetryRules(abandon_after_s=TIMEOUT_S), open_timeout_s=TIMEOUT_S)
        security = config.security
        tls_name = security.server_name if security.tls is not None else None
        role, service = (
            ("coordinator", codec.CONTROL_SERVICE) if config.coordinator else ("verifier", codec.DECODING_SERVICE)
        )
        address = config.coordinator or config.verifier
        return cls(hasty, {role: Endpoint(role, address, f"--{role}", service, security, tls_name)})

    async def close(self) -> None:
        """Close the client, if there is one."""
        if self.client is not None:
            await self.client.close()


async def open_lease(visit: Visit) -> Finding:
    """Ask for a lease as any session would; it is not used and runs out by itself."""
    at = visit.endpoints["coordinator"]
    client = CoordinatorClient(at.address, TIMEOUT_S, at.security)
    began = time.time()
    try:
        granted = await client.open_lease(LeaseRequest(model=visit.config.model, session=f"doctor-{uuid.uuid4().hex}"))
    except OutriderError as error:
        return failed_by(error)
    finally:
        await client.close()
    visit.lease = granted
    visit.leased_between = (began, time.time())
    visit.endpoints["verifier"] = at
    if not granted.relayed:
        option, tls_name = "`outrider verifier --advertise`", granted.tls_name if granted.tls else None
        visit.endpoints["verifier"] = Endpoint(
            "verifier", granted.address, option, codec.DECODING_SERVICE, at.security, tls_name
        )
    way = "through the coordinator" if granted.relayed else f"at {granted.address}"
    return ok(
        f"verifier {granted.verifier} with {granted.model}, {way}, for {granted.expires_in_s:g} s",
        verifier=granted.verifier,
        model=granted.model,
        relayed=granted.relayed,
        expires_in_s=granted.expires_in_s,
    )


async def compare_tokenizers(visit: Visit) -> Finding:
    """Compare the tokenizer's hash with the lease's; without a coordinator the verifier does that."""
    try:
        path = await asyncio.to_thread(_find_tokenizer, visit)
        found = tokenizer_hash(path.read_text(encoding="utf-8"))
    except OutriderError as error:
        return failed_by(error)
    except (OSError, UnicodeDecodeError, json.JSONDecodeError, AttributeError) as error:
        return failed(f"the tokenizer cannot be read: {error}", "give --tokenizer the target's tokenizer.json")
    visit.tokenizer = path
    if visit.lease is None:
        return ok(f"{path} has the hash {found[:12]}…; the verifier compares it below", sha256=found)
    wanted = visit.lease.tokenizer_sha256
    if found != wanted:
        return failed(
            f"{path} has the hash {found[:12]}…, the target's tokenizer {wanted[:12]}…",
            "leave out --tokenizer: the coordinator has the right one",
            sha256=found,
        )
    return ok(f"the same on both sides, {found[:12]}…", sha256=found)


def _find_tokenizer(visit: Visit) -> Path:
    config, lease = visit.config, visit.lease
    if lease is not None:
        return leased_tokenizer(config, lease, DrafterCache(config.cache))
    if config.tokenizer is not None:
        return config.tokenizer.expanduser()
    named = [name for name in config.drafters if name not in NO_PACKAGE]
    if not named:
        raise ConfigError(
            "is needed where there is no coordinator: give the target's tokenizer.json, or --drafter PACKAGE",
            field="tokenizer",
        )
    return find_package(named[0]).tokenizer_path


class _OpenedRecorder(Observer):
    """Keeps the verifier's answer to an Open."""

    def __init__(self) -> None:
        self.opened: Opened | None = None

    def received(self, frame: CloudFrame, at: float) -> None:  # noqa: ARG002 - the observer's signature
        if isinstance(frame, Opened):
            self.opened = frame


async def open_session(visit: Visit) -> Finding:
    """Decode one token without drafts: this tries the lease, the model's name, the tokenizer and the room."""
    recorder = _OpenedRecorder()
    client = Client(replace(visit.config, drafter="none", drafts_here=0, tokenizer=visit.tokenizer))
    began = time.monotonic()
    try:
        await client.prepare()
        async for _ in client.generate(PROMPT, max_tokens=1, observer=recorder):
            pass
    except OutriderError as error:
        if isinstance(error, TokenizerMismatch) and visit.lease is None and visit.config.tokenizer is None:
            return failed(
                f"the tokenizer of --drafter {visit.config.drafter} is not the target's, with which it drafts by text",
                "give --tokenizer the target's tokenizer.json",
                kind=type(error).__name__,
            )
        return failed_by(error)
    finally:
        await client.close()
    seconds = time.monotonic() - began
    opened = visit.opened = recorder.opened
    assert opened is not None  # noqa: S101 - a text came, and none does before Opened
    return ok(
        f"{opened.verifier} takes {opened.context_length} positions and {opened.credit} drafts in flight; "
        f"first token after {1000 * seconds:.0f} ms",
        verifier=opened.verifier,
        context_length=opened.context_length,
        credit=opened.credit,
        max_drafts=opened.max_drafts,
        first_token_s=seconds,
    )


async def compare_releases(visit: Visit) -> Finding:
    """Compare the releases of edge, coordinator and verifier.

    They speak one protocol: otherwise there would be no lease and no session.
    """
    releases = {"edge": release()}
    if visit.lease is not None:
        releases["coordinator"] = visit.lease.release or UNKNOWN
    if visit.opened is not None:
        releases["verifier"] = visit.opened.release or UNKNOWN
    metrics: dict[str, Metric] = {"protocol": float(PROTOCOL_VERSION), **releases}
    listed = ", ".join(f"{part} {version}" for part, version in releases.items())
    words = f"protocol {PROTOCOL_VERSION} on all sides; {listed}"
    if len(set(releases.values())) > 1:
        return warning(words, "they understand each other; install the newer release on both sides", **metrics)
    return ok(words, **metrics)


async def compare_clocks(visit: Visit) -> Finding:
    """Compare this machine's clock with the coordinator's, and with its own monotonic one.

    No protocol message carries a time of day, but a lease says when it ends and how long it lasts. Texts need no clock
    of the edge. Certificates do, and a wrong one here often means a wrong one elsewhere.
    """
    step_s = (time.time() - visit.began_wall_s) - (time.monotonic() - visit.began_s)
    if abs(step_s) > MAX_STEP_S:
        return warning(
            f"this machine's clock was moved by {step_s:+.1f} s during these checks",
            "something sets it in steps: `timedatectl timesync-status`, or see `chronyc tracking`",
            step_s=step_s,
        )
    if visit.lease is None:
        return skipped("it runs evenly; a verifier says nothing of its own clock, and texts need none")
    try:
        issued_s = expiry_s(visit.lease.token) - visit.lease.expires_in_s
    except Unauthenticated as error:
        return skipped(f"it runs evenly; the coordinator's is not known, since the lease {error.message}")
    before, after = visit.leased_between
    ahead_s = max(0.0, before - issued_s) or min(0.0, after - issued_s)  # 0: within the time that the call took
    distance = f"{abs(ahead_s):.1f} s {'ahead of' if ahead_s > 0 else 'behind'} the coordinator's"
    if abs(ahead_s) > CLOCK_SKEW_S:
        remedy = "set both by NTP: `timedatectl set-ntp true`"
        return warning(f"this machine's clock is {distance}", remedy, ahead_s=ahead_s)
    if ahead_s:
        return ok(f"{distance}, which does not matter", ahead_s=ahead_s)
    words = f"within {max(after - before, 0.001):.3f} s of the coordinator's, and it runs evenly"
    return ok(words, ahead_s=ahead_s)
