"""A benchmark's verifier in the process of the test."""

from __future__ import annotations

from pathlib import Path
from types import TracebackType
from typing import Self

from outrider.cloud.serving.steps import StepTiming
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig


class NearVerifier:
    """A `VerifierProcess` without its process, which takes seconds to start."""

    def __init__(self, config: VerifierConfig, tokenizer: Path) -> None:
        self.address = ""
        self.tokenizer = tokenizer
        self._server = VerifierServer(config)
        self.precision = self._server.rules.precision

    async def __aenter__(self) -> Self:
        self.tokenizer.write_text(self._server.tokenizer_json, encoding="utf-8")
        self.address = await self._server.start()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._server.stop(0)

    async def step_timings(self) -> list[StepTiming]:
        return list(self._server.take_step_timings())
