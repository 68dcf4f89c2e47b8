"""The command `outrider chat`: the main thread reads lines and prints; another decodes, and keeps the session alive."""

from __future__ import annotations

import asyncio
import contextlib
import signal
import sys
import termios
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator
from typing import Any, TypeVar

from rich.console import Console

from outrider.deploy.arguments import Given
from outrider.deploy.chat.chat_lines import PipedLines, TypedLines, history_file, read_message
from outrider.deploy.chat.slash import WORDS, SlashCommands
from outrider.deploy.chat.turns import ChatTurns
from outrider.deploy.commands.edge_options import MarkSettings, StopSettings, TalkSettings
from outrider.deploy.credentials import api_key
from outrider.deploy.process.end_watch import WATCH
from outrider.deploy.show import LiveText, marks_of
from outrider.edge import Client, EdgeConfig, Event, Finished, Sampling
from outrider.proto.errors import ConfigError, OutriderError

T = TypeVar("T")


def chat(given: Given) -> int:
    """Run `outrider chat`; from a pipe, the first message that cannot be answered ends it with 1."""
    settings, marking = given(TalkSettings), given(MarkSettings)
    console, notes = Console(highlight=False), Console(highlight=False, stderr=True)
    typed = sys.stdin.isatty()
    with LoopBeside() as loop:
        client = loop.run(_client(given))
        try:
            turns = loop.run(ChatTurns.open(client, settings.system, given(Sampling), given(StopSettings).stop))
            try:
                live = LiveText(console, notes, marks_of(console, marking))
                commands = SlashCommands(turns, live, notes)
                if typed:
                    _greet(given, client, commands)
                    _typed(TypedLines(None if settings.no_history else history_file(), WORDS), commands, loop)
                else:
                    _piped(commands, loop)
            finally:
                loop.run(turns.close())
        finally:
            loop.run(client.close())
    return 0


class LoopBeside:
    """An event loop in a thread beside the main one; a context manager."""

    def __init__(self) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-chat", daemon=True)

    def __enter__(self) -> LoopBeside:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, T]) -> T:
        """Return the result of a coroutine; Ctrl-C cancels it."""
        working = asyncio.run_coroutine_threadsafe(work, self._loop)
        try:
            return working.result()
        except KeyboardInterrupt:
            working.cancel()
            raise

    def each(self, events: AsyncGenerator[Event]) -> Generator[Event]:
        """Yield the events; leaving early closes their source."""
        taking: list[asyncio.Task[Any]] = []  # kept by the loop: Ctrl-C may come before this thread has its future
        try:
            while (event := asyncio.run_coroutine_threadsafe(_next(events, taking), self._loop).result()) is not None:
                yield event
        finally:
            self.run(_closed(events, taking))


async def _next(events: AsyncGenerator[Event], taking: list[asyncio.Task[Any]]) -> Event | None:
    task = asyncio.current_task()
    assert task is not None  # noqa: S101 - this is one
    taking[:] = [task]
    return await anext(events, None)


async def _closed(events: AsyncGenerator[Event], taking: list[asyncio.Task[Any]]) -> None:
    for task in taking:
        task.cancel()
        await asyncio.wait([task])
    await events.aclose()


async def _client(given: Given) -> Client:
    return Client(given(EdgeConfig, api_key=api_key(given)))


def _greet(given: Given, client: Client, commands: SlashCommands) -> None:
    config, ready = given.fields(EdgeConfig), client.ready
    model = ready.model if ready else ""
    commands.say(
        f"{model} at {config['coordinator'] or config['verifier']}, drafter {client.drafter_name}; "
        "/help lists commands, Ctrl-C stops an answer, Ctrl-D ends the chat"
    )
    if commands.live.legend:
        commands.notes.print(commands.live.legend, style="dim", highlight=False)


def _typed(lines: TypedLines, commands: SlashCommands, loop: LoopBeside) -> None:
    """Chat with a person: an answer that fails, or is stopped, does not end it."""
    _keep_ctrl_c()
    while not commands.ended:
        drafts, commands.replaces, commands.draft = iter([commands.draft]), bool(commands.draft), ""
        try:
            message = read_message(lambda prompt: lines.line_after(prompt, next(drafts, "")))  # noqa: B023
            message.encode()
        except EOFError:
            commands.notes.print()
            return
        except UnicodeError:
            commands.say("that is not UTF-8")
            continue
        except KeyboardInterrupt:
            _unless_asked_to_end()
            commands.notes.print()
            continue
        try:
            _take(message, commands, loop)
        except OutriderError as error:
            commands.say(f"no answer: {error}")
        except KeyboardInterrupt:
            _unless_asked_to_end()
            commands.say("(stopped)")


def _unless_asked_to_end() -> None:
    if WATCH.number:
        raise KeyboardInterrupt


def _piped(commands: SlashCommands, loop: LoopBeside) -> None:
    """Answer each message of a pipe."""
    lines = PipedLines()
    with contextlib.suppress(EOFError):
        while not commands.ended:
            try:
                message = read_message(lines.line_after)
            except UnicodeDecodeError as error:
                raise ConfigError("cannot read standard input: it is not UTF-8") from error
            _take(message, commands, loop)


def _take(message: str, commands: SlashCommands, loop: LoopBeside) -> None:
    if message.startswith("/") and not message.startswith("//"):
        message = commands.run(message)
    elif message.strip():
        commands.retries = 0
        message = message.removeprefix("/") if message.startswith("//") else message
        if commands.replaces:
            commands.chat.take_back()
    if message.strip():
        _answer(message, commands, loop)


def _answer(message: str, commands: SlashCommands, loop: LoopBeside) -> None:
    """Print an answer as it comes, and a line of statistics."""
    finished = False
    try:
        with contextlib.closing(loop.each(commands.chat.say(message, seed_offset=commands.retries))) as events:
            for event in events:
                commands.live.show(event)
                if isinstance(event, Finished):
                    finished = True
                    commands.totals.add(event)
                    commands.say(f"({_statistics(event, commands.chat.continued)})")
    finally:
        if not finished:
            commands.live.break_line()


def _statistics(event: Finished, continued: int) -> str:
    s = event.statistics
    tokens = max(1, s.committed)
    parts = [
        f"{s.committed} tokens, {s.committed / max(event.seconds, 1e-9):.1f}/s",
        f"first after {event.first_token_s * 1e3:.0f} ms",
        f"{s.accepted} drafts, {s.steps / tokens:.2f} steps a token",
    ]
    parts += [f"{continued} tokens kept"] if continued else []
    parts += [f"drafter failed: {s.drafter_error}"] if s.drafter_error else []
    parts += [event.reason.name.lower()] if event.reason.name not in ("EOS", "STOP") else []
    return "; ".join(parts)


def _keep_ctrl_c() -> None:
    """Have Ctrl-C interrupt what the chat does, and not end it; a terminal is left as it was."""
    terminal = sys.stdin.fileno()
    before = termios.tcgetattr(terminal)
    WATCH.at_end(lambda: termios.tcsetattr(terminal, termios.TCSANOW, before))
    WATCH.leave_alone(signal.SIGINT)
