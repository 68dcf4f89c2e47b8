"""From records to judged rows: the drafter reads each text once, and the target's half comes from the record."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from outrider.cloud.learning.adapted import AdaptedDrafter
from outrider.cloud.learning.lesson_record import TOP, LessonRecord
from outrider.cloud.learning.losses import JudgedRows, Loss
from outrider.drafters.packages import DrafterPackage
from outrider.proto.errors import InvalidArgument
from outrider.proto.noise import TorchNoise

CONTEXT = 256  # tokens before the first row of a passage that the drafter reads
PROPOSED = 128  # of the drafter's most likely tokens, among which it draws
TOKENS_PER_PASS = 8192  # padding included


@dataclass(frozen=True, slots=True, eq=False)
class _Passage:
    """Tokens [t] to read, and the places [m] in them after which the rows of `record` stand."""

    record: LessonRecord
    tokens: np.ndarray
    places: np.ndarray


def judged_rows(drafter: AdaptedDrafter, records: Sequence[LessonRecord], loss: Loss) -> JudgedRows | None:
    """Return the rows of `records` that `loss` can learn from, as the drafter sees them now; None: there are none.

    Where the loss asks for it, they have what the drafter of today would propose: the noise is known, so that is, and
    whether it hits (Daliri, Musco, Suresh 2024).
    """
    passages = [_passage(record) for record in records if len(record)]
    if not passages:
        return None
    passages.sort(key=lambda passage: len(passage.tokens))
    log_q = torch.cat([_read(drafter, part) for part in _parts(passages)])
    rows = _from_records(passages, log_q, None if loss.reads_target else 0)
    if loss.needs_parent:
        with torch.no_grad(), drafter.unchanged():
            rows = replace(rows, log_parent=torch.cat([_read(drafter, part) for part in _parts(passages)]))
    if loss.needs_noise or loss.on_policy:
        rows = _with_noise(rows, passages, loss)
    return rows


def check_record(record: LessonRecord, drafter: DrafterPackage, *, reads_target: bool = True) -> None:
    """Raise InvalidArgument unless the record is about the drafter's target and tokens, and has what the loss reads.

    `LessonRecord` has checked all else.
    """
    model, vocab = drafter.target, drafter.vocab_size
    if record.model != model:
        raise InvalidArgument(f"is of {record.model!r}; this trainer learns from {model!r}", field="lessons.model")
    if record.tokenizer_sha256 not in ("", drafter.tokenizer_sha256):
        raise InvalidArgument(
            f"is that of {model!r}, and {drafter.name!r}, which drafts by text, has another: it cannot learn from the "
            "target's tokens; name a drafter with the target's tokenizer by --learn-drafter",
            field="lessons.tokenizer_sha256",
        )
    for name in ("tokens", "top_ids"):
        if getattr(record, name).max(initial=0) >= vocab:
            raise InvalidArgument(f"holds a token beyond the vocabulary of {vocab}", field=f"lessons.{name}")
    top, needed = record.top_ids.shape[1], min(TOP, vocab)
    if reads_target and top != needed:
        raise InvalidArgument(f"has {top} tokens a row where this loss reads {needed}", field="lessons.top_ids")


def _passage(record: LessonRecord) -> _Passage:
    """Return the part of the record's text that its rows follow."""
    places = record.positions.astype(np.int64) - record.start - 1  # of the token before
    first = max(0, int(places.min()) - CONTEXT)
    return _Passage(record, record.tokens[first : int(places.max()) + 1], places - first)


def _parts(passages: Sequence[_Passage]) -> Iterator[Sequence[_Passage]]:
    """Divide passages, shortest first, into passes of at most `TOKENS_PER_PASS` or of one passage."""
    first = 0
    for end in range(1, len(passages) + 1):
        if end == len(passages) or (end + 1 - first) * len(passages[end].tokens) > TOKENS_PER_PASS:
            yield passages[first:end]
            first = end


def _read(drafter: AdaptedDrafter, passages: Sequence[_Passage]) -> torch.Tensor:
    """Return the log-probabilities [n, vocab] of the passages' rows, in the order of their places in each."""
    longest = max(len(passage.tokens) for passage in passages)
    tokens = torch.zeros(len(passages), longest, dtype=torch.int64)  # zeros to the right: a causal model never looks
    sources = []
    for index, passage in enumerate(passages):
        tokens[index, : len(passage.tokens)] = torch.from_numpy(passage.tokens.astype(np.int64))
        sources.append(torch.from_numpy(passage.places) + index * longest)
    log_q: torch.Tensor = drafter(tokens, torch.cat(sources))
    return log_q


def _from_records(passages: Sequence[_Passage], log_q: torch.Tensor, top: int | None) -> JudgedRows:
    """Return the rows with the `top` likeliest tokens of the target, or all that the records have."""

    def gathered(name: str, dtype: type) -> torch.Tensor:
        parts = [np.asarray(getattr(passage.record, name)) for passage in passages]
        if name.startswith("top_"):
            parts = [part[:, :top] for part in parts]
        return torch.from_numpy(np.concatenate(parts).astype(dtype))

    return JudgedRows(
        log_q=log_q,
        top=gathered("top_ids", np.int64),
        log_p=gathered("top_logp", np.float32),
        log_rest=gathered("rest_logp", np.float32),
        committed=gathered("targets", np.int64),
        weights=gathered("weights", np.float32),
    )


def _with_noise(rows: JudgedRows, passages: Sequence[_Passage], loss: Loss) -> JudgedRows:
    """Return the rows with the noise or the drafter's proposals, as the loss needs them."""
    keys, temperatures = [], []
    noise = TorchNoise(torch)
    for passage in passages:
        sampling, positions = passage.record.sampling, passage.record.positions.tolist()
        keys.append(noise.row_keys([sampling.seed] * len(positions), positions))
        temperatures += [sampling.temperature] * len(positions)
    row_keys, heat = torch.cat(keys), torch.tensor(temperatures)[:, None]
    if loss.needs_noise:
        everything = torch.arange(rows.log_q.shape[1])
        gumbel = torch.cat([noise.gumbel(part, everything).float() for part in row_keys.split(64)])
        rows = replace(rows, noise=heat * gumbel)
    if loss.on_policy:
        best = rows.log_q.detach().topk(min(PROPOSED, rows.log_q.shape[1]), dim=1)
        perturbed = best.values + heat * noise.gumbel(row_keys, best.indices).float()
        rows = replace(rows, drafted=best.indices.gather(1, perturbed.argmax(1, keepdim=True))[:, 0])
    return rows
