"""From the logits of kept rows to records: the likeliest tokens of each row, then the rows of a text together."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
import torch

from outrider.cloud.learning.record import MAX_DRAFTERS, MAX_NAME, NO_DRAFTER, TOP, LessonRecord
from outrider.proto.types import Sampling

_LEAST_LOGP = -60000.0  # the least that a float16 can say
_SLICE = 1 << 17  # logits that are read at once, so that they stay in a core's cache


@dataclass(frozen=True, slots=True)
class Teaching:
    """The target's likeliest tokens in m rows, as `LessonRecord` has it.

    Attributes:
        top_ids: [m, s] uint32.
        top_logp: [m, s] float16.
        rest_logp: [m] float32.
        finite: [m] bool, whether the row's logits were numbers.
    """

    top_ids: np.ndarray
    top_logp: np.ndarray
    rest_logp: np.ndarray
    finite: np.ndarray


@torch.inference_mode()
def teaching(logits: torch.Tensor) -> Teaching:
    """Return the likeliest tokens of each row of logits [m, vocab] with log p, and the log of what the rest has."""
    if logits.is_cuda:
        return _teaching(logits)
    parts = [_teaching(part) for part in logits.split(max(1, _SLICE // logits.shape[1]))]
    if len(parts) == 1:
        return parts[0]
    names = [each.name for each in fields(Teaching)]
    return Teaching(*(np.concatenate([getattr(part, name) for part in parts]) for name in names))


def _teaching(logits: torch.Tensor) -> Teaching:
    top, top_ids = _likeliest(logits, min(TOP, logits.shape[1]))
    best = top[:, :1]
    mass = (logits - best).exp_().sum(dim=-1)
    of_top = (top - best).exp().sum(dim=-1)
    log_sums = best + mass.log()[:, None]
    whole = logits.shape[1] <= TOP
    rest = torch.full_like(mass, -math.inf) if whole else ((mass - of_top).clamp(min=0.0) / mass).log()
    # Rounding may make them a little more than 0.
    top_logp = (top - log_sums).clamp(_LEAST_LOGP, 0.0).half()
    finite = log_sums[:, 0].isfinite() & top_logp.isfinite().all(dim=-1)
    return Teaching(
        top_ids.cpu().numpy().astype(np.uint32),
        top_logp.cpu().numpy(),
        rest.clamp(max=0.0).float().cpu().numpy(),
        finite.cpu().numpy(),
    )


def _likeliest(logits: torch.Tensor, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the largest `count` of each row of logits [m, vocab], in order, and their places.

    They are among the `count` columns with the largest maxima, if a row is cut into columns; on a CPU, to look for
    these and then in them takes a third of the time of a search through all.
    """
    vocab = logits.shape[1]
    height = round(math.sqrt(vocab / count))
    width = vocab // height
    if height < 4:
        top = logits.topk(count, dim=-1)
        return top.values, top.indices
    columns = logits[:, : height * width].unflatten(1, (height, width)).amax(dim=1).topk(count, sorted=False).indices
    rows = torch.arange(0, height * width, width, device=logits.device)
    places = (columns[:, None, :] + rows[:, None]).flatten(1)
    left_over = torch.arange(height * width, vocab, device=logits.device)
    places = torch.cat([places, left_over.expand(len(logits), -1)], dim=1)
    top = logits.gather(1, places).topk(count, dim=-1)
    return top.values, places.gather(1, top.indices)


@dataclass(slots=True, eq=False)
class StepRows:
    """Kept rows of one step, of all its texts.

    Attributes:
        logits: [r, vocab] float32 copies on the target's device, until they are read.
        said: what they say; None: they are not read yet, or were dropped unread.
    """

    logits: torch.Tensor | None
    said: Teaching | None = None

    @property
    def nbytes(self) -> int:
        """Size of the logits that wait."""
        return self.logits.nbytes if self.logits is not None else 0


def read_steps(steps: Iterable[StepRows]) -> None:
    """Read the rows of several steps with one call."""
    waiting = [(step, step.logits) for step in steps if step.logits is not None]
    if not waiting:
        return
    said = teaching(torch.cat([logits for _, logits in waiting]))
    first = 0
    for step, logits in waiting:
        rows = slice(first, first + len(logits))
        step.said = Teaching(said.top_ids[rows], said.top_logp[rows], said.rest_logp[rows], said.finite[rows])
        step.logits = None
        first += len(logits)


@dataclass(slots=True, eq=False)
class JudgedBlock:
    """A block that a step verified, of which at least one row is kept.

    Attributes:
        start: absolute position that its first draft proposed a token for.
        drafts: [k] drafted tokens.
        edge_drafter: name@version of whoever made them at the edge; empty: unknown.
        own_drafter: the same of the verifier's own drafter.
        made_here: drafts of the verifier's own, which come last.
        rows: [r] kept rows, by the index of their draft.
        kinds: [r] kind of each.
        targets: [r] the target's token in each.
        weights: [r] 1 / probability that it was kept.
        step: rows of the step.
        first: place of the first row among those of the step.
    """

    start: int
    drafts: tuple[int, ...]
    edge_drafter: str
    own_drafter: str
    made_here: int
    rows: Sequence[int]
    kinds: Sequence[int]
    targets: Sequence[int]
    weights: Sequence[float]
    step: StepRows
    first: int

    @property
    def makers(self) -> Iterable[str]:
        """Name of each draft's maker, [k]."""
        of_edge = len(self.drafts) - self.made_here
        return (*(self.edge_drafter,) * of_edge, *(self.own_drafter,) * self.made_here)


@dataclass(slots=True, eq=False)
class TextPart:
    """Part of one text with the blocks that verified it.

    Attributes:
        model, session_salt, key_salt, prompt_class, sampling, first_generated: as in `LessonRecord`.
        at_s: time of the first block, Unix seconds.
        start: absolute position of tokens[0].
        tokens: [n] text up to the end of the part.
        blocks: judged blocks, oldest first.
        tokenizer_sha256: as in `LessonRecord`.
    """

    model: str
    session_salt: bytes
    key_salt: bytes
    prompt_class: int
    sampling: Sampling
    first_generated: int
    at_s: float
    start: int = 0
    tokens: Sequence[int] = ()
    blocks: list[JudgedBlock] = field(default_factory=list)
    tokenizer_sha256: str = ""


def pack(part: TextPart) -> tuple[LessonRecord | None, int, int]:
    """Return the record of a part, or None where nothing is left.

    Beside it stand two numbers of rows that are left out: those whose step was dropped unread, and those whose logits
    were no numbers.
    """
    blocks = [block for block in part.blocks if block.step.said is not None]
    unread = sum(len(block.rows) for block in part.blocks) - sum(len(block.rows) for block in blocks)

    def of_rows(values: str, dtype: type) -> np.ndarray:
        return np.array([value for block in blocks for value in getattr(block, values)], dtype)

    def said(values: str) -> np.ndarray:
        return np.concatenate([
            getattr(block.step.said, values)[block.first : block.first + len(block.rows)] for block in blocks
        ])  # fmt: skip

    good = np.flatnonzero(said("finite")) if blocks else np.empty(0)
    row_block = np.repeat(np.arange(len(blocks), dtype=np.uint32), [len(block.rows) for block in blocks])
    broken = len(row_block) - len(good)
    if not len(good):
        return None, unread, broken
    names, made_by = _names(blocks)
    record = LessonRecord(
        model=part.model,
        session_salt=part.session_salt,
        key_salt=part.key_salt,
        prompt_class=part.prompt_class,
        drafters=names,
        sampling=part.sampling,
        at_s=part.at_s,
        start=part.start,
        first_generated=part.first_generated,
        tokens=np.array(part.tokens, np.uint32),
        block_starts=np.array([block.start for block in blocks], np.uint32),
        block_ends=np.cumsum([len(block.drafts) for block in blocks]).astype(np.uint32),
        drafts=np.array([draft for block in blocks for draft in block.drafts], np.uint32),
        drafted_by=np.array(made_by, np.uint8),
        row_block=row_block[good],
        row_index=of_rows("rows", np.uint32)[good],
        kinds=of_rows("kinds", np.uint8)[good],
        targets=of_rows("targets", np.uint32)[good],
        top_ids=said("top_ids")[good],
        top_logp=said("top_logp")[good],
        rest_logp=said("rest_logp")[good],
        weights=of_rows("weights", np.float32)[good],
        tokenizer_sha256=part.tokenizer_sha256,
    )
    return record, unread, broken


def _names(blocks: Sequence[JudgedBlock]) -> tuple[tuple[str, ...], list[int]]:
    """Return the drafters' names, and the index of each draft's maker."""
    numbers: dict[str, int] = {}
    made_by = []
    for block in blocks:
        for maker in block.makers:
            known = 0 < len(maker) <= MAX_NAME and (maker in numbers or len(numbers) < MAX_DRAFTERS)
            made_by.append(numbers.setdefault(maker, len(numbers)) if known else NO_DRAFTER)
    return tuple(numbers), made_by
