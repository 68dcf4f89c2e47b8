"""Verifiers of a Ray cluster together: `outrider scale` starts or drains some, `outrider key --forget` asks all."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import ray
import ray.exceptions

from outrider.cloud.serving.verifier_actor import ACTOR_PREFIX, NAMESPACE, start_verifier_actor
from outrider.coordinator.ray_cluster import connect_ray, verifier_names
from outrider.deploy.arguments import Given
from outrider.deploy.commands.operating import ScaleSettings
from outrider.deploy.local.local_cluster import wait_until_loaded
from outrider.proto.errors import ConfigError, NotFound, Unavailable

ANSWER_TIMEOUT_S = 60.0
SPARE_S = 30.0  # for an actor to answer after the grace


@dataclass(frozen=True, slots=True)
class Replica:
    """A verifier of the cluster; `model` is empty until it answers."""

    name: str
    model: str = ""
    draining: bool = False
    sessions: int = 0


def plan(replicas: Sequence[Replica], count: int) -> tuple[list[str], list[str]]:
    """Return the names to start, and those to drain and remove, of the fewest changes that leave `count` replicas.

    Draining replicas go first, then those with the fewest sessions, the newest name first. New ones continue the
    numbers: `verifier-2` after `verifier-0` and `verifier-1`.
    """
    staying = [replica for replica in replicas if not replica.draining]
    if count < len(staying):
        by_name = sorted(staying, key=lambda replica: _natural(replica.name), reverse=True)
        leaving = sorted(by_name, key=lambda replica: (bool(replica.model), replica.sessions))
        drained = [replica.name for replica in replicas if replica.draining]
        return [], [*drained, *(replica.name for replica in leaving[: len(staying) - count])]
    taken = {replica.name for replica in replicas}
    base = re.sub(r"-\d+$", "", min(taken)) if taken else "verifier"
    free = (name for name in (f"{base}-{i}" for i in itertools.count()) if name not in taken)
    return list(itertools.islice(free, count - len(staying))), []


def scale(given: Given) -> int:
    """Run `outrider scale`."""
    options = given(ScaleSettings)
    connect_ray(options.ray_address)
    replicas = of_model(_replicas(), options.model)
    start, remove = plan(replicas, options.count)
    recipe_of = next((replica.name for replica in replicas if replica.model), "")
    if start and not recipe_of:
        raise NotFound(
            "no verifier answers whose settings others could take; start one with `outrider verifier --ray-address`",
            field="count",
        )
    _start(start, recipe_of)
    _remove(remove, options.drain_grace_s)
    print(f"{options.count} verifiers")
    return 0


def forget(key: str, ray_address: str) -> int:
    """Run `outrider key --forget`: verifiers pass it on to their trainers, whose own texts go last."""
    connect_ray(ray_address)
    names = verifier_names()
    if not names:
        raise NotFound(
            "no verifier runs in this Ray cluster, so that nothing is kept for training", field="ray_address"
        )
    positions = 0
    for name in names:
        try:
            positions += ray.get(_actor(name).forget_lessons.remote(key), timeout=ANSWER_TIMEOUT_S)
        except (ray.exceptions.RayError, ValueError) as error:
            raise Unavailable(f"{name} did not forget; try again: {error}", field="forget") from error
    whose = key or "texts without a key"
    print(f"{positions} positions of {whose} are forgotten; drafters that were trained already stay")
    return 0


def of_model(replicas: Sequence[Replica], model: str) -> list[Replica]:
    """Return the replicas of one model, including silent ones if there is only one model.

    Raises:
        ConfigError: there are several models, and none is named.
        NotFound: no verifier serves the model.
    """
    models = sorted({replica.model for replica in replicas if replica.model})
    if model and model not in models:
        message = f"no verifier serves {model!r}; there is {', '.join(models) or 'none'}"
        raise NotFound(message, field="model", code="OUT-308")
    if len(models) > 1 and not model:
        raise ConfigError(f"must be one of {', '.join(models)}, which have verifiers here", field="model")
    wanted = {model or "".join(models), *([""] if len(models) <= 1 else [])}
    return [replica for replica in replicas if replica.model in wanted]


def _replicas() -> list[Replica]:
    """Return all verifiers of the joined cluster, including those that still load."""
    asked = {name: _actor(name).info.remote() for name in verifier_names()}
    if asked:
        ray.wait(list(asked.values()), num_returns=len(asked), timeout=ANSWER_TIMEOUT_S)
    return [_replica(name, answer) for name, answer in asked.items()]


def _replica(name: str, answer: ray.ObjectRef[Any]) -> Replica:
    try:
        info = ray.get(answer, timeout=0)
    except ray.exceptions.RayError:
        return Replica(name)
    return Replica(name, info["model"], info["state"] == "draining", info["sessions"])


def _start(names: Sequence[str], like: str) -> None:
    """Start detached actors together, with the settings of `like`, and wait until they serve."""
    if not names:
        return
    config, secret, ray_options = ray.get(_actor(like).recipe.remote(), timeout=ANSWER_TIMEOUT_S)
    detached = {**ray_options, "lifetime": "detached"}
    actors = {name: start_verifier_actor(name, config, lease_secret=secret, ray_options=detached) for name in names}
    for name, actor in actors.items():
        print(f"{name} serves {config.model_id} on {wait_until_loaded(name, actor)['address']}", flush=True)


def _remove(names: Sequence[str], grace_s: float) -> None:
    """Drain the named verifiers together, then end them."""
    actors = {name: _actor(name) for name in names}
    leaving = {name: actor.leave.remote(grace_s) for name, actor in actors.items()}
    for name, answer in leaving.items():
        try:
            cut = ray.get(answer, timeout=grace_s + SPARE_S)
        except ray.exceptions.RayError as error:
            raise Unavailable(f"{name} does not drain: {error}", field="count") from error
        ray.kill(actors[name], no_restart=True)
        print(f"{name} is gone" + (f"; {cut} sessions had not moved in time" if cut else ""), flush=True)


def _actor(name: str) -> Any:
    return ray.get_actor(ACTOR_PREFIX + name, namespace=NAMESPACE)


def _natural(name: str) -> tuple[str, int]:
    """Return a key that sorts `a-2` before `a-10`."""
    base, _, number = name.rpartition("-")
    return (base, int(number)) if number.isdecimal() else (name, -1)
