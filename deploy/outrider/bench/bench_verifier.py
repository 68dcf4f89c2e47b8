"""A verifier in a process of its own, for the benchmark: `python -m outrider.bench.bench_verifier`.

The first request has the pickled settings; each further one asks for the times of the steps since the last one.
"""

from __future__ import annotations

import asyncio
import base64
import pickle
from dataclasses import astuple
from pathlib import Path
from typing import Any

from outrider.cloud.serving.steps import StepTiming
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.process.child import Child, answer_requests
from outrider.deploy.process.progress import waiting


class VerifierProcess(Child):
    """A verifier in a child process, as an async context manager.

    Attributes:
        address: where the verifier serves.
        precision: what decides the rounding of its target, known once it serves.
        tokenizer: file of the target's tokenizer.
    """

    def __init__(self, config: VerifierConfig, tokenizer: Path) -> None:
        super().__init__(__name__, "the verifier")
        self.address = self.precision = ""
        self.tokenizer = tokenizer
        self._config = config

    async def prepare(self) -> None:
        config = base64.b64encode(pickle.dumps(self._config)).decode()
        with waiting(f"loading the target {self._config.target}"):
            served = await self.ask({"config": config, "tokenizer": str(self.tokenizer)})
        self.address, self.precision = served["address"], served["precision"]

    async def step_timings(self) -> list[StepTiming]:
        return [StepTiming(*values) for values in await self.ask({})]


async def _serve() -> None:
    server: VerifierServer | None = None

    async def answer(request: dict[str, Any]) -> Any:
        nonlocal server
        if server is not None:
            return [astuple(step) for step in server.take_step_timings()]
        new = VerifierServer(pickle.loads(base64.b64decode(request["config"])))  # noqa: S301 - from the parent alone
        await asyncio.to_thread(Path(request["tokenizer"]).write_text, new.tokenizer_json, "utf-8")
        address = await new.start()
        server = new
        return {"address": address, "precision": new.rules.precision}

    await answer_requests(answer)
    if server is not None:
        await server.stop()


if __name__ == "__main__":
    asyncio.run(_serve())
