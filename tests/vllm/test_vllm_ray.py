"""A verifier on vLLM as a Ray actor: it serves by gRPC, and Ray starts it again when one of its workers dies."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from typing import Any

import pytest
from command_processes import free_port

from outrider.cloud.models.family_index import target_folder, tokenizer_file
from outrider.cloud.serving.verifier_actor import start_verifier_actor
from outrider.cloud.verifier_config import VerifierConfig
from outrider.edge import Client, EdgeConfig
from outrider.proto.session import RetryRules

ray = pytest.importorskip("ray", reason="needs Ray: pip install --requirement constraints-vllm.txt")
TOKENIZER = tokenizer_file(target_folder("reference"))


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=80 << 20)
    yield
    ray.shutdown()


async def text_at(address: str) -> tuple[tuple[int, ...], int]:
    """The text, and how often its stream was lost."""
    config = EdgeConfig(
        verifier=address,
        model="reference",
        tokenizer=TOKENIZER,
        drafter="ngram",
        threads=1,
        retry=RetryRules(0.05, 0.5, 180.0),
    )
    async with Client(config) as client:
        done = await client.complete("Once upon a time", max_tokens=24, temperature=1.0, seed=5)
        return done.ids, done.statistics.resumes


def test_an_actor_serves_and_ray_starts_it_again_when_a_worker_is_killed() -> None:
    settings = {"dtype": "float32", "threads": 1, "kv_tokens": 2048, "context_length": 512}
    own = start_verifier_actor("own", VerifierConfig(**settings), ray_options={"num_cpus": 0})
    expected = asyncio.run(text_at(ray.get(own.info.remote())["address"]))
    config = VerifierConfig(listen=f"127.0.0.1:{free_port()}", engine="vllm", tensor_parallel=2, **settings)
    actor = start_verifier_actor("parallel", config, ray_options={"num_cpus": 0})
    before = ray.get(actor.info.remote())
    assert asyncio.run(text_at(before["address"])) == expected == (expected[0], 0)

    def worker_pids(served: Any) -> list[int]:
        return [worker.proc.pid for worker in served._server._engine.backend._core._executor.workers]

    workers = ray.get(actor.__ray_call__.remote(worker_pids))
    assert len(workers) == 2
    os.kill(workers[1], signal.SIGKILL)
    text, resumes = asyncio.run(text_at(before["address"]))
    assert text == expected[0]
    assert resumes > 0
    assert ray.get(actor.info.remote())["incarnation"] != before["incarnation"]
