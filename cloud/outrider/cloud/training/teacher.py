"""A target's texts with its probabilities, written once to a folder, from which every drafter of it learns.

Each row of the folder is a text with the place from which the target's word counts, and the target's most likely tokens
(`BEST` of them) at each place from there, with their log probabilities: 384 bytes a token.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence, Sized
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, TypeVar

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from outrider.proto.errors import InvalidArgument

BEST = 64
FACTS = "teacher.json"
BATCH = "part-{:06d}.safetensors"
LEAST = 1e-6  # probability of all tokens beyond the best that the loss tells from none
MARKED_TOKENS = 4096  # by whose embeddings a target is known

_Sized = TypeVar("_Sized", bound=Sized)


def passes(ordered: Sequence[_Sized], tokens: int) -> Iterator[Sequence[_Sized]]:
    """Divide what grows in length into parts of at most `tokens` tokens, padding included, or of one each."""
    first = 0
    for end in range(1, len(ordered) + 1):
        if end == len(ordered) or (end + 1 - first) * len(ordered[end]) > tokens:
            yield ordered[first:end]
            first = end


def target_mark(target: PreTrainedModel) -> str:
    """Return a hash of a target's embedding, whatever its name, its folder and the type that it is loaded in."""
    tokens = torch.arange(min(MARKED_TOKENS, target.config.get_text_config().vocab_size), device=target.device)
    with torch.no_grad():
        embedded = target.get_input_embeddings()(tokens).bfloat16().cpu()
    return hashlib.sha256(embedded.view(torch.int16).numpy().tobytes()).hexdigest()


@dataclass(frozen=True, eq=False)
class TeacherRows:
    """Rows laid end to end.

    Attributes:
        tokens: int32 [n].
        starts: int64 [rows + 1]; row `i` is `tokens[starts[i]:starts[i + 1]]`.
        firsts: int64 [rows], place in each row of the first token whose probabilities are kept.
        greedy: bool [rows], whether the target wrote the row at T = 0.
    """

    tokens: torch.Tensor
    starts: torch.Tensor
    firsts: torch.Tensor
    greedy: torch.Tensor

    def __len__(self) -> int:
        return len(self.firsts)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self.tokens[self.starts[index] : self.starts[index + 1]]

    @classmethod
    def of(cls, texts: Sequence[torch.Tensor], firsts: Sequence[int], greedy: torch.Tensor) -> Self:
        """Lay texts (int32 [length] each) end to end."""
        starts = torch.tensor([0, *map(len, texts)]).cumsum(0)
        return cls(torch.cat([*texts]), starts, torch.tensor(list(firsts)), greedy)

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Lay the rows of several one after another."""
        texts = [part[index] for part in parts for index in range(len(part))]
        firsts = [first for part in parts for first in part.firsts.tolist()]
        return cls.of(texts, firsts, torch.cat([part.greedy for part in parts]))

    def slots(self) -> torch.Tensor:
        """Return int64 [n], the row of `BestTokens` that is of each token; -1: none is."""
        lengths = self.starts.diff()
        place = torch.arange(len(self.tokens)) - self.starts[:-1].repeat_interleave(lengths)
        counted = place >= self.firsts.repeat_interleave(lengths)
        return torch.where(counted, counted.cumsum(0) - 1, -1)


@dataclass(frozen=True, eq=False)
class BestTokens:
    """The target's most likely tokens, most likely first, at each place of rows from `firsts` on.

    Attributes:
        tokens: int32 [m, BEST], or [m, vocab] of a smaller vocabulary.
        logprobs: float16 of the same shape.
    """

    tokens: torch.Tensor
    logprobs: torch.Tensor

    def __len__(self) -> int:
        return len(self.tokens)

    @classmethod
    def of(cls, logprobs: torch.Tensor) -> Self:
        """Take them from log probabilities [m, vocab]."""
        best = logprobs.topk(min(BEST, logprobs.shape[-1]))
        return cls(best.indices.int(), best.values.half())

    @classmethod
    def joined(cls, parts: Sequence[Self]) -> Self:
        """Return the rows of several batches as one, on the CPU."""
        return cls(torch.cat([part.tokens.cpu() for part in parts]), torch.cat([part.logprobs.cpu() for part in parts]))


class TeacherFolder:
    """The folder: `FACTS`, and a file for each batch of rows, which is there whole or not at all."""

    def __init__(self, folder: Path, *, field: str = "teacher") -> None:
        """Take a folder, which need not be there, that the setting `field` names."""
        self.folder, self._field = folder, field

    def begin(self, facts: Mapping[str, Any]) -> None:
        """Note what target and settings write the rows; raise InvalidArgument if others wrote those that are there."""
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / FACTS
        if not path.exists():
            unfinished = path.with_name(f"{FACTS}.unfinished")
            unfinished.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
            os.replace(unfinished, path)
        found = self.facts()
        for name, value in facts.items():
            if found.get(name) != value:
                raise InvalidArgument(
                    f"{self.folder} was begun with {found.get(name)!r}, not {value!r}; go on with that, or choose "
                    "another folder",
                    field=name,
                )

    def facts(self) -> dict[str, Any]:
        """Return what `begin` wrote."""
        path = self.folder / FACTS
        if not path.is_file():
            raise InvalidArgument(
                f"{self.folder} has no {FACTS}; `outrider train teacher` writes it", field=self._field
            )
        facts: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return facts

    def check_target(self, target: PreTrainedModel) -> None:
        """Raise InvalidArgument unless the rows are this target's."""
        facts = self.facts()
        if facts.get("mark") != target_mark(target):
            raise InvalidArgument(
                f"{self.folder} holds what {facts.get('target')!r} says, not this target; write what this one says "
                "with `outrider train teacher`",
                field="teacher",
            )

    def add(self, number: int, rows: TeacherRows, best: BestTokens) -> None:
        """Write batch `number`."""
        tensors = vars(rows) | {f"best_{name}": tensor for name, tensor in vars(best).items()}
        unfinished = self.folder / f"{BATCH.format(number)}.unfinished"
        save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, unfinished)
        os.replace(unfinished, self.folder / BATCH.format(number))

    def counts(self) -> list[int]:
        """Return how many tokens of the target's each batch holds, from batch 0 on."""
        counts: list[int] = []
        while (path := self.folder / BATCH.format(len(counts))).is_file():
            with safe_open(path, "pt") as file:
                counts.append(file.get_slice("best_tokens").get_shape()[0])
        return counts

    def rows(self) -> TeacherRows:
        """Return all rows.

        Raises:
            InvalidArgument: there are fewer than two, one to learn from and one to measure on.
        """
        rows = [TeacherRows(*tensors) for tensors in self._read("tokens", "starts", "firsts", "greedy")]
        if sum(map(len, rows)) < 2:
            raise InvalidArgument(
                f"{self.folder} has too few rows; let `outrider train teacher` go on", field="teacher"
            )
        return TeacherRows.joined(rows)

    def best(self) -> BestTokens:
        """Return what `BestTokens` has of all rows, in memory."""
        return BestTokens.joined([BestTokens(*tensors) for tensors in self._read("best_tokens", "best_logprobs")])

    def batches(self) -> Iterator[tuple[TeacherRows, BestTokens]]:
        """Yield the rows of one batch after the other, so that no more than these are in memory."""
        names = ("tokens", "starts", "firsts", "greedy", "best_tokens", "best_logprobs")
        for *rows, tokens, logprobs in self._read(*names):
            yield TeacherRows(*rows), BestTokens(tokens, logprobs)

    def _read(self, *names: str) -> Iterator[list[torch.Tensor]]:
        """Yield these tensors of each batch."""
        for number in range(len(self.counts())):
            with safe_open(self.folder / BATCH.format(number), "pt") as file:
                yield [file.get_tensor(name) for name in names]


class CachedTeacher:
    """A teacher's rows in the memory of a device, to learn from without the target."""

    def __init__(
        self, rows: TeacherRows, best: BestTokens, *, vocab: int, known: torch.Tensor | None, device: torch.device
    ):
        """Take rows for a drafter that knows the tokens `known` (int64, ascending) alone; None: all."""
        row_of = torch.arange(vocab, dtype=torch.int32)  # of the drafter's head, for each token
        if known is not None:
            row_of = torch.full((vocab,), -1, dtype=torch.int32)
            row_of[known.cpu()] = torch.arange(len(known), dtype=torch.int32)
        self._slots = rows.slots().to(device)
        self._best = BestTokens(row_of[best.tokens.long()].to(device), best.logprobs.to(device))

    def loss(
        self, places: torch.Tensor, hidden: torch.Tensor, head: torch.Tensor, *, positions_per_chunk: int
    ) -> torch.Tensor:
        """Return `kl_of_best` of what follows each place.

        Args:
            places: int64 [rows, block], of tokens in the teacher's.
            hidden: [rows, block, hidden], the drafter's states there.
            head: [tokens, hidden], over the tokens that it knows.
            positions_per_chunk: how many positions are expanded to the vocabulary at once.
        """
        slots = self._slots[places[:, 1:]]
        counted = slots >= 0
        chosen = slots[counted]
        return kl_of_best(
            hidden[:, :-1][counted],
            head,
            self._best.tokens[chosen].long(),
            self._best.logprobs[chosen],
            positions_per_chunk=positions_per_chunk,
        )


def kl_of_best(
    hidden_by_drafter: torch.Tensor,
    head: torch.Tensor,
    best_tokens: torch.Tensor,
    best_logprobs: torch.Tensor,
    *,
    positions_per_chunk: int,
) -> torch.Tensor:
    """Return the mean KL(target || drafter) of the target's best tokens and one class of all others, nats a token.

    It is at most the whole divergence (data processing), and less only by what tokens beyond the best would add.

    Args:
        hidden_by_drafter: [positions, hidden], after the last norm.
        head: [tokens, hidden], the drafter's, over the tokens that it knows.
        best_tokens: int64 [positions, best], rows of `head`; -1: the drafter does not know it, and the target's
            distribution is taken without it.
        best_logprobs: [positions, best], the target's.
        positions_per_chunk: how many positions are expanded to the vocabulary at once.

    Returns:
        A scalar, through which gradients flow to `hidden_by_drafter` and `head`.
    """
    chunks = zip(
        *(each.split(positions_per_chunk) for each in (hidden_by_drafter, best_tokens, best_logprobs)), strict=True
    )
    sums = [checkpoint(_kl_of_best, hidden, head, *best, use_reentrant=False) for hidden, *best in chunks]
    return torch.stack(sums).sum() / max(1, len(hidden_by_drafter))


def _kl_of_best(
    hidden: torch.Tensor, head: torch.Tensor, best_tokens: torch.Tensor, best_logprobs: torch.Tensor
) -> torch.Tensor:
    known = best_tokens >= 0
    p = best_logprobs.float().exp()
    others_p = (1 - p.sum(-1)).clamp(min=0)
    p = p * known
    total = (p.sum(-1) + others_p).clamp(min=LEAST)  # where the drafter knows none of it, there is nothing to learn
    p, others_p = p / total[:, None], others_p / total
    logits = (hidden @ head.T).float()
    log_q = logits.gather(1, best_tokens.clamp(min=0)) - logits.logsumexp(-1, keepdim=True)
    others_q = (1 - (log_q.exp() * known).sum(-1)).clamp(min=LEAST)
    of_best = torch.xlogy(p, p) - p * log_q.masked_fill(~known, 0.0)
    return of_best.sum() + (torch.xlogy(others_p, others_p) - others_p * others_q.log()).sum()
