"""Edge, coordinator and verifier together: leases that expire, a coordinator that dies, reports that arrive."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from command_processes import free_port

from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.coordinator.coordinator_config import CoordinatorConfig, StaticVerifier
from outrider.coordinator.coordinator_server import CoordinatorServer
from outrider.drafters.packages import FAMILY
from outrider.edge import Client, EdgeConfig
from outrider.edge.link.control_client import CoordinatorClient
from outrider.proto.errors import PromptTooLong
from outrider.proto.plumbing.access import Key, secret_sha256
from outrider.proto.testing import write_keys

SECRET = b"a secret of the two of them"
PROMPT = "def main(argv):\n"


def coordinator_config(address: str, tokenizer: Path, **config: Any) -> CoordinatorConfig:
    fixed = StaticVerifier("verifier", address, "reference", tokenizer.read_text())
    return CoordinatorConfig(
        lease_secret=SECRET,
        **{"listen": "127.0.0.1:0", "verifiers": (fixed,), "drafters": (FAMILY,), **config},
    )


@asynccontextmanager
async def verifier(**config: Any) -> AsyncIterator[str]:
    async with verifier_server(**config) as (_, address):
        yield address


@asynccontextmanager
async def verifier_server(**config: Any) -> AsyncIterator[tuple[VerifierServer, str]]:
    server = VerifierServer(VerifierConfig(threads=1, **config), lease_secret=SECRET)
    try:
        yield server, await server.start()
    finally:
        await server.stop(0)


async def test_a_text_outlives_its_lease(tokenizer_file, tmp_path) -> None:
    async with verifier(min_step_s=0.01) as address:
        short = {"lease_seconds": 0.7, "poll_s": 0.1}
        coordinator = CoordinatorServer(coordinator_config(address, tokenizer_file, **short))
        config = EdgeConfig(coordinator=await coordinator.start(), cache=tmp_path, drafter="none")
        async with Client(config) as client:
            short = await client.complete(PROMPT, max_tokens=20)
            long = await client.complete(PROMPT, max_tokens=200)
            control = CoordinatorClient(config.coordinator)
            reported = (await control.status()).recent
            await control.close()
        await coordinator.stop()
    assert long.statistics.resumes >= 1
    assert len(long.ids) == 200
    assert long.ids[:20] == short.ids
    assert [report.committed_tokens for report in reported] == [20, 200]
    assert reported[1].resumes == long.statistics.resumes


async def test_a_key_has_room_again_after_texts_that_were_refused_left_or_failed(tokenizer_file, tmp_path) -> None:
    keys = write_keys(tmp_path / "keys.toml", Key("alice", secret_sha256("alices"), max_sessions=2))

    async with verifier() as address:
        coordinator = CoordinatorServer(coordinator_config(address, tokenizer_file, api_keys=keys))
        where = await coordinator.start()
        config = EdgeConfig(coordinator=where, cache=tmp_path, drafter="none", api_key="alices")
        async with Client(config) as client:
            for _ in range(3):
                with pytest.raises(PromptTooLong):
                    await client.complete([5] * 3000, max_tokens=4)
            for _ in range(3):
                async with client.conversation(max_tokens=40) as talk:
                    turn = talk.say(PROMPT)
                    await anext(turn)
                    await turn.aclose()
            for _ in range(3):
                left = client.generate(PROMPT, max_tokens=40)
                await anext(left)
                await left.aclose()
            assert len((await client.complete(PROMPT, max_tokens=4)).ids) == 4
        assert coordinator.service is not None
        assert coordinator.service.admission.running() == {}
        await coordinator.stop(0)


def test_a_text_whose_lease_ends_while_the_coordinator_is_away_goes_on(tokenizer_file, tmp_path) -> None:
    async def main() -> None:
        async with verifier_server(min_step_s=0.1) as (server, address):  # the text lasts for 20 s
            short = {"lease_seconds": 1.0, "poll_s": 0.1}
            first = CoordinatorServer(coordinator_config(address, tokenizer_file, **short))
            where = await first.start()
            async with Client(EdgeConfig(coordinator=where, cache=tmp_path, drafter="none")) as client:
                running = client.generate(PROMPT, max_tokens=200, ignore_eos=True)
                tokens = list((await anext(running)).ids)
                leased_s = time.monotonic()
                await first.stop(0)
                while time.monotonic() < leased_s + 1.5:
                    tokens += (await anext(running)).ids
                had = len(tokens)
                while len(tokens) < had + 5:  # nobody can renew the lease now
                    tokens += (await anext(running)).ids
                second = CoordinatorServer(coordinator_config(address, tokenizer_file, listen=where, poll_s=0.1))
                await second.start()
                assert second.service is not None
                granted, grant = asyncio.Event(), second.service.admission.grant
                second.service.admission.grant = lambda *given: (grant(*given), granted.set())  # type: ignore[method-assign]
                while not granted.is_set():
                    tokens += (await anext(running)).ids
                server.set_pace(0.0)
                async for event in running:
                    tokens += getattr(event, "ids", ())
                assert event.statistics.resumes >= 1
                assert (await client.complete(PROMPT, max_tokens=200, ignore_eos=True)).ids == tuple(tokens)
                await second.stop(0)

    asyncio.run(asyncio.wait_for(main(), 300))


async def test_running_texts_outlive_the_coordinator_and_new_ones_wait_for_the_next(tokenizer_file, tmp_path) -> None:
    async with verifier() as address:
        where = f"127.0.0.1:{free_port()}"
        first = CoordinatorServer(coordinator_config(address, tokenizer_file, listen=where))
        await first.start()
        async with Client(EdgeConfig(coordinator=where, cache=tmp_path, drafter="general")) as client:
            running = client.generate(PROMPT, max_tokens=120)
            tokens = list((await anext(running)).ids)
            await first.stop(0)
            async for event in running:
                tokens += getattr(event, "ids", ())
            assert len(tokens) == 120
            waiting = asyncio.create_task(client.complete(PROMPT, max_tokens=120))
            await asyncio.sleep(0.5)
            assert not waiting.done()
            second = CoordinatorServer(coordinator_config(address, tokenizer_file, listen=where))
            await second.start()
            assert (await waiting).ids == tuple(tokens)
            await second.stop(0)


def test_a_turn_left_while_its_lease_is_awaited_takes_no_place_and_no_seat(tokenizer_file, tmp_path) -> None:
    keys = write_keys(tmp_path / "keys.toml", Key("alice", secret_sha256("alices"), max_sessions=1))

    async def main() -> None:
        async with verifier() as address:
            coordinator = CoordinatorServer(coordinator_config(address, tokenizer_file, api_keys=keys))
            config = EdgeConfig(coordinator=await coordinator.start(), cache=tmp_path, drafter="none", api_key="alices")
            service = coordinator.service
            assert service is not None
            place, grant, settle = service._place, service.admission.grant, service.admission.settle
            placing, granted, settled = asyncio.Event(), asyncio.Event(), asyncio.Event()

            async def place_late(*request: Any) -> Any:
                placing.set()
                await settled.wait()
                return await place(*request)

            async with Client(config) as client:
                service._place = place_late  # type: ignore[method-assign]
                service.admission.grant = lambda *given: (grant(*given), granted.set())  # type: ignore[method-assign]
                service.admission.settle = lambda *given: (settle(*given), settled.set())  # type: ignore[method-assign]
                async with client.conversation(max_tokens=40) as talk:
                    turn = asyncio.create_task(talk.complete(PROMPT))
                    await placing.wait()
                    turn.cancel()
                    await asyncio.wait([turn])
                    await granted.wait()
                    while service.admission.running():  # noqa: ASYNC110 - what is asserted, as soon as it is so
                        await asyncio.sleep(0.01)
                    assert talk.transcript.tokens == ()
                    # Another session of the key finds its one place free while this conversation is still open.
                    assert len((await client.complete(PROMPT, max_tokens=4)).ids) == 4
            await coordinator.stop(0)

    asyncio.run(asyncio.wait_for(main(), 120))
