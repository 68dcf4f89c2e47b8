"""Verifiers of one target in two precisions, or with unequal contexts: a text keeps to those that it began with."""

from __future__ import annotations

import asyncio
from contextlib import asynccontextmanager
from dataclasses import fields, replace

import pytest
from command_processes import free_port
from fake_cluster import ScriptedCluster
from fleets import SECRET

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

PROMPT = tuple(range(3, 23))
SAMPLED = Sampling(temperature=1.0, seed=3, max_tokens=120, ignore_eos=True)
TOO_LONG = replace(SAMPLED, max_tokens=200)
QUICK = RetryRules(0.02, 0.1, 60.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_target(tmp_path_factory.mktemp("tiny"), sharpness=20.0)


@pytest.fixture(scope="module")
def verifier(folder):
    """Make a verifier of the tiny target."""

    def made(name: str, secret: bytes = b"", **config) -> VerifierServer:
        settings = {"target": str(folder), "model": "tiny", "threads": 1, "kv_tokens": 1024, "min_step_s": 0.005}
        return VerifierServer(VerifierConfig(name=name, **settings, **config), secret)

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


@asynccontextmanager
async def coordinated(cache, *servers: VerifierServer):
    """A client that finds verifiers by a coordinator, to which they have told their own state."""
    cluster = ScriptedCluster(*map(reported, servers), tokenizer_json=servers[0].tokenizer_json)
    coordinator = CoordinatorServer(CoordinatorConfig(lease_secret=SECRET, listen="127.0.0.1:0"), cluster)
    config = EdgeConfig(coordinator=await coordinator.start(), cache=cache, drafter="ngram", retry=QUICK)
    try:
        async with Client(config) as client:
            yield client
    finally:
        await coordinator.stop(0)


def reported(server: VerifierServer) -> VerifierInfo:
    status = server.status()
    report = {field.name: getattr(status, field.name) for field in fields(status)}
    return VerifierInfo.from_report(report | {"tokenizer_sha256": tokenizer_hash(server.tokenizer_json)})


async def text_and_then(client: Client, act, sampling: Sampling = SAMPLED) -> tuple[tuple[int, ...], int]:
    """The text, after whose eighth token `act` is awaited, and how often its stream was lost."""
    got, acting = [], None
    async for event in client.generate(PROMPT, sampling):
        got += getattr(event, "ids", ())
        if acting is None and len(got) >= 8:
            acting = asyncio.create_task(act())
        statistics = getattr(event, "statistics", None)
    await acting
    return tuple(got), statistics.resumes


# === precision ==================================================================================================


@pytest.fixture(scope="module")
def texts(verifier, edge_of) -> dict[str, tuple[int, ...]]:
    """The text in each precision; they differ after the failover, so that one which changed over would show."""

    async def main() -> dict[str, tuple[int, ...]]:
        found = {}
        for dtype in ("float32", "bfloat16"):
            async with served(verifier("a", dtype=dtype)) as addresses, edge_of(*addresses) as client:
                found[dtype] = (await client.complete(PROMPT, SAMPLED)).ids
        return found

    found = asyncio.run(main())
    assert found["float32"][:30] == found["bfloat16"][:30]
    assert found["float32"] != found["bfloat16"]
    return found


@pytest.mark.parametrize(("own", "other"), [("float32", "bfloat16"), ("bfloat16", "float32")])
async def test_a_text_waits_until_its_precision_comes_back(verifier, edge_of, texts, own, other) -> None:
    first, again = (verifier("a", dtype=own, listen=f"127.0.0.1:{port}") for port in [free_port()] * 2)
    async with served(first, verifier("b", dtype=other)) as addresses, edge_of(*addresses) as client:

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
    first, other = verifier("a", dtype="float32"), verifier("b", dtype="bfloat16")
    few = RetryRules(0.02, 0.1, 0.4)
    async with served(first, other) as addresses, edge_of(*addresses, retry=few) as client:

        async def leave() -> None:
            await first.drain(5.0)
            await first.stop(0)

        with pytest.raises(Unavailable, match=r"at verifier b, the text was begun in float32 .*--dtype"):
            await text_and_then(client, leave)


async def test_the_coordinator_sends_a_text_to_its_precision_at_once(verifier, texts, tmp_path) -> None:
    """The verifier of the other precision would be chosen by its name."""
    kinds = (("a", "float32"), ("b", "bfloat16"), ("c", "float32"))
    servers = [verifier(name, SECRET, dtype=dtype) for name, dtype in kinds]
    async with served(*servers), coordinated(tmp_path, *servers) as client:
        text, resumes = await text_and_then(client, lambda: servers[0].drain(5.0))
    assert text == texts["float32"]
    assert resumes == 1, "no other one was asked"


# === contexts ===================================================================================================


async def test_a_text_that_moves_ends_where_its_first_verifier_would_have_ended_it(verifier, edge_of) -> None:
    servers = [verifier(name, context_length=context) for name, context in (("a", 96), ("b", 48), ("c", 256))]
    async with served(*servers) as addresses, edge_of(*addresses) as client:
        whole = (await client.complete(PROMPT, TOO_LONG)).ids
        assert len(whole) == 96 - len(PROMPT)
        text, _ = await text_and_then(client, lambda: servers[0].drain(5.0), TOO_LONG)
        assert text == whole


async def test_a_coordinator_sends_a_text_where_there_is_the_context_that_it_was_promised(verifier, tmp_path) -> None:
    """The verifier of fewer positions would be chosen by its name."""
    servers = [verifier(name, SECRET, context_length=context) for name, context in (("a", 96), ("b", 48), ("c", 96))]
    async with served(*servers), coordinated(tmp_path, *servers) as client:
        text, resumes = await text_and_then(client, lambda: servers[0].drain(5.0), TOO_LONG)
    assert (len(text), resumes) == (96 - len(PROMPT), 1)
