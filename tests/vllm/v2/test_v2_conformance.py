"""vLLM's Model Runner V2 behind the port passes the conformance suite."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from conformance import CHECKS, Suite
from conformance_oracle import Oracle

from outrider.cloud.verifier_config import VerifierConfig
from outrider.cloud.vllm.loading import load_vllm_backend
from outrider.cloud.vllm.vllm_backend import VllmBackend


@pytest.fixture(scope="module")
def backend(folder: Path) -> Iterator[VllmBackend]:
    backend = load_vllm_backend(
        VerifierConfig(target=str(folder), engine="vllm", dtype="float32", kv_tokens=2048, max_sessions=16)
    )
    yield backend
    backend.close()


def runner_of(backend: VllmBackend) -> Any:
    return backend._core._executor.driver_worker.worker.model_runner  # type: ignore[attr-defined]


def test_it_is_the_v2_runner(backend: VllmBackend) -> None:
    assert any(kind.__module__ == "vllm.v1.worker.gpu.model_runner" for kind in type(runner_of(backend)).__mro__)


@pytest.mark.parametrize("check", CHECKS)
def test_vllms_v2_conforms(check: str, backend: VllmBackend, oracle: Oracle, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail_next_step() -> None:
        model = runner_of(backend).model
        forward = model.forward

        def failing(*_: Any, **__: Any) -> Any:
            monkeypatch.setattr(model, "forward", forward)
            raise RuntimeError("it happens once")

        monkeypatch.setattr(model, "forward", failing)

    CHECKS[check](Suite(backend, oracle, fail_next_step))
