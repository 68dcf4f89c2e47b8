"""The health of a verifier as others see it: the gRPC health service, its state for the coordinator, and its sessions.

While the engine is sick the verifier says that it serves nobody, so that it gets no new sessions. Where the engine has
hung, the event loop sends its sessions elsewhere, and whatever the engine says of them when it wakes goes nowhere. An
event loop that has hung can say nothing: edges leave it since it is silent, and a thread ends its process.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable
from typing import Any, Protocol

from grpc_health.v1 import health_pb2

from outrider.cloud.serving.heartbeat import EngineCondition, HealthJudge, HealthRules, Heartbeat
from outrider.cloud.serving.sessions import Sessions
from outrider.cloud.serving.slots import Outbox
from outrider.cloud.serving.verifier_metrics import VerifierMetrics
from outrider.proto import codec
from outrider.proto.channel import ENGINE_SERVICE
from outrider.proto.errors import Unavailable
from outrider.proto.plumbing.logs import about
from outrider.proto.plumbing.loop_watch import LOOK_S, LoopWatch

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING

log = logging.getLogger(__name__)


class _Servicer(Protocol):
    async def set(self, service: str, status: Any) -> None: ...


class VerifierHealth:
    """Health of one verifier, in its event loop.

    Attributes:
        condition: condition of its engine at the last look.
        outboxes: those of open streams, which are ended where the engine has hung.
    """

    def __init__(
        self,
        heart: Heartbeat,
        metrics: VerifierMetrics,
        servicer: _Servicer,
        name: str,
        on_failure: Callable[[], None],
        rules: HealthRules | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Judge the engine of `heart` in the verifier `name`, and say so by the gRPC health service `servicer`.

        `on_failure` is called once, when no step succeeds any more or the engine has hung for good; and, from a thread
        of its own, where this event loop has.
        """
        rules = rules or HealthRules()
        self.condition = EngineCondition.WELL
        self.outboxes: set[Outbox] = set()
        self._clock = clock
        self._judge = HealthJudge(heart, rules, LOOK_S, clock())
        self._metrics = metrics
        self._servicer = servicer
        self._name = name
        self._on_failure = on_failure
        self._open = False  # whether the verifier takes sessions, as far as it is not sick
        self._failed = False
        self._watching: asyncio.Task[None] | None = None
        self._loop = LoopWatch(f"verifier {name}", self._lose, self._show, hung_s=rules.hung_s, lost_s=rules.lost_s)

    @property
    def hung(self) -> bool:
        """Whether the engine does nothing that it is asked."""
        return self.condition in (EngineCondition.HUNG, EngineCondition.LOST)

    def state(self, sessions: Sessions) -> str:
        if sessions.failed:
            return "down"
        if self.condition is not EngineCondition.WELL:
            return "sick"
        return "draining" if sessions.draining else "ready"

    async def begin(self) -> None:
        """Say that the verifier serves, and watch its engine and this event loop."""
        self._open = True
        await self._say()
        self._loop.begin()
        self._watching = asyncio.create_task(self._watch())

    async def close(self) -> None:
        """Say that it takes no more sessions; the engine is still watched."""
        self._open = False
        await self._say()

    async def fail(self) -> None:
        """Say that it serves nobody any more, and that the process should end."""
        await self.close()
        self._lose()

    def stop(self) -> None:
        self._loop.stop()
        if self._watching is not None:
            self._watching.cancel()

    def check(self) -> None:
        if self.hung:
            raise _standing_still()

    async def look(self) -> None:
        """Judge the engine, and do what a change of its condition asks for; due every `LOOK_S` seconds."""
        condition = self._judge.look(self._clock())
        if condition is not self.condition:
            await self._become(condition)

    async def _watch(self) -> None:
        while True:
            await asyncio.sleep(LOOK_S)
            await self.look()

    def _lose(self) -> None:
        if not self._failed:
            self._failed = True
            self._on_failure()

    def _show(self) -> None:
        self._metrics.show_condition(sick=self._loop.hung or self.condition is not EngineCondition.WELL)

    async def _become(self, condition: EngineCondition) -> None:
        before, self.condition = self.condition, condition
        level = logging.INFO if condition is EngineCondition.WELL else logging.CRITICAL
        log.log(level, "the engine was %s and is %s", before.value, condition.value, extra=about(verifier=self._name))
        self._show()
        await self._say()
        if condition is EngineCondition.HUNG:
            for outbox in self.outboxes:
                self._metrics.counts.fenced += 1
                outbox.put(_standing_still())
        elif condition is EngineCondition.LOST:
            await self.fail()

    async def _say(self) -> None:
        well = self.condition is EngineCondition.WELL
        for service in ("", codec.DECODING_SERVICE):
            await self._servicer.set(service, SERVING if well and self._open else NOT_SERVING)
        await self._servicer.set(ENGINE_SERVICE, SERVING if well else NOT_SERVING)


def _standing_still() -> Unavailable:
    return Unavailable("the verifier's engine stands still; resume elsewhere", retry_after_s=0.1, code="OUT-307")
