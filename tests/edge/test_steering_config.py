"""Whether an edge steers its drafter: the values of the option, its sources, and its effect."""

from __future__ import annotations

import pytest

from outrider.deploy.cli import parse
from outrider.edge import EdgeConfig
from outrider.proto.errors import ConfigError
from outrider.proto.policy import FixedSteering, PricedSteering
from outrider.proto.policy.steering import ALL, FIRST

WHERE = {"verifier": "127.0.0.1:1", "model": "m"}


def test_vectors_are_requested_by_what_pays_or_all_or_none_and_no_other_way():
    assert EdgeConfig(**WHERE).steering == "auto"
    chosen = EdgeConfig(**WHERE).steering_policy(64, ((1, 0.1),))
    assert isinstance(chosen, PricedSteering)
    assert chosen.rate == FIRST
    fixed = EdgeConfig(**WHERE, steering="on").steering_policy(64, ())
    assert isinstance(fixed, FixedSteering)
    assert fixed.rate == ALL
    assert EdgeConfig(**WHERE, steering="off").steering_policy(64, ()) is None
    with pytest.raises(ConfigError, match="steering: 'maybe' is none of auto, on, off"):
        EdgeConfig(**WHERE, steering="maybe")


def test_the_option_has_a_flag_a_key_and_an_environment_variable(tmp_path, monkeypatch):
    arguments = ["edge", "--verifier", "127.0.0.1:1", "--model", "m"]

    def steering(*more):
        return parse([*arguments, *more])(EdgeConfig).steering

    assert steering() == "auto"
    file = tmp_path / "outrider.toml"
    file.write_text('[edge]\nsteer = "on"\n')
    assert steering("--config", str(file)) == "on"
    monkeypatch.setenv("OUTRIDER_EDGE_STEER", "off")
    assert steering("--config", str(file)) == "off"
    assert steering("--config", str(file), "--steer", "auto") == "auto"
    with pytest.raises(SystemExit):
        steering("--steer", "sometimes")


@pytest.mark.parametrize(
    "command", [["run"], ["generate", "--coordinator", "127.0.0.1:1"], ["demo"], ["bench"], ["doctor"]]
)
def test_every_command_that_drafts_has_the_option(command):
    positional = ["hello"] if command[0] in ("run", "generate") else []
    assert parse([*command, *positional, "--steer", "off"]).values["steer"] == "off"
