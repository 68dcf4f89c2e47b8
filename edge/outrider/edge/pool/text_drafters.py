"""The drafters of one text, and when a kept session takes others."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Self

from outrider.drafters.protocol import Drafter
from outrider.proto.session import DrafterName, DrafterSteering, Selection
from outrider.proto.types import SteeringRequest


@dataclass(frozen=True, slots=True)
class TextDrafters:
    """Drafters that a text begins with.

    Attributes:
        drafters: in the order of `selection`.
        selection: selection among them; None: there are none.
        offered: name and version of each drafter that the edge had then, loaded or not.
        steering: steering of the one that takes vectors; None: none does.
        steering_request: request for these vectors.
    """

    drafters: tuple[Drafter, ...]
    selection: Selection | None
    offered: tuple[DrafterName, ...]
    steering: DrafterSteering | None
    steering_request: SteeringRequest | None

    def with_those_of(self, former: tuple[Drafter, ...]) -> Self:
        """Return these with the drafters of `former` in the place of equal versions: they have read the text."""
        known = {name_of(drafter): drafter for drafter in former}
        return replace(self, drafters=tuple([known.get(name_of(drafter), drafter) for drafter in self.drafters]))


def name_of(drafter: Drafter) -> DrafterName:
    """Return name and version of a drafter."""
    return drafter.name, drafter.version
