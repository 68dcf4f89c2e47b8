"""A text that is left while it waits or while its stream closes leaves no task behind, and no drafter's state."""

from __future__ import annotations

import asyncio
import gc
from contextlib import aclosing
from typing import Any

import pytest
from scripted_cloud import ScriptedChannels, ScriptedStream, scripted_client

from outrider.edge.pool.drafter_states import DrafterStates
from outrider.proto.types import CommittedToken


class SlowToClose(ScriptedChannels):
    """A verifier whose streams close after a while, as those do that send what is still waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.closing = asyncio.Event()

    async def close_stream(self, stream: ScriptedStream) -> None:
        self.closing.set()
        await asyncio.sleep(0.2)


async def tasks_left_by(tokenizer_file, monkeypatch, leave_when: str) -> tuple[set[str], list[str], int]:
    """Leave a text; return the tasks that still run, what the loop complained about, and the states closed."""
    complaints: list[str] = []
    closed = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: complaints.append(context["message"]))
    monkeypatch.setattr(DrafterStates, "close", lambda *_: closed.append(1))
    client, _ = scripted_client(tokenizer_file)
    channels: Any = SlowToClose()
    client._channels = channels
    channels.script = lambda _: [CommittedToken(10)] * 9
    began = asyncio.Event()
    before = asyncio.all_tasks()

    async def decode() -> None:
        async with aclosing(client.generate("a prompt", max_tokens=8)) as events:
            async for _ in events:
                began.set()
                if leave_when == "closing":
                    break

    text = asyncio.create_task(decode())
    await (channels.closing if leave_when == "closing" else began).wait()
    text.cancel()
    await asyncio.gather(text, return_exceptions=True)
    await loop.run_in_executor(client._thread, lambda: None)
    await client.close()
    left = {str(task.get_coro()) for task in asyncio.all_tasks() - before - {text}}
    gc.collect()
    return left, complaints, len(closed)


@pytest.mark.parametrize("leave_when", ["waiting", "closing"])
def test_a_text_that_is_left_leaves_no_task_and_no_state(tokenizer_file, monkeypatch, leave_when) -> None:
    left, complaints, closed = asyncio.run(tasks_left_by(tokenizer_file, monkeypatch, leave_when))
    assert left == set()
    assert complaints == []
    assert closed == 1
