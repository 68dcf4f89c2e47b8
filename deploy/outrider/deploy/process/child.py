"""Child processes that are asked in JSON, a line each way, and that end with their standard input.

A request is an object; the answer is `{"ok": …}`, or `{"error": MESSAGE, "field": NAME, "kind": ERROR}`.
"""

from __future__ import annotations

import asyncio
import json
import sys
from abc import ABC, abstractmethod
from collections.abc import Awaitable, Callable, Mapping
from typing import Any, Self

from outrider.proto import errors
from outrider.proto.errors import OutriderError, Unavailable

MAX_LINE_BYTES = 16 << 20
END_WITHIN_S = 10.0  # after standard input is closed; then the process is killed


class Child(ABC):
    """A process of `python -m module`, as an async context manager; its errors go to standard error.

    It is started by exec, since nothing may fork once gRPC is up.

    Args:
        module: module to run.
        name: name in errors, such as `the link`.
    """

    def __init__(self, module: str, name: str) -> None:
        self.process: asyncio.subprocess.Process | None = None
        self._module = module
        self._name = name
        self._exchanging = asyncio.Lock()

    @abstractmethod
    async def prepare(self) -> None:
        """Make the new process ready by its first requests."""

    async def __aenter__(self) -> Self:
        self.process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            self._module,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=MAX_LINE_BYTES,
            start_new_session=True,  # a terminal's Ctrl-C is for this process, whose end is the child's
        )
        try:
            await self.prepare()
        except BaseException:
            await self.__aexit__()
            raise
        return self

    async def __aexit__(self, *_error: object) -> None:
        process, self.process = self.process, None
        if process is None or process.stdin is None:
            return
        process.stdin.close()
        try:
            await asyncio.wait_for(process.wait(), END_WITHIN_S)
        except TimeoutError:
            process.kill()
            await process.wait()

    async def ask(self, request: Mapping[str, Any]) -> Any:
        """Send a request and return the answer; raises `Unavailable` or `OutriderError`."""
        # Shielded: an answer that nobody has read would be taken for the answer to the next request.
        answer = await asyncio.shield(self._exchange(request))
        if "error" in answer:
            raise getattr(errors, answer["kind"], Unavailable)(answer["error"], field=answer["field"])
        return answer["ok"]

    async def _exchange(self, request: Mapping[str, Any]) -> dict[str, Any]:
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


async def answer_requests(answer: Callable[[dict[str, Any]], Awaitable[Any]]) -> None:
    """Answer the parent of this process by the results of `answer`, until standard input ends."""
    lines = asyncio.StreamReader(limit=MAX_LINE_BYTES)
    await asyncio.get_running_loop().connect_read_pipe(lambda: asyncio.StreamReaderProtocol(lines), sys.stdin)
    while line := await lines.readline():
        try:
            answered = {"ok": await answer(json.loads(line))}
        except OutriderError as error:
            answered = {"error": error.message, "field": error.field, "kind": type(error).__name__}
        sys.stdout.write(json.dumps(answered) + "\n")
        sys.stdout.flush()
