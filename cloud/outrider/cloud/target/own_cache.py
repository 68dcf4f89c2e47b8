"""Any architecture, one session a pass: each session has the cache that transformers makes for its model.

The model runs as it is written, which is slow and exact. A session that is cut back goes on from a copy of its cache,
and reads again what was accepted since. It is the way of architectures that the paged KV cache cannot serve, and the
oracle of those that it can.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from outrider.cloud.target.architecture import CANNOT_RUN
from outrider.cloud.target.session_states import BORDER, SessionStates
from outrider.cloud.target.target import Piece, SessionRows, Target
from outrider.proto.errors import ModelRefused

# Names by which architectures take and return what they keep.
_NAMES = ("past_key_values", "cache_params", "state", "mems", "past_buckets_states")
_ROWS = 64, 1, 0  # rows of a pass that are tried, the last where a model keeps nothing: each pass reads the whole text


@dataclass(slots=True)
class OwnCache(SessionStates):
    """A session's cache of transformers.

    Attributes:
        held: it after `position` tokens; None: there are none.
        copy: it after `copied` tokens, to which the session can be cut back.
    """

    held: Any = None
    position: int = 0
    copy: Any = None
    copied: int = 0

    @property
    def border(self) -> int:
        """Position to which it can be cut back at most."""
        return self.copied

    def cut_back(self, length: int) -> None:
        """Hold `length` tokens or less."""
        if self.position > length:
            self.restore()

    def restore(self) -> None:
        """Hold what was copied."""
        self.held, self.position = copy.deepcopy(self.copy), self.copied

    def keep(self) -> None:
        """Copy what it holds."""
        if self.copied < self.position:
            self.copy, self.copied = copy.deepcopy(self.held), self.position


class OwnCacheTarget(Target):
    """A target that runs as transformers has written it, at most `most_rows` rows of one session a pass.

    Where `most_rows` is 0, a pass reads the whole text of a session: what it keeps nothing of, or not in a cache.
    """

    attention = "eager"
    verifies_branches = False
    most_rows = 1
    _name = ""  # of what its model returns
    _keeps_nothing = False

    @staticmethod
    def _new_states(model: Any) -> Any:  # noqa: ARG004 - what a model keeps is its own
        return OwnCache

    @torch.inference_mode()
    def check(self) -> float:
        """Compare as `Target.check` does, with passes of many rows if they agree, else of one, else of all."""
        reason = ""
        for rows in _ROWS:
            if not rows and not self._keeps_nothing:
                break
            self.most_rows = rows
            try:
                return super().check()
            except ModelRefused as error:
                reason = error.message
            except CANNOT_RUN as error:
                reason = str(error).split("\n", maxsplit=1)[0]
        name = self.model.config.model_type
        raise ModelRefused(f"{name} cannot run in steps: {reason}; choose a decoder of text", field="target")

    def _pass(self, pieces: Sequence[Piece]) -> torch.Tensor:
        return torch.cat([self._session(rows) for rows, _, _ in pieces])

    def _session(self, rows: SessionRows) -> torch.Tensor:
        """Return logits of a session's wanted rows [n, vocab] float32."""
        if not self.most_rows:
            return self._whole((*rows.cache.tokens, *rows.tokens), rows.wanted)
        states: Any = rows.cache.states
        states.cut_back(rows.cache.length)
        again = rows.cache.tokens[states.position :]
        if len(again) > BORDER:
            self._read(states, again, 0)
            again = []
        if rows.drafts and not again:
            states.keep()
        return self._read(states, (*again, *rows.tokens), rows.wanted)

    def _read(self, own: OwnCache, tokens: Sequence[int], wanted: int) -> torch.Tensor:
        logits = []
        try:
            for first in range(0, len(tokens), self.most_rows):
                piece = tokens[first : first + self.most_rows]
                read = self._own_pass(own, piece)
                skipped = max(0, min(len(piece), len(tokens) - wanted - first))
                if self._tapped is not None:
                    self._tapped.keep(range(skipped, len(piece)))
                logits.append(read[skipped:])
        except BaseException:
            own.restore()  # it may have read a part
            raise
        return torch.cat(logits)

    def _whole(self, tokens: Sequence[int], wanted: int) -> torch.Tensor:
        """Return logits [wanted, vocab] float32 of the last of `tokens` [n], without a cache."""
        output = self.model(input_ids=torch.tensor([list(tokens)], device=self.device), use_cache=False)
        if self._tapped is not None:
            self._tapped.keep(range(len(tokens) - wanted, len(tokens)))
        logits: torch.Tensor = output.logits[0, len(tokens) - wanted :].float()
        return logits

    def _own_pass(self, own: OwnCache, tokens: Sequence[int]) -> torch.Tensor:
        """Return logits [n, vocab] float32 of `tokens` [n], which the session's cache then holds."""
        given = {} if own.held is None else {self._name: own.held}
        output = self.model(input_ids=torch.tensor([list(tokens)], device=self.device), use_cache=True, **given)
        self._name = next((name for name in _NAMES if output.get(name) is not None), "")
        if not self._name:
            self._keeps_nothing = True
            raise ModelRefused(f"{self.model.config.model_type} keeps nothing between tokens", field="target")
        own.held, own.position = output[self._name], own.position + len(tokens)
        logits: torch.Tensor = output.logits[0, -len(tokens) :].float()
        return logits
