"""The edge's side of a trainer on its own machine: texts that it hands over, and versions that it drafts with.

The trainer itself is no part of the edge, which never loads torch: `outrider edge --learn-here` runs it in another
process. Texts go to it and nowhere else, and versions come from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

from outrider.drafters.packages import DrafterPackage, load_package
from outrider.edge.features import TOKENS_LOOKED_AT, prompt_class
from outrider.edge.pool.preparation import Preparation, Ready
from outrider.proto.session import EdgeSession
from outrider.proto.types import Sampling


@dataclass(frozen=True, slots=True)
class OwnText:
    """A text that has ended.

    Attributes:
        session: id of its session.
        tokens: [n] ids, prompt and text.
        first_generated: number of the prompt's.
        sampling: settings with the seed of the noise, by which any drafter's hits are known.
        prompt_class: kind of text.
    """

    session: str
    tokens: tuple[int, ...]
    first_generated: int
    sampling: Sampling
    prompt_class: int


class LocalTrainer(Protocol):
    """A trainer on this machine."""

    def take(self, text: OwnText) -> None:
        """Take a text to learn from; return at once, and raise nothing."""
        ...


class OwnLearning:
    """The learning of one edge from its own texts.

    Attributes:
        trainer: takes the texts; None: nobody learns.
    """

    def __init__(self, preparation: Preparation) -> None:
        self.trainer: LocalTrainer | None = None
        self._preparation = preparation

    @property
    def parent(self) -> DrafterPackage | None:
        """Package of the drafter that can learn, as others have it too; None: there is none, or nothing is prepared."""
        return self._preparation.learnable

    async def draft_with(self, folder: Path) -> None:
        """Let texts and turns to come draft with a version that was trained here, or with its parent again.

        What cannot be loaded changes nothing.

        Raises:
            OutriderError: the folder holds no whole package.
        """
        package, parent = load_package(folder), self.parent
        await self._preparation.take_own(None if parent is not None and package.version == parent.version else package)

    def ended(self, ready: Ready, session: str, machine: EdgeSession) -> None:
        """Hand a text over that has ended, if somebody learns from it."""
        sampling = machine.sampling
        if self.trainer is None or sampling.constrains:
            return
        prompt = machine.transcript[: machine.prompt_length]
        kind = prompt_class(ready.decode(prompt[-TOKENS_LOOKED_AT:]))
        self.trainer.take(OwnText(session, tuple(machine.transcript), len(prompt), sampling, kind))
