"""Distillation of an adapter: a drafter's low-rank update for a corpus, from its package to a package."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
from transformers import PreTrainedModel

from outrider.cloud.learning.adapted import AdaptedDrafter
from outrider.cloud.learning.parent import load_parent
from outrider.cloud.training.acceptance import MeanAcceptance
from outrider.cloud.training.optimizers import adam, linear_fall
from outrider.cloud.training.report import Reporter
from outrider.cloud.training.run import TRAINING_FILE, TrainingResult, TrainingRun, carry_out
from outrider.cloud.training.same_tokenizer import check_tokenizer
from outrider.cloud.training.settings import AdapterTraining
from outrider.cloud.training.texts import Texts
from outrider.drafters.adapters import write_adapter_package
from outrider.drafters.packages import ADAPTER, DrafterPackage, LearnedFrom, find_package
from outrider.drafters.tensor_file import read_tensors, write_tensors
from outrider.proto.errors import InvalidArgument

PACKAGE = "package"


def train_adapter(
    config: AdapterTraining,
    *,
    on_step: Callable[[int], None] | None = None,
    stopping: Callable[[], bool] | None = None,
) -> TrainingResult:
    """Distil an adapter and write its package to `config.output / PACKAGE`, with arguments and errors of `carry_out`.

    Raises:
        InvalidArgument: the package is there already, or the parent has another tokenizer or vocabulary.
        ModelRefused: the parent cannot be trained on.
    """
    package = config.output / PACKAGE
    if package.exists():
        raise InvalidArgument(f"{package} is there already; choose another folder", field="output")
    parent = find_package(config.parent)
    check_tokenizer(parent.name, parent.tokenizer_sha256, config.target, field="parent")
    result = carry_out(partial(_AdapterRun, config, parent), config, on_step, stopping)
    _write_package(config, parent, result, package)
    return result


def _write_package(config: AdapterTraining, parent: DrafterPackage, result: TrainingResult, package: Path) -> None:
    record = json.loads((result.folder / TRAINING_FILE).read_text(encoding="utf-8"))
    tensors = read_tensors(result.folder / ADAPTER)
    names = [name.removesuffix(".A") for name in tensors if name.endswith(".A")]
    write_adapter_package(
        parent.folder,
        package,
        {name: (tensors[f"{name}.A"], tensors[f"{name}.B"]) for name in names},
        sequence=parent.sequence + 1 if config.name == parent.name else 0,
        learned_from=LearnedFrom(result.tokens_seen, 0, record["tokens_by_source"]),
        name=config.name,
        more={"training": {key: value for key, value in record.items() if key != "losses"}},
    )


class _AdapterRun(TrainingRun):
    def __init__(
        self,
        config: AdapterTraining,
        parent: DrafterPackage,
        target: PreTrainedModel,
        texts: Texts,
        reporter: Reporter,
    ) -> None:
        if parent.vocab_size != target.config.vocab_size:
            counts = f"{parent.vocab_size} tokens, the target {target.config.vocab_size}"
            raise InvalidArgument(f"the drafter {parent.name} has {counts}; take one of this target", field="parent")
        loaded = load_parent(parent)
        self.adapted = AdaptedDrafter(loaded, rank=config.rank, seed=config.seed).to(target.device)
        super().__init__(
            config,
            target,
            texts,
            reporter,
            models={"": loaded.model},
            students={"": self._logits},
            decisive="",
            trained=[self.adapted.learned()],
            optimizers=[adam(self.adapted.learned(), config.other_lr)],
            fall=linear_fall(config.decay_fraction),
        )

        self.cache(self.adapted.known)

    def backward(self, blocks: torch.Tensor, *, share: float) -> float:
        return self.distil(blocks, self._terms, known=self.adapted.known, share=share)

    def _terms(self, tokens: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return self.adapted.hidden(tokens), self.adapted.head()

    def write_models(self, folder: Path) -> None:
        tensors = {
            f"{name}.{side}": each
            for name, pair in self.adapted.matrices().items()
            for side, each in zip("AB", pair, strict=True)
        }
        write_tensors(folder / ADAPTER, tensors)

    def read_models(self, folder: Path) -> None:
        tensors = read_tensors(folder / ADAPTER)
        names = self.adapted.matrices()
        self.adapted.load({name: (tensors[f"{name}.A"], tensors[f"{name}.B"]) for name in names})

    def facts(self, name: str, acceptance: Mapping[str, MeanAcceptance]) -> dict[str, Any]:
        """Return the acceptance, and what was read of each source."""
        read = zip(self.texts.sources, self.sampler.taken, strict=True)
        by_source = {source.name: blocks * self.config.block for source, blocks in read}
        return {**super().facts(name, acceptance), "tokens_by_source": by_source}

    def _logits(self, tokens: torch.Tensor) -> torch.Tensor:
        return self.adapted.logits(self.adapted.hidden(tokens))
