"""What the target thought of tokens that it did not write: its processed probabilities in place of those it did."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from outrider.bench.comparison.texts import Written
from outrider.cloud.sampling import VerificationInput, processed_logits


class TargetChances:
    """Of one text. At temperature 0 its distribution is taken at temperature 1, as the verifier takes it."""

    def __init__(self, written: Written) -> None:
        """Process the logits of all places of the text."""
        text = written.text
        prompt, tokens = text.transcript[: text.prompt_length], text.transcript[text.prompt_length :]
        judged = VerificationInput(written.wish.sampling, list(prompt), len(prompt), tokens[:-1])
        with torch.inference_mode():
            self._scores = processed_logits(written.logits, judged)  # [n, vocab] float64
            self._log_totals = torch.logsumexp(self._scores, dim=-1)

    def of(self, tokens: Sequence[int]) -> list[float]:
        """[n] probabilities of `tokens` [n], the i-th after prompt and text up to place i; 0 beyond the vocabulary."""
        wanted = torch.tensor(tokens, device=self._scores.device)
        known = wanted.clamp(max=self._scores.shape[1] - 1)
        p = torch.exp(self._scores.gather(1, known[:, None])[:, 0] - self._log_totals)
        return [float(chance) for chance in torch.where(known == wanted, p, 0.0)]
