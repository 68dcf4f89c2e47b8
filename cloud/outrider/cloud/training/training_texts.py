"""The inputs of a training run: the frozen target, its tokenizer, and what it has said.

A drafter must have the target's tokenizer, since it learns what the target says in its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
from transformers import PreTrainedModel

from outrider.cloud.models.family_index import load_causal_lm
from outrider.cloud.target.target_loading import tokenizer_json
from outrider.cloud.training.measured_acceptance import HeldOutText
from outrider.cloud.training.teacher import TeacherFolder, TeacherRows
from outrider.cloud.training.training_settings import Training
from outrider.proto.errors import InvalidArgument
from outrider.proto.tokenizer import TOKENIZER_FILE, tokenizer_hash

HELD_OUT_ROWS = 64  # of a teacher's, a tenth at most


def load_target(config: Training) -> PreTrainedModel:
    """Load the target, frozen."""
    refusal = f"{config.target!r} is no causal language model with safetensors weights"
    target = load_causal_lm(config.target, refusal, field="target", device=config.device)
    target.eval().requires_grad_(False)
    return target


def check_tokenizer(drafter: str, tokenizer_sha256: str, target: str, *, field: str) -> None:
    """Raise InvalidArgument unless a drafter has the tokenizer of a target.

    Args:
        drafter: its name, for the message.
        tokenizer_sha256: hash of its tokenizer.
        target: folder or hub name of the target.
        field: setting that names the drafter.
    """
    if tokenizer_sha256 != tokenizer_hash(tokenizer_json(target, target)):
        raise InvalidArgument(
            f"{drafter!r} has another tokenizer than the target, so its tokens are other text; take one of this target",
            field=field,
        )


def check_tokenizer_of_folder(folder: Path, target: str, *, field: str) -> None:
    """Raise what `check_tokenizer` does of the model in a folder; one without a tokenizer passes."""
    if (folder / TOKENIZER_FILE).is_file():
        own = tokenizer_hash((folder / TOKENIZER_FILE).read_text(encoding="utf-8"))
        check_tokenizer(str(folder), own, target, field=field)


def save_tokenizer(target: str, folder: Path) -> None:
    """Give a drafter's folder the target's `tokenizer.json`, which transformers would write with changes of its own."""
    (folder / TOKENIZER_FILE).write_text(tokenizer_json(target, target), encoding="utf-8")


@dataclass(frozen=True)
class Texts:
    """A teacher's rows.

    Attributes:
        rows: all of them.
        places: uint32 [n], places of the tokens to train on, row by row.
        held_out: texts to measure on; those that the target wrote at T = 0 are apart, after all others.
    """

    rows: TeacherRows
    places: np.ndarray
    held_out: tuple[list[HeldOutText], list[HeldOutText]]

    def tokens_of(self, places: torch.Tensor) -> torch.Tensor:
        """Return the tokens at places [rows, block], int64 of the same shape."""
        return self.rows.tokens[places.cpu()].long().to(places.device)


def gather_texts(config: Training, target: PreTrainedModel) -> Texts:
    """Read a teacher's rows, and set some aside, drawn by the seed."""
    folder = TeacherFolder(config.teacher)
    folder.check_target(target)
    rows = folder.rows()
    drawn = np.random.default_rng([config.seed, 0]).permutation(len(rows))
    held = np.sort(drawn[: max(1, min(HELD_OUT_ROWS, len(rows) // 10))])
    starts = rows.starts.numpy()
    places = [np.arange(starts[i], starts[i + 1], dtype=np.uint32) for i in np.setdiff1d(drawn, held)]
    measured: tuple[list[HeldOutText], list[HeldOutText]] = ([], [])
    for index in held.tolist():
        text = HeldOutText(rows[index].numpy().astype(np.uint32), first=int(rows.firsts[index]))
        measured[bool(rows.greedy[index])].append(text)
    return Texts(rows, np.concatenate(places), measured)


class BlockSampler:
    """A sampler of contiguous blocks of an array [n]; every epoch reads it in a new order, from a new offset.

    Attributes:
        drawn: blocks that were read; with the seed it decides the next.
    """

    def __init__(self, places: np.ndarray, block: int, seed: int):
        if len(places) < 2 * block:
            raise InvalidArgument(
                f"there are {len(places)} tokens to train on, fewer than two blocks of {block}; let `outrider train "
                "teacher` go on, or give shorter blocks",
                field="block",
            )
        self.places = places
        self.block = block
        self.seed = seed
        self.drawn = 0

    def draw(self, blocks: int) -> np.ndarray:
        """Return the next blocks, int64 [blocks, block]."""
        drawn = np.stack([self._block(self.drawn + index) for index in range(blocks)]).astype(np.int64)
        self.drawn += blocks
        return drawn

    def _block(self, number: int) -> np.ndarray:
        blocks_an_epoch = len(self.places) // self.block - 1
        epoch, index = divmod(number, blocks_an_epoch)
        order = np.random.default_rng([self.seed, 1, epoch])
        offset = int(order.integers(self.block))
        first = offset + self.block * int(order.permutation(blocks_an_epoch)[index])
        return self.places[first : first + self.block]
