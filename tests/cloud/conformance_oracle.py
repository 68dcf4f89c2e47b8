"""The target of the conformance suite, and the oracle of its texts: transformers' plain forward and the rule."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from outrider.cloud.target.distribution import processed_logits
from outrider.cloud.target.verification import VerificationInput
from outrider.cloud.testing import VOCAB, save_tiny_target
from outrider.proto.noise import gumbel
from outrider.proto.types import Sampling

__all__ = ["VOCAB", "Oracle", "save_conformance_target"]


def save_conformance_target(folder: Path) -> Path:
    """Write the target of the suite, a random Llama whose texts depend on all of their tokens; return its folder."""
    return save_tiny_target(
        folder,
        sharpness=25.0,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=4,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=256,
    )


class Oracle:
    """The plain model and the documented rule.

    Attributes:
        eos_tokens: ids that end its texts.
    """

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
        self.eos_tokens = frozenset([self._model.config.eos_token_id])
        self._known: dict[tuple[int, ...], torch.Tensor] = {}

    @torch.inference_mode()
    def logits(self, text: Sequence[int]) -> torch.Tensor:
        """Return [1, vocab] float32, the logits after `text`."""
        text = tuple(text)
        if text not in self._known:
            rows = self._model(torch.tensor([text]), use_cache=False).logits[0].float()
            self._known |= {text[: end + 1]: rows[end : end + 1] for end in range(len(text))}
        return self._known[text]

    @torch.inference_mode()
    def entering(self, text: Sequence[int], layers: Sequence[int]) -> torch.Tensor:
        """Return [layers * hidden] float32, what enters `layers` at the last position of `text`."""
        states = self._model(torch.tensor([tuple(text)]), output_hidden_states=True).hidden_states
        return torch.cat([states[layer][0, -1] for layer in layers])

    def scores(
        self, text: Sequence[int], sampling: Sampling, prompt: int, allowed: np.ndarray | None = None
    ) -> np.ndarray:
        """Return [vocab] float64, log p + G of each token after `text`, whose first `prompt` tokens are the prompt."""
        mask = None if allowed is None else allowed[None]
        row = VerificationInput(sampling, list(text), prompt, (), mask, eos_tokens=self.eos_tokens)
        processed = processed_logits(self.logits(text), row)[0]
        if sampling.temperature == 0:
            return processed.double().numpy()
        logp = torch.log_softmax(processed.double(), -1).numpy()
        return np.asarray(logp + gumbel(sampling.seed, len(text), np.arange(len(logp))))
