"""Verifiers of one target in two precisions: a text that has begun keeps to its own."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import fields

import pytest
from command_processes import free_port

from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.testing import save_tiny_target
from outrider.cloud.verifier_config import VerifierConfig
from outrider.coordinator.cluster import VerifierInfo
from outrider.coordinator.coordinator_config import CoordinatorConfig
from outrider.coordinator.coordinator_server import CoordinatorServer
from outrider.edge import Client, EdgeConfig, Sampling
from outrider.proto.errors import Unavailable
from outrider.proto.session import RetryRules
from outrider.proto.tokenizer import tokenizer_hash

SECRET = b"a secret of the fleet"
PROMPT = "w3 w4 w5"
SAMPLED = Sampling(temperature=1.0, seed=3, max_tokens=120, ignore_eos=True)
QUICK = RetryRules(0.02, 0.1, 60.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_target(tmp_path_factory.mktemp("tiny"), sharpness=20.0)


@pytest.fixture(scope="module")
def verifier(folder):
    """Make a verifier of the tiny target."""

    def made(name: str, dtype: str, secret: bytes = b"", **config) -> VerifierServer:
        settings = {"target": str(folder), "model": "tiny", "threads": 1, "kv_tokens": 1024, "min_step_s": 0.005}
        return VerifierServer(VerifierConfig(name=name, dtype=dtype, **settings, **config), secret)

    return made


@pytest.fixture(scope="module")
def edge_of(edge, folder):
    """Make an edge that knows verifiers by address."""

    def made(*addresses: str, retry: RetryRules = QUICK):
        return edge(*addresses, model="tiny", tokenizer=folder / "tokenizer.json", drafter="ngram", retry=retry)

    return made


@asynccontextmanager
async def served(*servers: VerifierServer):
    """The addresses of verifiers, which are stopped at last."""
    try:
        yield [await server.start() for server in servers]
    finally:
        for server in servers:
            await server.stop(0)


async def text_and_then(client: Client, act) -> tuple[tuple[int, ...], int]:
    """The text, after whose eighth token `act` is awaited, and how often its stream was lost."""
    got, acting = [], None
    async for event in client.generate(PROMPT, SAMPLED):
        got += getattr(event, "ids", ())
        if acting is None and len(got) >= 8:
            acting = asyncio.create_task(act())
        statistics = getattr(event, "statistics", None)
    await acting
    return tuple(got), statistics.resumes


@pytest.fixture(scope="module")
def texts(verifier, edge_of) -> dict[str, tuple[int, ...]]:
    """The text in each precision; they differ after the failover, so that one which changed over would show."""

    async def main() -> dict[str, tuple[int, ...]]:
        found = {}
        for dtype in ("float32", "bfloat16"):
            async with served(verifier("a", dtype)) as addresses, edge_of(*addresses) as client:
                found[dtype] = (await client.complete(PROMPT, SAMPLED)).ids
        return found

    found = asyncio.run(main())
    assert found["float32"][:50] == found["bfloat16"][:50]
    assert found["float32"] != found["bfloat16"]
    return found


@pytest.mark.parametrize(("own", "other"), [("float32", "bfloat16"), ("bfloat16", "float32")])
async def test_a_text_waits_until_its_precision_comes_back(verifier, edge_of, texts, own, other) -> None:
    first, again = (verifier("a", own, listen=f"127.0.0.1:{port}") for port in [free_port()] * 2)
    async with served(first, verifier("b", other)) as addresses, edge_of(*addresses) as client:

        async def restart() -> None:
            await first.drain(5.0)
            await first.stop(0)
            await asyncio.sleep(0.3)  # there is the other one alone
            await again.start()

        text, resumes = await text_and_then(client, restart)
    await again.stop(0)
    assert text == texts[own]
    assert resumes > 2, "the other one was asked, and refused"


async def test_a_text_without_a_verifier_of_its_precision_fails_and_says_so(verifier, edge_of) -> None:
    first, other = verifier("a", "float32"), verifier("b", "bfloat16")
    few = RetryRules(0.02, 0.1, 0.4)
    async with served(first, other) as addresses, edge_of(*addresses, retry=few) as client:

        async def leave() -> None:
            await first.drain(5.0)
            await first.stop(0)

        with pytest.raises(Unavailable, match=r"at verifier b, the text was begun in float32 .*--dtype"):
            await text_and_then(client, leave)


class ReportingFleet:
    """Verifiers that tell a coordinator their own state, as actors do."""

    trainers = ()

    def __init__(self, *servers: VerifierServer) -> None:
        self.servers = {server.status().name: server for server in servers}

    async def refresh(self) -> tuple[VerifierInfo, ...]:
        infos = []
        for server in self.servers.values():
            status = server.status()
            report = {field.name: getattr(status, field.name) for field in fields(status)}
            sha256 = tokenizer_hash(server.tokenizer_json)
            infos.append(VerifierInfo.from_report(report | {"tokenizer_sha256": sha256}))
        return tuple(infos)

    async def tokenizer_json(self, name: str) -> str:
        return self.servers[name].tokenizer_json

    async def chat_template_json(self, _: str) -> str:
        return ""

    async def retire_versions(self, _: frozenset[tuple[str, str]]) -> None:
        """Have no trainer that could be told."""

    async def close(self) -> None:
        """Leave the verifiers to whoever started them."""


async def test_the_coordinator_sends_a_text_to_its_precision_at_once(verifier, texts, tmp_path) -> None:
    """The verifier of the other precision would be chosen by its name."""

    kinds = (("a", "float32"), ("b", "bfloat16"), ("c", "float32"))
    servers = [verifier(name, dtype, SECRET) for name, dtype in kinds]
    async with served(*servers):
        config = CoordinatorConfig(lease_secret=SECRET, listen="127.0.0.1:0")
        coordinator = CoordinatorServer(config, ReportingFleet(*servers))
        edge = EdgeConfig(coordinator=await coordinator.start(), cache=tmp_path, drafter="ngram", retry=QUICK)
        try:
            async with Client(edge) as client:
                text, resumes = await text_and_then(client, lambda: servers[0].drain(5.0))
        finally:
            await coordinator.stop(0)
    assert text == texts["float32"]
    assert resumes == 1, "no other one was asked"
