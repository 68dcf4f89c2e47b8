"""`outrider doctor`: checks of everything between this machine and the target, and what to do about what they find."""

from __future__ import annotations

import asyncio
import datetime as dt
import logging
import socket
import ssl
import statistics
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from enum import Enum
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
from cryptography import x509
from grpc_health.v1 import health_pb2, health_pb2_grpc

from outrider.drafters import NgramDrafter, find_package
from outrider.drafters.search import WITHOUT_PACKAGE
from outrider.edge.client import Client
from outrider.edge.decoding import Observer
from outrider.edge.edge_config import EdgeConfig
from outrider.edge.link.control_client import CoordinatorClient
from outrider.edge.link.security import Security
from outrider.proto import codec, errors
from outrider.proto.address import is_loopback, split_address
from outrider.proto.channel import CLIENT_OPTIONS
from outrider.proto.error_codes import REMEDIES, coded
from outrider.proto.errors import ConfigError, OutriderError
from outrider.proto.plumbing.tls import PUBLIC, ClientCredentials, ClientTls, certificate_names, explain, open_channel
from outrider.proto.release import UNKNOWN, release
from outrider.proto.rpc_errors import from_rpc_error
from outrider.proto.session import RetryRules
from outrider.proto.types import CloudFrame, Guarantee, Lease, LeaseRequest, Opened

TIMEOUT_S = 5.0  # of a server that does not answer, or is full
SOON = dt.timedelta(days=14)
FIRST_BYTES_S = 2.0  # a gRPC server speaks first; one that wants a client's certificate says so then
HTTP2 = "h2"
NAME_MISMATCHES = (62, 64)  # OpenSSL's codes of a name and of an IP address
CALLS = 20
MAX_CALLS_S = 4.0  # for all calls
LONG_ROUND_TRIP_S = 0.25
MAX_UNEVENNESS = 3.0  # of slow calls to the median
PROMPT = "Once upon a time there was a small house at the edge of the forest, and in it lived"
TOKENS = 16
NO_PACKAGE = ("auto", "all", "none", *WITHOUT_PACKAGE)

LOG = "the logs say more: `outrider --log-level info`, on both sides"
_REMEDIES = {  # of errors without a code
    errors.Unavailable: REMEDIES["OUT-301"],
    errors.ResourceExhausted: REMEDIES["OUT-302"],
    errors.Unauthenticated: REMEDIES["OUT-201"],
    errors.NotFound: (
        "`outrider status --coordinator HOST:PORT` lists what there is; name that with --model or --drafter"
    ),
    errors.DeadlineExceeded: "`outrider status --coordinator HOST:PORT` shows whether the verifier is busy or down",
    errors.ConfigError: "mend that option; `outrider doctor --help` lists them",
}

log = logging.getLogger(__name__)


class Outcome(Enum):
    """Outcome of a check."""

    OK = "ok"
    WARNING = "warning"
    FAILED = "failed"
    SKIPPED = "skipped"


@dataclass(frozen=True, slots=True)
class Finding:
    """One line for people.

    Attributes:
        message: sentence about what was found, or why the check was skipped.
        remedy: sentence that names an option or a command; warnings and failures have one.
    """

    outcome: Outcome
    message: str
    remedy: str = ""
    check: str = ""

    def __post_init__(self) -> None:
        if self.outcome in (Outcome.WARNING, Outcome.FAILED) and not self.remedy:
            raise ValueError(f"there is no remedy for {self.message!r}")


ok = partial(Finding, Outcome.OK)
warning = partial(Finding, Outcome.WARNING)


def failed(message: str, remedy: str, code: str = "") -> Finding:
    """Return the finding of a failed check."""
    return Finding(Outcome.FAILED, coded(code, message), remedy)


def failed_by(error: OutriderError) -> Finding:
    """Return the finding that an error stands for."""
    option = f"--{error.field.rpartition('.')[2].replace('_', '-')}" if isinstance(error, ConfigError) else error.field
    message = coded(error.code, str(error.message).strip().splitlines()[0])
    usual = (_REMEDIES[kind] for kind in type(error).__mro__ if kind in _REMEDIES)
    remedy = REMEDIES.get(error.code) or next(usual, LOG)
    if error.retry_after_s:
        remedy += f" (retry in {error.retry_after_s:g} s)"
    return failed(f"{option}: {message}" if option.strip("-") else message, remedy)


@dataclass(frozen=True, slots=True)
class Endpoint:
    """A server under examination.

    Attributes:
        role: `coordinator` or `verifier`.
        address: host:port.
        option: option that names it, here or at the other end.
        service: gRPC service whose health is of interest.
        security: TLS files, and the key for coordinators.
        tls_name: name that its certificate must have; empty: its host; None: it speaks plain text.
    """

    role: str
    address: str
    option: str
    service: str
    security: Security
    tls_name: str | None

    @property
    def place(self) -> tuple[str, int]:
        return split_address(self.address, self.role)

    @property
    def unreachable(self) -> str:
        """Code of an error that it cannot be reached."""
        return "OUT-101" if self.role == "coordinator" else "OUT-102"

    @property
    def metadata(self) -> tuple[tuple[str, str], ...]:
        """GRPC metadata of calls to it; only a coordinator is shown the key."""
        return self.security.metadata if self.role == "coordinator" else ()

    @asynccontextmanager
    async def channel(self) -> AsyncIterator[grpc.aio.Channel]:
        """Open a connection of its own; raises `ConfigError` where the TLS files are no good."""
        tls = self.security.tls if self.tls_name is not None else None
        credentials = ClientCredentials(tls).current() if tls is not None else None
        async with open_channel(self.address, CLIENT_OPTIONS, credentials, self.tls_name or "") as opened:
            yield opened


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
        endpoints: servers under examination, by role; a lease adds `verifier`, which is the coordinator where that
            relays.
        plain: client without drafts; None: no session was tried.
        drafting: client with the drafter of the config.
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
        await plain.complete(PROMPT, max_tokens=1, observer=recorder)
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


# --- the way to a server: its port, its certificate, its health ---


async def connect_port(at: Endpoint) -> Finding:
    """Look up the host and time a TCP handshake."""
    began = time.monotonic()
    try:
        async with asyncio.timeout(TIMEOUT_S):
            _, writer = await asyncio.open_connection(*at.place)
    except socket.gaierror as error:
        return failed(
            f"the name {at.place[0]!r} is not known here: {error.strerror}",
            f"check the spelling in {at.option}; `getent hosts {at.place[0]}` asks the same resolver",
            at.unreachable,
        )
    except ConnectionRefusedError:
        return failed(
            f"nothing listens on {at.address}",
            f"start `outrider {at.role} --listen …`, or mend the port in {at.option}; a server that listens on "
            "127.0.0.1 is reached from its own machine only",
            at.unreachable,
        )
    except OSError as error:  # TimeoutError among them
        return failed(
            f"{at.address} cannot be reached: {error.strerror or str(error) or 'no answer in time'}",
            f"a firewall or a wrong address; see `outrider {at.role} --listen` over there and {at.option} here",
            at.unreachable,
        )
    writer.close()
    return ok(f"connected in {1000 * (time.monotonic() - began):.1f} ms")


async def inspect_tls(at: Endpoint) -> Finding:
    """Check the handshake, and the certificate's names, issuer and dates; raises `ConfigError` for files here."""
    return await asyncio.to_thread(_inspect_tls, at)


def _inspect_tls(at: Endpoint) -> Finding:
    tls = at.security.tls if at.tls_name is not None else None
    if tls is not None:
        ClientCredentials(tls)  # says precisely which file is no good, and why
    try:
        shown = _fetch_certificate(at)
    except (ssl.SSLError, ConnectionError, TimeoutError) as error:
        if tls is not None:
            return failed(
                f"{at.address} does not speak TLS ({error})",
                f"start `outrider {at.role}` with --tls-cert and --tls-key, or leave out --tls-ca",
                "OUT-103",
            )
        if is_loopback(at.place[0]):
            return Finding(Outcome.SKIPPED, "plain text, which stays on this machine")
        return warning(
            f"everything to {at.address} goes in plain text",
            f"make certificates with `outrider certs`, give them to `outrider {at.role} --tls-cert --tls-key`, "
            "and --tls-ca here",
        )
    if tls is None:
        remedy = "give --tls-ca FILE, or `--tls-ca public`"
        return failed(f"{at.address} speaks TLS, and this edge does not", remedy, "OUT-103")
    certificate = f"the certificate for {', '.join(certificate_names(shown)) or 'no name'} by {_issuer(shown)}"
    try:
        protocol = _shake_hands(at, tls)
    except ssl.SSLCertVerificationError as error:
        return _explain_distrust(at, certificate, shown, error)
    except (ssl.SSLError, ConnectionError) as error:
        return failed(
            f"the server ends the handshake: {getattr(error, 'reason', None) or error}",
            "it wants a certificate of this edge by an authority that it trusts: give --tls-cert and --tls-key",
            "OUT-104",
        )
    if protocol != HTTP2:
        return failed(
            f"TLS is agreed on but not HTTP/2 (ALPN says {protocol})",
            f"a proxy on the way to the {at.role} speaks HTTP/1 only; let {at.option} go past it",
            "OUT-107",
        )
    left = shown.not_valid_after_utc - dt.datetime.now(dt.UTC)
    words = f"{certificate}, {left.days} days left"
    if left < SOON:
        return warning(words, f"renew it in time: `outrider certs`, for `outrider {at.role} --tls-cert`")
    return ok(words)


def _fetch_certificate(at: Endpoint) -> x509.Certificate:
    """Return the server's certificate, trusted or not; raises `SSLError` where it speaks no TLS."""
    context = ssl.create_default_context()
    context.check_hostname = False
    context.verify_mode = ssl.CERT_NONE
    with socket.create_connection(at.place, TIMEOUT_S) as plain, context.wrap_socket(plain) as secure:
        return x509.load_der_x509_certificate(secure.getpeercert(binary_form=True) or b"")


def _shake_hands(at: Endpoint, tls: ClientTls) -> str | None:
    """Shake hands as gRPC would and return the protocol agreed on; raises `SSLError`."""
    context = ssl.create_default_context(cafile=None if tls.ca == PUBLIC else str(tls.ca.expanduser()))
    context.verify_flags &= ~ssl.VERIFY_X509_STRICT  # gRPC is not as strict
    context.set_alpn_protocols([HTTP2])
    if tls.cert is not None and tls.key is not None:
        context.load_cert_chain(tls.cert.expanduser(), tls.key.expanduser())
    with (
        socket.create_connection(at.place, TIMEOUT_S) as plain,
        context.wrap_socket(plain, server_hostname=at.tls_name or at.place[0]) as secure,
    ):
        secure.settimeout(FIRST_BYTES_S)
        with suppress(TimeoutError):
            if not secure.recv(1):
                raise ConnectionResetError("it hung up")
        return secure.selected_alpn_protocol()


def _explain_distrust(
    at: Endpoint, certificate: str, shown: x509.Certificate, error: ssl.SSLCertVerificationError
) -> Finding:
    now, begins, ends = dt.datetime.now(dt.UTC), shown.not_valid_before_utc, shown.not_valid_after_utc
    if not begins <= now <= ends:
        return failed(
            f"{certificate} is valid from {begins:%Y-%m-%d %H:%M} to {ends:%Y-%m-%d %H:%M} UTC; this machine's clock "
            f"says {now:%Y-%m-%d %H:%M}",
            f"renew it (`outrider certs`) and give it to `outrider {at.role} --tls-cert`, which needs no restart; "
            "if the clock is wrong, `timedatectl` sets it",
            "OUT-104",
        )
    if error.verify_code in NAME_MISMATCHES:
        return failed(
            f"{certificate} is not for {at.tls_name or at.place[0]}",
            f"reach it by such a name in {at.option}, or give --tls-server-name",
            "OUT-104",
        )
    return failed(
        f"--tls-ca does not vouch for {certificate}: {error.verify_message}",
        f"give --tls-ca the authority's file that the operator of the {at.role} gave out",
        "OUT-104",
    )


def _issuer(certificate: x509.Certificate) -> str:
    return certificate.issuer.rfc4514_string() or "an authority without a name"


async def time_answers(at: Endpoint) -> Finding:
    """Ask for the health of its service again and again: the network, and the server's answer."""
    seconds: list[float] = []
    try:
        async with at.channel() as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            until = time.monotonic() + MAX_CALLS_S
            while len(seconds) <= CALLS and time.monotonic() < until:
                began = time.monotonic()
                reply = await stub.Check(
                    health_pb2.HealthCheckRequest(service=at.service), timeout=TIMEOUT_S, metadata=at.metadata
                )
                seconds.append(time.monotonic() - began)
    except grpc.aio.AioRpcError as error:
        return _explain_refusal(at, error)
    if reply.status != health_pb2.HealthCheckResponse.SERVING:
        status = health_pb2.HealthCheckResponse.ServingStatus.Name(reply.status)
        return failed(
            f"the {at.role} says that it takes no calls: {status}",
            f"it starts, drains or stops; look again, or start another `outrider {at.role}`",
            "OUT-301",
        )
    seconds = sorted(seconds[1:] or seconds)  # the first one connects
    median_s, slow_s = statistics.median(seconds), seconds[int(0.9 * (len(seconds) - 1))]
    words = f"the {at.role} serves, in {1000 * median_s:.1f} ms, one in ten over {1000 * slow_s:.1f} ms"
    if median_s > LONG_ROUND_TRIP_S:
        return warning(
            f"{words}: so long that drafts gain little",
            f"run a verifier nearer by; `outrider bench --rtt {1000 * median_s:.0f}` shows what such a link costs",
        )
    if slow_s > MAX_UNEVENNESS * median_s and slow_s - median_s > 0.05:
        return warning(
            f"{words}: uneven, which makes rejected drafts expensive",
            f"a wire instead of Wi-Fi, or less load; `outrider bench --rtt {1000 * median_s:.0f} "
            f"--jitter {1000 * (slow_s - median_s) / 2:.0f}` shows what it costs",
        )
    return ok(words)


def _explain_refusal(at: Endpoint, error: grpc.aio.AioRpcError) -> Finding:
    code = error.code()
    if code in (grpc.StatusCode.NOT_FOUND, grpc.StatusCode.UNIMPLEMENTED):
        other = "--verifier" if at.role == "coordinator" else "--coordinator"
        return failed(
            f"something else than a {at.role} answers at {at.address}",
            f"check the port in {at.option}, or give {other} if that is what listens there",
            "OUT-107",
        )
    translated = from_rpc_error(error)
    if code in (grpc.StatusCode.UNAVAILABLE, grpc.StatusCode.DEADLINE_EXCEEDED):
        reason = explain(translated.message).replace("; `outrider doctor` looks closer", "") or translated.message
        return failed(
            f"no gRPC at {at.address}: {reason}",
            f"is that port a {at.role}'s, and are the --tls-… options those that its operator gave out?",
            at.unreachable,
        )
    return failed_by(translated)
