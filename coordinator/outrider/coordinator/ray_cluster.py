"""Verifiers and trainers that are Ray actors: the only file here that imports Ray."""

from __future__ import annotations

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import ray
import ray.exceptions
from ray._private import ray_constants, services

from outrider.coordinator.cluster import SendAway, VerifierInfo, known_fields
from outrider.coordinator.roster import Roster
from outrider.proto.cluster_status import TrainerStatus
from outrider.proto.errors import ConfigError, NotFound, OutriderError, Unavailable

logger = logging.getLogger(__name__)

NAMESPACE = "outrider"
ACTOR_PREFIX = "outrider-verifier-"
TRAINER_PREFIX = "outrider-trainer-"
RETRY_S = 1.0
DRAIN_GRACE_S = 10.0  # for the sessions of a drained verifier to move
TEMPLATE_TIMEOUT_S = 20.0  # transformers reads the tokenizer's files for it

# What Ray raises when it cannot be asked, beside its own tree.
_RAY_FAILURES = (ray.exceptions.RayError, ConnectionError, RuntimeError)


def connect_ray(address: str) -> None:
    """Join the Ray cluster at `address` (`auto`: the one on this machine), unless this process has joined one.

    Call it before any gRPC server or channel exists: Ray forks helpers, and gRPC does not survive a fork.
    """
    if ray.is_initialized():
        return
    try:
        found: str = services.get_ray_address_from_environment(address, None)
        here = found.startswith("127.0.0.1:") and found in services.find_gcs_addresses()  # type: ignore[no-untyped-call]
        with ray_on_loopback() if here else nullcontext():  # as the cluster's own processes were started
            ray.init(address=address, namespace=NAMESPACE, log_to_driver=False, configure_logging=False)
    except (*_RAY_FAILURES, ValueError) as error:
        message = f"no Ray cluster answers at {address!r}: {error}"
        raise Unavailable(message, field="ray_address", code="OUT-502") from error


@contextmanager
def ray_on_loopback() -> Iterator[None]:
    """Have Ray take 127.0.0.1 for the address of this machine in what is started or joined meanwhile.

    It would put the machine's address in place of that, and listen on all interfaces. The switch is the one by which it
    keeps to loopback on macOS and Windows: a variable for its processes, and what this process has read of it.
    """
    variable = ray_constants.ENABLE_RAY_CLUSTERS_ENV_VAR
    before = os.environ.get(variable), ray_constants.ENABLE_RAY_CLUSTER
    os.environ[variable], ray_constants.ENABLE_RAY_CLUSTER = "0", False
    try:
        yield
    finally:
        ray_constants.ENABLE_RAY_CLUSTER = before[1]
        del os.environ[variable]
        if before[0] is not None:
            os.environ[variable] = before[0]


def verifier_names() -> tuple[str, ...]:
    """Return the sorted names of the joined cluster's verifiers, also those that load; raises `Unavailable`."""
    return _named(ACTOR_PREFIX)


def _named(prefix: str) -> tuple[str, ...]:
    """Return the sorted names of actors behind their prefix."""
    try:
        actors = ray.util.list_named_actors(all_namespaces=True)
    except _RAY_FAILURES as error:
        raise Unavailable(f"Ray does not answer: {error}", retry_after_s=RETRY_S) from error
    names = (actor["name"] for actor in actors if actor["namespace"] == NAMESPACE)
    return tuple(sorted(name.removeprefix(prefix) for name in names if name.startswith(prefix)))


class RayCluster:
    """A fleet of the actors in `NAMESPACE` whose names begin with `ACTOR_PREFIX`.

    Calls of Ray block, so worker threads make them.

    Args:
        info_timeout_s: seconds that a poll waits for all actors together; an actor that takes longer is down.
        respawn: function that starts a new actor under a verifier's name (without prefix) after Ray has given up the
            old one, and returns its handle; a detached actor outlives the coordinator. None: lost verifiers stay down.
    """

    def __init__(
        self,
        *,
        info_timeout_s: float = 2.0,
        respawn: Callable[[str], object] | None = None,
    ) -> None:
        if not ray.is_initialized():
            raise ConfigError("this process is in no Ray cluster; call connect_ray first", field="ray_address")
        self._info_timeout_s = info_timeout_s
        self._respawn = respawn
        self._roster = Roster()
        self._polling = asyncio.Lock()
        self._asked: dict[str, ray.ObjectRef[Any]] = {}
        self._trainers: dict[str, TrainerStatus] = {}
        self._asked_trainers: dict[str, ray.ObjectRef[Any]] = {}
        # Ray ends an actor that is not detached when its first handle goes.
        self._respawned: dict[str, object] = {}

    @property
    def trainers(self) -> tuple[TrainerStatus, ...]:
        return tuple(self._trainers.values())

    async def refresh(self) -> tuple[VerifierInfo, ...]:
        """Ask every actor for its info; raises `Unavailable` if Ray itself does not answer."""
        async with self._polling:
            return await asyncio.to_thread(self._poll)

    async def drain(self, name: str) -> int:
        """Ask the sessions of verifier `name` to move, and return their number; raises `NotFound` or `Unavailable`."""
        timeout_s = DRAIN_GRACE_S + self._info_timeout_s
        sessions = await asyncio.to_thread(self._call, name, "drain", timeout_s, DRAIN_GRACE_S)
        async with self._polling:
            self._roster.drained(name)
        return int(sessions)

    async def send_away(self, sessions: SendAway) -> None:
        """Tell the verifiers' actors, and wait for no answer, since the next poll shows what goes on."""
        for name, those in sessions.items():
            await asyncio.to_thread(self._send, ACTOR_PREFIX + name, "send_away", those)

    async def tokenizer_json(self, name: str) -> str:
        return str(await asyncio.to_thread(self._call, name, "tokenizer_json", self._info_timeout_s))

    async def chat_template_json(self, name: str) -> str:
        return str(await asyncio.to_thread(self._call, name, "chat_template_json", TEMPLATE_TIMEOUT_S))

    async def allow_learning(self, keys: frozenset[bytes]) -> None:
        """Tell every trainer these keys, and wait for no answer, since the next poll tells them again."""
        await asyncio.to_thread(self._tell_trainers, "allow", keys)

    async def retire_versions(self, versions: frozenset[tuple[str, str]]) -> None:
        """Tell every trainer these versions, and wait for no answer, since their files are looked at again."""
        if versions:
            await asyncio.to_thread(self._tell_trainers, "retire", versions)

    async def close(self) -> None:
        """Forget the handles; the actors and the connection to Ray stay."""
        self._asked.clear()
        self._asked_trainers.clear()
        self._respawned.clear()

    def _poll(self) -> tuple[VerifierInfo, ...]:
        listed = verifier_names()
        self._roster.observe(listed, self._reports(listed))
        for name in self._roster.leaving:
            self._send(ACTOR_PREFIX + name, "acknowledge_drain")  # so that its end counts as intended
        if self._respawn is not None:
            for name in self._roster.to_respawn(time.monotonic()):
                self._replace(name, self._respawn)
        self._poll_trainers()
        return self._roster.infos

    def _poll_trainers(self) -> None:
        """Take the answers that are there, and ask again: a trainer may be in the middle of a step."""
        models = _named(TRAINER_PREFIX)
        asked, self._asked_trainers = self._asked_trainers, {}
        refs = list(asked.values())
        done = set(ray.wait(refs, num_returns=len(refs), timeout=0)[0]) if refs else set()
        known, self._trainers = self._trainers, {}
        for model in models:
            self._trainers[model] = known.get(model, TrainerStatus(model, "loading"))
            answer = asked.get(model)
            if answer is not None and answer in done:
                self._trainers[model] = self._trainer(self._trainers[model], answer)
                answer = None
            if (answer := answer or self._send(TRAINER_PREFIX + model, "info")) is not None:
                self._asked_trainers[model] = answer

    def _trainer(self, before: TrainerStatus, answer: ray.ObjectRef[Any]) -> TrainerStatus:
        try:
            return replace(before, **{**known_fields(TrainerStatus, ray.get(answer)), "model": before.model})
        except (*_RAY_FAILURES, ValueError, TypeError) as error:  # it is dead or restarts, or of another release
            logger.debug("the trainer of %s does not answer: %s", before.model, error)
            return replace(before, state="down")

    def _reports(self, listed: tuple[str, ...]) -> dict[str, Mapping[str, Any]]:
        # An actor that is still loading answers much later, so its request is kept instead of repeated at every poll.
        asked = {name: self._asked.get(name) or self._send(ACTOR_PREFIX + name, "info") for name in listed}
        waiting = {name: ref for name, ref in asked.items() if ref is not None}
        refs = list(waiting.values())
        done = set(ray.wait(refs, num_returns=len(refs), timeout=self._info_timeout_s)[0]) if refs else set()
        self._asked = {name: ref for name, ref in waiting.items() if ref not in done}
        answers = {name: self._answer(name, ref) for name, ref in waiting.items() if ref in done}
        return {name: answer for name, answer in answers.items() if answer is not None}

    def _tell_trainers(self, method: str, argument: frozenset[Any]) -> None:
        for model in _named(TRAINER_PREFIX):
            self._send(TRAINER_PREFIX + model, method, argument)

    def _send(self, name: str, method: str, *arguments: Any) -> ray.ObjectRef[Any] | None:
        """Call a method of an actor without waiting for its answer; None: the actor cannot be called."""
        try:
            actor = ray.get_actor(name, namespace=NAMESPACE)
            answer: ray.ObjectRef[Any] = getattr(actor, method).remote(*arguments)
            return answer
        # One of another release may have no such method.
        except (AttributeError, ValueError, *_RAY_FAILURES) as error:
            logger.debug("%s cannot be called for %s: %s", name, method, error)
            return None

    def _answer(self, name: str, ref: ray.ObjectRef[Any]) -> Mapping[str, Any] | None:
        try:
            answer: Mapping[str, Any] = ray.get(ref, timeout=self._info_timeout_s)
            return answer
        except _RAY_FAILURES as error:
            logger.debug("verifier %s does not answer: %s", name, error)
            return None

    def _replace(self, name: str, respawn: Callable[[str], object]) -> None:
        try:
            self._respawned[name] = respawn(name)
        except (OutriderError, ValueError, *_RAY_FAILURES) as error:
            logger.warning("verifier %s cannot be replaced, will try again: %s", name, error)
        else:
            logger.info("verifier %s is being replaced", name)

    def _actor(self, name: str) -> Any:
        try:
            return ray.get_actor(ACTOR_PREFIX + name, namespace=NAMESPACE)
        except ValueError as error:
            raise NotFound(f"there is no verifier {name!r}", field="verifier") from error

    def _call(self, name: str, method: str, timeout_s: float, *arguments: Any) -> Any:
        try:
            return ray.get(getattr(self._actor(name), method).remote(*arguments), timeout=timeout_s)
        except _RAY_FAILURES as error:
            raise Unavailable(
                f"verifier {name!r} does not answer to {method}: {error}", retry_after_s=RETRY_S
            ) from error
