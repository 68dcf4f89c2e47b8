"""An observer for tests that keeps which versions of drafters a text was drafted with."""

from __future__ import annotations

from outrider.edge.decoding import Observer
from outrider.proto.types import Draft, EdgeFrame


class DraftingVersions(Observer):
    """Keeps the versions that drafts name."""

    def __init__(self) -> None:
        self.versions: set[str] = set()

    def sent(self, frame: EdgeFrame, at: float) -> None:
        if isinstance(frame, Draft) and frame.drafter:
            self.versions.add(frame.drafter_version)
