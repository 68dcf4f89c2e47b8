"""More texts than slots: order and shares of those that wait, through a daemon and a relay, and of those that run."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from fleets import Fleet, fleet, until

from outrider.coordinator.coordinator_server import CoordinatorServer
from outrider.edge import Client, EdgeConfig
from outrider.edge.daemon import DaemonConfig
from outrider.edge.daemon.http_server import Daemon
from outrider.proto.cluster_status import RelayStatus
from outrider.proto.plumbing.access import Key, secret_sha256
from outrider.proto.testing import write_keys
from outrider.proto.types import LeaseRequest

PROMPT = "def main(argv):\n"

Ask = Callable[[], Awaitable[Any]]


def one_verifier(slots: int, *, step_s: float = 0.02, **options: Any) -> Any:
    return fleet("a", verifier={"min_step_s": step_s, "max_sessions": slots}, poll_s=0.2, **options)


def waiting_line(waited_at: Fleet) -> Any:
    return waited_at.coordinator.service._view.queue  # type: ignore[union-attr]


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


@pytest.mark.parametrize(
    ("door", "slots", "options"),
    [(by_daemon, 1, {}), (by_client, 1, {"relay": True}), (by_daemon, 4, {"relay": True, "relay_streams": 1})],
    ids=["daemon", "relay", "daemon and slots of the relay"],
)
async def test_texts_that_wait_are_served_in_order_and_before_newcomers(
    door: Any, slots: int, options: Any, tmp_path: Path
) -> None:
    served: list[str] = []

    async def text(name: str, ask: Ask) -> None:
        await ask()
        served.append(name)

    async with one_verifier(slots, **options) as found, found.client(tmp_path) as client, door(client) as ask:
        running = client.generate(PROMPT, max_tokens=2000, ignore_eos=True)
        await anext(running)
        line, texts = waiting_line(found), []
        for number, name in enumerate(("first", "second"), 1):
            texts.append(asyncio.create_task(text(name, ask)))
            await until(lambda: len(line) == number)  # noqa: B023 - awaited here
        await running.aclose()
        await until(lambda: not found.verifiers["a"].status().sessions or served)
        await asyncio.gather(*texts, *(text("newcomer", ask) for _ in range(3)))
    assert served == ["first", "second", *["newcomer"] * 3]


@pytest.mark.parametrize(
    ("slots", "options"),
    [(2, {}), (2, {"relay": True}), (4, {"relay": True, "relay_streams": 2})],
    ids=["direct", "relay", "slots of the relay"],
)
async def test_a_key_with_many_waiting_texts_has_no_second_slot_while_another_waits(
    slots: int, options: Any, tmp_path: Path
) -> None:
    """The key `many` has both slots; the first that is free is that of the key `few`, whose text came last."""
    keys = write_keys(tmp_path / "keys.toml", *(Key(name, secret_sha256(name)) for name in ("many", "few")))
    served: list[str] = []

    async def text(client: Client, name: str) -> None:
        await client.complete(PROMPT, max_tokens=2)
        served.append(name)

    async with (
        one_verifier(slots, api_keys=keys, **options) as found,
        found.client(tmp_path, api_key="many", plaintext=True) as many,
        found.client(tmp_path, api_key="few", plaintext=True) as few,
    ):
        running = [many.generate(PROMPT, max_tokens=2000, ignore_eos=True) for _ in range(2)]
        for each in running:
            await anext(each)
        line = waiting_line(found)
        texts = [asyncio.create_task(text(many, "many")) for _ in range(5)]
        await until(lambda: len(line) == 5)
        texts.append(asyncio.create_task(text(few, "few")))
        await until(lambda: len(line) == 6)
        await running[0].aclose()
        await asyncio.gather(*texts)
        await running[1].aclose()
    assert served == ["few", *["many"] * 5]


async def test_a_text_whose_lease_ends_goes_on_before_those_that_wait(tmp_path: Path) -> None:
    """There is one slot; a text that is there sooner than the edge of the running one may have it meanwhile."""
    ended: list[str] = []

    async with one_verifier(1, step_s=0.05, lease_seconds=1.5) as found, found.client(tmp_path) as client:

        async def text(name: str, tokens: int) -> None:
            await client.complete(PROMPT, max_tokens=tokens, ignore_eos=True)
            ended.append(name)

        running = asyncio.create_task(text("running", 45))
        await until(lambda: found.coordinator.service.verifiers[0].sessions)  # type: ignore[union-attr]
        texts = [asyncio.create_task(text("waiting", 10)) for _ in range(6)]
        await until(lambda: len(waiting_line(found)) == 6)
        await asyncio.gather(running, *texts)
    assert ended[-1] == "waiting", "not all of them came before the text that was running"


# --- edges that can reach the coordinator only: texts through the relay are the same, also when verifiers die ---


def relayed(fleet: Fleet) -> RelayStatus:
    service = fleet.coordinator.service
    assert service is not None
    assert service.relay_metrics is not None
    return service.relay_metrics.status()


async def directly(relaying: Fleet, cache: Path) -> tuple[int, ...]:
    """The tokens of the text by the same verifiers, without the relay."""
    coordinator = CoordinatorServer(replace(relaying.config, relay=False))
    async with Client(EdgeConfig(coordinator=await coordinator.start(), cache=cache, drafter="none")) as client:
        tokens = (await client.complete(PROMPT, max_tokens=120)).ids
    await coordinator.stop(0)
    return tokens


async def test_a_relayed_text_equals_the_direct_one_also_when_its_verifier_dies(tmp_path: Path) -> None:
    async with (
        fleet("a", "b", relay=True, poll_s=0.2) as relaying,
        relaying.client(tmp_path, drafter="ngram") as client,
    ):
        wanted = await directly(relaying, tmp_path)
        service = relaying.coordinator.service
        assert service is not None
        lease = await service.open_lease(LeaseRequest(model="", session="s1", inquiry=True))
        assert (lease.relayed, lease.address) == (True, "")
        whole = await client.complete(PROMPT, max_tokens=120)
        assert whole.ids == wanted
        assert relayed(relaying).streams_total == 1
        moved = relayed(relaying).downlink_bytes
        assert 0 < moved < whole.statistics.downlink_bytes, "frames are counted without gRPC's prefix"

        texts = [asyncio.create_task(client.complete(PROMPT, max_tokens=120)) for _ in range(2)]
        while relayed(relaying).downlink_bytes < moved + 200:  # noqa: ASYNC110 - counted elsewhere
            await asyncio.sleep(0.005)
        busy = next(name for name, one in relaying.verifiers.items() if one.status().sessions)
        await relaying.verifiers[busy].stop(0)
        done = await asyncio.gather(*texts)
        assert [text.ids for text in done] == [wanted, wanted]
        assert sum(text.statistics.resumes for text in done) >= 1
        assert relayed(relaying).broken >= 1


async def test_cancelled_texts_free_their_sessions_behind_the_relay(tmp_path: Path) -> None:
    async with fleet("a", relay=True, poll_s=0.2) as relaying, relaying.client(tmp_path, drafter="ngram") as client:
        for _ in range(3):
            text = client.generate(PROMPT, max_tokens=500)
            await anext(text)
            await text.aclose()
        while relaying.verifiers["a"].status().sessions or relayed(relaying).streams:  # noqa: ASYNC110 - as above
            await asyncio.sleep(0.02)
        assert relayed(relaying).streams_total == 3
