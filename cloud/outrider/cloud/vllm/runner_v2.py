"""vLLM's Model Runner V2, the default on GPUs, with our sampling; no method of vLLM's is replaced.

Three hooks that vLLM offers are enough. A custom logits processor sees every row of a step, those of drafts too: it
takes the tokens of our rule and leaves each row a single point there, at which vLLM's greedy sampler can only agree.
The same processor is called before the inputs are prepared, where it writes what the engine has planned over vLLM's
record of each request: computed positions, tokens and drafts. So V2 sees a short prompt and drafts behind it in every
step, whatever it believed before, and a rollback needs nothing else. The worker gets a speculator that proposes nothing
and hands on what the tapped layers gave.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from outrider.cloud.vllm.worker_messages import NOTHING, PassRow, PassSampling, tap_model

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker


class PlannedV2Worker(Worker):
    """A worker that samples by the coupled rule, and answers with what that found."""

    def init_device(self) -> None:
        """Make the runner, and take its speculator's place."""
        super().init_device()
        runner = self.model_runner
        self._sampling = PassSampling(runner.device)
        runner.speculator = NullSpeculator(
            self._sampling, runner.max_num_reqs, runner.num_speculative_steps, runner.device
        )

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and find the logits processor that vLLM has made."""
        super().load_model(*args, **kwargs)
        rule = next(each for each in self.model_runner.sampler.logits_processors if isinstance(each, CoupledRows))
        rule.attach(self._sampling, self.model_runner.req_states)

    def execute_model(self, scheduler_output: Any) -> Any:
        self._sampling.begin(scheduler_output.outrider)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        output = super().sample_tokens(grammar_output)
        if hasattr(output, "get_output"):  # it is still on its way from the device
            output = output.get_output()
        output.outrider = self._sampling.result
        return output

    def tap_layers(self, layers: Sequence[int]) -> str:
        """Have later passes keep what enters `layers`, and return why they cannot; empty: they can."""
        if reason := tap_model(self.model_runner.get_model(), layers):
            return reason
        self.model_runner.use_aux_hidden_state_outputs = True
        return ""

    def forget_pass(self) -> None:
        self.model_runner.execute_model_state = None


class CoupledRows(LogitsProcessor):
    """The rows of each pass: planned before it, and each left a single point at the rule's token."""

    def attach(self, sampling: PassSampling, states: Any) -> None:
        """Sample by `sampling`, for requests in vLLM's `states`; vLLM makes this before its runner is whole."""
        self._sampling, self._states = sampling, states

    def apply_staged_writes(self) -> None:
        """Write the plan over vLLM's record of the requests, before the inputs of a pass are prepared."""
        states, rows = self._states, self._sampling.rows.values()
        if not rows:
            return
        drafts = torch.full((len(rows), states.draft_tokens.shape[1]), NOTHING, dtype=torch.int64)
        slots = [states.req_id_to_index[row.name] for row in rows]
        for index, (slot, row) in enumerate(zip(slots, rows, strict=True)):
            end = row.start + len(row.tokens)
            states.all_token_ids.stage_write(slot, row.start, list(row.tokens))
            states.num_computed_tokens.stage_write_elem(slot, row.start)
            states.total_len.stage_write_elem(slot, end)
            states.prefill_len.np[slot] = end
            drafts[index, : len(row.drafts)] = torch.tensor(row.drafts, dtype=torch.int64)
        states.draft_tokens[torch.tensor(slots, device=states.device)] = drafts.to(states.device)
        states.apply_staged_writes()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Sample, and return rows [rows, vocab] that are -inf but at the rule's token; others stay as they are."""
        sampling = self._sampling
        names = [self._states.index_to_req_id.get(slot, "") for slot in ctx.idx_mapping_np.tolist()]
        if sampling.rows.keys().isdisjoint(names):
            return logits  # vLLM tries itself
        result = sampling.result
        result.forwarded = result.forwarded or time.monotonic()
        counts = [_num_logits(sampling.rows.get(name)) for name in names]
        if sum(counts) != len(logits):
            raise RuntimeError(f"vLLM has {len(logits)} rows of logits where {sum(counts)} were planned")
        kept = sampling.sample(logits, names, counts)
        if not kept:
            return logits
        sampled = [result.sampled[name] for name in names if name in result.sampled]
        tokens = torch.tensor([token.id for each in sampled for token in each.tokens], device=logits.device)
        rows = torch.tensor(kept, device=logits.device)
        logits[rows] = -torch.inf
        logits[rows, tokens] = 0.0
        return logits


def _num_logits(row: PassRow | None) -> int:
    """Return how many rows of logits a request has: one more than drafts where it verifies, else one."""
    return row.verification.rows if row is not None and row.verification is not None else 1


class NullSpeculator(BaseSpeculator):
    """vLLM verifies drafts only where something proposes them; this proposes none, and takes what was tapped."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, sampling: PassSampling, max_requests: int, max_drafts: int, device: torch.device) -> None:
        """Hand what is tapped to the results of `sampling`."""
        self._sampling = sampling
        self._drafts = torch.full((max_requests, max_drafts), NOTHING, dtype=torch.int64, device=device)

    def init_cudagraph_manager(self, cudagraph_mode: Any) -> None:
        """Need no graphs."""

    def capture(self) -> None:
        """Capture nothing."""

    def propose(
        self,
        input_batch: Any,
        attn_metadata: Any,  # noqa: ARG002 - vLLM's signature, as far as it names what is used here
        slot_mappings: Any,  # noqa: ARG002
        last_hidden_states: torch.Tensor,  # noqa: ARG002
        aux_hidden_states: list[torch.Tensor] | None = None,
        *_: Any,
        **__: Any,
    ) -> torch.Tensor:
        """Return no draft for each of the requests, [requests, drafts] int64, and keep the states that are wanted."""
        if aux_hidden_states:
            sampling, firsts = self._sampling, input_batch.cu_num_logits_np
            for index, name in enumerate(input_batch.req_ids):
                planned = sampling.rows.get(name)
                if planned is not None and planned.tapped and (committed := sampling.committed(name)):
                    row = input_batch.logits_indices[int(firsts[index]) + len(committed) - 1]
                    taps = torch.cat([layer[row] for layer in aux_hidden_states])
                    sampling.result.taps[name] = taps.float().cpu()
        return self._drafts[: input_batch.num_reqs]
