"""vLLM on a CPU, its engine in this process; runs in its own environment (see `child.py`)."""

from __future__ import annotations

import os

# In one process, so that its CPU time is all there is; set before vLLM reads them.
os.environ |= {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",
    "VLLM_NO_USAGE_STATS": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "HF_HUB_OFFLINE": "1",
}
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")

import vllm

_MAX_SESSIONS = 64


class VllmPeer:
    """A model on vLLM.

    Attributes:
        version: version of vLLM, and whether the model is compiled.
    """

    def __init__(self, model: str, dtype: str, threads: int, *, compiled: bool) -> None:
        """Load the model of a folder."""
        import torch

        torch.set_num_threads(threads)
        self._engine = vllm.LLM(
            model,
            dtype=dtype,
            skip_tokenizer_init=True,
            enforce_eager=not compiled,
            enable_prefix_caching=False,
            max_num_seqs=_MAX_SESSIONS,
            disable_log_stats=True,
        ).llm_engine
        self._running: list[str] = []
        self._next = 0
        self.version = f"vllm {vllm.__version__} ({'compiled' if compiled else 'eager'})"

    def prepare(self, context: list[int], sessions: int, rows: int, logits: int) -> int | None:
        """Read `context` in each session, and repeat steps of one more token; without it, prompts of `rows` tokens.

        Returns the greedy token after the context; None where it is empty.
        """
        if logits > 1:
            raise ValueError("has no plain step of several tokens a session")
        self._engine.abort_request(self._running)
        self._running.clear()
        self._prompt: list[int] = [] if context else list(range(3, 3 + rows))
        if not context:
            return None
        for _ in range(sessions):
            self._add(context, max_tokens=100_000)
        first: dict[str, int] = {}
        while len(first) < sessions:
            for output in self._engine.step():
                first.setdefault(output.request_id, output.outputs[0].token_ids[0])
        return first[self._running[0]]

    def step(self) -> None:
        """Compute the next token of all sessions, or a prompt and its first token."""
        if self._prompt:
            self._running.clear()
            self._add(self._prompt, max_tokens=1)
        if len(self._engine.step()) != len(self._running):
            raise ValueError("made no step for each session; the context may be full")

    def _add(self, tokens: list[int], max_tokens: int) -> None:
        name, self._next = str(self._next), self._next + 1
        parameters = vllm.SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            detokenize=False,
            output_kind=vllm.sampling_params.RequestOutputKind.DELTA,
        )
        self._engine.add_request(name, {"prompt_token_ids": tokens}, parameters)
        self._running.append(name)
