"""A verifier in a process of its own, for the benchmark: `python -m outrider.bench.benchmark.verifier`.

The first line of standard input is a JSON object ({"config": …, "tokenizer": FILE}), its config a pickle of the
parent's settings; the answer is the address. Each further line asks for the times of the steps since the last one. The
process ends with its standard input.
"""

from __future__ import annotations

import asyncio
import base64
import json
import pickle
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from outrider.cloud.config import VerifierConfig
from outrider.cloud.server import VerifierServer
from outrider.cloud.step_timing import StepTiming
from outrider.deploy.child import Child, requests
from outrider.proto.errors import ConfigError, OutriderError

_END_WITHIN_S = 10.0


class VerifierProcess:
    """A verifier in a child process, as an async context manager.

    Attributes:
        address: where the verifier serves.
        tokenizer: file of the target's tokenizer.
    """

    def __init__(self, config: VerifierConfig, tokenizer: Path) -> None:
        self.address = ""
        self.tokenizer = tokenizer
        self._config = config
        self._child = Child(__name__, "the verifier", _END_WITHIN_S)

    async def __aenter__(self) -> Self:
        await self._child.start(self._serve)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._child.end()

    async def _serve(self) -> None:
        config = base64.b64encode(pickle.dumps(self._config)).decode()
        answer = await self._ask({"config": config, "tokenizer": str(self.tokenizer)})
        self.address = answer["address"]

    async def step_timings(self) -> list[StepTiming]:
        """Return the times of the steps since the last call."""
        return [StepTiming(*values) for values in (await self._ask({}))["steps"]]

    async def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        answer = await self._child.ask(question)
        if "error" in answer:
            raise ConfigError(answer["error"], field=answer["field"])
        return answer


async def _serve() -> None:
    lines = await requests()
    request = json.loads(await lines.readline())
    try:
        config = pickle.loads(base64.b64decode(request["config"]))  # noqa: S301 - from the parent process alone
        server = VerifierServer(config)
        _write(request["tokenizer"], server.tokenizer_json)
        _say({"address": await server.start()})
    except OutriderError as error:
        _say({"error": error.message, "field": error.field})
        return
    while await lines.readline():
        _say({"steps": [tuple(asdict(step).values()) for step in server.take_step_timings()]})
    await server.stop()


def _write(path: str, text: str) -> None:
    Path(path).write_text(text, encoding="utf-8")


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve())
