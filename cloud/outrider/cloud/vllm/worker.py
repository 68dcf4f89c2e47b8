"""vLLM's worker with our sampling: named as `worker_cls`, so that vLLM makes it in every process that computes.

Nothing of vLLM is replaced for others: a runner that this worker has made gets three methods of its own.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.v1.outputs import SamplerOutput
from vllm.v1.worker.cpu_worker import CPUWorker

from outrider.cloud.target.distribution import VerificationInput
from outrider.cloud.target.sampler import Sampler
from outrider.cloud.vllm.requests import committed_tokens
from outrider.cloud.vllm.worker_messages import PassResult, Wanted

NOTHING = -1  # what vLLM's runner takes for no token


class PlannedCpuWorker(CPUWorker):
    """A worker that samples by the coupled rule, and answers with what that found."""

    def init_device(self) -> None:
        """Make the runner, and give it our methods."""
        super().init_device()
        self._seam = RunnerSeam(self.model_runner)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Compute the pass, with what is to be sampled from it at hand."""
        self._seam.begin(scheduler_output.outrider)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, and attach the results."""
        output = super().sample_tokens(grammar_output)
        output.outrider = self._seam.result
        return output

    def tap_layers(self, layers: Sequence[int]) -> str:
        """Have later passes keep what enters `layers`, and return why they cannot; empty: they can."""
        return self._seam.tap(layers)

    def forget_pass(self) -> None:
        """Forget a pass that has failed half way."""
        self.model_runner.execute_model_state = None


class RunnerSeam:
    """The place where a V1 runner's logits become tokens: `_sample`, with drafts and without.

    The rows of a request stand together, those of a block's drafts last but one. All ranks of a tensor-parallel group
    have the same logits and take the same tokens, so each knows how its requests go on.
    """

    def __init__(self, runner: Any) -> None:
        self.result = PassResult()
        self._runner = runner
        self._sampler = Sampler(runner.device)
        self._orders: Mapping[str, Wanted] = {}
        self._layers: tuple[int, ...] = ()
        self._entering: Sequence[torch.Tensor] = ()
        self._stock_forward = runner._model_forward
        runner._model_forward = self._forward
        runner._sample = self._sample
        runner._input_fits_in_drafter = lambda _: True  # the drafter that proposes nothing fits everywhere

    def begin(self, orders: Mapping[str, Wanted]) -> None:
        """Take what is wanted of the next pass."""
        self._orders, self.result = orders, PassResult()

    def tap(self, layers: Sequence[int]) -> str:
        """Keep what enters `layers`, and return why that cannot be; empty: it can."""
        model = self._runner.get_model()
        if not hasattr(model, "set_aux_hidden_state_layers"):
            return f"vLLM gives no states from amid {type(model).__name__}"
        model.set_aux_hidden_state_layers(tuple(layers))
        self._layers = tuple(layers)
        return ""

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        output = self._stock_forward(*args, **kwargs)
        if self._layers:
            output, self._entering = output
        return output

    def _sample(self, logits: torch.Tensor, metadata: Any) -> Any:
        """Return vLLM's record of the tokens, [requests, most tokens of one] int32, filled up with `NOTHING`."""
        self.result.forwarded = time.monotonic()
        names, counts = self._runner.input_batch.req_ids, [drafts + 1 for drafts in metadata.num_draft_tokens]
        wanted = [self._orders[name] for name in names]
        rows = metadata.logits_indices.tolist()
        logits = logits.float()
        kept: list[int] = []
        inputs: list[VerificationInput] = []
        places: dict[str, int] = {}
        first = 0
        for name, count, each in zip(names, counts, wanted, strict=True):
            if each.verification is not None:
                kept += range(first, first + count)
                inputs.append(each.verification)
            places[name] = first
            first += count
        of_inputs = logits if len(kept) == len(logits) else logits[torch.tensor(kept, dtype=torch.int64)]
        results, self.result.finite = self._sampler.sample_numbers(of_inputs, inputs) if inputs else ([], True)
        sampled = iter(results)
        tokens = torch.full((len(names), max(2, *counts)), NOTHING, dtype=torch.int32)
        for index, (name, each) in enumerate(zip(names, wanted, strict=True)):
            newest = rows[places[name]]
            if each.verification is not None:
                result = self.result.sampled[name] = next(sampled)
                committed = committed_tokens(each.verification, result)
                tokens[index, : len(committed)] = torch.tensor(committed, dtype=torch.int32)
                newest = rows[places[name] + len(committed) - 1]
            if each.tapped and self._layers:
                self.result.taps[name] = torch.cat([layer[newest] for layer in self._entering]).float().cpu()
        return SamplerOutput(sampled_token_ids=tokens.to(logits.device), logprobs_tensors=None)


class NoProposer:
    """vLLM's runner verifies drafts only where something proposes them; this proposes none."""

    def __init__(self, _: Any) -> None:
        """Need nothing of vLLM's configuration."""

    def load_model(self, _: Any) -> None:
        """Need no model."""

    def propose(self, sampled: Sequence[Any], *_: Any, **__: Any) -> list[list[int]]:
        """Return no draft for each of the requests."""
        return [[] for _ in sampled]
