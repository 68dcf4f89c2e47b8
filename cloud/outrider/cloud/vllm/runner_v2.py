"""vLLM's Model Runner V2, the default on GPUs, with our sampling; no method of vLLM's is replaced.

Three places that vLLM offers are enough. A custom logits processor sees every row of a step, those of drafts too: it
takes the tokens of our rule and leaves each row a single point there, at which vLLM's greedy sampler can only agree.
The same processor is called before the inputs are prepared, where it writes what the engine has planned over vLLM's
record of each request: computed positions, tokens and drafts. So V2 sees a short prompt and drafts behind it in every
step, whatever it believed before, and a rollback needs nothing else. The worker gets a speculator that proposes nothing
and hands on what the tapped layers gave.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from vllm.platforms import current_platform
from vllm.v1.worker.gpu.sample.logits_processor.interface import LogitsContext, LogitsProcessor
from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

from outrider.cloud.target.distribution import VerificationInput
from outrider.cloud.target.sampler import Sampler
from outrider.cloud.vllm.requests import committed_tokens
from outrider.cloud.vllm.worker_messages import PassResult, PassRow, Wanted

if current_platform.is_cpu():
    from vllm.v1.worker.cpu_worker import CPUWorker as Worker
else:
    from vllm.v1.worker.gpu_worker import Worker

_NOTHING = -1  # what the runner takes for no draft


class PlannedV2Worker(Worker):
    """A worker that samples by the coupled rule, and answers with what that found."""

    def init_device(self) -> None:
        """Make the runner, and take its speculator's place."""
        super().init_device()
        runner = self.model_runner
        self._speculator = NullSpeculator(runner.max_num_reqs, runner.num_speculative_steps, runner.device)
        runner.speculator = self._speculator

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        """Load the model, and find the logits processor that vLLM has made."""
        super().load_model(*args, **kwargs)
        self._rule = next(each for each in self.model_runner.sampler.logits_processors if isinstance(each, CoupledRows))
        self._rule.attach(self.model_runner)
        self._speculator.attach(self._rule)

    def execute_model(self, scheduler_output: Any) -> Any:
        """Compute the pass, with what is to be sampled from it at hand."""
        self._rule.begin(scheduler_output.outrider_rows, scheduler_output.outrider)
        return super().execute_model(scheduler_output)

    def sample_tokens(self, grammar_output: Any) -> Any:
        """Sample, and attach the results."""
        output = super().sample_tokens(grammar_output)
        if hasattr(output, "get_output"):  # it is still on its way from the device
            output = output.get_output()
        output.outrider = self._rule.result
        return output

    def tap_layers(self, layers: Sequence[int]) -> str:
        """Have later passes keep what enters `layers`, and return why they cannot; empty: they can."""
        model = self.model_runner.get_model()
        if not hasattr(model, "set_aux_hidden_state_layers"):
            return f"vLLM gives no states from amid {type(model).__name__}"
        model.set_aux_hidden_state_layers(tuple(layers))
        self.model_runner.use_aux_hidden_state_outputs = True
        return ""

    def forget_pass(self) -> None:
        """Forget a pass that has failed half way."""
        self.model_runner.execute_model_state = None


class CoupledRows(LogitsProcessor):
    """The rows of each pass: planned before it, and each left a single point at the rule's token.

    Attributes:
        result: results of the newest pass.
    """

    def __init__(self, vllm_config: Any, req_states: Any) -> None:
        """Wait for `attach`; vLLM makes it, before the runner is whole."""
        super().__init__(vllm_config, req_states)
        self.result = PassResult()
        self._rows: Sequence[PassRow] = ()
        self._orders: Mapping[str, Wanted] = {}

    def attach(self, runner: Any) -> None:
        """Sample for `runner`."""
        self._states = runner.req_states
        self._sampler = Sampler(runner.device)

    def begin(self, rows: Sequence[PassRow], orders: Mapping[str, Wanted]) -> None:
        """Take the plan of the next pass, and what is wanted of each request."""
        self._rows, self._orders, self.result = rows, orders, PassResult()

    def tapped(self, name: str) -> int | None:
        """Return which of a request's rows of logits is the newest valid one; None: its state is not wanted."""
        wanted = self._orders.get(name)
        if wanted is None or not wanted.tapped or wanted.verification is None:
            return None
        return len(committed_tokens(wanted.verification, self.result.sampled[name])) - 1

    # --- called by vLLM ---

    def apply_staged_writes(self) -> None:
        """Write the plan over vLLM's record of the requests, before the inputs of a pass are prepared."""
        states, rows = self._states, self._rows
        if not rows:
            return
        drafts = torch.full((len(rows), states.draft_tokens.shape[1]), _NOTHING, dtype=torch.int64)
        slots = [states.req_id_to_index[row.name] for row in rows]
        for place, (slot, row) in enumerate(zip(slots, rows, strict=True)):
            end = row.start + len(row.tokens)
            states.all_token_ids.stage_write(slot, row.start, list(row.tokens))
            states.num_computed_tokens.stage_write_elem(slot, row.start)
            states.total_len.stage_write_elem(slot, end)
            states.prefill_len.np[slot] = end
            drafts[place, : len(row.drafts)] = torch.tensor(row.drafts, dtype=torch.int64)
        states.draft_tokens[torch.tensor(slots, device=states.device)] = drafts.to(states.device)
        states.apply_staged_writes()

    def apply(self, logits: torch.Tensor, ctx: LogitsContext) -> torch.Tensor:
        """Sample, and return rows [rows, vocab] that are -inf but at the rule's token; others stay as they are."""
        names = [self._states.index_to_req_id.get(slot, "") for slot in ctx.idx_mapping_np.tolist()]
        wanted = [self._orders.get(name) for name in names]
        if not any(wanted):
            return logits  # vLLM tries itself
        self.result.forwarded = self.result.forwarded or time.monotonic()
        counts = _rows_of_each(wanted, len(logits))
        kept: list[int] = []
        inputs: dict[str, VerificationInput] = {}
        first = 0
        for name, count, each in zip(names, counts, wanted, strict=True):
            if each is not None and each.verification is not None:
                kept += range(first, first + count)
                inputs[name] = each.verification
            first += count
        if not inputs:
            return logits
        places = torch.tensor(kept, device=logits.device)
        sampled, finite = self._sampler.sample_numbers(logits[places], list(inputs.values()))
        self.result.finite &= finite
        self.result.sampled |= dict(zip(inputs, sampled, strict=True))
        tokens = torch.tensor([token.id for each in sampled for token in each.tokens], device=logits.device)
        logits[places] = -torch.inf
        logits[places, tokens] = 0.0
        return logits


def _rows_of_each(wanted: Sequence[Wanted | None], rows: int) -> list[int]:
    """Return how many rows of logits each request has: one more than drafts."""
    counts = [
        len(each.verification.block) + 1 if each is not None and each.verification is not None else 1 for each in wanted
    ]
    if sum(counts) != rows:
        raise RuntimeError(f"vLLM has {rows} rows of logits where {sum(counts)} were planned")
    return counts


class NullSpeculator(BaseSpeculator):
    """vLLM verifies drafts only where something proposes them; this proposes none, and takes what was tapped."""

    supports_mm_inputs = False
    draft_logits = None

    def __init__(self, max_requests: int, max_drafts: int, device: torch.device) -> None:
        self._drafts = torch.full((max_requests, max_drafts), _NOTHING, dtype=torch.int64, device=device)
        self._rule: CoupledRows | None = None

    def attach(self, rule: CoupledRows) -> None:
        """Hand what is tapped to the results of `rule`."""
        self._rule = rule

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
        if aux_hidden_states and self._rule is not None:
            firsts = input_batch.cu_num_logits_np
            for place, name in enumerate(input_batch.req_ids):
                newest = self._rule.tapped(name)
                if newest is not None:
                    row = input_batch.logits_indices[int(firsts[place]) + newest]
                    taps = torch.cat([layer[row] for layer in aux_hidden_states])
                    self._rule.result.taps[name] = taps.float().cpu()
        return self._drafts[: input_batch.num_reqs]
