"""An edge whose radio sleeps between texts, and which wakes it while the user types."""

from __future__ import annotations

import asyncio
import time

from outrider.deploy.link.link_process import LinkProcess
from outrider.edge import Client, Sampling, SyncClient, Tokens
from outrider.edge.edge_config import EdgeConfig

SAMPLING = Sampling(max_tokens=3)
IDLE_S = 0.5
LONGEST_S = 60.0


async def first_token(client: Client) -> tuple[float, tuple[int, ...]]:
    """Return the seconds to a text's first token, and its tokens."""
    began, first, tokens = time.monotonic(), 0.0, ()
    async for event in client.generate("def main():", SAMPLING):
        if isinstance(event, Tokens):
            first = first or time.monotonic() - began
            tokens += event.ids
    return first, tokens


async def test_a_radio_that_is_woken_while_the_user_types_delays_no_first_token(verifier, edge) -> None:
    async with LinkProcess(verifier, radio_idle_s=IDLE_S) as link, edge(link.address, drafter="none") as client:
        _, text = await first_token(client)
        await asyncio.sleep(2 * IDLE_S)
        asleep_s, same = await first_token(client)
        assert asleep_s >= 0.29
        assert same == text
        deadline = time.monotonic() + LONGEST_S
        while True:
            await asyncio.sleep(2 * IDLE_S)
            before = await link.counters()
            await client.wake()
            after = await link.counters()
            assert 0 < after.up_bytes - before.up_bytes < 200, "a few bytes"
            assert after.connections == before.connections, "over the connection of the next text"
            awake_s, same = await first_token(client)
            assert same == text
            if awake_s < 0.29:
                return
            assert time.monotonic() < deadline, "the radio slept all the same"


async def test_waking_before_the_client_is_prepared_sends_nothing(verifier, tokenizer_file) -> None:
    async with LinkProcess(verifier) as link:
        config = EdgeConfig(verifier=link.address, model="reference", tokenizer=tokenizer_file, drafter="none")
        client = Client(config)
        await client.wake()
        assert (await link.counters()).connections == 0
        await client.close()

        def wake_without_async() -> None:
            with SyncClient(config) as twin:
                twin.wake()

        await asyncio.to_thread(wake_without_async)
        assert (await link.counters()).up_bytes > 0


async def test_waking_a_verifier_that_is_gone_is_no_error(verifier, edge) -> None:
    async with LinkProcess(verifier) as link, edge(link.address, drafter="none", open_timeout_s=2.0) as client:
        await first_token(client)
        assert link.process is not None
        link.process.kill()
        await link.process.wait()
        await client.wake()
