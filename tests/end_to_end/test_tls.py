"""Edge, coordinator and verifier under mutual TLS with API keys: texts as ever, and no secret in any output."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from outrider.cloud.serving import metering
from outrider.cloud.serving.verifier_actor import VerifierActor
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.coordinator import service as coordinator_service
from outrider.coordinator.coordinator_config import CoordinatorConfig, StaticVerifier
from outrider.coordinator.coordinator_server import CoordinatorServer
from outrider.deploy.certs import Issued, issue
from outrider.edge import Client, EdgeConfig
from outrider.proto.errors import ConfigError, Unauthenticated
from outrider.proto.plumbing.access import Key, secret_sha256
from outrider.proto.plumbing.tls import ClientTls, ServerTls

SECRET = b"a secret of the two of them"
API_KEY = "otr_alices-own-secret"
PROMPT = "def main(argv):\n"
TOKENS_PER_MINUTE = 600


@pytest.fixture(scope="module")
def issued(tmp_path_factory: pytest.TempPathFactory) -> Issued:
    # The verifier's host is not in it: its name comes with the lease.
    return issue(tmp_path_factory.mktemp("certs"), ("fleet.example", "localhost"))


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    path = tmp_path / "keys.toml"
    alice = Key("alice", secret_sha256(API_KEY), max_sessions=2, tokens_per_minute=TOKENS_PER_MINUTE)
    path.write_text(alice.toml())
    path.chmod(0o600)
    return path


@pytest.fixture(scope="module")
def verifier(issued: Issued) -> Iterator[VerifierActor]:
    """On a loop of its own, so that all tests can share it."""
    tls = ServerTls(issued.server_cert, issued.server_key, issued.ca)
    actor = VerifierActor(VerifierConfig(threads=1, tls=tls), SECRET)
    yield actor
    actor.stop()


@dataclass(frozen=True)
class Running:
    """A coordinator and its address."""

    address: str
    coordinator: CoordinatorServer


@asynccontextmanager
async def fleet(issued: Issued, verifier: VerifierActor, **options: Any) -> AsyncIterator[Running]:
    info = await asyncio.to_thread(verifier.info)
    tls = ServerTls(issued.server_cert, issued.server_key, issued.ca)
    fixed = StaticVerifier(
        info["name"],
        info["address"],
        info["model"],
        verifier.tokenizer_json(),
        tls=info["tls"],
        tls_name=info["tls_name"],
    )
    towards = ClientTls(issued.ca, issued.server_cert, issued.server_key)
    config = CoordinatorConfig(
        lease_secret=SECRET, listen="127.0.0.1:0", verifiers=(fixed,), tls=tls, verifier_tls=towards, **options
    )
    coordinator = CoordinatorServer(config)
    try:
        yield Running((await coordinator.start()).replace("127.0.0.1", "localhost"), coordinator)
    finally:
        await coordinator.stop(0)


def edge(issued: Issued, running: Running, cache: Path, **fields: Any) -> EdgeConfig:
    own = {"tls_ca": issued.ca, "tls_cert": issued.client_cert, "tls_key": issued.client_key, "api_key": API_KEY}
    return EdgeConfig(**{"coordinator": running.address, "cache": cache, "drafter": "ngram"} | own | fields)


def test_a_session_with_every_secret_logs_none_at_the_lowest_level(
    issued: Issued,
    keys: Path,
    verifier: VerifierActor,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    tokens: list[bytes] = []

    def remembering(*arguments: Any) -> bytes:
        tokens.append(sign(*arguments))
        return tokens[-1]

    sign = coordinator_service.sign_lease
    monkeypatch.setattr(coordinator_service, "sign_lease", remembering)

    async def main() -> None:
        async with fleet(issued, verifier, api_keys=keys) as running:
            config = edge(issued, running, tmp_path)
            print(repr(config), repr(running))  # what a person at a debugger would see
            async with Client(config) as client:
                assert len((await client.complete(PROMPT, max_tokens=20)).ids) == 20
                left = client.generate(PROMPT, max_tokens=500)
                await anext(left)
                await left.aclose()
            admission = running.coordinator.service.admission
            assert admission.running() == {}, "a text that was left has given its room back"
            for wrong in ({"api_key": "otr_not-a-key"}, {"api_key": ""}):
                with pytest.raises(Unauthenticated) as refusal:
                    await Client(edge(issued, running, tmp_path, **wrong)).prepare()
                print(refusal.value)

    with caplog.at_level(logging.DEBUG):
        asyncio.run(main())
    out, err = capfd.readouterr()
    said = caplog.text + out + err
    assert "a lease is granted" in said, "the log was really on"
    assert tokens
    key_lines = [
        line
        for path in (issued.server_key, issued.client_key, issued.ca_key)
        for line in path.read_text().splitlines()
        if not line.startswith("---")
    ]
    secrets = [API_KEY, "not-a-key", SECRET.decode(), SECRET.hex(), *key_lines]
    secrets += [part for token in tokens for part in token.decode().split(".")]
    secrets += [PROMPT.strip()]
    assert [secret for secret in secrets if secret in said] == []


async def test_a_session_whose_key_is_spent_is_sent_away_and_its_text_goes_on_unchanged(
    issued: Issued, keys: Path, verifier: VerifierActor, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(metering, "REFILL", 0.001)

    async with fleet(issued, verifier, api_keys=keys) as running, Client(edge(issued, running, tmp_path)) as client:
        whole = await client.complete(PROMPT, max_tokens=40)
        now_s = time.monotonic()
        meter = verifier._server._streams._meters.of("alice", TOKENS_PER_MINUTE, now_s)
        meter.spend(meter.level(now_s) - 5, now_s)
        paced = await client.complete(PROMPT, max_tokens=40)
        assert paced.ids == whole.ids
        assert paced.statistics.resumes > whole.statistics.resumes


def test_a_verifier_beyond_loopback_needs_certificates_and_leases_and_says_which(issued: Issued) -> None:
    with pytest.raises(ConfigError, match="outrider certs") as refusal:
        VerifierConfig(listen="0.0.0.0:0")
    assert refusal.value.field == "listen"
    tls = ServerTls(issued.server_cert, issued.server_key, issued.ca)
    with pytest.raises(ConfigError) as refusal:
        VerifierServer(VerifierConfig(listen="0.0.0.0:0", tls=tls))
    assert refusal.value.field == "lease_secret"


def test_a_key_is_not_sent_in_plain_text_over_a_network() -> None:
    with pytest.raises(ConfigError, match="--tls-ca") as refusal:
        EdgeConfig(coordinator="coordinator.example:443", api_key=API_KEY)
    assert refusal.value.field == "api_key"
    assert API_KEY not in str(refusal.value)
