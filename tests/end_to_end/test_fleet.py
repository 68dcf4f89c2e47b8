"""A fleet in one local Ray is scaled, loses a machine, and is drained; texts go on through all of it unchanged."""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path

import pytest

from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.cli import main, parse
from outrider.deploy.local.fleet import scale
from outrider.deploy.local.local_cluster import local_cluster
from outrider.edge import Client, EdgeConfig, Sampling
from outrider.edge.link.control_client import CoordinatorClient
from outrider.proto.cluster_status import ClusterStatus, VerifierStatus

pytestmark = [pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(500)]

PROMPT = "def main(argv):\n"
SAMPLED = Sampling(max_tokens=160, temperature=1.0, seed=5, ignore_eos=True)


async def scale_to(count: int) -> None:
    assert await asyncio.to_thread(scale, parse(["scale", str(count)])) == 0


async def until(control: CoordinatorClient, holds: Callable[[ClusterStatus], bool]) -> ClusterStatus:
    while not holds(seen := await control.status()):  # noqa: ASYNC110 - another process is waited for
        await asyncio.sleep(0.2)
    return seen


def by_name(status: ClusterStatus) -> dict[str, VerifierStatus]:
    return {verifier.name: verifier for verifier in status.verifiers}


async def decode_while(client: Client, happens: Callable[[], Awaitable[None]]) -> tuple[tuple[int, ...], int]:
    """The tokens of one text during which something happens, and how often it was resumed."""
    tokens: list[int] = []
    happening = None
    resumes = 0
    async for event in client.generate(PROMPT, SAMPLED):
        tokens += getattr(event, "ids", ())
        if happening is None and len(tokens) > 20:
            happening = asyncio.create_task(happens())
        if hasattr(event, "statistics"):
            resumes = event.statistics.resumes
    assert happening is not None
    await happening
    return tuple(tokens), resumes


async def terminate_the_busy_one(control: CoordinatorClient) -> str:
    """SIGTERM to the process of the verifier that has a session; its name."""
    import ray

    from outrider.cloud.serving.verifier_actor import ACTOR_PREFIX, NAMESPACE

    seen = await until(control, lambda status: any(v.sessions for v in status.verifiers))
    name = next(v.name for v in seen.verifiers if v.sessions)
    actor = ray.get_actor(ACTOR_PREFIX + name, namespace=NAMESPACE)
    pid = await asyncio.to_thread(ray.get, actor.__ray_call__.remote(lambda _: os.getpid()))
    os.kill(pid, signal.SIGTERM)
    return name


def test_texts_go_on_while_the_fleet_grows_loses_a_process_and_shrinks(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    async def scenario() -> None:
        async with local_cluster(VerifierConfig(threads=1, min_step_s=0.02), verifiers=1) as cluster:
            control = CoordinatorClient(cluster.coordinator)
            config = EdgeConfig(coordinator=cluster.coordinator, cache=tmp_path, drafter="none", edge="test-edge")
            async with Client(config) as client:
                expected = (await client.complete(PROMPT, SAMPLED)).ids
                await scale_to(2)
                await until(control, lambda status: [v.state for v in status.verifiers] == ["ready", "ready"])

                terminated = []

                async def lose_a_process() -> None:
                    terminated.append(await terminate_the_busy_one(control))

                tokens, resumes = await decode_while(client, lose_a_process)
                assert (tokens, resumes) == (expected, 1), "it moved, once, and nothing was lost or said twice"
                back = await until(
                    control,
                    lambda status: (
                        by_name(status)[terminated[0]].restarts == 1
                        and all(v.state == "ready" for v in status.verifiers)
                    ),
                )
                assert len(back.verifiers) == 2

                tokens, _ = await decode_while(client, lambda: scale_to(1))
                assert tokens == expected
                left = await until(control, lambda status: len(status.verifiers) == 1)
                assert left.verifiers[0].state == "ready"
            await control.close()
            # A process of its own is what an operator has; here it is one thread.
            assert await asyncio.to_thread(main, ["status", "--coordinator", cluster.coordinator, "--json"]) == 0

    asyncio.run(asyncio.wait_for(scenario(), 450))
    shown = json.loads(capfd.readouterr().out.splitlines()[-1])
    assert shown["verifiers"][0]["max_sessions"] == VerifierConfig().max_sessions
    (edge,) = shown["edges"]
    assert (edge["edge"], edge["sessions"]) == ("test-edge", 3)
    assert edge["links"]["tokens_per_s"] > 0
