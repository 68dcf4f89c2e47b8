"""The changes that bring a fleet to a number of verifiers, without Ray."""

from __future__ import annotations

from dataclasses import replace

import pytest

from outrider.deploy.commands.serving_options import ActorSettings
from outrider.deploy.local.fleet import Replica, of_model, plan
from outrider.deploy.local.servers import ray_options
from outrider.proto.errors import ConfigError, NotFound


def fleet(*sessions: int) -> list[Replica]:
    return [Replica(f"v-{i}", "m", sessions=n) for i, n in enumerate(sessions)]


@pytest.mark.parametrize(
    ("replicas", "count", "change"),
    [
        (fleet(0, 0), 2, ([], [])),
        (fleet(0, 0), 4, (["v-2", "v-3"], [])),
        ([Replica("v-1", "m")], 3, (["v-0", "v-2"], [])),
        ([Replica("solo", "m")], 2, (["solo-0"], [])),
        (fleet(5, 0, 3), 1, ([], ["v-1", "v-2"])),
        (fleet(0, 0, 0), 1, ([], ["v-2", "v-1"])),
        (fleet(*[0] * 11), 10, ([], ["v-10"])),
        ([*fleet(2), Replica("v-1")], 1, ([], ["v-1"])),
        ([*fleet(2, 0), Replica("v-2", "m", draining=True, sessions=9)], 1, ([], ["v-2", "v-1"])),
        ([Replica("v-0", "m", draining=True)], 1, (["v-1"], [])),
        (fleet(1), 0, ([], ["v-0"])),
    ],
)
def test_the_plan_has_the_fewest_changes_and_spares_those_with_sessions(
    replicas: list[Replica], count: int, change: tuple[list[str], list[str]]
) -> None:
    assert plan(replicas, count) == change


def test_one_model_at_a_time_is_scaled() -> None:
    mixed = [Replica("a", "m"), Replica("b", "n"), Replica("c")]
    assert of_model(mixed, "n") == [Replica("b", "n")]
    with pytest.raises(ConfigError, match="m, n"):
        of_model(mixed, "")
    with pytest.raises(NotFound, match="m, n"):
        of_model(mixed, "o")
    loading = [Replica("a", "m"), Replica("c")]
    assert of_model(loading, "") == of_model(loading, "m") == loading, "what loads can only be of that model"


def test_placement_and_resources_are_told_to_ray() -> None:
    options = ActorSettings(cpus=2.0, gpus=1.0, resource=("big=0.5",), placement="spread")
    assert ray_options(options) == {
        "lifetime": "detached",
        "num_cpus": 2.0,
        "num_gpus": 1.0,
        "resources": {"big": 0.5},
        "scheduling_strategy": "SPREAD",
    }
    for wrong in ("big", "big=", "=1", "big=some", "big=0", "big=-1"):
        with pytest.raises(ConfigError) as refusal:
            ray_options(replace(options, resource=(wrong,)))
        assert refusal.value.field == "resource"
