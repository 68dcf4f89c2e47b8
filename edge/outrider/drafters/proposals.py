"""From a drafter's logits to the token it proposes.

The verifier takes argmax log p + G (docs/exactness.md; Daliri, Musco, Suresh 2024), so the drafter proposes
argmax log q + G with the same noise, over its top candidates only. q is the drafter's distribution processed the way
the target's will be (the order is fixed by `outrider.proto.types.Sampling`): a drafter that ignored a penalty would
be contradicted by it. What follows is exact when the candidates are the whole vocabulary and close otherwise, which
is enough, since the verifier decides.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Collection

import numpy as np

from outrider.proto.noise import exponentials_for_proposals
from outrider.proto.token_counts import TokenCounts
from outrider.proto.types import DraftToken, Sampling

_LOG_LARGEST_VOCABULARY = 15.0
NO_PROPOSAL = DraftToken(-1)


class ProposalRule:
    """Rule by which one session turns candidates into a proposal; stateless, so one rule serves any drafter.

    Args:
        sampling: the session's parameters, the seed of the shared noise among them.
        prompt_length: tokens of prompt, which presence and frequency penalties and `min_tokens` leave out.
        runners_up: most tokens to name beside each proposal that would have been proposed next.
        eos_tokens: ids that end a text of the target, as far as they are known; `min_tokens` forbids them.
    """

    def __init__(
        self, sampling: Sampling, *, prompt_length: int = 0, runners_up: int = 0, eos_tokens: Collection[int] = ()
    ) -> None:
        self.sampling = sampling
        self.runners_up = runners_up
        self.eos_tokens = frozenset(eos_tokens)
        self.prompt_length = prompt_length
        self._bias = dict(sampling.logit_bias)
        self._allowed = np.array(sorted(sampling.allowed_tokens), dtype=np.int64)
        self._inverse_temperature = 1 / max(sampling.temperature, 1e-9) if sampling.temperature else 1.0
        self._truncates = bool(sampling.top_k or sampling.top_p < 1 or sampling.min_p)
        self._forbidden = frozenset((*eos_tokens, *sampling.stop_tokens) if sampling.min_tokens else ())
        self._ends = np.array(sorted(self._forbidden), dtype=np.int64)
        self._first_end = prompt_length + sampling.min_tokens if self._forbidden else 0  # they may come from it on
        edits = bool(sampling.logit_bias or sampling.allowed_tokens or sampling.has_penalties)
        self._plain = not (edits or (self._truncates and sampling.temperature))

    def counts(self) -> TokenCounts | None:
        """Return empty counts for a prefix's tokens; None: this rule has no penalties."""
        return TokenCounts(self.prompt_length) if self.sampling.has_penalties else None

    def forbids(self, position: int, token: int) -> bool:
        """Return whether `token` is an end at a `position` before `min_tokens`, where the target cannot have it."""
        return position < self._first_end and token in self._forbidden

    def candidates_wanted(self, useful: int) -> int:
        """Return how many candidates `choose` needs, `useful` at most: few where only the argmax can be proposed."""
        if not self._plain or self.sampling.temperature > 0:
            return useful
        return min(useful, 1 + self.runners_up + len(self._ends))  # so that some are left without the ends

    def choose(
        self, position: int, tokens: np.ndarray, logits: np.ndarray, log_normalizer: float, counts: TokenCounts | None
    ) -> DraftToken:
        """Return the token to propose at `position`; its confidence is q.

        q counts the tokens that are no candidates too, so it is an honest confidence: exact at temperature 1, and
        estimated by `_log_tail` elsewhere. At temperature 0, where every proposal is certain, q is the argmax's
        probability at temperature 1, which says how likely the target agrees.

        Args:
            position: absolute, of the token to choose; seeds the noise.
            tokens: [K] int64 candidates, most likely first.
            logits: [K] float32, descending.
            log_normalizer: log of the sum of exp(logit) over the whole vocabulary.
            counts: those of the tokens before `position`; None only where there are no penalties.

        Returns:
            `NO_PROPOSAL` where no candidate may be proposed.
        """
        if not self._plain or position < self._first_end:
            return self._choose_processed(position, tokens, logits, log_normalizer, counts)
        temperature = self.sampling.temperature
        if temperature == 0:
            q = min(1.0, math.exp(float(logits[0]) - log_normalizer))
            runners_up = tuple(tokens[1 : 1 + self.runners_up].tolist()) if self.runners_up else ()
            return DraftToken(int(tokens[0]), q, q, runners_up)
        log_q = logits.astype(np.float64)
        log_q -= log_normalizer
        if temperature != 1:
            log_tail = _log_tail(log_q, self._inverse_temperature) - log_q[0] * self._inverse_temperature
            log_q = (log_q - log_q[0]) * self._inverse_temperature
            log_q -= math.log(np.exp(log_q).sum() + math.exp(log_tail))
        return self._draw(position, tokens, log_q)

    def _draw(self, position: int, tokens: np.ndarray, log_q: np.ndarray) -> DraftToken:
        """Choose among candidates of log_q [K] float64, where nothing is edited and so the first is not next to 0.

        The argmax of log q + G is that of q e^G = q / E, which spares a logarithm and an exponential.
        """
        q = np.exp(log_q)
        race = q / exponentials_for_proposals(self.sampling.seed, position, tokens)
        index = int(race.argmax())
        perturbed = float(race[index]) / _sum(race)
        confidence = min(1.0, float(q[index]))
        return DraftToken(int(tokens[index]), confidence, perturbed, self._runners_up(tokens, race, index))

    def _runners_up(self, tokens: np.ndarray, race: np.ndarray, index: int) -> tuple[int, ...]:
        """Return the tokens [K] that come after that of `index` in the order of `race` [K], which is written over."""
        followers = []
        for _ in range(min(self.runners_up, len(race) - 1)):
            race[index] = -math.inf
            index = int(race.argmax())
            if race[index] == -math.inf:
                break
            followers.append(int(tokens[index]))
        return tuple(followers)

    def _choose_processed(
        self, position: int, tokens: np.ndarray, logits: np.ndarray, log_normalizer: float, counts: TokenCounts | None
    ) -> DraftToken:
        logits = logits.astype(np.float64)
        log_q = logits - log_normalizer  # at temperature 1, as the model has it
        edited = self._edit(tokens, logits, counts)
        if position < self._first_end:
            edited = np.where(np.isin(tokens, self._ends), -np.inf, edited)
        processed = (edited - log_normalizer) * self._inverse_temperature
        allowed = np.isfinite(processed)
        if not allowed.any():
            return NO_PROPOSAL
        tokens, processed = tokens[allowed], processed[allowed]
        if len(self._allowed):  # almost no other token may be drawn
            log_total = _log_sum_exp(processed)
        else:
            log_total = float(np.logaddexp(_log_sum_exp(processed), _log_tail(log_q, self._inverse_temperature)))
        if self.sampling.temperature and self._truncates:
            kept = self._keep(tokens, processed, log_total)
            if 0 < self.sampling.top_k <= len(logits) or not kept.all():  # then whatever is no candidate is cut too
                tokens, processed = tokens[kept], processed[kept]
                log_total = _log_sum_exp(processed)
        processed -= log_total
        q = np.exp(processed)
        noisy = processed
        if self.sampling.temperature == 0:
            index = int(processed.argmax())
            perturbed = min(1.0, float(q[index]))
        else:
            noisy = processed - np.log(exponentials_for_proposals(self.sampling.seed, position, tokens))
            index = int(noisy.argmax())
            perturbed = 1.0 / float(np.exp(noisy - noisy[index]).sum())
        confidence = min(1.0, float(q[index]))
        return DraftToken(int(tokens[index]), confidence, perturbed, self._runners_up(tokens, noisy, index))

    def _edit(self, tokens: np.ndarray, logits: np.ndarray, counts: TokenCounts | None) -> np.ndarray:
        """Apply allowed tokens, bias and penalties to logits [K] float64; what may not be drawn becomes -inf."""
        sampling = self.sampling
        if len(self._allowed):
            logits = np.where(np.isin(tokens, self._allowed), logits, -np.inf)
        if self._bias:
            logits = logits + np.array([self._bias.get(token, 0.0) for token in tokens.tolist()])
        if counts is None:
            return logits
        in_text = counts.in_text(tokens)
        if sampling.repetition_penalty != 1:
            penalised = np.where(logits > 0, logits / sampling.repetition_penalty, logits * sampling.repetition_penalty)
            logits = np.where(in_text + counts.in_prompt(tokens) > 0, penalised, logits)
        edited: np.ndarray = logits - sampling.presence_penalty * (in_text > 0) - sampling.frequency_penalty * in_text
        return edited

    def _keep(self, tokens: np.ndarray, scaled: np.ndarray, log_total: float) -> np.ndarray:
        """Return which candidates survive top-k, top-p and min-p, in this order; [K] bool."""
        sampling = self.sampling
        order = np.lexsort((-tokens, -scaled))  # the larger token first in a tie, as the verifier has it
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


def _sum(values: np.ndarray) -> float:
    """Return the sum of [K] float64; a product takes a third of the time."""
    return float(values.dot(_ones(len(values))))


@functools.cache
def _ones(count: int) -> np.ndarray:
    return np.ones(count)


def _log_sum_exp(values: np.ndarray) -> float:
    """Return the log of the sum of exp(values), [K] with at least one finite entry."""
    largest = values.max()
    return float(largest + math.log(np.exp(values - largest).sum()))


def _log_tail(log_q: np.ndarray, inverse_temperature: float) -> float:
    """Return the log of the sum of q ** (1 / temperature) over all but the candidates of `log_q` [K] float64.

    Their probability r at temperature 1 is known. They are taken for r / q_K tokens as likely as the last candidate:
    exact at temperature 1, an upper bound below it, a lower bound above it.
    """
    rest = 1.0 - float(np.exp(log_q).sum())
    if rest < 1e-5:  # float32's rounding, or no tail at all
        return -math.inf
    last = float(log_q[-1])
    log_tokens = min(math.log(rest) - last, _LOG_LARGEST_VOCABULARY)
    return log_tokens + last * inverse_temperature
