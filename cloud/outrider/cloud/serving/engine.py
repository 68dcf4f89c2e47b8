"""The thread of a verifier's engine, which waits for events and makes the steps that its core begins."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from outrider.cloud.learning.lessons import NoLessons
from outrider.cloud.serving.batching import Batching
from outrider.cloud.serving.core import EngineCore
from outrider.cloud.serving.local_source import NoSource
from outrider.cloud.serving.runner import ModelRunner
from outrider.cloud.serving.verifier_metrics import VerifierMetrics
from outrider.cloud.target.backend import Backend
from outrider.cloud.target.projection import Projection
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto.session.verifier import VerifierRules

IDLE_S = 0.5


class Engine(EngineCore):
    """An engine on a target, in a thread of its own, which is the one that calls the target."""

    def __init__(
        self,
        backend: Backend,
        rules: VerifierRules,
        config: VerifierConfig,
        projections: Mapping[str, Projection] | None = None,
        on_failure: Callable[[], None] = lambda: None,
        source: NoSource | None = None,
        lessons: NoLessons | None = None,
    ) -> None:
        """Decode on `backend` by `config`; steering vectors are made by `projections`, which have ids.

        `on_failure` is called in the thread; what is beside the target, and what is kept of its steps, is as
        `EngineCore` has it.
        """
        self._model = ModelRunner(backend, projections or {}, min_step_s=config.min_step_s)
        self._bell = threading.Event()
        super().__init__(
            backend,
            self._model,
            replace(rules, projections=frozenset(projections or ())),
            config.max_sessions,
            Batching(config.max_gap_s, config.prefill_chunk),
            VerifierMetrics(rules.model, rules.name),
            self._bell.set,
            on_failure,
            source,
            lessons,
        )
        self._stopping = False
        self._thread = threading.Thread(target=self._run, name="outrider-engine", daemon=True)

    def start(self) -> None:
        """Begin to decode."""
        self._thread.start()

    def stop(self) -> None:
        """End the thread; sessions still here get Unavailable."""
        self.inbox.post(self._stop)
        self._thread.join()
        self.source.stop()
        self._lessons.stop()

    def set_pace(self, min_step_s: float) -> None:
        """Let the steps from now on take at least so many seconds."""
        self._model.min_step_s = min_step_s

    def _run(self) -> None:
        while not self._stopping:
            self._wait(min(self.turn(), self._clock() + IDLE_S))

    def _wait(self, until: float) -> None:
        """Wait for an event, until a time at most; the bell may still ring for one that has been taken."""
        self._bell.clear()
        began = time.monotonic()
        if not self.inbox and until > began:
            self._bell.wait(until - began)
            self.meter.waited(time.monotonic() - began)

    def _stop(self) -> None:
        self._stopping = True
        self.sessions.stop()
