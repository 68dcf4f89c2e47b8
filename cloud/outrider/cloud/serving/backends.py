"""The choice of a backend; the one place that knows which there are."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

from outrider.cloud.target.backend import Backend
from outrider.cloud.target.target import load_target
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.verifier_config import VerifierConfig


def load_backend(config: VerifierConfig) -> Backend:
    """Load the target of `config` behind the port, and check it.

    Raises:
        NotFound, ModelRefused: the target cannot be loaded.
        ConfigError: its engine is not installed.
    """
    if config.engine == "vllm":
        from outrider.cloud.vllm.loading import load_vllm_backend

        return load_vllm_backend(config)
    # OpenMP ends its threads with the one that they work for. Left beside those of the engine they would outnumber the
    # cores, and idle ones would then sleep at once: products with two threads took half as long again.
    with ThreadPoolExecutor(1, thread_name_prefix="outrider-load") as loading:
        target = loading.submit(
            load_target,
            config.target,
            device=config.device,
            dtype=config.dtype,
            kv_tokens=config.kv_tokens,
            page_size=config.page_size,
            context_length=config.context_length,
            max_sessions=config.max_sessions,
            exact=config.exact,
        ).result()
    return TransformersBackend(target)
