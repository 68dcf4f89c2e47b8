"""A trainer as a named, detached Ray actor that goes on from its checkpoint whenever Ray restarts it.

Verifiers find it by its name and hand it records as plain bytes, which are checked like a stranger's.
"""

from __future__ import annotations

import logging
import os
import sys
import threading
import time
from collections import deque
from collections.abc import Mapping
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from outrider.proto.errors import ConfigError, Unavailable
from outrider.proto.plumbing.cores import available_cores
from outrider.proto.plumbing.logs import configure

if TYPE_CHECKING:
    from outrider.cloud.learning.trainer_settings import TrainerSettings

NAMESPACE = "outrider"  # as verifiers have
VERIFIER_PREFIX = "outrider-verifier-"
LOAD_WITHIN_S = 1.0
TRAINER_PREFIX = "outrider-trainer-"
MEMORY_BYTES = 2 << 30
CONCURRENT_CALLS = 8
MAX_INBOX_BYTES = 16 << 20
ROOM_WITHIN_S = 20.0  # for a push to be taken; its verifier waits for 30 seconds, and drops what comes meanwhile
IDLE_S = 0.2
NICE = 10

log = logging.getLogger(__name__)


class TrainerActor:
    """An actor that learns in a thread of its own, and only with the time that verifiers on its node leave.

    All methods block, so Ray calls them in threads. The class works without Ray. What goes wrong in learning ends the
    process: Ray starts another, which goes on from the last checkpoint. Records are in memory alone and are lost then.

    Raises:
        OutriderError: the drafter cannot be trained on; Ray then gives the actor up, and its callers see the error.
    """

    def __init__(self, settings: TrainerSettings, log_level: str = "", log_format: str = "text") -> None:
        import torch

        from outrider.cloud.learning.cpu_share import CpuShare, IdleGate
        from outrider.cloud.learning.learner import Learner

        if log_level:
            configure(log_level, log_format)
        os.nice(NICE)
        torch.set_num_threads(1)
        self._learner = Learner(settings)
        self._allowed: frozenset[bytes] = frozenset()  # as a coordinator has said last
        self._retired: frozenset[tuple[str, str]] = frozenset()  # since the last look
        self._share = CpuShare(settings.cpu_share, time.monotonic, time.process_time)
        self._gate = IdleGate(verifiers_cpu_s, time.monotonic, available_cores(), settings.max_load)
        self._inbox: deque[bytes] = deque()
        self._inbox_bytes = 0
        self._changed = threading.Condition()
        self._learning = threading.Lock()
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name="outrider-trainer", daemon=True)
        self._thread.start()

    def push(self, records: tuple[bytes, ...]) -> int:
        """Take encoded records, and return their number; wait where the trainer is behind.

        Raises:
            Unavailable: there was no room in time.
        """
        size = sum(map(len, records))
        with self._changed:
            if not self._changed.wait_for(lambda: self._inbox_bytes + size <= MAX_INBOX_BYTES, ROOM_WITHIN_S):
                raise Unavailable("the trainer is behind; send less")
            self._inbox.extend(records)
            self._inbox_bytes += size
        return len(records)

    def forget(self, key_salt: bytes) -> int:
        """Drop all records of a key, and return their number of positions."""
        with self._learning:
            self._take_all()
            return self._learner.trainer.buffer.forget(key_salt)

    def allow(self, keys: frozenset[bytes]) -> None:
        """Hear which keys, named by their salts, allow learning now: see `Learner.allow`. It returns at once."""
        self._allowed = keys

    def retire(self, versions: frozenset[tuple[str, str]]) -> None:
        """Delete published versions that a coordinator has retired, each named by its drafter and itself.

        It returns at once.
        """
        self._retired = versions

    def info(self) -> dict[str, Any]:
        """Return plain values about the learning so far."""
        with self._learning:
            gate, share = self._gate, self._share
            idle = {"state": gate.state, "load": gate.load or 0.0, "waited_s": gate.waited_s, "hurried": gate.hurried}
            idle |= {"cpu_share": share.lately, "max_cpu_share": share.limit, "verifiers": gate.watched}
            return self._learner.status() | idle | {"pid": os.getpid()}

    def stop(self) -> None:
        """Write a checkpoint and learn no more; the actor stays, to be killed."""
        self._stopped.set()
        self._thread.join()
        with self._learning:
            self._learner.trainer.save()

    def _run(self) -> None:
        try:
            while not self._stopped.wait(IDLE_S):
                self._learn()
        except Exception:
            log.exception("learning failed; the trainer ends, and is started again from its last checkpoint")
            logging.shutdown()
            os._exit(1)

    def _learn(self) -> None:
        """Take what came, and make the steps that it, the share of a core and the load of verifiers allow."""
        with self._learning:
            self._take_all()
        while not self._stopped.wait(self._share.wait_s()):
            with self._learning:
                self._take_all()
                ready = self._learner.ready(time.time())
            if not ready:
                self._gate.rest()
            if not ready or not self._gate.opens():
                return
            with self._learning:
                self._learner.step(time.time())

    def _take_all(self) -> None:
        self._learner.allow(self._allowed)
        retired, self._retired = self._retired, frozenset()
        if retired:
            learning = self._learner.trainer.package.name
            self._learner.retire([version for name, version in retired if name == learning])
        while True:
            with self._changed:
                if not self._inbox:
                    return
                record = self._inbox.popleft()
                self._inbox_bytes -= len(record)
                self._changed.notify_all()
            self._learner.take(record)


def verifiers_cpu_s() -> dict[str, float]:
    """Return the processor time that each verifier on this node has used, in seconds by its actor's name.

    Those that do not answer in time are left out, as they load or have ended; without Ray there are none.
    """
    ray = sys.modules.get("ray")
    if ray is None or not ray.is_initialized():
        return {}
    node = ray.get_runtime_context().get_node_id()
    try:
        there = ray.util.list_named_actors(all_namespaces=True)
        names = [each["name"] for each in there if each["namespace"] == NAMESPACE]
        names = [name for name in names if name.startswith(VERIFIER_PREFIX)]
        asked = {ray.get_actor(name, namespace=NAMESPACE).cpu_s.remote(): name for name in names}
        answered, _ = ray.wait([*asked], num_returns=len(asked), timeout=LOAD_WITHIN_S) if asked else ([], [])
        said = {asked[answer]: ray.get(answer) for answer in answered}
    except (ray.exceptions.RayError, ValueError):  # one has just ended
        return {}
    return {name: seconds for name, (where, seconds) in said.items() if where == node}


class TrainerLink:
    """The way of a verifier's records to the trainer of its target, whenever that runs: a `LessonSink`.

    Args:
        model: id of the target.
    """

    def __init__(self, model: str) -> None:
        self._name = TRAINER_PREFIX + model
        self._actor: Any = None

    def push(self, records: tuple[bytes, ...]) -> Future[object]:
        """Hand over encoded records; raises `Unavailable` if there is no trainer."""
        return self._called("push", records)

    def forget(self, key_salt: bytes) -> Future[int]:
        """Drop all lessons of one API key; raises `Unavailable` if there is no trainer."""
        return self._called("forget", key_salt)

    def _called(self, method: str, argument: object) -> Future[Any]:
        import ray

        try:
            if self._actor is None:
                self._actor = ray.get_actor(self._name, namespace=NAMESPACE)
            answer: Future[Any] = getattr(self._actor, method).remote(argument).future()
        except ValueError as error:
            self._actor = None
            raise Unavailable(f"no trainer {self._name} runs; start one with `outrider trainer`") from error
        except ray.exceptions.RayError:
            self._actor = None  # it was killed: another may have its name
            raise
        answer.add_done_callback(self._look)
        return answer

    def _look(self, answer: Future[Any]) -> None:
        if not answer.cancelled() and answer.exception() is not None:
            self._actor = None


def start_trainer_actor(
    model: str, settings: TrainerSettings, *, ray_options: Mapping[str, Any] | None = None, **logs: str
) -> Any:
    """Start the trainer of the target `model` in the Ray cluster that this process has joined.

    It is detached: it outlives this process, until it is killed. It returns at once, while the drafter loads.

    Args:
        model: id of the target, by which verifiers find it.
        settings: what to train, and how.
        ray_options: arguments of `ActorClass.options` that differ, such as num_cpus or scheduling_strategy.
        logs: log_level and log_format of its process.

    Returns:
        The actor's handle (`ray.actor.ActorHandle`).

    Raises:
        ConfigError: this process is in no Ray cluster, or the target has a trainer.
    """
    import ray

    if not ray.is_initialized():
        raise ConfigError("this process is in no Ray cluster; call ray.init first", field="ray")
    options = {
        "num_cpus": 1,
        "memory": MEMORY_BYTES,
        "max_restarts": -1,
        "max_task_retries": 0,
        "max_concurrency": CONCURRENT_CALLS,
        "lifetime": "detached",
        **(ray_options or {}),
        "name": TRAINER_PREFIX + model,
        "namespace": NAMESPACE,
    }
    try:
        return ray.remote(TrainerActor).options(**options).remote(settings, **logs)
    except ValueError as error:
        raise ConfigError(f"the trainer of {model!r} cannot be started: {error}", field="drafter") from error
