"""Live output of a text that sets accepted drafts apart from the target's own tokens."""

from __future__ import annotations

import sys
from collections.abc import Sequence

from rich.console import Console
from rich.text import Text

from outrider.deploy.prompts import Prompt
from outrider.edge import Client, Completion, Finished, Provenance, Sampling, Tokens

DRAFT_STYLE = "green"
TARGET_STYLE = "bold"


class LiveText:
    """Printer of texts: on a terminal drafts are green, elsewhere the target's own tokens stand in ⟦⟧."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._colour = console.is_terminal and not console.no_color

    @property
    def legend(self) -> str:
        """Explanation of the colours or brackets."""
        if self._colour:
            return f"[{DRAFT_STYLE}]accepted drafts[/] and [{TARGET_STYLE}]the target's own tokens[/]"
        return "accepted drafts plain, the target's own tokens in ⟦⟧"

    async def decode(
        self, client: Client, prompt: Prompt, sampling: Sampling, stop: Sequence[str], shown: str
    ) -> Completion:
        """Decode a prompt and print its `shown` part, the text, and a line of metrics."""
        self._console.print(shown, style="dim", end="", markup=False, soft_wrap=True)
        events = client.generate(prompt.text, sampling, stop=stop)
        completion = await client.collect(prompt.text, events, self._show)
        self._console.print(_summary(completion), style="dim", markup=False, soft_wrap=True)
        return completion

    def _show(self, event: Tokens | Finished) -> None:
        if isinstance(event, Finished):
            self._console.print(event.text, end="\n", markup=False, highlight=False)
            return
        for piece, provenance in zip(event.pieces, event.provenance, strict=True):
            if piece:
                self._console.print(self._render(piece, provenance), end="", highlight=False, soft_wrap=True)
        sys.stdout.flush()

    def _render(self, piece: str, provenance: Provenance) -> Text:
        drafted = provenance is Provenance.DRAFT
        if self._colour:
            return Text(piece, style=DRAFT_STYLE if drafted else TARGET_STYLE)
        return Text(piece if drafted else f"⟦{piece}⟧")


def _summary(completion: Completion) -> str:
    s, n = completion.statistics, max(1, len(completion.tokens))
    line = (
        f"{n} tokens in {completion.seconds:.2f} s ({n / completion.seconds:.1f}/s), "
        f"{s.accepted} of them accepted drafts, {s.steps / n:.2f} target steps per token, "
        f"{s.uplink_bytes / n:.0f} B up and {s.downlink_bytes / n:.0f} B down per token, "
        f"{completion.finish_reason.name.lower()}"
    )
    return line + (f"; drafter failed: {s.drafter_error}" if s.drafter_error else "")
