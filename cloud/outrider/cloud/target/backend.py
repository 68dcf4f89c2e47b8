"""The port in front of a target: all that engine, server, policies and steering know of a model.

Behind it stand our own runs of transformers models (`transformers_backend.py`), the default and the oracle, and others
that pass the same conformance suite (`tests/cloud/conformance.py`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from outrider.proto.errors import ResourceExhausted
from outrider.proto.types import BlockBranch, DraftToken, Guarantee, TokenFacts, token_ids

if TYPE_CHECKING:
    import torch

    from outrider.cloud.target.sampler import Sampled
    from outrider.cloud.target.verification import VerificationInput


def dtype_name(dtype: torch.dtype) -> str:
    """Return the name of a type as options have it, such as `bfloat16`."""
    return str(dtype).removeprefix("torch.")


def precision_of(
    dtype: torch.dtype, *, engine: str = "", device: str = "cpu", quantization: str = "", kv_dtype: str = ""
) -> str:
    """Return what decides the rounding of a target, such as `bfloat16` or `vllm bfloat16, fp8 KV cache`.

    Where two of these texts are equal, so are bytes, as far as guarantees and machines allow; else some are not. Empty
    settings stand for our own engine, weights that are not quantised, and keys and values of `dtype`.
    """
    parts = [f"{engine} {dtype_name(dtype)}".strip()]
    parts += [f"{quantization} weights"] if quantization else []
    parts += [f"{kv_dtype} KV cache"] if kv_dtype not in ("", "auto", dtype_name(dtype)) else []
    parts += [f"on {device}"] if device != "cpu" else []
    return ", ".join(parts)


def quantization_of(config: Any) -> str:
    """Return how the weights of a model with this transformers config are quantised; empty: not at all."""
    settings = getattr(config, "quantization_config", None)
    method = settings.get("quant_method") if isinstance(settings, dict) else getattr(settings, "quant_method", None)
    return str(getattr(method, "value", method) or "")


@dataclass(frozen=True, slots=True)
class TargetFacts:
    """Facts of a loaded target.

    Attributes:
        tokenizer_json: text of its `tokenizer.json`, which edges name by its hash.
        context_length: most positions of a session.
        hidden_size: width of the residual stream.
        device: device that holds the taps; None: a server elsewhere computes.
        guarantee: what a text keeps whatever shares its steps.
        scores_prompts: whether steps tell log probabilities of prompts (`StepRow.scored`).
        precision: what decides its rounding, as `precision_of` writes it.
        verifies_branches: whether steps verify branches beside a block; else they are never given any.
        server: the server that computes, and what it lacks; empty: this process does.
        chat_template_json: as `models.family_index` writes it, where no folder of a target has it.
    """

    tokenizer_json: str
    tokenizer_sha256: str
    vocab_size: int
    context_length: int
    eos_tokens: frozenset[int]
    hidden_size: int
    num_layers: int
    device: torch.device | None
    guarantee: Guarantee = Guarantee.DISTRIBUTION
    precision: str = ""
    scores_prompts: bool = False
    verifies_branches: bool = False
    server: str = ""
    chat_template_json: str = ""


@dataclass(frozen=True, slots=True)
class Capacity:
    """The KV cache of a backend: `pages` of `page_size` positions each, of which no sequence holds `free_pages`."""

    page_size: int
    pages: int
    free_pages: int

    @property
    def used_pages(self) -> int:
        return self.pages - self.free_pages

    def pages_for(self, tokens: int) -> int:
        return math.ceil(tokens / self.page_size)

    def check_room(self, tokens: int, more: int) -> None:
        """Raise ResourceExhausted unless `tokens` positions fit at all, and `more` pages are free."""
        if self.pages_for(tokens) > self.pages:
            message = (
                f"needs {tokens} positions, the verifier's KV cache holds {self.pages * self.page_size}; "
                "lower sampling.max_tokens"
            )
            raise ResourceExhausted(message, field="open.prompt", code="OUT-303")
        if more > self.free_pages:
            message = f"needs {more} KV pages, {self.free_pages} are free; try again later"
            raise ResourceExhausted(message, field="open.prompt", retry_after_s=1.0, code="OUT-303")


class Handle(Protocol):
    """A sequence in a backend."""

    @property
    def length(self) -> int:
        """Positions that hold valid keys and values."""

    @property
    def num_pages(self) -> int:
        """Pages that it holds."""


@dataclass(frozen=True, slots=True)
class VerificationBranch:
    """Drafts to verify beside a block.

    Attributes:
        index: drafts of the block that come before them.
        first: first of them.
        verification: of the rows after each of them: `first` ends its transcript, and the others are its block.
    """

    index: int
    first: DraftToken
    verification: VerificationInput

    @classmethod
    def of(cls, whole: VerificationInput, branch: BlockBranch, allowed: np.ndarray | None = None) -> VerificationBranch:
        """Return a branch beside the block of `whole`; `allowed` [m, vocab] is what may follow each of its m drafts."""
        first, *others = branch.drafts
        before = (*token_ids(whole.block[: branch.index]), first.id)
        length = len(whole.transcript) + len(before)
        after = replace(
            whole,
            transcript=[*whole.transcript, *before] if whole.sampling.penalises else range(length),
            block=tuple(others),
            allowed=allowed,
            counts=whole.counts.followed_by(before) if whole.counts is not None else None,
        )
        return cls(branch.index, first, after)

    @property
    def drafts(self) -> tuple[DraftToken, ...]:
        return self.first, *self.verification.block


@dataclass(frozen=True, slots=True)
class StepRow:
    """The part of a step that is one sequence's.

    Attributes:
        handle: the sequence.
        tokens: [n] next tokens of its transcript, from position `handle.length` on.
        verification: drafts to verify after them, with the settings and the mask of their sampling; None: more of the
            prompt is left for later steps.
        tapped: whether the residual stream of the newest position that is valid after the step is wanted.
        scored: [m] the transcript's tokens after the first m of `tokens`, whose log probabilities are wanted; only of a
            backend that scores prompts.
        top_logprobs: number of likeliest tokens wanted beside each of these.
        branches: drafts to verify beside the block, where the target verifies branches; no two of them, and none and
            the block, have the same draft at the same position.
    """

    handle: Handle
    tokens: tuple[int, ...]
    verification: VerificationInput | None
    tapped: bool = False
    scored: tuple[int, ...] = ()
    top_logprobs: int = 0
    branches: tuple[VerificationBranch, ...] = ()

    def path(self, branch: int | None) -> tuple[DraftToken, ...]:
        """Return the drafts that lead to the end of a branch; None: to that of the block."""
        block = self.verification.block if self.verification is not None else ()
        if branch is None:
            return block
        return (*block[: self.branches[branch].index], *self.branches[branch].drafts)


@dataclass(frozen=True, slots=True)
class StepOutput:
    """The results of a step.

    Attributes:
        sampled: [rows] target's tokens for each row: one after each draft that was verified, and one more. A backend
            may verify fewer drafts and branches than it was given. None: the row only read, or was put off;
            `handle.length` tells.
        taps: [tapped rows with tokens, taps * hidden] float32, in their order; None: there are none.
        forwarded: moment at which the logits were there, on the monotonic clock, seconds.
        logits: [sum of verified rows, vocab] float32, of the rows that `sampled` has tokens for, in their order, before
            any processing; valid until the next step. None: they are not at hand.
        scores: [rows that score] what the model says of the tokens that these wanted, in their order.
        followed: by the number of its row, the branch that has the target's token where the block has not; the row's
            `sampled` then has the tokens after each draft of `StepRow.path`.
    """

    sampled: Sequence[Sampled | None]
    taps: torch.Tensor | None
    forwarded: float
    logits: torch.Tensor | None = None
    scores: Sequence[tuple[TokenFacts, ...]] = ()
    followed: Mapping[int, int] = field(default_factory=dict)


class Backend(Protocol):
    """A loaded target that computes for many sequences at once, called from one thread."""

    @property
    def facts(self) -> TargetFacts:
        """Facts of the target."""

    @property
    def capacity(self) -> Capacity:
        """Present state of the KV cache."""

    def tap(self, layers: Sequence[int]) -> None:
        """Have later steps tap what enters `layers`, ascending; ModelRefused: the target has no such layers."""

    def open(self, tokens: Sequence[int] = (), isolation: str = "") -> Handle:
        """Open a sequence that will hold `tokens`; its length tells how many of them are computed already.

        Args:
            tokens: [n] transcript so far, the last of which is never computed already.
            isolation: only sequences that were opened with the same may share what was computed.
        """

    def reserve(self, handle: Handle, tokens: int) -> None:
        """Let a sequence hold pages for `tokens` positions instead, no fewer than are valid.

        Raises:
            ResourceExhausted: not enough pages are free; the sequence keeps what it has.
        """

    def truncate(self, handle: Handle, length: int) -> None:
        """Forget the positions from `length` on; ValueError: the sequence has fewer."""

    def release(self, handle: Handle) -> None:
        """Give back what a sequence holds, on a device that has failed, too; `open` may find it until it is evicted."""

    def step(self, rows: Sequence[StepRow]) -> StepOutput:
        """Compute the rows in one pass, and sample after those that verify.

        Each sequence grows by the tokens and the drafts that were computed, for which it must hold pages: those of
        its block or, where that is followed, of the path to the end of a branch. Other branches leave no trace.

        Raises:
            FloatingPointError: logits, or the scores that settings make of them, are no numbers.
            Exception: anything that the target raises; sequences then keep their length.
        """

    def close(self) -> None:
        """End what the backend has started; no other call follows."""
