"""vLLM behind the port passes the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conformance import CHECKS, Suite, Text

from outrider.cloud.verifier_config import VerifierConfig
from outrider.cloud.vllm.loading import load_vllm_backend
from outrider.cloud.vllm.vllm_backend import VllmBackend
from outrider.proto.types import Sampling


@pytest.fixture(scope="module", params=[1, 2], ids=["one process", "tensor parallel"])
def backend(folder: Path, request: pytest.FixtureRequest) -> Iterator[VllmBackend]:
    config = VerifierConfig(
        target=str(folder),
        dtype="float32",
        engine="vllm",
        kv_tokens=2048,
        max_sessions=16,
        tensor_parallel=request.param,
    )
    backend = load_vllm_backend(config)
    yield backend
    backend.close()


@pytest.mark.parametrize("check", CHECKS)
def test_vllm_conforms(check, backend, oracle) -> None:
    CHECKS[check](Suite(backend, oracle, lambda: fail_next_step(backend)))


def test_the_next_turn_finds_what_the_last_one_computed(backend, oracle) -> None:
    suite = Suite(backend, oracle)
    first = Text(suite, suite.prompt(70), Sampling(temperature=1.0, seed=4), isolation="turns")
    first.write(30)
    first.close()
    turn = (*first.transcript, 5, 6, 7)
    mine, theirs = (Text(suite, turn, Sampling(), isolation) for isolation in ("turns", "nobody"))
    assert (mine.sequence.length, theirs.sequence.length) == (96, 0)
    assert mine.write(8) == theirs.write(8)
    mine.close()
    theirs.close()


def test_a_text_fills_the_context(backend, oracle) -> None:
    """To the last position, with a block of drafts before it."""
    suite, context = Suite(backend, oracle), backend.facts.context_length
    text = Text(suite, suite.prompt(context - 12), Sampling(temperature=1.0, seed=3), isolation="long")
    while len(text.transcript) < context:
        text.advance(suite.drafts(text, min(4, context - len(text.transcript) - 1), good=0.5))
    assert len(text.transcript) == context
    text.close()


def fail_next_step(backend: VllmBackend) -> None:
    def fail_once(worker: Any) -> None:  # inside, so that it travels by value to workers in other processes
        runner = worker.worker.model_runner
        forward = runner._model_forward

        def failing(*_: Any, **__: Any) -> Any:
            runner._model_forward = forward
            raise RuntimeError("it happens once")

        runner._model_forward = failing

    backend._core._executor.collective_rpc(fail_once)
