"""From a drafter's logits to the token it proposes.

The verifier takes argmax log p + G (DESIGN section 1; Daliri, Musco, Suresh 2024), so the drafter proposes
argmax log q + G with the same noise, over its top candidates only. q is the drafter's distribution processed the way
the target's will be (the order is fixed by `outrider.proto.types.Sampling`): a drafter that ignored a penalty would
be contradicted by it. What follows is exact when the candidates are the whole vocabulary and close otherwise, which
is enough: a proposal binds nobody.
"""

from __future__ import annotations

import math

import numpy as np

from outrider.proto.noise import gumbel_for_proposals
from outrider.proto.types import Sampling

_LOG_LARGEST_VOCABULARY = 15.0


class ProposalRule:
    """How one session turns candidates into a proposal. Holds no state of the text: one rule serves any drafter."""

    def __init__(self, sampling: Sampling, *, prompt_length: int = 0) -> None:
        """Make the rule.

        Args:
            sampling: the session's parameters, the seed of the shared noise among them.
            prompt_length: tokens of prompt, which presence and frequency penalties leave out.
        """
        self.sampling = sampling
        self.prompt_length = prompt_length
        self._bias = dict(sampling.logit_bias)
        self._allowed = np.array(sorted(sampling.allowed_tokens), dtype=np.int64)
        self._inverse_temperature = 1 / max(sampling.temperature, 1e-9) if sampling.temperature else 1.0
        self._truncates = bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p)
        edits = bool(sampling.logit_bias or sampling.allowed_tokens or sampling.penalises)
        self._plain = not (edits or (self._truncates and sampling.temperature))

    def candidates_wanted(self, useful: int) -> int:
        """How many candidates to hand to `choose`: one where only the argmax can be proposed, else `useful`."""
        return 1 if self._plain and self.sampling.temperature == 0 else useful

    def choose(
        self, position: int, tokens: np.ndarray, logits: np.ndarray, log_normalizer: float, history: np.ndarray
    ) -> tuple[int, float] | None:
        """Return the token to propose at `position` and its probability q under the drafter.

        q counts the tokens that are no candidates too, so it is an honest confidence: exact at temperature 1, and
        by `_log_tail` elsewhere. At temperature 0, where every proposal is certain, q is the argmax's probability at
        temperature 1, since that is what tells how likely the target agrees.

        Args:
            position: absolute, of the token to choose; seeds the noise.
            tokens: [K] int64 candidates, most likely first.
            logits: [K] float32, descending.
            log_normalizer: log of the sum of exp(logit) over the whole vocabulary.
            history: [position] integers, every token before `position`; read only where penalties are on.

        Returns:
            Token and q; None where no candidate may be proposed.
        """
        if not self._plain:
            return self._choose_processed(position, tokens, logits, log_normalizer, history)
        temperature = self.sampling.temperature
        if temperature == 0:
            return int(tokens[0]), min(1.0, math.exp(float(logits[0]) - log_normalizer))
        noise = gumbel_for_proposals(self.sampling.seed, position, tokens)
        if temperature == 1:  # the sum is float64, as the noise is
            index = int((logits + noise).argmax())
            return int(tokens[index]), min(1.0, math.exp(float(logits[index]) - log_normalizer))
        log_q = logits.astype(np.float64) - log_normalizer  # at temperature 1
        scaled = (log_q - log_q[0]) * self._inverse_temperature
        weights = np.exp(scaled)
        index = int((scaled + noise).argmax())
        tail = math.exp(_log_tail(log_q, self._inverse_temperature) - log_q[0] * self._inverse_temperature)
        return int(tokens[index]), min(1.0, float(weights[index] / (weights.sum() + tail)))

    def _choose_processed(
        self, position: int, tokens: np.ndarray, logits: np.ndarray, log_normalizer: float, history: np.ndarray
    ) -> tuple[int, float] | None:
        logits = logits.astype(np.float64)
        processed = (self._edit(tokens, logits, history) - log_normalizer) * self._inverse_temperature
        if not np.isfinite(processed).any():
            return None
        log_total = _log_sum_exp(processed)
        if not len(self._allowed):  # else almost no other token may be drawn
            log_total = float(np.logaddexp(log_total, _log_tail(logits - log_normalizer, self._inverse_temperature)))
        if self.sampling.temperature == 0:
            index = int(processed.argmax())
            return int(tokens[index]), min(1.0, math.exp(processed[index] - log_total))
        if self._truncates:
            kept = self._keep(processed, log_total)
            if 0 < self.sampling.top_k <= len(tokens) or not kept.all():  # then whatever is no candidate is cut too
                processed[~kept] = -np.inf
                log_total = _log_sum_exp(processed)
        index = int((processed + gumbel_for_proposals(self.sampling.seed, position, tokens)).argmax())
        return int(tokens[index]), min(1.0, math.exp(processed[index] - log_total))

    def _edit(self, tokens: np.ndarray, logits: np.ndarray, history: np.ndarray) -> np.ndarray:
        """Apply allowed tokens, bias and penalties to logits [K] float64; what may not be drawn becomes -inf."""
        sampling = self.sampling
        if len(self._allowed):
            logits = np.where(np.isin(tokens, self._allowed), logits, -np.inf)
        if self._bias:
            logits = logits + np.array([self._bias.get(token, 0.0) for token in tokens.tolist()])
        if sampling.repetition_penalty != 1:
            penalised = np.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
            logits = np.where(np.isin(tokens, history), penalised, logits)
        if sampling.presence_penalty or sampling.frequency_penalty:
            counts = np.count_nonzero(tokens[:, None] == history[None, self.prompt_length :], axis=1)
            logits = logits - sampling.presence_penalty * (counts > 0) - sampling.frequency_penalty * counts
        return logits

    def _keep(self, scaled: np.ndarray, log_total: float) -> np.ndarray:
        """Which candidates [K] survive top-k, top-p and min-p, in this order; [K] bool."""
        sampling = self.sampling
        order = np.argsort(-scaled, kind="stable")
        sorted_scaled = scaled[order]
        kept = np.isfinite(sorted_scaled)
        if 0 < sampling.top_k < len(order):
            kept[sampling.top_k :] = False
            log_total = _log_sum_exp(sorted_scaled[kept])
        if sampling.top_p < 1:
            probability = np.where(kept, np.exp(sorted_scaled - log_total), 0.0)
            kept &= np.cumsum(probability) - probability < sampling.top_p
        if sampling.min_p:
            kept &= sorted_scaled >= sorted_scaled[0] + math.log(sampling.min_p)
        mask = np.empty(len(order), dtype=bool)
        mask[order] = kept
        return mask


def _log_sum_exp(values: np.ndarray) -> float:
    """Log of the sum of exp(values), [K] with at least one finite entry."""
    largest = values.max()
    return float(largest + math.log(np.exp(values - largest).sum()))


def _log_tail(log_q: np.ndarray, inverse_temperature: float) -> float:
    """Log of the sum of q ** (1 / temperature) over the tokens that are no candidates; `log_q` [K] float64 are.

    Their probability r at temperature 1 is known. They are taken for r / q_K tokens as likely as the last candidate:
    exact at temperature 1, an upper bound below it, a lower bound above it.
    """
    rest = 1.0 - float(np.exp(log_q).sum())
    if rest < 1e-5:  # float32's rounding, or no tail at all
        return -math.inf
    last = float(log_q[-1])
    log_tokens = min(math.log(rest) - last, _LOG_LARGEST_VOCABULARY)
    return log_tokens + last * inverse_temperature
