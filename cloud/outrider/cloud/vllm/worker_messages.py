"""Messages between the backend and vLLM's workers, which may be other processes: one pass, and its results."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from outrider.cloud.target.distribution import VerificationInput
from outrider.cloud.target.sampler import Sampled


@dataclass(frozen=True, slots=True)
class PassRow:
    """One request's part of a pass.

    Attributes:
        name: the request's id.
        start: positions that are computed already.
        tokens: [n] tokens to compute after them.
        drafts: [k] drafts after these.
        new_tokens: all tokens of a request that the workers do not know yet; None: they know it.
        new_blocks: numbers of the blocks that they do not know of yet.
        num_output_tokens: tokens of the request that are not from `new_tokens`, once.
        verification: what to sample; None: nothing.
        tapped: whether the tapped state at the newest valid position is wanted.
    """

    name: str
    start: int
    tokens: tuple[int, ...]
    drafts: tuple[int, ...]
    new_tokens: list[int] | None
    new_blocks: list[int]
    num_output_tokens: int
    verification: VerificationInput | None
    tapped: bool

    @property
    def num_rows(self) -> int:
        """Rows of the pass."""
        return len(self.tokens) + len(self.drafts)


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One pass through the model.

    Attributes:
        rows: the requests' parts.
        departed: ids of the requests to forget.
        copies: numbers of KV blocks to copy before it: from, to.
    """

    rows: tuple[PassRow, ...]
    departed: frozenset[str] = frozenset()
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Wanted:
    """The use of one request's logits: `verification` to sample by (None: nothing), and whether it is `tapped`."""

    verification: VerificationInput | None
    tapped: bool


@dataclass(slots=True)
class PassResult:
    """The results of a pass, from the worker that answers.

    Attributes:
        sampled: results by request.
        taps: [taps * hidden] float32 by request.
        forwarded: when the logits were there, on the monotonic clock, seconds.
        finite: whether all logits, and the scores made of them, are numbers.
    """

    sampled: dict[str, Sampled] = field(default_factory=dict)
    taps: dict[str, torch.Tensor] = field(default_factory=dict)
    forwarded: float = 0.0
    finite: bool = True
