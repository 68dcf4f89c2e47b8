"""A child process that is asked in JSON, a line each way, and that ends with its standard input."""

from __future__ import annotations

import asyncio
import json
import os
import sys
from collections.abc import Awaitable, Callable, Mapping
from typing import Any

from outrider.proto.errors import Unavailable

MAX_LINE_BYTES = 16 << 20


class Child:
    """A process of `python -m module`, started by exec since nothing may fork once gRPC is up.

    Args:
        module: module to run.
        name: name in errors, such as `the link`.
        end_within_s: seconds after its standard input is closed until it is killed.
        environment: variables beside this process's own.
    """

    def __init__(
        self, module: str, name: str, end_within_s: float, environment: Mapping[str, str] | None = None
    ) -> None:
        self.process: asyncio.subprocess.Process | None = None
        self._module = module
        self._name = name
        self._end_within_s = end_within_s
        self._environment = os.environ | (environment or {})
        self._exchanging = asyncio.Lock()

    async def start(self, greet: Callable[[], Awaitable[None]]) -> None:
        """Start the process and make it ready by `greet`; end it if that fails. Its errors go to standard error."""
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=self._environment,
            limit=MAX_LINE_BYTES,
        )
        try:
            await greet()
        except BaseException:
            await self.end()
            raise

    async def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        """Send a request and return the answer.

        Raises:
            Unavailable: it is not running, or dies.
        """
        # Shielded: an answer that nobody has read would be taken for the answer to the next request.
        return await asyncio.shield(self._exchange(request))

    async def _exchange(self, request: dict[str, Any]) -> dict[str, Any]:
        process = self.process
        if process is None or process.stdin is None or process.stdout is None:
            raise Unavailable(f"{self._name} is not running; use it inside `async with`")
        async with self._exchanging:
            try:
                process.stdin.write(json.dumps(request).encode() + b"\n")
                await process.stdin.drain()
                line = await process.stdout.readline()
            except ConnectionError:
                line = b""
        if not line:
            raise Unavailable(f"the process of {self._name} has died")
        answer: dict[str, Any] = json.loads(line)
        return answer

    async def end(self) -> None:
        """Close its standard input and wait; kill it if it does not end in time."""
        process, self.process = self.process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), self._end_within_s)
        except TimeoutError:
            process.kill()
            await process.wait()


async def requests() -> asyncio.StreamReader:
    """Return the standard input of the child that calls this, to be read line by line."""
    lines = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    return lines
