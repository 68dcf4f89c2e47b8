"""The coupled rule by vLLM's own sampler: its kernels and its noise on this device, bit for bit.

A text of `Noise.VLLM` is then the one that a plain vLLM draws on the same device. The sampler is a second one of vLLM's
class, with slots of its own; what it knows of a session is set before each pass, so it follows any rollback.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from vllm.exceptions import VLLMValidationError
from vllm.sampling_params import SamplingParams
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

from outrider.cloud.distribution import VerificationInput, checked, masked
from outrider.cloud.shortlist import RowChoices
from outrider.cloud.vllm_rule import VllmRule, choices
from outrider.proto.token_counts import TokenCounts
from outrider.proto.types import Sampling, token_ids

_MOST_BIASES = 1024  # that vLLM's kernel holds


@dataclass(frozen=True, slots=True)
class _Native:
    """A session whose settings vLLM takes: its place among the sessions, and the place of its first row."""

    place: int
    first: int
    session: VerificationInput
    settings: SamplingParams

    @property
    def rows(self) -> np.ndarray:
        """Places of its rows."""
        return np.arange(self.first, self.first + self.session.rows)


class NativeRule(VllmRule):
    """vLLM's sampler where it takes a session's settings, and the same rule in torch where it refuses them."""

    def __init__(self, runner: Any) -> None:
        """Make a sampler like that of `runner`, a GPUModelRunner of V2."""
        super().__init__(runner.device)
        states = RequestState(runner.max_num_reqs, 1, 1, 1, runner.vocab_size, runner.device)
        states.prompt_len.np.fill(1)
        states.prefill_len.np.fill(1)
        states.apply_staged_writes()
        self._sampler = Sampler(
            runner.vllm_config,
            runner.max_num_reqs,
            runner.vocab_size,
            runner.device,
            states,
            use_fp64_gumbel=runner.model_config.use_fp64_gumbel,
        )
        self._known: dict[int, Sampling] = {}  # by slot

    def choose(self, logits: torch.Tensor, sessions: Sequence[VerificationInput], asked: np.ndarray) -> RowChoices:
        """Return the token of every row, its log p and that of the token asked for; see `VllmRule.choose`."""
        choice = RowChoices.none(len(asked))
        native: list[_Native] = []
        refused: list[tuple[int, VerificationInput]] = []
        first = 0
        for place, session in enumerate(sessions):
            settings = native_settings(session.sampling)
            if settings is None:
                refused.append((first, session))
            else:
                native.append(_Native(place, first, session, settings))
            first += session.rows
        if native:
            rows = np.concatenate([each.rows for each in native])
            choice.put(rows, self._choose_natively(logits[torch.from_numpy(rows)], native, asked[rows]))
        if refused:
            rows = np.concatenate([np.arange(first, first + session.rows) for first, session in refused])
            others = [session for _, session in refused]
            choice.put(rows, super().choose(logits[torch.from_numpy(rows)], others, asked[rows]))
        return choice

    def _choose_natively(self, logits: torch.Tensor, sessions: Sequence[_Native], asked: np.ndarray) -> RowChoices:
        device, sampler = logits.device, self._sampler
        slots = np.array([each.place for each in sessions])
        counts = np.array([each.session.rows for each in sessions])
        for slot, each in zip(slots.tolist(), sessions, strict=True):
            if self._known.get(slot) != each.session.sampling:
                sampler.add_request(slot, each.settings)
                self._known[slot] = each.session.sampling
        sampler.apply_staged_writes()
        kept, first = [], 0
        for slot, each in zip(slots.tolist(), sessions, strict=True):
            if each.session.sampling.penalises:
                self._set_counts(slot, each.session)
            kept.append(masked(logits[first : first + each.session.rows].float(), each.session))
            first += each.session.rows
        local = np.concatenate([np.arange(count) for count in counts])
        lengths = np.array([len(each.session.transcript) for each in sessions])
        inputs = [token for each in sessions for token in _inputs(each.session)]
        tokens, scores = sampler.sample(
            torch.cat(kept),
            torch.from_numpy(np.repeat(slots, counts)).to(device),
            torch.from_numpy(slots).to(device),
            slots,
            torch.from_numpy(np.repeat(lengths - 1, counts) + local).to(device),
            torch.tensor(inputs, dtype=torch.int32, device=device),
            torch.from_numpy(local.astype(np.int32)).to(device),
            lengths + counts - 1,
        )
        return choices(checked(scores.float()), tokens.long(), asked)

    def _set_counts(self, slot: int, session: VerificationInput) -> None:
        """Tell vLLM's penalties what came before; its own record knows nothing of ours."""
        counts = session.counts or TokenCounts(session.prompt_length, session.transcript)
        state, used = self._sampler.penalties_state, counts.used
        in_prompt = used[counts.in_prompt(used) > 0]
        bits = np.zeros(state.prompt_bin_mask.shape[1], np.uint32)
        np.bitwise_or.at(bits, in_prompt // 32, np.uint32(1) << (in_prompt % 32).astype(np.uint32))
        state.prompt_bin_mask[slot] = torch.from_numpy(bits.view(np.int32)).to(self._device)
        state.output_bin_counts[slot] = 0
        in_text = torch.from_numpy(counts.in_text(used).astype(np.int32)).to(self._device)
        state.output_bin_counts[slot, torch.from_numpy(used).to(self._device)] = in_text


@functools.lru_cache(maxsize=1024)  # a session has the same in every step
def native_settings(sampling: Sampling) -> SamplingParams | None:
    """Return vLLM's settings for ours, less what `masked` does; None: vLLM refuses them."""
    if len(sampling.logit_bias) > _MOST_BIASES:
        return None
    try:
        settings = SamplingParams(
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            repetition_penalty=sampling.repetition_penalty,
            presence_penalty=sampling.presence_penalty,
            frequency_penalty=sampling.frequency_penalty,
            logit_bias=dict(sampling.logit_bias) or None,
        )
    except (VLLMValidationError, ValueError):
        return None
    settings.seed = sampling.seed - (1 << 64) * (sampling.seed >> 63)  # after its checks, which take -1 for none
    return settings


def _inputs(session: VerificationInput) -> tuple[int, ...]:
    """Return the token before each of the session's rows."""
    return (session.transcript[-1], *token_ids(session.block))
