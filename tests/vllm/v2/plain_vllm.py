"""Write texts with vLLM's V2 alone: no line of Outrider's runs in this process.

python plain_vllm.py < request.json > texts.json
"""

from __future__ import annotations

import json
import sys
from typing import Any

from interpreter import prepare_interpreter

DRAFTS = 4


def propose_texts(texts: list[list[int]]) -> None:
    """Let vLLM's own speculation propose these texts, and verify them as it does."""
    import torch
    from vllm.v1.worker.gpu import model_runner
    from vllm.v1.worker.gpu.spec_decode.speculator import BaseSpeculator

    class Knowing(BaseSpeculator):
        supports_mm_inputs = False
        draft_logits = None

        def __init__(self, *_: Any) -> None:
            self._sampled = [0] * len(texts)

        def init_cudagraph_manager(self, *_: Any) -> None:
            pass

        def capture(self) -> None:
            pass

        def propose(self, input_batch: Any, *args: Any, **__: Any) -> torch.Tensor:
            drafts = torch.zeros(input_batch.num_reqs, DRAFTS, dtype=torch.int64)
            for place, (name, sampled) in enumerate(zip(input_batch.req_ids, args[4].tolist(), strict=True)):
                text = int(name.split("-")[0])
                self._sampled[text] += sampled
                coming = texts[text][self._sampled[text] :][:DRAFTS]
                drafts[place, : len(coming)] = torch.tensor(coming, dtype=torch.int64)
            return drafts

    model_runner.init_speculator = Knowing


def main() -> None:
    """Answer {target, prompts, settings, proposed} with the tokens of each text."""
    prepare_interpreter()
    from vllm import LLM, SamplingParams

    request = json.load(sys.stdin)
    speculation = None
    if request["proposed"]:
        propose_texts(request["proposed"])
        lookup = {"prompt_lookup_min": 2, "prompt_lookup_max": 2}  # a method that V2 knows; it proposes nothing itself
        speculation = {"method": "ngram", "num_speculative_tokens": DRAFTS, **lookup}
    model = LLM(
        request["target"],
        dtype="float32",
        max_model_len=512,
        max_num_seqs=16,
        block_size=32,
        enforce_eager=True,
        skip_tokenizer_init=True,
        kv_cache_memory_bytes=1 << 28,
        speculative_config=speculation,
    )
    assert model.llm_engine.vllm_config.use_v2_model_runner
    settings = [SamplingParams(ignore_eos=True, detokenize=False, **each) for each in request["settings"]]
    prompts = [{"prompt_token_ids": prompt} for prompt in request["prompts"]]
    outputs = model.generate(prompts, settings, use_tqdm=False)
    print("\n" + json.dumps([list(each.outputs[0].token_ids) for each in outputs]))


main()
