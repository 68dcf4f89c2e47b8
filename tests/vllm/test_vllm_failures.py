"""Failures of vLLM, and pages that run out, cost no text a byte: it goes on, here or elsewhere."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import replace
from typing import Any

import pytest

from outrider.cloud.models.family_index import target_folder, tokenizer_file
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.coordinator.coordinator_config import CoordinatorConfig, StaticVerifier
from outrider.coordinator.coordinator_server import CoordinatorServer
from outrider.deploy.built_in_prompts import held_out
from outrider.edge import Client, EdgeConfig
from outrider.proto.session import RetryRules
from outrider.proto.types import Sampling

SECRET = b"a secret of the fleet"
TOKENIZER = tokenizer_file(target_folder("reference"))
PROMPTS = [prompt.text[:120] for prompt in held_out(2)]
SAMPLING = Sampling(temperature=1.0, seed=3, max_tokens=60, ignore_eos=True)
LONG = replace(SAMPLING, max_tokens=200)
QUICK = RetryRules(0.02, 0.2, 60.0)

Texts = list[tuple[int, ...]]


def config_of(name: str, **fields: Any) -> VerifierConfig:
    return VerifierConfig(
        **{"name": name, "model": "reference", "dtype": "float32", "threads": 1}
        | {"kv_tokens": 8192, "context_length": 512}
        | fields
    )


async def texts_of(client: Client, sampling: Sampling = SAMPLING) -> tuple[Texts, int]:
    """Text of each prompt, all at once, and how often a stream was lost."""
    found = await asyncio.gather(*(client.complete(prompt, sampling) for prompt in PROMPTS))
    return [each.ids for each in found], sum(each.statistics.resumes for each in found)


async def texts_at(server: VerifierServer, *samplings: Sampling) -> list[tuple[Texts, int]]:
    address = await server.start()
    config = EdgeConfig(
        verifier=address, model="reference", tokenizer=TOKENIZER, drafter="ngram", threads=1, retry=QUICK
    )
    try:
        async with Client(config) as client:
            return [await texts_of(client, each) for each in samplings]
    finally:
        await server.stop(0)


@pytest.fixture(scope="module")
def texts() -> tuple[Texts, Texts]:
    """Short and long texts of our own engine."""
    (short, _), (long, _) = asyncio.run(texts_at(VerifierServer(config_of("own")), SAMPLING, LONG))
    return short, long


def test_texts_go_on_where_pages_run_out(texts) -> None:
    """Ten pages for eight texts of up to nine each: the youngest are sent away and come again."""
    few = VerifierServer(config_of("few", engine="vllm", kv_tokens=320))
    [(found, resumes)] = asyncio.run(texts_at(few, LONG))
    assert found == texts[1]
    assert resumes > 0


@asynccontextmanager
async def fleet(broken: VerifierServer) -> AsyncIterator[str]:
    """The coordinator's address of `broken`, which is asked first, and of a sound verifier."""
    # A text goes on in its own precision alone; workers in other processes let two cores of vLLM share this one.
    sound = VerifierServer(config_of("sound", engine="vllm", tensor_parallel=2), SECRET)
    tokenizer = broken.tokenizer_json
    fixed = [StaticVerifier(name, await each.start(), "reference", tokenizer) for name, each in (("a", broken),)]
    fixed.append(StaticVerifier("sound", await sound.start(), "reference", tokenizer))
    coordinator = CoordinatorServer(
        CoordinatorConfig(lease_secret=SECRET, listen="127.0.0.1:0", verifiers=tuple(fixed))
    )
    try:
        yield await coordinator.start()
    finally:
        await coordinator.stop(0)
        await broken.stop(0)
        await sound.stop(0)


def break_steps(server: VerifierServer) -> None:
    def break_target(worker: Any) -> None:
        def broken(*_: Any, **__: Any) -> Any:
            raise RuntimeError("CUDA error: device-side assert triggered")

        worker.worker.model_runner._model_forward = broken

    server._engine.backend._core._executor.collective_rpc(break_target)  # type: ignore[attr-defined]


def kill_a_worker(server: VerifierServer) -> None:
    workers = server._engine.backend._core._executor.workers  # type: ignore[attr-defined]
    os.kill(workers[1].proc.pid, signal.SIGKILL)


@pytest.mark.parametrize(("tensor_parallel", "harm"), [(1, break_steps), (2, break_steps), (2, kill_a_worker)])
def test_texts_go_on_elsewhere_when_vllm_fails(tensor_parallel, harm, texts) -> None:
    """The process ends, as `on_failure` asks for, and placement leaves it."""
    failed: list[bool] = []

    async def main() -> tuple[Texts, int, str]:
        config = config_of("a", engine="vllm", tensor_parallel=tensor_parallel)
        broken = VerifierServer(config, SECRET, lambda: failed.append(True))
        async with fleet(broken) as address:
            edge = EdgeConfig(coordinator=address, model="reference", drafter="ngram", threads=1, retry=QUICK)
            async with Client(edge) as client:
                running = asyncio.create_task(texts_of(client))
                await until(lambda: broken._engine.step_s.value > 0)
                broken._engine.inbox.post(lambda: harm(broken))  # vLLM's workers are called from one thread
                found, resumes = await asyncio.wait_for(running, 120)
                await until(lambda: bool(failed))
                return found, resumes, broken.status().state

    found, resumes, state = asyncio.run(main())
    assert found == texts[0]
    assert resumes > 0
    assert (failed, state) == ([True], "down")


async def until(condition: Callable[[], bool]) -> None:
    for _ in range(3000):
        if condition():
            return
        await asyncio.sleep(0.01)
    raise AssertionError("it never came to that")
