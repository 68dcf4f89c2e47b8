"""The losses that a drafter learns from, each with its source and equation, and the rows of a batch that they read.

p is the target's distribution at T = 1, q the drafter's, y the committed token. Of p a record keeps the likeliest
tokens S and the mass outside. The drafter reads each text once; the target's half comes from the record.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from outrider.cloud.learning.adapted import AdaptedDrafter
from outrider.cloud.learning.lesson_record import TOP, LessonRecord
from outrider.cloud.training.teacher import passes
from outrider.drafters.packages import DrafterPackage
from outrider.proto.errors import InvalidArgument
from outrider.proto.noise import TorchNoise

MIN_MASS = 1e-7  # of a rest: float32 sums of probabilities are not exact below
CONTEXT = 256  # tokens before the first row of a passage that the drafter reads
TOKENS_PER_PASS = 8192  # padding included
NOISE_ROWS = 64  # rows whose noise over the vocabulary is computed at once


@dataclass(frozen=True, slots=True, eq=False)
class JudgedRows:
    """Positions of one batch, as the verifier judged them and the drafter sees them now.

    Attributes:
        log_q: float32 [n, vocab], the drafter's log-probabilities at T = 1; gradients flow to them.
        committed: int64 [n], y.
        weights: float32 [n], inverse of the probability that the position was logged.
        top: int64 [n, k], the target's most likely tokens, S; k = 0 where the loss does not read the target.
        log_p: float32 [n, k], the target's log-probabilities of these.
        log_rest: float32 [n], log of the target's mass outside S; -inf: none.
        log_parent: float32 [n, vocab], the parent's log-probabilities, which do not learn; None: not given.
        noise: float32 [n, vocab], the shared Gumbel noise of each position, times the temperature; None: not given.
    """

    log_q: torch.Tensor
    committed: torch.Tensor
    weights: torch.Tensor
    top: torch.Tensor
    log_p: torch.Tensor
    log_rest: torch.Tensor
    log_parent: torch.Tensor | None = None
    noise: torch.Tensor | None = None

    def mean(self, values: torch.Tensor) -> torch.Tensor:
        """Return the weighted mean of `values` [n]; 0 where all weights are 0."""
        total = self.weights.sum()
        return (values * self.weights).sum() / total.clamp(min=torch.finfo(total.dtype).tiny)


@dataclass(frozen=True, slots=True)
class Loss:
    """A loss of judged rows.

    Attributes:
        value: returns the loss of a batch, a scalar.
        reads_target: whether it needs the probabilities of target and parent; else tokens and their noise are enough.
    """

    value: Callable[[JudgedRows], torch.Tensor]
    reads_target: bool


def tailed_kl(rows: JudgedRows) -> torch.Tensor:
    """Return the mean of KL(t|q), t the target where it is known, else the parent.

    t is p in S; outside it is the mass there times the parent's probabilities, scaled to 1. A divergence with one entry
    for the rest leaves the shape of q outside S to chance, and at T = 1 a fifth of the tokens can be from there.
    """
    if rows.log_parent is None:
        raise ValueError("the loss kl-tail needs the parent's log-probabilities")
    outside = rows.log_parent.exp().scatter(1, rows.top, 0.0)
    outside = outside / outside.sum(1, keepdim=True).clamp(min=MIN_MASS)
    taught = (rows.log_rest.exp()[:, None] * outside).scatter(1, rows.top, rows.log_p.exp())
    return rows.mean((torch.xlogy(taught, taught) - taught * rows.log_q).sum(-1))


def coupled_cross_entropy(rows: JudgedRows) -> torch.Tensor:
    """Return the mean of -ln softmax(ln q + G)[y], G the shared noise.

    y is the argmax of ln p + G, so the perturbed drafter is trained as a classifier of it; at T = 0 it is plain
    cross-entropy.
    """
    if rows.noise is None:
        raise ValueError("the loss cce needs the noise of its positions")
    perturbed = (rows.log_q + rows.noise).log_softmax(-1)
    return -rows.mean(perturbed.gather(1, rows.committed[:, None])[:, 0])


LOSSES: Mapping[str, Loss] = {
    "kl-tail": Loss(tailed_kl, reads_target=True),
    "cce": Loss(coupled_cross_entropy, reads_target=False),
}


def check_record(record: LessonRecord, drafter: DrafterPackage, loss: Loss) -> None:
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
    if loss.reads_target and top != needed:
        raise InvalidArgument(f"has {top} tokens a row where this loss reads {needed}", field="lessons.top_ids")


@dataclass(frozen=True, slots=True, eq=False)
class _Passage:
    """Tokens [t] to read, and the indices [m] in them after which the rows of `record` stand."""

    record: LessonRecord
    tokens: np.ndarray
    after: np.ndarray

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, record: LessonRecord) -> _Passage:
        after = record.positions.astype(np.int64) - record.start - 1  # of the token before
        first = max(0, int(after.min()) - CONTEXT)
        return cls(record, record.tokens[first : int(after.max()) + 1], after - first)


def judged_rows(drafter: AdaptedDrafter, records: Sequence[LessonRecord], loss: Loss) -> JudgedRows | None:
    """Return the rows of `records` with what `loss` reads, as the drafter sees them now; None: there are none."""
    passages = sorted((_Passage.of(record) for record in records if len(record)), key=len)
    if not passages:
        return None

    def log_probabilities() -> torch.Tensor:
        return torch.cat([_read(drafter, part) for part in passes(passages, TOKENS_PER_PASS)])

    def gathered(name: str, dtype: type) -> torch.Tensor:
        parts = [np.asarray(getattr(passage.record, name)) for passage in passages]
        if name.startswith("top_") and not loss.reads_target:
            parts = [part[:, :0] for part in parts]
        return torch.from_numpy(np.concatenate(parts).astype(dtype))

    log_q = log_probabilities()
    log_parent: torch.Tensor | None = None
    noise: torch.Tensor | None = None
    if loss.reads_target:
        with torch.no_grad(), drafter.unchanged():
            log_parent = log_probabilities()
    else:
        noise = torch.cat([_noise(passage.record, log_q.shape[1]) for passage in passages])
    return JudgedRows(
        log_q=log_q,
        committed=gathered("targets", np.int64),
        weights=gathered("weights", np.float32),
        top=gathered("top_ids", np.int64),
        log_p=gathered("top_logp", np.float32),
        log_rest=gathered("rest_logp", np.float32),
        log_parent=log_parent,
        noise=noise,
    )


def _read(drafter: AdaptedDrafter, passages: Sequence[_Passage]) -> torch.Tensor:
    """Return the log-probabilities [n, vocab] of the passages' rows, in the order of their indices in each."""
    longest = max(map(len, passages))
    tokens = torch.zeros(len(passages), longest, dtype=torch.int64)  # zeros to the right: a causal model never looks
    sources = []
    for index, passage in enumerate(passages):
        tokens[index, : len(passage)] = torch.from_numpy(passage.tokens.astype(np.int64))
        sources.append(torch.from_numpy(passage.after) + index * longest)
    log_q: torch.Tensor = drafter(tokens, torch.cat(sources))
    return log_q


def _noise(record: LessonRecord, vocab: int) -> torch.Tensor:
    """Return the shared noise of a record's rows times its temperature, float32 [m, vocab]."""
    source, positions = TorchNoise(torch), record.positions.tolist()
    keys = source.row_keys([record.sampling.seed] * len(positions), positions)
    gumbel = [source.gumbel(part, torch.arange(vocab)).float() for part in keys.split(NOISE_ROWS)]
    noise: torch.Tensor = torch.cat(gumbel) * record.sampling.temperature
    return noise
