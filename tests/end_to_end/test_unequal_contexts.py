"""Verifiers of one target with unequal contexts: a text ends where its first verifier would have ended it."""

from __future__ import annotations

import asyncio
from contextlib import AsyncExitStack, asynccontextmanager

import pytest
from fake_cluster import ScriptedCluster, ready

from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.testing import save_tiny_target
from outrider.cloud.verifier_config import VerifierConfig
from outrider.coordinator.coordinator_config import CoordinatorConfig
from outrider.coordinator.coordinator_server import CoordinatorServer
from outrider.edge import Client, EdgeConfig, Sampling, Tokens
from outrider.proto.session import RetryRules
from outrider.proto.tokenizer import tokenizer_hash

SECRET = b"a secret of the fleet"
PROMPT = tuple(range(3, 23))
SAMPLED = Sampling(temperature=1.0, seed=5, max_tokens=200, ignore_eos=True)
QUICK = RetryRules(0.02, 0.1, 60.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return save_tiny_target(tmp_path_factory.mktemp("tiny"), sharpness=20.0)


@asynccontextmanager
async def serving(folder, *contexts: int, secret: bytes = b""):
    """Verifiers that hold so many positions, the first named `a`, with their addresses."""
    async with AsyncExitStack() as stack:
        servers = []
        for name, context in zip("abc", contexts, strict=False):
            config = VerifierConfig(
                name=name,
                target=str(folder),
                model="tiny",
                threads=1,
                kv_tokens=1024,
                context_length=context,
                min_step_s=0.005,
                draft_here="off",
            )
            servers.append(VerifierServer(config, secret))
            stack.push_async_callback(servers[-1].stop, 0)
        yield servers, [await server.start() for server in servers]


async def text_and_then(client: Client, act) -> tuple[int, ...]:
    """The text, after whose eighth token `act` is awaited."""
    got, acting = [], None
    async for event in client.generate(PROMPT, SAMPLED):
        got += event.ids if isinstance(event, Tokens) else ()
        if acting is None and len(got) >= 8:
            acting = asyncio.create_task(act())
    await acting
    return tuple(got)


@pytest.mark.parametrize("contexts", [(96, 48, 96), (48, 96, 96), (96, 256)])
async def test_a_text_that_moves_is_the_one_of_the_verifier_that_began_it(edge, folder, contexts) -> None:
    async with (
        serving(folder, *contexts) as (servers, addresses),
        edge(*addresses, model="tiny", tokenizer=folder / "tokenizer.json", drafter="ngram", retry=QUICK) as client,
    ):
        whole = (await client.complete(PROMPT, SAMPLED)).ids
        assert len(whole) == contexts[0] - len(PROMPT)
        assert await text_and_then(client, lambda: servers[0].drain(5.0)) == whole


async def test_a_coordinator_sends_a_text_where_there_is_the_context_that_it_was_promised(folder, tmp_path) -> None:
    """The verifier of fewer positions would be chosen by its name."""

    async with serving(folder, 96, 48, 96, secret=SECRET) as (servers, addresses):
        tokenizer = servers[0].tokenizer_json
        known = {"tokenizer_sha256": tokenizer_hash(tokenizer)}
        infos = [
            ready(name, address=address, context_length=server.rules.context_length, **known)
            for name, server, address in zip("abc", servers, addresses, strict=True)
        ]
        cluster = ScriptedCluster(*infos, tokenizer_json=tokenizer)
        coordinator = CoordinatorServer(CoordinatorConfig(lease_secret=SECRET, listen="127.0.0.1:0"), cluster)
        config = EdgeConfig(coordinator=await coordinator.start(), cache=tmp_path, drafter="none", retry=QUICK)
        try:
            async with Client(config) as client:
                text = await text_and_then(client, lambda: servers[0].drain(5.0))
        finally:
            await coordinator.stop(0)
    assert len(text) == 96 - len(PROMPT)
