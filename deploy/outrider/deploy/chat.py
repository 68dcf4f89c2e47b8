"""`outrider chat`, a conversation in the terminal: the main thread reads lines and prints, another one decodes."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import termios
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from rich.console import Console

from outrider.deploy.arguments import Given
from outrider.deploy.commands.edge_options import MarkSettings, StopSettings, TalkSettings
from outrider.deploy.credentials import api_key
from outrider.deploy.process.termination import WATCH
from outrider.deploy.show import LiveText, marks_of
from outrider.edge import Client, Conversation, EdgeConfig, Event, Finished, Sampling
from outrider.edge.chat.rendering import TemplateProcess
from outrider.proto.errors import ConfigError, FailedPrecondition, OutriderError, did_you_mean
from outrider.proto.types import FinishReason

BLOCK = '"""'
PROMPT, MORE = "> ", ". "
MAX_HISTORY = 1000  # lines
HELP = {
    "/help": "list these commands",
    "/new": "begin again, with the same system prompt",
    "/retry": "answer the last message again, by another seed",
    "/save FILE": "write the chat to a new file, as Markdown, or to .json",
    "/quit": "end the chat, like Ctrl-D",
}
EDITING = (
    'a \\ at the end of a line, or """ around several, for a message of several lines; '
    "// for a message that begins with /"
)
T = TypeVar("T")
Message = dict[str, str]


def chat(given: Given) -> int:
    """Run `outrider chat`; from a pipe, the first message that cannot be answered ends it with 1."""
    settings = given(TalkSettings)
    console, notes = Console(highlight=False), Console(highlight=False, stderr=True)
    live = LiveText(console, notes, marks_of(console, given(MarkSettings)))
    with LoopBeside() as loop:
        client = loop.run(_client(given))
        try:
            turns = loop.run(ChatTurns.open(client, settings.system, given(Sampling), given(StopSettings).stop))
            try:
                talk = Talk(turns, loop, live, notes)
                if sys.stdin.isatty():
                    model, place = client.ready.model if client.ready else "", given.fields(EdgeConfig)
                    talk.note(
                        f"{model} at {place['coordinator'] or place['verifier']}, drafter {client.drafter_name}; "
                        "/help lists commands, Ctrl-C stops an answer, Ctrl-D ends the chat"
                    )
                    if live.legend:
                        notes.print(live.legend, style="dim", highlight=False)
                    talk.with_person(TypedLines(None if settings.no_history else history_file()))
                else:
                    talk.with_pipe()
            finally:
                loop.run(turns.close())
        finally:
            loop.run(client.close())
    return 0


async def _client(given: Given) -> Client:
    return Client(given(EdgeConfig, api_key=api_key(given)))


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


class ChatTurns:
    """A chat with the target's model: what was said, and the conversation that holds it.

    Each prompt is the one that the chat template makes of all messages. Where it begins with the conversation's
    transcript, the turn continues that; elsewhere (after /retry, or where the template writes an answer in another way
    than the model) it begins another conversation, and the verifier computes what its cache of prefixes lacks.

    Attributes:
        messages: what was said, a system prompt first if there is one.
        continued: tokens of the last prompt that the conversation held already.
    """

    def __init__(
        self, client: Client, template: TemplateProcess, system: str, sampling: Sampling, stop: tuple[str, ...]
    ) -> None:
        self.continued = 0
        self._client = client
        self._template = template
        self._sampling = sampling
        self._stop = stop
        self._conversation: Conversation | None = None
        self._system: list[Message] = [{"role": "system", "content": system}] if system else []
        self.forget()

    @classmethod
    async def open(cls, client: Client, system: str, sampling: Sampling, stop: tuple[str, ...]) -> ChatTurns:
        """Find the target, and start the process of its chat template.

        Raises:
            FailedPrecondition: the target has no chat template.
            OutriderError: nobody answers.
        """
        ready = await client.find()
        template = await TemplateProcess.of(ready.chat_template)
        if template is None:
            raise FailedPrecondition(
                f"{ready.model} has none; give its file, or use `outrider run`", field="chat_template"
            )
        return cls(client, template, system, sampling, stop)

    def forget(self) -> None:
        """Begin again, with the same system prompt."""
        self.messages = list(self._system)

    def take_back(self) -> str:
        """Remove the last question and its answer, and return the question; empty: there is none."""
        if len(self.messages) == len(self._system):
            return ""
        *self.messages, question, _ = self.messages
        return question["content"]

    async def say(self, content: str, *, seed_offset: int = 0) -> AsyncGenerator[Event]:
        """Ask, and yield the events of the answer; what came of one that was left early stays part of the chat.

        Raises:
            OutriderError: the answer cannot be finished anywhere, or the template refuses the messages.
        """
        messages = [*self.messages, {"role": "user", "content": content}]
        ready = await self._client.find()
        prompt = await ready.encode_prompt(await self._template.render(messages), special=False)
        kept = self._conversation.transcript.tokens if self._conversation is not None else ()
        if self._conversation is None or len(prompt) <= len(kept) or prompt[: len(kept)] != kept:
            await self._leave()
            self._conversation, kept = self._client.conversation(self._sampling, stop=self._stop), ()
        self.continued = len(kept)
        sampling = replace(self._sampling, seed=(self._sampling.seed + seed_offset) % (1 << 64))
        answer, answered = "", False
        try:
            async with aclosing(self._conversation.say(prompt[len(kept) :], sampling)) as events:
                async for event in events:
                    answer += event.text
                    answered |= bool(answer) or isinstance(event, Finished)
                    yield event
        finally:
            if answered:
                self.messages = [*messages, {"role": "assistant", "content": answer}]

    async def close(self) -> None:
        """End the conversation and the template's process; the client is closed by whoever made it."""
        await self._leave()
        await self._template.close()

    async def _leave(self) -> None:
        conversation, self._conversation = self._conversation, None
        if conversation is not None:
            await conversation.close()


class Talk:
    """A chat as it is typed and shown."""

    def __init__(self, turns: ChatTurns, loop: LoopBeside, live: LiveText, notes: Console) -> None:
        self._turns = turns
        self._loop = loop
        self._live = live
        self._notes = notes
        self._retries = 0  # answers to the last message so far, each by a seed of its own
        self._ended = False

    def note(self, text: str) -> None:
        """Print what is no answer."""
        self._notes.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def with_person(self, lines: TypedLines) -> None:
        """Chat until it is ended: an answer that fails, or is stopped, does not end it, and neither does Ctrl-C."""
        terminal = sys.stdin.fileno()
        before = termios.tcgetattr(terminal)
        WATCH.at_end(lambda: termios.tcsetattr(terminal, termios.TCSANOW, before))
        WATCH.leave_alone(signal.SIGINT)
        while not self._ended:
            answering = False
            try:
                message = read_message(lines.line_after)
                message.encode()
                answering = True
                self._take(message)
            except EOFError:
                self._notes.print()
                return
            except UnicodeError:
                self.note("that is not UTF-8")
            except OutriderError as error:
                self.note(f"no answer: {error}")
            except KeyboardInterrupt:
                if WATCH.number:  # asked to end
                    raise
                self.note("(stopped)" if answering else "")

    def with_pipe(self) -> None:
        """Answer each message of standard input."""
        with contextlib.suppress(EOFError):
            while not self._ended:
                try:
                    message = read_message(_piped_line)
                except UnicodeDecodeError as error:
                    raise ConfigError("cannot read standard input: it is not UTF-8") from error
                self._take(message)

    def _take(self, message: str) -> None:
        if message.startswith("/") and not message.startswith("//"):
            message = self._command(*message.strip().partition(" ")[::2])
        elif message.strip():
            self._retries = 0
            message = message.removeprefix("/") if message.startswith("//") else message
        if message.strip():
            self._answer(message)

    def _command(self, word: str, rest: str) -> str:
        """Carry out a command, and return the message to answer now; empty: none."""
        if word == "/new":
            self._turns.forget()
            self.note("a new chat")
        elif word == "/retry":
            self._retries += 1
            if question := self._turns.take_back():
                return question
            self.note("there is nothing to answer yet")
        elif word == "/save":
            self._save(rest.strip())
        elif word == "/quit":
            self._ended = True
        elif word == "/help":
            width = max(map(len, HELP))
            self.note("\n".join([*(f"{command:<{width}}  {meaning}" for command, meaning in HELP.items()), EDITING]))
        else:
            near = did_you_mean(word, [command.split()[0] for command in HELP])
            self.note(f"there is no {word}{near or '; /help lists what there is'}")
        return ""

    def _save(self, name: str) -> None:
        if not name:
            self.note("give a file: /save FILE")
            return
        path, messages = Path(name).expanduser(), self._turns.messages
        text = "\n".join(f"## {message['role']}\n\n{message['content'].strip()}\n" for message in messages)
        if path.suffix == ".json":
            text = json.dumps({"messages": messages}, ensure_ascii=False, indent=2) + "\n"
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
            self.note(f"{len(messages)} messages in {path}")
        except FileExistsError:
            self.note(f"{path} exists; give another name")
        except OSError as error:
            self.note(f"cannot write {path}: {error.strerror}")

    def _answer(self, message: str) -> None:
        """Print an answer as it comes, and a line of statistics."""
        finished = False
        try:
            events = self._loop.each(self._turns.say(message, seed_offset=self._retries))
            with contextlib.closing(events):
                for event in events:
                    self._live.show(event)
                    if isinstance(event, Finished):
                        finished = True
                        self.note(f"({_statistics(event, self._turns.continued)})")
        finally:
            if not finished:
                self._live.break_line()


def _statistics(event: Finished, continued: int) -> str:
    s = event.statistics
    parts = [
        f"{s.committed} tokens, {s.committed / max(event.seconds, 1e-9):.1f}/s",
        f"first after {event.first_token_s * 1e3:.0f} ms",
        f"{s.accepted} drafts, {s.steps / max(1, s.committed):.2f} steps a token",
    ]
    parts += [f"{continued} tokens kept"] if continued else []
    if s.service is not None:
        kept = "missed" if s.service.missed else "kept"
        parts.append(f"service {kept}: {s.service.kept} of {s.service.gaps} gaps in time")
    parts += [f"drafter failed: {s.drafter_error}"] if s.drafter_error else []
    parts += [event.reason.name.lower()] if event.reason is not FinishReason.EOS else []
    return "; ".join(parts)


def read_message(line_after: Callable[[str], str]) -> str:
    r'''Read one message by `line_after(prompt)`, which raises `EOFError` at the end.

    A line that ends in a backslash goes on in the next one, and lines between """ and """ are one message.
    '''
    line = line_after(PROMPT)
    if not line.strip().startswith(BLOCK):
        lines = [line]
        while lines[-1].endswith("\\"):
            lines[-1] = lines[-1][:-1]
            lines.append(line_after(MORE))
        return "\n".join(lines)
    first = line.strip().removeprefix(BLOCK)
    lines = [first] if first else []
    while not (lines and lines[-1].rstrip().endswith(BLOCK)):
        lines.append(line_after(MORE))
    lines[-1] = lines[-1].rstrip().removesuffix(BLOCK)
    return "\n".join(lines if lines[-1] else lines[:-1])


def _piped_line(_: str) -> str:
    line = sys.stdin.buffer.readline().decode()
    if not line:
        raise EOFError
    return line.rstrip("\r\n")


class TypedLines:
    """Lines that are typed in a terminal, with the editing and the history of readline where Python has it.

    Args:
        history: file of what was typed before, which only this user can read; None: nothing is kept.
    """

    def __init__(self, history: Path | None) -> None:
        self._history = history
        self._readline = _readline()
        if self._readline is None:
            return
        self._readline.set_auto_history(False)
        if history is not None:
            with contextlib.suppress(OSError):  # a history is no reason not to chat
                history.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
                os.close(os.open(history, os.O_RDWR | os.O_CREAT, 0o600))
                history.chmod(0o600)
                self._readline.read_history_file(str(history))
                self._readline.set_history_length(MAX_HISTORY)
                self._readline.write_history_file(str(history))  # without the oldest

    def line_after(self, prompt: str) -> str:
        """Return the line that is typed after a prompt; raises `EOFError` at Ctrl-D."""
        if self._readline is None:
            print(prompt, end="", file=sys.stderr, flush=True)  # standard output may be a file of answers
            return input()
        line = input(prompt)
        if line.strip():
            self._readline.add_history(line)
            if self._history is not None:
                with contextlib.suppress(OSError):
                    self._readline.append_history_file(1, str(self._history))
        return line


def history_file() -> Path:
    """Return the file of what was typed in chats, in XDG_STATE_HOME if that is set."""
    home = os.environ.get("XDG_STATE_HOME")
    return (Path(home) if home else Path("~/.local/state").expanduser()) / "outrider" / "chat_history"


def _readline() -> ModuleType | None:
    """Return readline; None where Python lacks it, or would not use it, since output is no terminal."""
    if not sys.stdout.isatty():
        return None
    try:
        import readline
    except ImportError:
        return None
    return readline
