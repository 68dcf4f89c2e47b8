"""vLLM's worker with our sampling: named as `worker_cls`, so that vLLM makes it in every process that computes.

Nothing of vLLM is replaced for others: a runner that this worker has made gets three methods of its own.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from outrider.cloud.vllm.worker_messages import NOTHING, PassSampling, tap_model


class PlannedCpuWorker(CPUWorker):
    """A worker that samples by the coupled rule, with drafts and without, and answers with what that found."""

    def init_device(self) -> None:
        """Make the runner, and give it our methods."""
        super().init_device()
        runner = self.model_runner
        self._sampling = PassSampling(runner.device)
        self._layers: tuple[int, ...] = ()
        self._entering: Sequence[torch.Tensor] = ()
        self._stock_forward = runner._model_forward
        runner._model_forward = self._forward_and_tap
        runner._sample = self._sample_by_rule
        runner._input_fits_in_drafter = lambda _: True  # the drafter that proposes nothing fits everywhere

    def execute_model(self, scheduler_output: Any) -> Any:
        self._sampling.begin(scheduler_output.outrider)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        output.outrider = self._sampling.result
        return output

    def tap_layers(self, layers: Sequence[int]) -> str:
        """Have later passes keep what enters `layers`, and return why they cannot; empty: they can."""
        reason = tap_model(self.model_runner.get_model(), layers)
        self._layers = self._layers if reason else tuple(layers)
        return reason

    def forget_pass(self) -> None:
        self.model_runner.execute_model_state = None

    def _forward_and_tap(self, *args: Any, **kwargs: Any) -> Any:
        output = self._stock_forward(*args, **kwargs)
        if self._layers:
            output, self._entering = output
        return output

    def _sample_by_rule(self, logits: torch.Tensor, metadata: Any) -> Any:
        """Return vLLM's record of the tokens, [requests, most tokens of one] int32, filled up with `NOTHING`."""
        sampling, names = self._sampling, self.model_runner.input_batch.req_ids
        sampling.result.forwarded = time.monotonic()
        counts = [drafts + 1 for drafts in metadata.num_draft_tokens]
        sampling.sample(logits, names, counts)
        tokens = torch.full((len(names), max(2, *counts)), NOTHING, dtype=torch.int32)
        rows = metadata.logits_indices.tolist()
        first = 0
        for index, (name, count) in enumerate(zip(names, counts, strict=True)):
            committed = sampling.committed(name)
            tokens[index, : len(committed)] = torch.tensor(committed, dtype=torch.int32)
            if sampling.rows[name].tapped and self._layers:
                newest = rows[first + max(0, len(committed) - 1)]
                sampling.result.taps[name] = torch.cat([layer[newest] for layer in self._entering]).float().cpu()
            first += count
        return SamplerOutput(sampled_token_ids=tokens.to(logits.device), logprobs_tensors=None)


class NoProposer:
    """vLLM's runner verifies drafts only where something proposes them; this proposes none."""

    def __init__(self, _: Any) -> None:
        """Need nothing of vLLM's configuration."""

    def load_model(self, _: Any) -> None:
        """Load nothing: there is no draft model."""

    def propose(self, sampled: Sequence[Any], *_: Any, **__: Any) -> list[list[int]]:
        return [[] for _ in sampled]
