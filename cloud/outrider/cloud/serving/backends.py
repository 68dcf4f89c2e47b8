"""The choice of a backend, and the engine on it; the one place that knows which there are."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

from outrider.cloud.learning.lessons import LessonCollector, LessonSink, NoLessons
from outrider.cloud.serving.engine import Engine, rules_of
from outrider.cloud.serving.local_source import local_source
from outrider.cloud.target.backend import Backend
from outrider.cloud.target.steering_vectors import load_projections
from outrider.cloud.target.target_loading import load_target
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.verifier_config import VerifierConfig

LEARN_POSITIONS_S = 500.0  # most positions that are kept a second for the trainer; misses come first


def load_backend(config: VerifierConfig) -> Backend:
    """Load the target of `config` behind the port, and check it.

    Raises:
        NotFound, ModelRefused: the target cannot be loaded.
        ConfigError: its engine is not installed.
    """
    torch.set_num_threads(config.torch_threads)
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


def load_engine(
    config: VerifierConfig,
    on_failure: Callable[[], None] = lambda: None,
    sink: LessonSink | None = None,
    secret: bytes = b"",
) -> Engine:
    """Return an engine on the target of `config`; `sink` takes lessons, if `config.learn` is set, salted by `secret`.

    Raises:
        NotFound, ModelRefused: the target or a projection cannot be loaded.
        ConfigError: its engine is not installed.
    """
    backend = load_backend(config)
    target = backend.facts
    source = local_source(config, target)
    lessons = NoLessons()
    if config.learn and sink is not None:
        lessons = LessonCollector(
            config.model_id,
            sink,
            LEARN_POSITIONS_S,
            tokenizer_sha256=target.tokenizer_sha256,
            secret=secret,
            count=lambda *counted: engine.metrics.lessons(*counted),
        )
    projections = load_projections(config.steering, target, name=config.target, model=config.model_id)
    engine = Engine(backend, rules_of(config, target), config, projections, on_failure, source, lessons)
    return engine
