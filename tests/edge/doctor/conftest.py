"""Servers for the doctor to look at: a real verifier and coordinator, and small ones that answer health calls only."""

from __future__ import annotations

import asyncio
import datetime as dt
import ipaddress
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from grpc_health.v1 import health_pb2, health_pb2_grpc
from loop_thread import LoopThread

from outrider.proto import codec
from outrider.proto.channel import SERVER_OPTIONS

SLOTS = 2


@dataclass(frozen=True)
class Cloud:
    """Addresses of a coordinator and of its one verifier, which takes sessions without a lease, too."""

    coordinator: str
    verifier: str
    another: Callable[..., Any]
    slots = SLOTS  # sessions of the verifier

    @contextmanager
    def coordinated(self, **config: Any) -> Iterator[str]:
        """Yield the address of another coordinator of the same fleet, with this config."""
        stop, address = self.another(**config)
        yield address
        stop()


@pytest.fixture(scope="session")
def cloud() -> Iterator[Cloud]:
    from outrider.cloud.serving.verifier_server import VerifierServer
    from outrider.cloud.verifier_config import VerifierConfig
    from outrider.coordinator.coordinator_config import CoordinatorConfig, StaticVerifier
    from outrider.coordinator.coordinator_server import CoordinatorServer
    from outrider.drafters.packages import FAMILY

    loop = LoopThread()
    verifier = VerifierServer(VerifierConfig(threads=1, name="a", max_sessions=SLOTS))
    address = loop.run(verifier.start())

    def another(**config: Any) -> tuple[Callable[[], None], str]:
        static = StaticVerifier("a", address, "reference", verifier.tokenizer_json)
        # What it has granted counts as a session until it asks its verifier again, which has two places.
        common = {"lease_secret": b"s" * 32, "listen": "127.0.0.1:0", "verifiers": (static,), "poll_s": 0.02}
        server = CoordinatorServer(CoordinatorConfig(**common, drafters=(FAMILY,), **config))
        return lambda: loop.run(server.stop(0)), loop.run(server.start())

    stop, coordinator = another()
    yield Cloud(coordinator, address, another)
    stop()
    loop.run(verifier.stop(0))
    loop.close()


class _Health(health_pb2_grpc.HealthServicer):
    def __init__(self, delay_s: float, status: Any) -> None:
        self._delay_s = delay_s
        self._status = status

    async def Check(self, request: Any, context: Any) -> Any:  # noqa: N802
        await asyncio.sleep(self._delay_s)
        if len(request.service) > 100:
            await context.abort(grpc.StatusCode.NOT_FOUND, "no such service")
        return health_pb2.HealthCheckResponse(status=self._status)


@asynccontextmanager
async def _small_server(
    *,
    delay_s: float = 0.0,
    status: Any = health_pb2.HealthCheckResponse.SERVING,
    credentials: grpc.ServerCredentials | None = None,
) -> AsyncIterator[str]:
    server = grpc.aio.server(options=SERVER_OPTIONS)
    health_pb2_grpc.add_HealthServicer_to_server(_Health(delay_s, status), server)
    if credentials is None:
        port = server.add_insecure_port("127.0.0.1:0")
    else:
        port = server.add_secure_port("127.0.0.1:0", credentials)
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(0)


@pytest.fixture(scope="session")
def small_server() -> Callable[..., Any]:
    """`async with small_server(...) as address`: health calls only."""
    return _small_server


@dataclass(frozen=True)
class Authority:
    """Makes certificates. `file` is its own."""

    file: Path
    certificate: x509.Certificate
    key: ec.EllipticCurvePrivateKey

    @classmethod
    def make(cls, folder: Path, name: str) -> Authority:
        key = ec.generate_private_key(ec.SECP256R1())
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, name)])
        now = dt.datetime.now(dt.UTC)
        certificate = (
            _builder(subject, subject, key, now - dt.timedelta(days=900), now + dt.timedelta(days=900))
            .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
            .sign(key, hashes.SHA256())
        )
        file = folder / f"{name}.pem"
        file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        return cls(file, certificate, key)

    def sign(
        self, folder: Path, *, names: tuple[str, ...] = ("localhost",), days: tuple[int, int] = (-1, 300)
    ) -> tuple:
        """Return the files of a certificate and its key, valid between `days` from now."""
        key = ec.generate_private_key(ec.SECP256R1())
        now = dt.datetime.now(dt.UTC)
        begins, ends = (now + dt.timedelta(days=day) for day in days)
        subject = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, names[0])])
        alternatives = [*map(x509.DNSName, names), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]
        shown = alternatives if names == ("localhost",) else alternatives[:-1]
        certificate = (
            _builder(subject, self.certificate.subject, key, begins, ends)
            .add_extension(x509.SubjectAlternativeName(shown), critical=False)
            .sign(self.key, hashes.SHA256())
        )
        cert_file, key_file = folder / f"{names[0]}-{days[1]}.pem", folder / f"{names[0]}-{days[1]}.key"
        cert_file.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
        key_file.write_bytes(
            key.private_bytes(
                serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
            )
        )
        key_file.chmod(0o600)
        return cert_file, key_file


def _builder(subject: Any, issuer: Any, key: Any, begins: dt.datetime, ends: dt.datetime) -> x509.CertificateBuilder:
    return (
        x509.CertificateBuilder()
        .subject_name(subject)
        .issuer_name(issuer)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(begins)
        .not_valid_after(ends)
    )


@pytest.fixture
def authority(tmp_path: Path) -> Callable[[str], Authority]:
    return lambda name: Authority.make(tmp_path, name)


@pytest.fixture(scope="session")
def service() -> str:
    return codec.CONTROL_SERVICE
