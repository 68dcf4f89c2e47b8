"""Messages between the backend and vLLM's workers, which may be other processes, and the sampling that answers them."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from outrider.cloud.target.sampler import Sampled, Sampler
from outrider.cloud.target.verification import VerificationInput
from outrider.proto.session.acceptance import num_agreeing
from outrider.proto.types import token_ids

NOTHING = -1  # what vLLM's runners take for no token


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
        return len(self.tokens) + len(self.drafts)


@dataclass(frozen=True, slots=True)
class ForwardPass:
    """One pass through the model; before it `departed` requests are forgotten, and KV blocks copied (from, to)."""

    rows: tuple[PassRow, ...]
    departed: frozenset[str] = frozenset()
    copies: tuple[tuple[int, int], ...] = ()


@dataclass(slots=True)
class PassResult:
    """The results of a pass, from the worker that answers, by request.

    Attributes:
        taps: [taps * hidden] float32 each.
        forwarded: when the logits were there, on the monotonic clock, seconds.
        finite: whether all logits, and the scores made of them, are numbers.
    """

    sampled: dict[str, Sampled] = field(default_factory=dict)
    taps: dict[str, torch.Tensor] = field(default_factory=dict)
    forwarded: float = 0.0
    finite: bool = True


def committed_tokens(verification: VerificationInput, sampled: Sampled) -> list[int]:
    """Return the drafts that agree, and the target's own token after them."""
    own = token_ids(sampled.tokens)
    return list(own[: num_agreeing(verification.block, own) + 1])


class PassSampling:
    """The coupled rule in a worker; all ranks of a tensor-parallel group have the same logits and take the same tokens.

    Attributes:
        rows: rows of the newest pass by request.
        result: results of the newest pass.
    """

    def __init__(self, device: torch.device) -> None:
        self.rows: dict[str, PassRow] = {}
        self.result = PassResult()
        self._sampler = Sampler(device)

    def begin(self, rows: Sequence[PassRow]) -> None:
        self.rows, self.result = {row.name: row for row in rows}, PassResult()

    def sample(self, logits: torch.Tensor, names: Sequence[str], counts: Sequence[int]) -> list[int]:
        """Sample where requests verify, and return the rows of `logits` [sum of counts, vocab] that were sampled from.

        The rows of a request stand together, one after each of its drafts and one before them.
        """
        firsts = itertools.accumulate(counts, initial=0)
        of_pass = [(first, self.rows.get(name)) for first, name in zip(firsts, names, strict=False)]
        inputs = {row.name: (first, row.verification) for first, row in of_pass if row is not None and row.verification}
        if not inputs:
            return []
        kept = [first + j for first, verification in inputs.values() for j in range(verification.rows)]
        of_inputs = logits if len(kept) == len(logits) else logits[torch.tensor(kept, device=logits.device)]
        sampled, finite = self._sampler.sample_numbers(of_inputs.float(), [each for _, each in inputs.values()])
        self.result.finite &= finite
        self.result.sampled |= dict(zip(inputs, sampled, strict=True))
        return kept

    def committed(self, name: str) -> list[int]:
        """Return the tokens that a request goes on with; none where it does not verify."""
        row = self.rows.get(name)
        if row is None or row.verification is None:
            return []
        return committed_tokens(row.verification, self.result.sampled[name])


def tap_model(model: Any, layers: Sequence[int]) -> str:
    """Have vLLM's `model` give what enters `layers`, and return why it cannot; empty: it can."""
    if not hasattr(model, "set_aux_hidden_state_layers"):
        return f"vLLM gives no states from amid {type(model).__name__}"
    model.set_aux_hidden_state_layers(tuple(layers))
    return ""
