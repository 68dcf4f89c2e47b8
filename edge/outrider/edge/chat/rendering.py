"""Rendering of a chat template in a process of its own."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from outrider.edge.chat.template import FIELD, TemplateSource
from outrider.edge.chat.template_process import LENGTH
from outrider.proto.errors import InvalidArgument

CPU_S = 2.0  # for one chat
ANSWER_WITHIN_S = 60.0  # whatever else the machine does
MAX_ANSWER_BYTES = 64 << 20  # a prompt's characters, each as JSON writes it


class TemplateProcess:
    """A chat template, and the process that renders it, chat after chat.

    The process is started by exec, since nothing may fork once gRPC is up, and stays; where a chat has cost the process
    its life, the next one starts another.

    Args:
        source: the template.
    """

    def __init__(self, source: TemplateSource) -> None:
        self.source = source
        self._process: asyncio.subprocess.Process | None = None
        self._exchanging = asyncio.Lock()

    @classmethod
    async def of(cls, text: str) -> TemplateProcess | None:
        """Start the process of the template in a file's `text`, if there is one; a bad one is an `InvalidArgument`."""
        source = TemplateSource.of(text)
        if source is None:
            return None
        rendering = cls(source)
        try:
            async with rendering._exchanging:
                await rendering._start()
        except BaseException:
            await rendering.close()
            raise
        return rendering

    async def render(self, messages: Sequence[Mapping[str, Any]], /, **variables: Any) -> str:
        """Return the prompt; see `ChatTemplate.render`.

        Raises:
            InvalidArgument: the template refuses these messages, fails, or needs too much time or memory for them.
        """
        # Shielded: an answer that nobody has read would be taken for the answer to the next chat.
        return await asyncio.shield(self._render({"messages": messages, "variables": variables}))

    async def close(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(process.pid, signal.SIGKILL)  # `process.kill` would take the status of one that has ended
            await process.wait()

    async def _render(self, request: dict[str, Any]) -> str:
        async with self._exchanging:
            if self._process is None:
                await self._start()
            return await self._ask(request)

    async def _start(self) -> None:
        environment = {name: value for name, value in os.environ.items() if not name.startswith("OUTRIDER_")}
        self._process = await asyncio.create_subprocess_exec(
            sys.executable,
            *("-m", "outrider.edge.chat.template_process"),
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            env=environment,  # without API keys
            start_new_session=True,  # a terminal's Ctrl-C is for the daemon, whose end is this process's
        )
        await self._ask({"template": asdict(self.source)})

    async def _ask(self, request: dict[str, Any]) -> str:
        process = self._process
        assert process is not None  # noqa: S101 - the callers see to it
        assert process.stdin is not None  # noqa: S101 - it has pipes
        assert process.stdout is not None  # noqa: S101
        data = json.dumps(request | {"cpu_s": CPU_S}).encode()
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                process.stdin.write(LENGTH.pack(len(data)) + data)
                await process.stdin.drain()
                (length,) = LENGTH.unpack(await process.stdout.readexactly(LENGTH.size))
                if length > MAX_ANSWER_BYTES:
                    raise ConnectionError
                answer: dict[str, str] = json.loads(await process.stdout.readexactly(length))
        except (OSError, EOFError, TimeoutError) as error:  # it died, or does not answer
            await self.close()
            raise InvalidArgument(_why(process.returncode), field=FIELD) from error
        except BaseException:
            await self.close()
            raise
        if "refused" in answer:
            raise InvalidArgument(answer["refused"], field=FIELD)
        return answer["prompt"]


def _why(status: int | None) -> str:
    if status == -signal.SIGPROF:
        return f"was stopped, since it took more than {CPU_S:g} s of the processor; use a simpler template"
    return f"was stopped, since the process that renders it ended with status {status}"
