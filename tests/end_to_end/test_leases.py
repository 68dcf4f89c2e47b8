"""Edge, coordinator and verifier together: leases that expire, a coordinator that dies, reports that arrive."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from fleets import fleet, until

from outrider.coordinator.coordinator_server import CoordinatorServer
from outrider.edge.link.control_client import CoordinatorClient
from outrider.proto.errors import PromptTooLong
from outrider.proto.plumbing.access import Key, secret_sha256
from outrider.proto.testing import write_keys

PROMPT = "def main(argv):\n"


async def test_a_text_outlives_its_lease(tmp_path) -> None:
    async with fleet("verifier", verifier={"min_step_s": 0.01}, lease_seconds=0.7, poll_s=0.1) as found:
        async with found.client(tmp_path) as client:
            short = await client.complete(PROMPT, max_tokens=20)
            long = await client.complete(PROMPT, max_tokens=200)
        control = CoordinatorClient(found.address)
        reported = (await control.status()).recent
        await control.close()
    assert long.statistics.resumes >= 1
    assert len(long.ids) == 200
    assert long.ids[:20] == short.ids
    assert [report.committed_tokens for report in reported] == [20, 200]
    assert reported[1].resumes == long.statistics.resumes


async def test_a_key_has_room_again_after_texts_that_were_refused_left_or_failed(tmp_path) -> None:
    keys = write_keys(tmp_path / "keys.toml", Key("alice", secret_sha256("alices"), max_sessions=2))

    async with fleet("verifier", api_keys=keys) as found:
        async with found.client(tmp_path, api_key="alices") as client:
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
        assert found.coordinator.service is not None
        assert found.coordinator.service.admission.running() == {}


async def test_a_text_whose_lease_ends_without_a_coordinator_goes_on_and_new_ones_wait(tmp_path) -> None:
    slow = {"min_step_s": 0.05}  # the text would last for half a minute
    async with (
        fleet("verifier", verifier=slow, lease_seconds=1.0, poll_s=0.1) as found,
        found.client(tmp_path) as client,
    ):
        running = client.generate(PROMPT, max_tokens=600, ignore_eos=True)
        tokens = list((await anext(running)).ids)

        async def take(number: int) -> None:
            had = len(tokens)
            while len(tokens) < had + number:
                tokens.extend((await anext(running)).ids)

        leased_s = time.monotonic()
        await found.coordinator.stop(0)
        while time.monotonic() < leased_s + 1.5:
            await take(1)
        waiting = asyncio.create_task(client.complete(PROMPT, max_tokens=4, ignore_eos=True))
        await take(5)  # nobody can renew the lease now
        assert not waiting.done()
        second = CoordinatorServer(replace(found.config, listen=found.address, lease_seconds=600.0))
        await second.start()
        assert second.service is not None
        granted, grant = asyncio.Event(), second.service.admission.grant
        second.service.admission.grant = lambda *given: (grant(*given), granted.set())  # type: ignore[method-assign]
        while not granted.is_set():
            await take(1)
        await take(5)  # on the stream of the new lease
        assert (await waiting).ids == tuple(tokens[:4])
        await running.aclose()
        found.verifiers["verifier"].set_pace(0.0)
        whole = await client.complete(PROMPT, max_tokens=len(tokens), ignore_eos=True)
        assert whole.ids == tuple(tokens)
        await second.stop(0)


async def test_a_turn_left_while_its_lease_is_awaited_takes_no_slot_and_no_seat(tmp_path) -> None:
    keys = write_keys(tmp_path / "keys.toml", Key("alice", secret_sha256("alices"), max_sessions=1))

    async with fleet("verifier", api_keys=keys) as found, found.client(tmp_path, api_key="alices") as client:
        service = found.coordinator.service
        assert service is not None
        place, grant, settle = service._place, service.admission.grant, service.admission.settle
        placing, granted, settled = asyncio.Event(), asyncio.Event(), asyncio.Event()

        async def place_late(*request: Any) -> Any:
            placing.set()
            await settled.wait()
            return await place(*request)

        service._place = place_late  # type: ignore[method-assign]
        service.admission.grant = lambda *given: (grant(*given), granted.set())  # type: ignore[method-assign]
        service.admission.settle = lambda *given: (settle(*given), settled.set())  # type: ignore[method-assign]
        async with client.conversation(max_tokens=40) as talk:
            turn = asyncio.create_task(talk.complete(PROMPT))
            await placing.wait()
            turn.cancel()
            await asyncio.wait([turn])
            await granted.wait()
            await until(lambda: not service.admission.running())
            assert talk.transcript.tokens == ()
            # Another session of the key finds its one slot free while this conversation is still open.
            assert len((await client.complete(PROMPT, max_tokens=4)).ids) == 4
