"""From the logits of kept rows to records: the likeliest tokens of each row, then the rows of a text together."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, fields
from typing import NamedTuple

import numpy as np
import torch

from outrider.cloud.learning.lesson_record import TOP, LessonRecord
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
class KeptRows:
    """The r rows of one step that are kept of a text.

    Attributes:
        positions: [r] absolute position of the target's token in each.
        kinds: [r] `LessonKind` of each.
        weights: [r] 1 / probability that it was kept.
        step: rows of the step.
        first: place of the first row among those of the step.
    """

    positions: Sequence[int]
    kinds: Sequence[int]
    weights: Sequence[float]
    step: StepRows
    first: int


@dataclass(slots=True, eq=False)
class TextPart:
    """Part of one text with the rows that are kept of it.

    Attributes:
        model, session_salt, key_salt, prompt_class, sampling, first_generated: as in `LessonRecord`.
        at_s: time of its beginning, Unix seconds.
        start: absolute position of tokens[0].
        tokens: [n] text up to the end of the part.
        kept: rows of each step, oldest first.
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
    kept: list[KeptRows] = field(default_factory=list)
    tokenizer_sha256: str = ""

    def __len__(self) -> int:
        """Return the number of rows."""
        return sum(len(rows.positions) for rows in self.kept)


class PackedPart(NamedTuple):
    """The outcome of a part that was packed.

    Attributes:
        record: what is left of it; None: nothing.
        kinds: number of its rows by `LessonKind`.
        unread: rows whose step was dropped unread.
        broken: rows whose logits were no numbers.
    """

    record: LessonRecord | None
    kinds: Counter[int]
    unread: int
    broken: int


def pack(part: TextPart) -> PackedPart:
    """Return the record of a part, and what is left out of it."""
    read = [(rows, rows.step.said) for rows in part.kept if rows.step.said is not None]
    unread = len(part) - sum(len(rows.positions) for rows, _ in read)
    if not read:
        return PackedPart(None, Counter(), unread, 0)

    def of_rows(values: str, dtype: type) -> np.ndarray:
        return np.array([value for rows, _ in read for value in getattr(rows, values)], dtype)

    def of_target(values: str) -> np.ndarray:
        places = [slice(rows.first, rows.first + len(rows.positions)) for rows, _ in read]
        return np.concatenate([getattr(said, values)[place] for (_, said), place in zip(read, places, strict=True)])

    finite = of_target("finite")
    good = np.flatnonzero(finite)
    broken = len(finite) - len(good)
    if not len(good):
        return PackedPart(None, Counter(), unread, broken)
    record = LessonRecord(
        model=part.model,
        session_salt=part.session_salt,
        key_salt=part.key_salt,
        prompt_class=part.prompt_class,
        sampling=part.sampling,
        at_s=part.at_s,
        start=part.start,
        first_generated=part.first_generated,
        tokens=np.array(part.tokens, np.uint32),
        positions=of_rows("positions", np.uint32)[good],
        top_ids=of_target("top_ids")[good],
        top_logp=of_target("top_logp")[good],
        rest_logp=of_target("rest_logp")[good],
        weights=of_rows("weights", np.float32)[good],
        tokenizer_sha256=part.tokenizer_sha256,
    )
    return PackedPart(record, Counter(of_rows("kinds", np.int64)[good].tolist()), unread, broken)
