"""Commands within a chat, which begin with /."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path

from rich.console import Console

from outrider.deploy.chat.turns import ChatTurns, Message
from outrider.deploy.show import LiveText, Marks
from outrider.edge import Finished
from outrider.proto.near import did_you_mean

HELP = {
    "/help": "list these commands",
    "/new": "begin again, with the same system prompt",
    "/system [TEXT]": "show the system prompt, or set it; - for none",
    "/retry": "answer the last message again, by another seed",
    "/edit": "type the last message again, from its text",
    "/marks": "mark drafts in the text, or no more",
    "/stats": "sum up the chat so far",
    "/save FILE": "write the chat to a new file, as Markdown, or to .json",
    "/quit": "end the chat, like Ctrl-D",
}
WORDS = tuple(command.split()[0] for command in HELP)
EDITING = (
    'a \\ at the end of a line, or """ around several, for a message of several lines; '
    "// for a message that begins with /"
)


@dataclass(slots=True)
class ChatTotals:
    """Sums over the answers of a chat."""

    answers: int = 0
    tokens: int = 0
    accepted: int = 0
    steps: int = 0
    seconds: float = 0.0
    bytes_up: int = 0
    bytes_down: int = 0

    def add(self, event: Finished) -> None:
        """Count an answer."""
        s = event.statistics
        self.answers += 1
        self.tokens += s.committed
        self.accepted += s.accepted
        self.steps += s.steps
        self.seconds += event.seconds
        self.bytes_up += s.uplink_bytes
        self.bytes_down += s.downlink_bytes

    def __str__(self) -> str:
        if not self.tokens:
            return "no answer yet"
        return (
            f"{self.answers} answers, {self.tokens} tokens in {self.seconds:.1f} s ({self.tokens / self.seconds:.1f}/s)"
            f", {self.accepted / self.tokens:.0%} of them drafts, {self.steps / self.tokens:.2f} target steps a token, "
            f"{self.bytes_up / 1e3:.1f} kB up, {self.bytes_down / 1e3:.1f} kB down"
        )


@dataclass(slots=True)
class SlashCommands:
    """Commands of a chat that begin with a slash, and what they act on.

    Attributes:
        chat: the chat.
        live: printer of the answers.
        notes: console for what is no answer.
        retries: answers to the last message so far, each by a seed of its own.
        draft: text to begin the next message with, in place of the last one.
        replaces: whether the message that is typed now takes the last one's place.
        ended: whether the chat is to end.
    """

    chat: ChatTurns
    live: LiveText
    notes: Console
    totals: ChatTotals = field(default_factory=ChatTotals)
    retries: int = 0
    draft: str = ""
    replaces: bool = False
    ended: bool = False

    def run(self, line: str) -> str:
        """Carry out a command, and return the message that it has answered now; empty: none."""
        word, _, rest = line.strip().partition(" ")
        rest = rest.strip()
        known = {"/exit": "/quit", "/?": "/help"}.get(word, word)
        if known not in WORDS:
            self.say(f"there is no {word}{did_you_mean(known, WORDS) or '; /help lists what there is'}")
            return ""
        return str(getattr(self, f"_{known[1:]}")(rest) or "")

    def say(self, text: str) -> None:
        """Print a note."""
        self.notes.print(text, style="dim", markup=False, highlight=False, soft_wrap=True)

    def _help(self, _: str) -> None:
        width = max(map(len, HELP))
        self.say("\n".join([*(f"{command:<{width}}  {meaning}" for command, meaning in HELP.items()), EDITING]))

    def _new(self, _: str) -> None:
        self.chat.forget()
        self.say("a new chat")

    def _system(self, text: str) -> None:
        if not text:
            self.say(f"system prompt: {self.chat.system or 'none'}")
            return
        self.chat.system = "" if text == "-" else text
        self.say("the system prompt holds from the next message on")

    def _retry(self, _: str) -> str:
        question = self.chat.take_back()
        self.retries += 1
        if not question:
            self.say("there is nothing to answer yet")
        return question

    def _edit(self, _: str) -> None:
        self.draft = self.chat.last_question
        if not self.draft:
            self.say("there is nothing to edit yet")

    def _marks(self, _: str) -> None:
        marked = self.live.marks is not Marks.NONE
        self.live.marks = Marks.NONE if marked else self.live.possible_marks
        self.notes.print(self.live.legend or "no marks", style="dim", highlight=False)

    def _stats(self, _: str) -> None:
        self.say(str(self.totals))

    def _save(self, name: str) -> None:
        if not name:
            self.say("give a file: /save FILE")
            return
        path = Path(name).expanduser()
        text = _as_json(self.chat.messages) if path.suffix == ".json" else _as_markdown(self.chat.messages)
        try:
            with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="utf-8") as file:
                file.write(text)
            self.say(f"{len(self.chat.messages)} messages in {path}")
        except FileExistsError:
            self.say(f"{path} exists; give another name")
        except OSError as error:
            self.say(f"cannot write {path}: {error.strerror}")

    def _quit(self, _: str) -> None:
        self.ended = True


def _as_json(messages: list[Message]) -> str:
    return json.dumps({"messages": messages}, ensure_ascii=False, indent=2) + "\n"


def _as_markdown(messages: list[Message]) -> str:
    return "\n".join(f"## {message['role']}\n\n{message['content'].strip()}\n" for message in messages)
