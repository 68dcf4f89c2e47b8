"""All checks in order: the ways, the lease, a session, the drafter, a whole text."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
from collections.abc import Awaitable, Callable
from dataclasses import replace
from pathlib import Path

from outrider.drafters import NgramDrafter, find_package
from outrider.drafters.search import WITHOUT_PACKAGE
from outrider.edge.client import Client
from outrider.edge.decoding import Observer
from outrider.edge.doctor.connection_check import (
    LOG,
    TIMEOUT_S,
    Endpoint,
    Finding,
    Outcome,
    connect_port,
    failed,
    failed_by,
    inspect_tls,
    ok,
    time_answers,
    warning,
)
from outrider.edge.edge_config import EdgeConfig
from outrider.edge.link.control_client import CoordinatorClient
from outrider.proto import codec
from outrider.proto.errors import OutriderError
from outrider.proto.release import UNKNOWN, release
from outrider.proto.session import RetryRules
from outrider.proto.types import CloudFrame, Guarantee, Lease, LeaseRequest, Opened

PROMPT = "Once upon a time there was a small house at the edge of the forest, and in it lived"
TOKENS = 16
NO_PACKAGE = ("auto", "all", "none", *WITHOUT_PACKAGE)

log = logging.getLogger(__name__)


async def examine(config: EdgeConfig, report: Callable[[Finding], None] = lambda _: None) -> list[Finding]:
    """Make every check, calling `report` after each; a check that needs a failed one is skipped and says so."""
    visit = _Visit(config, report)
    try:
        if config.coordinator:
            await visit.reach("coordinator")
            await visit.check("lease", visit.open_lease, "coordinator answers")
        await visit.reach("verifier", *(("lease",) if config.coordinator else ()))
        await visit.check("session opens", visit.open_session, "verifier answers")
        await visit.check("drafter", visit.load_drafter, "session opens")
        await visit.check("text", visit.decode_text, "drafter")
    finally:
        for client in (visit.plain, visit.drafting):
            if client is not None:
                await client.close()
    return visit.findings


class _Visit:
    """State of the checks so far: each adds what later ones need.

    Attributes:
        findings: of the checks that were made.
        endpoints: servers under examination, by role; a lease adds `verifier`, which is the coordinator where that
            relays.
        plain: client without drafts; None: no session was tried.
        drafting: client with the drafter of the config.
        opened: the verifier's answer to a session.
    """

    def __init__(self, config: EdgeConfig, report: Callable[[Finding], None]) -> None:
        self._config = replace(config, retry=RetryRules(abandon_after_s=TIMEOUT_S), open_timeout_s=TIMEOUT_S)
        self.plain: Client | None = None
        self.drafting: Client | None = None
        self.findings: list[Finding] = []
        self.lease: Lease | None = None
        self.opened: Opened | None = None
        self._report = report
        self._failures: dict[str, str] = {}  # by check: the failed one that kept it from being made, or itself
        role, service = "verifier", codec.DECODING_SERVICE
        if config.coordinator:
            role, service = "coordinator", codec.CONTROL_SERVICE
        security = config.security
        tls_name = security.server_name if security.tls is not None else None
        address = config.coordinator or config.verifier
        self.endpoints = {role: Endpoint(role, address, f"--{role}", service, security, tls_name)}

    async def check(self, name: str, run: Callable[[], Awaitable[Finding]], *needs: str) -> None:
        """Make a check, unless one that it needs has failed."""
        cause = next((self._failures[need] for need in needs if need in self._failures), "")
        if cause:
            finding = Finding(Outcome.SKIPPED, f"{cause} failed")
        else:
            try:
                finding = await run()
            except OutriderError as error:
                finding = failed_by(error)
            except Exception as error:  # a check's top: its defect must not hide what the others find
                log.exception("the check %r broke", name)
                finding = failed(f"the check itself broke: {type(error).__name__}: {error}", LOG)
        if finding.outcome is Outcome.FAILED or cause:
            self._failures[name] = cause or name
        self.findings.append(replace(finding, check=name))
        self._report(self.findings[-1])

    async def reach(self, role: str, *needs: str) -> None:
        """Check the way to a server, from the port to the service; each check needs the one before."""
        if role in self.endpoints and self.endpoints[role].role != role:
            return  # the coordinator relays the sessions, so the edge never meets the verifier
        await self.check(f"{role} port", lambda: connect_port(self.endpoints[role]), *needs)
        await self.check(f"{role} TLS", lambda: inspect_tls(self.endpoints[role]), f"{role} port")
        await self.check(f"{role} answers", lambda: time_answers(self.endpoints[role]), f"{role} TLS")

    async def open_lease(self) -> Finding:
        """Ask for a lease as any session would; it is not used and runs out by itself."""
        at = self.endpoints["coordinator"]
        client = CoordinatorClient(at.address, TIMEOUT_S, at.security)
        try:
            lease = await client.open_lease(LeaseRequest(self._config.model, f"doctor-{uuid.uuid4().hex}"))
        finally:
            await client.close()
        self.lease, self.endpoints["verifier"] = lease, at
        if not lease.relayed:
            option, tls_name = "`outrider verifier --advertise`", lease.tls_name if lease.tls else None
            self.endpoints["verifier"] = Endpoint(
                "verifier", lease.address, option, codec.DECODING_SERVICE, at.security, tls_name
            )
        way = "through the coordinator, which relays" if lease.relayed else f"at {lease.address}"
        return ok(f"verifier {lease.verifier} with {lease.model}, {way}, for {lease.expires_in_s:g} s")

    async def open_session(self) -> Finding:
        """Decode one token without drafts: this tries the lease, the model's name, the tokenizer and the room."""
        recorder = _OpenedRecorder()
        began = time.monotonic()
        config = replace(self._config, tokenizer=self._tokenizer())
        plain = self.plain = Client(replace(config, drafter="none", drafts_here=0))
        self.drafting = Client(config)
        await plain.prepare()
        async for _ in plain.generate(PROMPT, max_tokens=1, observer=recorder):
            pass
        milliseconds = 1000 * (time.monotonic() - began)
        opened = self.opened = recorder.opened
        assert opened is not None  # noqa: S101 - a text came, and none does before Opened
        words = (
            f"{opened.verifier} takes {opened.context_length} positions and {opened.credit} drafts in flight; "
            f"first token after {milliseconds:.0f} ms"
        )
        releases = {"edge": release(), "verifier": opened.release or UNKNOWN}
        if self.lease is not None:
            releases["coordinator"] = self.lease.release or UNKNOWN
        if len(set(releases.values())) > 1:
            listed = ", ".join(f"{part} {version}" for part, version in releases.items())
            return warning(
                f"{words}; releases differ: {listed}",
                "they understand each other; install the newest everywhere, by `pip`",
            )
        return ok(words)

    def _tokenizer(self) -> Path | None:
        """Return the tokenizer that the config names, or means by a package where there is no coordinator."""
        named = [name for name in self._config.drafters if name not in NO_PACKAGE]
        if self._config.tokenizer is not None or self._config.coordinator or not named:
            return self._config.tokenizer
        return find_package(named[0]).tokenizer_path

    async def load_drafter(self) -> Finding:
        """Load the drafters as a client would, each file checked against its hash."""
        assert self.drafting is not None  # noqa: S101 - a session was opened beside it
        ready, wanted = await self.drafting.prepare(), self._config.drafter
        shelf, drafter = ready.shelf, ready.shelf.first
        if shelf.error:
            return failed(
                f"{wanted!r} cannot be used, texts would go on without drafts: {shelf.error}",
                "mend or `outrider export` the package again, delete the folder of --cache, or give --drafter ngram",
            )
        if drafter is None:
            return Finding(Outcome.SKIPPED, "--drafter none: plain cloud streaming")
        if isinstance(drafter, NgramDrafter) and wanted == "auto":
            return warning(
                "no drafter package fits this target, so n-grams of the text itself are proposed",
                "train one (`outrider train drafter`), and serve it with `outrider coordinator --drafters DIR`",
            )
        if broken := await asyncio.to_thread(shelf.load_all):
            return warning(
                "the others draft without " + "; ".join(f"{name}: {reason}" for name, reason in broken.items()),
                "mend them, `outrider export` them again, or leave them out of --drafter",
            )
        words = f"{shelf.names.replace(',', ', ')} {drafter.version}, every file as promised"
        if shelf.by_text:
            words += f"; {', '.join(shelf.by_text)} drafts by text, since its tokenizer is another than the target's"
        else:
            words += "; drafts in the target's own tokens"
        return ok(words)

    async def decode_text(self) -> Finding:
        """Decode the same greedy text with the config's drafter and without any."""
        assert self.plain is not None  # noqa: S101 - the session was opened by it
        assert self.drafting is not None  # noqa: S101 - its drafter was loaded
        await self.drafting.complete(PROMPT, max_tokens=TOKENS, ignore_eos=True)  # the first one teaches its policies
        alone = await self.plain.complete(PROMPT, max_tokens=TOKENS, ignore_eos=True)
        drafted = await self.drafting.complete(PROMPT, max_tokens=TOKENS, ignore_eos=True)
        s = drafted.statistics
        if alone.ids != drafted.ids:
            exact = self.opened is not None and self.opened.guarantee is not Guarantee.DISTRIBUTION
            return warning(
                f"two greedy texts of {TOKENS} tokens differ"
                + (", though the verifier guarantees their bytes" if exact else ""),
                "near-ties fall either way; start `outrider verifier` with --exact tiles, which is slower",
            )
        if s.drafter_error:
            return warning(
                f"the drafter gave up during the text: {s.drafter_error}",
                "give --drafter ngram, or mend the package with `outrider export`",
            )
        return ok(
            f"{TOKENS} tokens, the same both ways; {s.accepted} were accepted drafts, {s.steps} target steps; "
            f"{TOKENS / drafted.seconds:.1f} tok/s with drafts, {TOKENS / alone.seconds:.1f} without (too few to judge "
            "speed by; `outrider bench` measures it)"
        )


class _OpenedRecorder(Observer):
    """Keeps the verifier's answer to an Open."""

    def __init__(self) -> None:
        self.opened: Opened | None = None

    def received(self, frame: CloudFrame, at: float) -> None:  # noqa: ARG002 - the observer's signature
        if isinstance(frame, Opened):
            self.opened = frame
