"""Record what vLLM's own kernels draw, as the golden table of tests/proto/vllm_noise.json.

In the environment of `make vllm`, where the kernels run in Triton's interpreter:

    TRITON_INTERPRET=1 python tests/vllm/record_noise.py > tests/proto/vllm_noise.json
"""

# ruff: noqa: E402 - the interpreter is made ready before vLLM is imported
from __future__ import annotations

import json
import sys
import types

import triton.backends

# vLLM wants a driver for this platform, which the interpreter does not need.
triton.backends.backends.setdefault(
    "cpu", types.SimpleNamespace(driver=types.SimpleNamespace(is_active=lambda: False), compiler=None)
)

import numpy as np
import torch
import triton
import triton.language as tl
import vllm.v1.worker.cpu.shm
from vllm.sampling_params import SamplingParams
from vllm.v1.sample.ops import topk_topp_sampler
from vllm.v1.worker.gpu.sample.gumbel import gumbel_noised_argmax, murmur3_hash32, murmur3_uniform32
from vllm.v1.worker.gpu.sample.sampler import Sampler
from vllm.v1.worker.gpu.states import RequestState

import vllm

VOCAB = 1500  # more than one of the kernels' blocks
PROMPT = [3, 4, 4, 900, 1400]
TEXT = [7, 7, 8, 1300, 3]
DRAFTS = [5, 7, 1499]
SEEDS = [0, 1, 42, -1, -(2**63), 2**63 - 1, 0x123456789ABCDEF]
POSITIONS = [0, 1, 9, 131071]
TOKENS = [0, 1, 1023, 1024, 50256, 151935]
SETTINGS: list[dict[str, object]] = [
    {"temperature": 1.0},
    {"temperature": 0.7},
    {"temperature": 0.001},
    {"temperature": 0.0},
    {"temperature": 0.0, "repetition_penalty": 1.7, "frequency_penalty": 0.5},
    {"temperature": 1.0, "top_k": 3},
    {"temperature": 1.3, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 40, "top_p": 0.9},
    {"temperature": 2.0, "min_p": 0.2},
    {"temperature": 1.6, "min_p": 0.01, "top_k": 100, "top_p": 0.95},
    {"temperature": 1.0, "repetition_penalty": 1.3, "presence_penalty": 0.4, "frequency_penalty": -0.2},
    {"temperature": 0.9, "logit_bias": {7: 3.5, 1499: -2.25}},
    {"temperature": 1.1, "allowed_token_ids": [5, 7, 1400]},
]


def logits(rows: int) -> np.ndarray:
    """Return [rows, VOCAB] float32 that any machine can compute; tests have the same lines."""
    numbers = np.arange(1, VOCAB + 1, dtype=np.uint64) * np.arange(1, rows + 1, dtype=np.uint64)[:, None]
    mixed = (numbers * np.uint64(2654435761)) % np.uint64(1 << 32)
    return ((mixed >> np.uint64(12)).astype(np.float64) / 65536 - 8).astype(np.float32)


@triton.jit
def _entries(seeds, positions, tokens, hashes, uniforms, gumbels):
    i = tl.program_id(0)
    seed, position = tl.load(seeds + i), tl.load(positions + i)
    token = tl.load(tokens + i) + tl.arange(0, 1)
    tl.store(hashes + i + tl.arange(0, 1), murmur3_hash32(seed, position, token).to(tl.int64))
    tl.store(uniforms + i + tl.arange(0, 1), murmur3_uniform32(seed, position, token))
    nothing = tl.zeros([1], tl.float32)
    noise, _ = gumbel_noised_argmax(nothing, token, token >= 0, seed, position, 1.0, IS_DRAFTING=False, USE_FP64=False)
    tl.store(gumbels + i, noise)


def entries() -> list[dict[str, object]]:
    """Return hash, uniform and noise of single entries; seeds signed and positions as vLLM counts them."""
    triples = [(seed, position, token) for seed in SEEDS for position in POSITIONS for token in TOKENS]
    seeds, positions, tokens = (torch.tensor(column, dtype=torch.int64) for column in zip(*triples, strict=True))
    hashes = torch.zeros_like(seeds)
    uniforms, gumbels = torch.zeros(len(triples)), torch.zeros(len(triples))
    _entries[(len(triples),)](seeds, positions, tokens, hashes, uniforms, gumbels)
    columns = zip(triples, hashes.tolist(), uniforms.tolist(), gumbels.tolist(), strict=True)
    return [[*triple, h % 2**32, u.hex(), g.hex()] for triple, h, u, g in columns]


def draws() -> list[dict[str, object]]:
    """Return the tokens of vLLM's whole sampler, row by row, for each of `SETTINGS` and two seeds."""
    topk_topp_sampler.apply_top_k_top_p_triton = topk_topp_sampler.apply_top_k_top_p_pytorch  # beyond the interpreter
    transcript = PROMPT + TEXT
    rows = len(DRAFTS) + 1
    config = types.SimpleNamespace(reasoning_config=None)
    found = []
    for settings in SETTINGS:
        for seed in (5, -(2**62), 2**63 - 1):
            states = RequestState(2, 64, 64, 4, VOCAB, torch.device("cpu"))
            sampler = Sampler(config, 2, VOCAB, torch.device("cpu"), states)
            states.add_request("r", len(PROMPT), transcript, len(transcript) - 1, 16)
            slot = states.req_id_to_index["r"]
            states.apply_staged_writes()
            sampler.add_request(slot, SamplingParams(seed=seed, **settings))
            sampler.apply_staged_writes()
            positions = len(transcript) - 1 + torch.arange(rows)
            sampled, _ = sampler.sample(
                torch.from_numpy(logits(rows)),
                torch.full((rows,), slot),
                torch.tensor([slot]),
                np.array([slot]),
                positions,
                torch.tensor([transcript[-1], *DRAFTS]),
                torch.arange(rows),
                np.array([len(transcript) + rows - 1]),
            )
            found.append({"seed": seed, "settings": settings, "tokens": sampled.tolist()})
    return found


def main() -> None:
    """Print the table."""
    table = {
        "made by": "TRITON_INTERPRET=1 python tests/vllm/record_noise.py",
        "vllm": vllm.__version__,
        "triton": triton.__version__,
        "torch": torch.__version__,
        "vocab": VOCAB,
        "prompt": PROMPT,
        "text": TEXT,
        "drafts": DRAFTS,
        "entries": entries(),
        "draws": draws(),
    }
    json.dump(table, sys.stdout)
    print()


main()
