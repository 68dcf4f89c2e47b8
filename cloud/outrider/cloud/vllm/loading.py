"""Loading a target into vLLM: the verifier's settings as vLLM's, and the facts that the port tells."""

from __future__ import annotations

import logging
import math
import os
from dataclasses import replace
from typing import Any

import torch

from outrider.cloud.models.family_index import eos_tokens, find_target, first_line
from outrider.cloud.target.backend import TargetFacts
from outrider.cloud.target.kv_size import STATE_LAYERS, bytes_per_token, kv_tokens_by_memory, session_length
from outrider.cloud.target.target_loading import tokenizer_json
from outrider.cloud.verifier_config import AUTO, MAX_PREFILL_ROWS, VerifierConfig
from outrider.cloud.vllm.adapter import VllmCore, check_device, check_release, chosen_dtype
from outrider.cloud.vllm.vllm_backend import VllmBackend
from outrider.proto.errors import ModelRefused, NotFound, OutriderError
from outrider.proto.tokenizer import tokenizer_hash

CPU_PAGE = 32  # positions that vLLM's attention on CPUs takes at a time

log = logging.getLogger(__name__)


def load_vllm_backend(config: VerifierConfig) -> VllmBackend:
    """Load the target of `config` into vLLM.

    Raises:
        ConfigError: vLLM is not installed, is another release than those that are known, or refuses the settings.
        NotFound, ModelRefused: the target cannot be loaded.
    """
    _set_environment(config)
    check_release()
    check_device(config.device)
    source = find_target(config.target)
    tokenizer, shape = tokenizer_json(source, config.target), _shape(source, config.target)
    try:
        if config.dtype == AUTO:
            config = replace(config, dtype=chosen_dtype(source, config.quantization))
        options = engine_options(config, source, shape)
        core = VllmCore(config.most_drafts, options)
    except OutriderError:
        raise
    except Exception as error:  # vLLM raises anything, and where its workers fail, their errors' text alone
        words = " ".join(str(error).split())[:600]
        raise ModelRefused(f"vLLM cannot load {config.target!r}: {words}", field="target") from error
    facts = TargetFacts(
        tokenizer_json=tokenizer,
        tokenizer_sha256=tokenizer_hash(tokenizer),
        vocab_size=int(shape.vocab_size),
        context_length=options["max_model_len"],
        eos_tokens=_eos_tokens(source, shape),
        hidden_size=int(shape.hidden_size),
        num_layers=int(shape.num_hidden_layers),
        device=torch.device("cpu"),  # where workers put what is tapped
        precision=core.precision,
    )
    log.info("loaded %s: %s, %d KV pages of %d", config.target, core.precision, core.store.count, core.store.size)
    return VllmBackend(core, facts, max_rows=options["max_num_batched_tokens"], max_requests=options["max_num_seqs"])


def engine_options(config: VerifierConfig, source: str, shape: Any) -> dict[str, Any]:
    """Return the fields of vLLM's `EngineArgs` for a model of `shape` (its transformers config) at `source`.

    The config names a type, since the size of the KV cache follows from it.
    """
    context = session_length(shape, config.context_length)
    on_cpu = config.device == "cpu"
    page_size = CPU_PAGE * math.ceil(config.page_size / CPU_PAGE) if on_cpu else config.page_size
    requests = config.max_sessions + 1  # and the verifier's own, when it tests itself
    options: dict[str, Any] = {
        "model": source,
        "skip_tokenizer_init": True,
        "load_format": "safetensors",
        "trust_remote_code": False,
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_dtype,
        "quantization": config.quantization or None,
        "tensor_parallel_size": config.tensor_parallel,
        "distributed_executor_backend": "ray" if config.across_nodes else "mp" if config.tensor_parallel > 1 else "uni",
        "max_model_len": context,
        "max_num_seqs": requests,
        "max_num_batched_tokens": MAX_PREFILL_ROWS + requests * (config.most_drafts + 1),
        "block_size": page_size,
        "enable_prefix_caching": True,
        "disable_hybrid_kv_cache_manager": True,  # pages of one kind, which a rollback leaves valid
        "enforce_eager": True,
        "async_scheduling": False,  # a step is planned when the last one's tokens are known
        "disable_log_stats": True,
    }
    if config.memory_share:
        options["gpu_memory_utilization"] = config.memory_share
    tokens = config.kv_tokens
    dtype = getattr(torch, config.dtype)
    if not tokens and on_cpu and not config.memory_share:
        tokens = kv_tokens_by_memory(shape, dtype, torch.device("cpu"), config.max_sessions * context)
    if tokens:
        pages = max(1, tokens // page_size)
        options["max_model_len"] = min(context, pages * page_size)
        options["num_gpu_blocks_override"] = pages + 1  # vLLM's first stands for nothing
        options["kv_cache_memory_bytes"] = (pages + 1) * page_size * bytes_per_token(shape, dtype)
    return options


def _set_environment(config: VerifierConfig) -> None:
    """Set what vLLM takes from the environment alone, where the operator has not."""
    defaults = {
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",  # a single worker computes in this process
        "VLLM_CONFIGURE_LOGGING": "0",  # our own logs show its lines
        "VLLM_NO_USAGE_STATS": "1",
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
    }
    if config.threads:
        defaults["OMP_NUM_THREADS"] = str(config.threads)
    for name, value in defaults.items():
        os.environ.setdefault(name, value)


def _shape(source: str, target: str) -> Any:
    """Return the transformers config of the text model."""
    from transformers import AutoConfig

    try:
        shape = AutoConfig.from_pretrained(source, trust_remote_code=False).get_text_config()
    except OSError as error:
        raise NotFound(f"cannot load {target!r}: {first_line(error)}", field="target") from error
    except ValueError as error:
        raise ModelRefused(f"{target!r}: {first_line(error)}", field="target") from error
    if not getattr(shape, "num_attention_heads", 0):
        raise ModelRefused(f"{target!r} has no keys and values of attention to roll back", field="target")
    if kinds := sorted(STATE_LAYERS & set(getattr(shape, "layer_types", None) or ())):
        raise ModelRefused(
            f"{target!r} has layers of type {', '.join(kinds)}, whose state vLLM cannot roll back here; the own engine "
            "serves it (leave --engine out)",
            field="target",
        )
    return shape


def _eos_tokens(source: str, shape: Any) -> frozenset[int]:
    from transformers import GenerationConfig

    try:
        generation = GenerationConfig.from_pretrained(source)
    except OSError:  # it has no file of its own
        generation = None
    return eos_tokens(generation, shape)
