"""Two verifiers: texts go where the beginning of their prompt is cached, unless others have used it or load forbids."""

from __future__ import annotations

import asyncio
import random
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

import outrider.edge.link.routes
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.testing import save_tiny_target
from outrider.cloud.verifier_config import VerifierConfig
from outrider.coordinator.coordinator_config import CoordinatorConfig, StaticVerifier
from outrider.coordinator.coordinator_server import CoordinatorServer
from outrider.edge import Client, EdgeConfig
from outrider.edge.client import Completion
from outrider.proto.plumbing.access import Key, secret_sha256
from outrider.proto.testing import write_keys

SECRET = b"a secret of the fleet"
# As long as the test: a granted lease counts as a session, so that load alone sends the next text elsewhere.
POLL_S = 60.0


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    return save_tiny_target(tmp_path_factory.mktemp("tiny"))


@asynccontextmanager
async def fleet(folder: Path, **coordinator: Any) -> AsyncIterator[tuple[CoordinatorServer, str]]:
    """A coordinator of two verifiers, and its address."""
    async with AsyncExitStack() as stack:
        tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
        fixed = []
        for name in ("a", "b"):
            server = VerifierServer(VerifierConfig(target=str(folder), model="tiny", name=name, threads=1), SECRET)
            fixed.append(StaticVerifier(name, await server.start(), "tiny", tokenizer))
            stack.push_async_callback(server.stop, 0)
        config = CoordinatorConfig(
            lease_secret=SECRET, listen="127.0.0.1:0", verifiers=tuple(fixed), poll_s=POLL_S, **coordinator
        )
        served = CoordinatorServer(config)
        address = await served.start()
        stack.push_async_callback(served.stop, 0)
        yield served, address


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, 60), k=length))


def places(coordinator: CoordinatorServer) -> list[str]:
    """Verifiers of the leases, in their order."""
    return [grant.verifier for grant in coordinator.service._view.granted]


async def complete(client: Client, text: tuple[int, ...], seed: int = 0) -> Completion:
    return await client.complete(text, max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True)


@pytest.mark.parametrize("second", ["the chat's next stream", "another text of its system prompt"])
@pytest.mark.parametrize("recognised", [True, False])
def test_a_text_that_begins_alike_finds_what_is_cached(recognised, second, folder, tmp_path, monkeypatch) -> None:
    if not recognised:
        monkeypatch.setattr(outrider.edge.link.routes, "text_prefixes", lambda *_: ())

    async def main() -> None:
        system, question = prompt(1, 100), prompt(2, 20)
        async with (
            fleet(folder) as (coordinator, address),
            Client(EdgeConfig(coordinator=address, cache=tmp_path, drafter="none")) as client,
        ):
            first = await complete(client, (*system, *question))
            before = (*question, *first.ids) if "chat" in second else ()
            done = await complete(client, (*system, *before, *prompt(3, 20)))
            assert places(coordinator) == ["a", "a" if recognised else "b"]
        assert first.statistics.cached_tokens == 0
        if recognised:
            assert done.statistics.cached_tokens >= 100 + max(0, len(before) - 1), "all that was computed"
        else:
            assert done.statistics.cached_tokens == 0, "load alone sends it to the other verifier"

    asyncio.run(asyncio.wait_for(main(), 60))


def test_load_wins_where_the_verifier_that_has_the_beginning_is_busy(folder, tmp_path) -> None:
    async def main() -> None:
        async with (
            fleet(folder) as (coordinator, address),
            Client(EdgeConfig(coordinator=address, cache=tmp_path, drafter="none")) as client,
        ):
            text = prompt(1, 70)  # five beginnings, worth a session
            found = [(await complete(client, text, seed)).statistics.cached_tokens for seed in range(4)]
            where = places(coordinator)
        assert where == ["a", "a", "b", "b"], "one more than the other, and no more; then both have it"
        assert found == [0, 69, 0, 69]

    asyncio.run(asyncio.wait_for(main(), 60))


def test_keys_do_not_attract_each_other(folder, tmp_path) -> None:
    names = ("alice", "bob")
    keys = write_keys(tmp_path / "keys.toml", *(Key(name, secret_sha256(f"{name}s")) for name in names))

    async def main() -> None:
        text = prompt(5, 200)
        async with AsyncExitStack() as stack:
            coordinator, address = await stack.enter_async_context(fleet(folder, api_keys=keys))
            clients = [
                await stack.enter_async_context(
                    Client(
                        EdgeConfig(
                            coordinator=address,
                            cache=tmp_path,
                            drafter="none",
                            api_key=f"{name}s",
                        )
                    )
                )
                for name in names
            ]
            found = [(await complete(client, text)).statistics.cached_tokens for client in (*clients, *clients)]
            where = places(coordinator)
        assert where == ["a", "b", "a", "b"], "to each its own, though the prompts are equal"
        assert found == [0, 0, 199, 199]

    asyncio.run(asyncio.wait_for(main(), 60))
