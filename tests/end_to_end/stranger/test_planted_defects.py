"""Defects that once were in the product, put back: the texts of a few worlds show each."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from strange_worlds import THEMES, WORLDS, World
from tokenizers import Tokenizer
from tokenizers.decoders import DecodeStream

from outrider.cloud.grammar.grammar import Allowed
from outrider.cloud.target import target_loading
from outrider.cloud.target.backend import StepRow
from outrider.cloud.target.session_states import Tail
from outrider.cloud.target.target import Target
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.drafters.token_text import TokenDecoder
from outrider.edge import event_stream as text_module
from outrider.proto import types as settings_module
from outrider.proto.session import verifier
from outrider.proto.session.stream import EdgeStream

Patch = pytest.MonkeyPatch


def masks_in_order(patch: Patch) -> None:
    """Let a step have twin branches, and give the masks of its branches away in order."""
    really = Allowed.about

    def about(self: Allowed, block: Any, branches: Any) -> Allowed:
        found = really(self, block, branches)
        masks = [found.branches[branch] for branch in branches if branch in found.branches]
        given: dict[Any, np.ndarray] = {}
        for branch, mask in zip(found.branches, masks, strict=False):
            right = found.branches[branch]
            given[branch] = mask if len(mask) == len(right) else right
        return replace(found, branches=given)

    patch.setattr(verifier, "_without_twins", list)
    patch.setattr(Allowed, "about", about)


@dataclass
class StreamedText:
    """Decoder by the library's stream, which raises where a run of byte tokens turns out to be broken."""

    tokenizer: Tokenizer
    hidden: Any
    before: Sequence[int] = ()

    def __post_init__(self) -> None:
        self._stream, self._tokens, self._text = DecodeStream(skip_special_tokens=True), list[int](), ""

    def push(self, token: int) -> str:
        self._tokens.append(token)
        piece = self._stream.step(self.tokenizer, token) or ""
        self._text += piece
        return piece

    def rest(self) -> str:
        whole = self.tokenizer.decode(self._tokens)
        return whole[len(self._text) :] if whole.startswith(self._text) else ""


def streamed_text(patch: Patch) -> None:
    patch.setattr(text_module, "TokenDecoder", StreamedText)


def nothing_before_a_turn(patch: Patch) -> None:
    """Decode a text as if nothing came before it."""
    patch.setattr(text_module, "TokenDecoder", lambda tokenizer, hidden, _: TokenDecoder(tokenizer, hidden))


def failing_while_a_verifier_has_it(patch: Patch) -> None:
    """Count a text as failing from its first loss until a commit."""
    accept = EdgeStream.accept

    def accepted(self: EdgeStream, *given: Any) -> Any:
        before = self._failing_since, self._failed_s
        try:
            return accept(self, *given)
        finally:
            self._failing_since, self._failed_s = before

    patch.setattr(EdgeStream, "accept", accepted)


def any_context(patch: Patch) -> None:
    """Forget the context that a text was promised."""
    patch.setattr(EdgeStream, "context_length", property(lambda _: 0))


def states_too_long(patch: Patch) -> None:
    """Keep the first draft that was not accepted among the rows of a state."""
    patch.setattr(Tail, "before", lambda tail, end: tail.rows.part(0, min(len(tail.rows), end - tail.border + 1)))
    patch.setattr(target_loading, "_kind", lambda _: Target)
    patch.setattr(Target, "check", lambda _: 0.0)


def sequences_moved_on(patch: Patch) -> None:
    """Leave sequences where a step that failed after its pass has taken them."""

    @torch.inference_mode()
    def step(self: TransformersBackend, rows: Sequence[StepRow]) -> Any:
        return self._step(rows, [row.handle.length for row in rows])

    patch.setattr(TransformersBackend, "step", step)


def no_bounds(patch: Patch) -> None:
    """Take every finite number for a setting, and whatever comes of it for a score."""
    wide = {
        name: bounds if bounds.is_whole else replace(bounds, low=-math.inf, high=math.inf)
        for name, bounds in settings_module.BOUNDS.items()
    }
    patch.setattr(settings_module, "BOUNDS", wide)


# By defect: the worlds that show it, and the complaint that they show it by.
PLANTED: dict[Callable[[Patch], None], tuple[str, str]] = {
    masks_in_order: ("twins", r"cannot be followed|token \d+ (is|has logp)"),
    streamed_text: ("bytes", r"Invalid prefix| reads "),
    nothing_before_a_turn: ("turns", r" reads "),
    failing_while_a_verifier_has_it: ("slow reading", r"ends with Unavailable"),
    any_context: ("contexts", r"has \d+ tokens, not"),
    states_too_long: ("states", r"token \d+ (is|has logp)"),
    sequences_moved_on: ("failing steps", r"prompt_logprobs: do not come from this verifier"),
    no_bounds: ("extremes", r"FloatingPointError|log probabilities are"),
}


@pytest.mark.soak
@pytest.mark.parametrize("planted", PLANTED, ids=lambda planted: planted.__name__)
def test_a_defect_that_is_planted_shows_in_the_texts_of_its_worlds(play, monkeypatch, planted) -> None:
    theme, complaint = PLANTED[planted]
    planted(monkeypatch)
    seeds = range(THEMES.index(theme), WORLDS, len(THEMES))
    assert any(re.search(complaint, each) for seed in seeds for each in play(World.drawn(seed)).complaints)
