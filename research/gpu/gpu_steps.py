"""Time the engine's step on a GPU: an 8 B shape with random weights in bfloat16, beside transformers and a floor.

    PYTHONPATH=cloud:deploy:edge:proto python research/gpu/gpu_steps.py > steps.jsonl

Every line of the output is a JSON object. A step's device time is by CUDA events; its floor is the time in which the
device copies as many bytes as weights and KV cache hold. Nothing is downloaded, and neither Ray nor gRPC is needed.
"""

from __future__ import annotations

import json
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM

from outrider.cloud.target.target import SessionRows, Target

DEVICE = "cuda"
SHAPE: dict[str, Any] = {
    "hidden_size": 4096,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "intermediate_size": 14336,
    "vocab_size": 128256,
    "max_position_embeddings": 8192,
}
KV_BYTES = 32 * 2 * 8 * 128 * 2  # of a position
CONTEXT, ROOM, SESSIONS, ROWS = 1024, 1104, (1, 16, 64), (1, 5, 9)
WARM_UP, REPEATS, GROWTH = 3, 10, 60


def say(what: str, **facts: Any) -> None:
    """Print a line of the record."""
    print(json.dumps({"what": what, **facts}), flush=True)


def median_ms(seconds: list[float]) -> float:
    """Return the median of times, ms."""
    return round(1e3 * statistics.median(seconds), 2)


def copy_bandwidth() -> float:
    """Return the bytes a second that a copy on the device reads and writes."""
    source = torch.empty(4 << 30, dtype=torch.uint8, device=DEVICE)
    copy = torch.empty_like(source)
    copy.copy_(source)
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    begin.record()
    for _ in range(5):
        copy.copy_(source)
    end.record()
    torch.cuda.synchronize()
    seconds: float = begin.elapsed_time(end) / 1e3
    return 5 * 2 * source.numel() / seconds


def random_model() -> Any:
    """Return the shape's model with random weights."""
    torch.set_default_dtype(torch.bfloat16)
    with torch.device(DEVICE):
        model = LlamaForCausalLM(LlamaConfig(**SHAPE))
    torch.set_default_dtype(torch.float32)
    return model.eval().requires_grad_(False)


@torch.inference_mode()
def time_transformers(model: Any) -> None:
    """Time one row a session with the model's own cache, as `generate` does it."""
    for sessions in SESSIONS:
        cache = DynamicCache(config=model.config)
        tokens = torch.randint(0, 1000, (sessions, CONTEXT), device=DEVICE)
        for part in tokens.split(256, 1):
            model(input_ids=part, past_key_values=cache, use_cache=True, logits_to_keep=1)

        def step(cache: Any = cache, newest: torch.Tensor = tokens[:, :1]) -> None:
            logits = model(input_ids=newest, past_key_values=cache, use_cache=True).logits
            logits[:, -1].argmax(-1).tolist()

        say("transformers step", sessions=sessions, rows=1, ms=median_ms(_times(step)))


class Steps:
    """Sessions of `CONTEXT` tokens, and steps of some of them."""

    def __init__(self, model: Any) -> None:
        self.target = Target(model, "{}", kv_tokens=max(SESSIONS) * ROOM, page_size=16)
        self.caches = [self.target.pool.allocate(ROOM - 4) for _ in range(max(SESSIONS))]
        generator = torch.Generator().manual_seed(0)
        for cache in self.caches:
            text = tuple(torch.randint(0, 1000, (CONTEXT,), generator=generator).tolist())
            self.target.forward([SessionRows(cache, text, 1)])

    def step(self, sessions: int, rows: int) -> tuple[float, float, float, torch.Tensor]:
        """Return seconds in all, on the host until all is queued, and on the device; and the logits."""
        batch = [SessionRows(cache, tuple(range(5, 5 + rows)), rows) for cache in self.caches[:sessions]]
        begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
        torch.cuda.synchronize()
        began = time.monotonic()
        begin.record()
        logits = self.target.forward(batch)
        end.record()
        queued = time.monotonic() - began
        logits.argmax(-1).tolist()
        spent = time.monotonic() - began
        for cache in self.caches[:sessions]:
            cache.truncate(CONTEXT)
        return spent, queued, begin.elapsed_time(end) / 1e3, logits

    def time_all(self, weight_bytes: int, bandwidth: float) -> None:
        for sessions in SESSIONS:
            floor = (weight_bytes + sessions * CONTEXT * KV_BYTES) / bandwidth
            for rows in ROWS:
                times = [self.step(sessions, rows)[:3] for _ in range(WARM_UP + REPEATS)][WARM_UP:]
                spent, queued, device = (median_ms(list(each)) for each in zip(*times, strict=True))
                say(
                    "step",
                    sessions=sessions,
                    rows=rows,
                    ms=spent,
                    host_until_queued_ms=queued,
                    device_ms=device,
                    floor_ms=round(1e3 * floor, 2),
                )

    def compare_bits(self) -> None:
        """Compare the first row's logits alone and beside others."""
        alone = self.step(1, 1)[3][:1].clone()
        for sessions, rows in ((1, 5), (1, 9), (16, 1), (64, 1)):
            beside = self.step(sessions, rows)[3][:1]
            largest = float((alone - beside).abs().max())
            say(
                "bits of the first row", sessions=sessions, rows=rows, equal=torch.equal(alone, beside), largest=largest
            )

    def grow(self) -> None:
        """Time steps of one session whose context grows by one each, with cuDNN's attention and without, in turns."""
        for cudnn in (True, False, True, False):
            torch.backends.cuda.enable_cudnn_sdp(cudnn)

            def step() -> None:
                self.target.forward([SessionRows(self.caches[0], (7,), 1)])

            times = _times(step, GROWTH)
            self.caches[0].truncate(CONTEXT)
            say("growing context", cudnn=cudnn, ms=median_ms(times), worst_ms=round(1e3 * max(times), 2))


def _times(step: Callable[[], None], repeats: int = REPEATS) -> list[float]:
    times = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.monotonic()
        step()
        torch.cuda.synchronize()
        times.append(time.monotonic() - began)
    return times


def main() -> None:
    """Print the record."""
    bandwidth = copy_bandwidth()
    device = torch.cuda.get_device_name()
    say("copy bandwidth", gb_per_s=round(bandwidth / 1e9), device=device, torch=torch.__version__)
    model = random_model()
    weights = sum(each.nbytes for each in model.parameters()) - model.model.embed_tokens.weight.nbytes
    time_transformers(model)
    steps = Steps(model)
    steps.time_all(weights, bandwidth)
    steps.compare_bits()
    steps.grow()


if __name__ == "__main__":
    main()
