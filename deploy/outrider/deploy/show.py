"""Live output of a text: accepted drafts set apart from the target's own tokens."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.text import Text

from outrider.edge import Completion, Finished, Provenance, Tokens

DRAFT_STYLE = "green"
TARGET_STYLE = "bold"


class LiveText:
    """Printer of tokens: on a terminal drafts are green, elsewhere the target's own tokens stand in ⟦⟧."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._colour = console.is_terminal and not console.no_color

    @property
    def legend(self) -> str:
        """Explanation of the colours or brackets."""
        if self._colour:
            return f"[{DRAFT_STYLE}]accepted drafts[/] and [{TARGET_STYLE}]the target's own tokens[/]"
        return "accepted drafts plain, the target's own tokens in ⟦⟧"

    def show(self, event: Tokens | Finished) -> None:
        """Print one event."""
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


def summary(completion: Completion) -> str:
    """Return one line with the metrics of a text."""
    s, n = completion.statistics, max(1, len(completion.tokens))
    line = (
        f"{n} tokens in {completion.seconds:.2f} s ({n / completion.seconds:.1f}/s), "
        f"{s.accepted} of them accepted drafts, {s.steps / n:.2f} target steps a token, "
        f"{s.uplink_bytes / n:.0f} B up and {s.downlink_bytes / n:.0f} B down a token, "
        f"{completion.finish_reason.name.lower()}"
    )
    return line + (f"; drafter failed: {s.drafter_error}" if s.drafter_error else "")
