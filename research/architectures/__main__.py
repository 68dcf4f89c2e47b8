"""The table of architectures: `python -m research.architectures [NAME ...]`.

For each causal language model that transformers has, made small and random: how it is served, what its rows keep, and
24 greedy texts beside those of its own `generate`, with drafts of which 30 to 90 % are right, 1 to 4 sessions at once,
prompts in pieces, sessions sent away and resumed. Times are those of so small a model: its calls, not its products.
"""

from __future__ import annotations

import logging
import sys
import tempfile
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from transformers import GenerationConfig

from outrider.cloud.target.architecture import CANNOT_RUN
from outrider.cloud.target.own_cache import OwnCacheTarget
from outrider.cloud.target.target import Target
from outrider.cloud.target.target_loading import load_target
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.testing import VOCAB
from outrider.proto.errors import ModelRefused
from outrider.proto.testing import word_tokenizer
from research.architectures.drafted_texts import DraftedText, write
from research.architectures.small_models import NAMES, NOT_SMALL, small_model

TEXTS, TOKENS, SHARED = 24, 24, 16  # a family; each; of each prompt that others have too
COLUMNS = ("family", "way", "a row keeps", "drafts", "texts", "ms a step", "ms a token of generate")


class Family(NamedTuple):
    """Results of a family.

    Attributes:
        target: the small model as it is served.
        texts: texts that it wrote.
        equal: how many of them are those of `generate`.
        step_s: mean time of a step, seconds.
        token_s: mean time of a token of `generate`, seconds.
    """

    target: Target
    texts: int
    equal: int
    step_s: float
    token_s: float

    def cells(self, name: str) -> Sequence[str]:
        way = "one session a pass" if isinstance(self.target, OwnCacheTarget) else "together"
        states = "" if self.target.pool.new_states is None or way != "together" else ", states"
        drafts = "branches" if self.target.verifies_branches else "chains"
        guarantee = self.target.passes.guarantee.name.lower().replace("_", " ")
        texts, step, token = f"{self.equal}/{self.texts}", f"{1e3 * self.step_s:.1f}", f"{1e3 * self.token_s:.1f}"
        return name, way + states, guarantee, drafts, texts, step, token


@torch.inference_mode()
def tried(name: str, folder: Path, count: int = TEXTS) -> Family:
    """Return what a family does with `count` texts; raises ModelRefused where it is not served."""
    model = small_model(name)
    save(model, folder)
    target = load_target(str(folder), kv_tokens=2048)
    texts, token_s = texts_of(model, count)
    started, steps = time.perf_counter(), 0
    for at_once in (1, 2, 3, 4):
        some = texts[at_once - 1 :: 4]
        steps += write(TransformersBackend(target), some, at_once=at_once, vocab=VOCAB, seed=at_once)
    step_s = (time.perf_counter() - started) / steps
    return Family(target, count, sum(text.equal for text in texts), step_s, token_s)


def texts_of(model: Any, count: int) -> tuple[list[DraftedText], float]:
    """Return `count` texts to be written that `generate` has written, and its seconds a token."""
    model.set_attn_implementation("eager")
    model.generation_config = GenerationConfig(pad_token_id=0)  # some would not be greedy, or force their last token
    generator = torch.Generator().manual_seed(1)
    shared = torch.randint(3, VOCAB, (1, SHARED), generator=generator)
    texts, started = [], time.perf_counter()
    for number in range(count):
        own = torch.randint(3, VOCAB, (1, 3 + number), generator=generator)
        prompt = torch.cat([shared, own], dim=1) if number % 2 else own
        text = model.generate(
            prompt, max_new_tokens=TOKENS, min_new_tokens=TOKENS, do_sample=False, eos_token_id=None, use_cache=True
        )
        texts.append(DraftedText(tuple(prompt[0].tolist()), text[0].tolist(), 0.3 + 0.6 * number / (count - 1)))
    return texts, (time.perf_counter() - started) / (count * TOKENS)


def save(model: Any, folder: Path) -> None:
    """Write a small model as a folder of a target."""
    model.save_pretrained(folder)
    (folder / "tokenizer.json").write_text(word_tokenizer(VOCAB))


def main(names: Sequence[str]) -> None:
    """Print the table of `names`, or of all."""
    warnings.filterwarnings("ignore")
    logging.disable(logging.WARNING)
    refused = []
    print(f"| {' | '.join(COLUMNS)} |\n|{'---|' * len(COLUMNS)}")
    for name in names or [name for name in NAMES if name not in NOT_SMALL]:
        with tempfile.TemporaryDirectory() as folder:
            try:
                print(f"| {' | '.join(tried(name, Path(folder)).cells(name))} |", flush=True)
            except (ModelRefused, *CANNOT_RUN) as error:
                refused.append(f"- {name}: {str(error).splitlines()[0]}")
    print("\n".join(["", "Not served:", "", *refused] if refused else []))


if __name__ == "__main__":
    main(sys.argv[1:])
