"""A verifier in a process of its own, for the benchmark: `python -m outrider.deploy.bench.verifier`.

One JSON object comes on standard input ({"config": …, "tokenizer": FILE}); the address goes out on a line. Each
further line asks for the figures of the steps since the last one. It ends with its standard input.
"""

from __future__ import annotations

import asyncio
import json
import sys
from dataclasses import asdict
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from outrider.cloud.config import VerifierConfig
from outrider.cloud.engine import StepFigures
from outrider.cloud.server import VerifierServer
from outrider.proto.errors import ConfigError, OutriderError, Unavailable
from outrider.proto.types import Goal

_MOST_LINE_BYTES = 16 << 20
_END_WITHIN_S = 10.0


class VerifierProcess:
    """An async context manager; `address` is where it serves, `tokenizer` the target's tokenizer file."""

    def __init__(self, config: VerifierConfig, tokenizer: Path) -> None:
        self.address = ""
        self.tokenizer = tokenizer
        self._config = config
        self._process: asyncio.subprocess.Process | None = None

    async def __aenter__(self) -> Self:
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            __name__,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_MOST_LINE_BYTES,
        )
        values = asdict(self._config) | {"goal": self._config.goal.name}
        try:
            answer = await self._ask({"config": values, "tokenizer": str(self.tokenizer)})
            self.address = answer["address"]
        except BaseException:
            await self._end()
            raise
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self._end()

    async def step_figures(self) -> list[StepFigures]:
        """Of the steps since the last time that this was asked."""
        return [StepFigures(*values) for values in (await self._ask({}))["steps"]]

    async def _ask(self, question: dict[str, Any]) -> dict[str, Any]:
        process = self._process
        if process is None or process.stdin is None or process.stdout is None:
            raise Unavailable("the verifier is not running; use it inside `async with`")
        process.stdin.write(json.dumps(question).encode() + b"\n")
        await process.stdin.drain()
        line = await process.stdout.readline()
        if not line:
            raise Unavailable("the verifier's process has died")
        answer: dict[str, Any] = json.loads(line)
        if "error" in answer:
            raise ConfigError(answer["error"], field=answer["field"])
        return answer

    async def _end(self) -> None:
        process, self._process = self._process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), _END_WITHIN_S)
        except TimeoutError:
            process.kill()
            await process.wait()


async def _serve() -> None:
    lines = asyncio.StreamReader(limit=_MOST_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    request = json.loads(await lines.readline())
    try:
        values = request["config"]
        server = VerifierServer(VerifierConfig(**values | {"goal": Goal[values["goal"]]}))
        _write(request["tokenizer"], server.tokenizer_json)
        _say({"address": await server.start()})
    except OutriderError as error:
        _say({"error": error.message, "field": error.field})
        return
    while await lines.readline():
        _say({"steps": [tuple(asdict(step).values()) for step in server.take_step_figures()]})
    await server.stop()


def _write(path: str, text: str) -> None:
    Path(path).write_text(text, encoding="utf-8")


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    asyncio.run(_serve())
