"""Live output of a text that sets accepted drafts apart from the target's own tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from enum import Enum

from rich.console import Console
from rich.text import Text

from outrider.deploy.commands.edge_options import MarkSettings
from outrider.edge import Client, Completion, Finished, Provenance, Sampling, Tokens
from outrider.edge.event_stream import collect

DRAFT_STYLE = "green"
TARGET_STYLE = "bold"


class Marks(Enum):
    """Ways to set the target's own tokens apart, with the legend of each."""

    NONE = ""
    COLOUR = f"[{DRAFT_STYLE}]accepted drafts[/] and [{TARGET_STYLE}]the target's own tokens[/]"
    BOLD = f"accepted drafts plain, [{TARGET_STYLE}]the target's own tokens[/] bold"
    BRACKETS = "accepted drafts plain, the target's own tokens in ⟦⟧"

    @classmethod
    def on(cls, console: Console) -> Marks:
        """Return the marks that the console can show: brackets where it has neither colours nor bold."""
        if console.color_system is None:  # a pipe, or a terminal that is dumb
            return cls.BRACKETS
        return cls.BOLD if console.no_color else cls.COLOUR


def marks_of(console: Console, marking: MarkSettings) -> Marks | None:
    """Return the marks that the options choose; None: the default."""
    return {"on": Marks.on(console), "off": Marks.NONE}.get(marking.marks)


class LiveText:
    """Printer of texts as they come: on a terminal after their prompts, elsewhere alone, byte for byte.

    Attributes:
        marks: marks of the target's own tokens.

    Args:
        console: console of the texts.
        notes: console of statistics; None: that of the texts.
        marks: replaces the default: what a terminal can show, and none elsewhere.
    """

    def __init__(self, console: Console, notes: Console | None = None, marks: Marks | None = None) -> None:
        self.marks = marks or (Marks.on(console) if console.is_terminal else Marks.NONE)
        self._console = console
        self._notes = notes or console

    @property
    def legend(self) -> str:
        """Explanation of the marks; empty without any."""
        return self.marks.value

    async def decode(
        self, client: Client, prompt: str | Sequence[int], sampling: Sampling, stop: Sequence[str], shown: str
    ) -> Completion:
        """Decode a prompt and print `shown` on a terminal, the text, a newline, and a line of metrics."""
        if self._console.is_terminal:
            self._console.print(shown, style="dim", end="", markup=False, soft_wrap=True)
        completion = await collect(client.generate(prompt, sampling, stop=stop), self.show)
        self.summarise(completion)
        return completion

    def show(self, event: Tokens | Finished) -> None:
        """Print what an event adds to the text, and a newline after its end."""
        if isinstance(event, Finished):
            self._print(f"{event.text}\n")
            return
        for piece, provenance in zip(event.pieces, event.provenance, strict=True):
            if piece:
                self._print(*self._marked(piece, provenance))

    def break_line(self) -> None:
        """End the line of a text that was left early."""
        self._print("\n")

    def summarise(self, completion: Completion) -> None:
        """Print a line of metrics."""
        self._notes.print(summary(completion), style="dim", markup=False, soft_wrap=True)

    def _print(self, text: str, style: str = "") -> None:
        if self._console.is_terminal:
            self._console.print(Text(text, style), end="", highlight=False, soft_wrap=True)
        else:
            print_exactly(text)

    def _marked(self, piece: str, provenance: Provenance) -> tuple[str, str]:
        drafted = provenance is Provenance.DRAFT
        if self.marks is Marks.BRACKETS:
            return piece if drafted else f"⟦{piece}⟧", ""
        styles = {Marks.COLOUR: (DRAFT_STYLE, TARGET_STYLE), Marks.BOLD: ("", TARGET_STYLE), Marks.NONE: ("", "")}
        return piece, styles[self.marks][not drafted]


def print_exactly(text: str) -> None:
    """Write text to standard output at once, as UTF-8 whatever the locale, without a change."""
    sys.stdout.flush()
    sys.stdout.buffer.write(text.encode())
    sys.stdout.buffer.flush()


def summary(completion: Completion) -> str:
    """Return a line of metrics."""
    s, n = completion.statistics, max(1, len(completion.tokens))
    line = (
        f"{n} tokens in {completion.seconds:.2f} s ({n / completion.seconds:.1f}/s), "
        f"{s.accepted} of them accepted drafts, {s.steps / n:.2f} target steps per token, "
        f"{s.uplink_bytes / n:.0f} B up and {s.downlink_bytes / n:.0f} B down per token, "
        f"{completion.finish_reason.name.lower()}"
    )
    return line + (f"; drafter failed: {s.drafter_error}" if s.drafter_error else "")
