"""More texts than places: order and shares of those that wait, through a daemon and a relay, and of those that run."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.coordinator.coordinator_config import CoordinatorConfig, StaticVerifier
from outrider.coordinator.coordinator_server import CoordinatorServer
from outrider.edge import Client, EdgeConfig
from outrider.edge.daemon import DaemonConfig
from outrider.edge.daemon.http_server import Daemon
from outrider.proto.plumbing.access import Key, secret_sha256

SECRET = b"a secret of the two of them"
PROMPT = "def main(argv):\n"

Ask = Callable[[], Awaitable[Any]]


@asynccontextmanager
async def fleet(
    tokenizer_file: Path, places: int, *, step_s: float = 0.02, **options: Any
) -> AsyncIterator[tuple[VerifierServer, CoordinatorServer, str]]:
    tokenizer = await asyncio.to_thread(tokenizer_file.read_text, encoding="utf-8")
    async with AsyncExitStack() as stack:
        verifier = VerifierServer(VerifierConfig(name="a", threads=1, min_step_s=step_s, max_sessions=places), SECRET)
        stack.push_async_callback(verifier.stop, 0)
        fixed = (StaticVerifier("a", await verifier.start(), "reference", tokenizer),)
        coordinator = CoordinatorServer(
            CoordinatorConfig(lease_secret=SECRET, listen="127.0.0.1:0", verifiers=fixed, poll_s=0.2, **options)
        )
        stack.push_async_callback(coordinator.stop, 0)
        yield verifier, coordinator, await coordinator.start()


@asynccontextmanager
async def by_client(client: Client) -> AsyncIterator[Ask]:
    yield lambda: client.complete(PROMPT, max_tokens=2)


@asynccontextmanager
async def by_daemon(client: Client) -> AsyncIterator[Ask]:
    daemon = Daemon(DaemonConfig(listen="127.0.0.1:0"), client)
    url = await daemon.start()
    await daemon.cloud.found.wait()

    def ask() -> None:
        body = json.dumps({"model": "reference", "prompt": PROMPT, "max_tokens": 2}).encode()
        request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=120) as answer:
            answer.read()

    yield lambda: asyncio.to_thread(ask)
    await daemon.stop()


async def until(holds: Callable[[], object]) -> None:
    while not holds():  # noqa: ASYNC110 - the condition has no event
        await asyncio.sleep(0.005)


@pytest.mark.parametrize(
    ("door", "places", "options"),
    [
        (by_daemon, 1, {}),
        (by_client, 1, {"relay": True}),
        (by_client, 4, {"relay": True, "relay_streams": 1}),
        (by_daemon, 4, {"relay": True, "relay_streams": 1}),
    ],
    ids=["daemon", "relay", "places of the relay", "daemon and places of the relay"],
)
def test_texts_that_wait_are_served_in_order_and_before_newcomers(
    door: Any, places: int, options: Any, tokenizer_file: Path, tmp_path: Path
) -> None:
    served: list[str] = []

    async def text(name: str, ask: Ask) -> None:
        await ask()
        served.append(name)

    async def main() -> None:
        async with fleet(tokenizer_file, places, **options) as (verifier, coordinator, address):
            client = Client(EdgeConfig(coordinator=address, cache=tmp_path, drafter="none"))
            async with client, door(client) as ask:
                running = client.generate(PROMPT, max_tokens=2000, ignore_eos=True)
                await anext(running)
                line = coordinator.service._view.queue  # type: ignore[union-attr]
                texts = []
                for number, name in enumerate(("first", "second"), 1):
                    texts.append(asyncio.create_task(text(name, ask)))
                    await until(lambda: len(line) == number)  # noqa: B023 - awaited here
                await running.aclose()
                await until(lambda: not verifier.status().sessions or served)
                await asyncio.gather(*texts, *(text("newcomer", ask) for _ in range(3)))
        assert served == ["first", "second", *["newcomer"] * 3]

    asyncio.run(asyncio.wait_for(main(), 120))


@pytest.mark.parametrize(
    ("places", "options"),
    [(2, {}), (2, {"relay": True}), (4, {"relay": True, "relay_streams": 2})],
    ids=["direct", "relay", "places of the relay"],
)
def test_a_key_with_many_waiting_texts_has_no_second_place_while_another_waits(
    places: int, options: Any, tokenizer_file: Path, tmp_path: Path
) -> None:
    """The key `many` has both places; the first that is free is that of the key `few`, whose text came last."""
    keys = tmp_path / "keys.toml"
    keys.write_text("".join(Key(name, secret_sha256(name)).toml() for name in ("many", "few")))
    keys.chmod(0o600)
    served: list[str] = []

    async def main() -> None:
        async with fleet(tokenizer_file, places, api_keys=keys, **options) as (_, coordinator, address):
            many, few = (
                Client(EdgeConfig(coordinator=address, cache=tmp_path, drafter="none", api_key=name, plaintext=True))
                for name in ("many", "few")
            )
            async with many, few:
                running = [many.generate(PROMPT, max_tokens=2000, ignore_eos=True) for _ in range(2)]
                for text in running:
                    await anext(text)
                line = coordinator.service._view.queue  # type: ignore[union-attr]

                async def text(client: Client, name: str) -> None:
                    await client.complete(PROMPT, max_tokens=2)
                    served.append(name)

                texts = [asyncio.create_task(text(many, "many")) for _ in range(5)]
                await until(lambda: len(line) == 5)
                texts.append(asyncio.create_task(text(few, "few")))
                await until(lambda: len(line) == 6)
                await running[0].aclose()
                await asyncio.gather(*texts)
                await running[1].aclose()
        assert served == ["few", *["many"] * 5]

    asyncio.run(asyncio.wait_for(main(), 120))


def test_a_text_whose_lease_ends_goes_on_before_those_that_wait(tokenizer_file: Path, tmp_path: Path) -> None:
    """There is one place; a text that is there sooner than the edge of the running one may have it meanwhile."""
    ended: list[str] = []

    async def main() -> None:
        async with fleet(tokenizer_file, 1, step_s=0.05, lease_seconds=1.5) as (_, coordinator, address):
            client = Client(EdgeConfig(coordinator=address, cache=tmp_path, drafter="none"))
            async with client:
                line = coordinator.service._view.queue  # type: ignore[union-attr]

                async def text(name: str, tokens: int) -> None:
                    await client.complete(PROMPT, max_tokens=tokens, ignore_eos=True)
                    ended.append(name)

                running = asyncio.create_task(text("running", 45))
                await until(lambda: coordinator.service.verifiers[0].sessions)  # type: ignore[union-attr]
                texts = [asyncio.create_task(text("waiting", 10)) for _ in range(6)]
                await until(lambda: len(line) == 6)
                await asyncio.gather(running, *texts)
        assert ended[-1] == "waiting", "not all of them came before the text that was running"

    asyncio.run(asyncio.wait_for(main(), 120))
