"""Options of an edge that its machine or its verifier decide: the battery, steering, drafts made elsewhere."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from scripted_cloud import scripted_client

from outrider.cloud.models.family_index import target_folder, tokenizer_file
from outrider.deploy.cli import parse
from outrider.edge import EdgeConfig
from outrider.edge.battery import Battery
from outrider.proto.errors import ConfigError
from outrider.proto.policy.steering_rate import ALL, FIRST, FixedSteering, PricedSteering
from outrider.proto.types import CommittedToken, Open, Sampling


def supply(folder: Path, name: str, **files: str) -> None:
    (folder / name).mkdir()
    for file, text in files.items():
        (folder / name / file).write_text(text + "\n")


@pytest.mark.parametrize(
    ("supplies", "share"),
    [
        ([], 1.0),
        ([{"type": "Mains", "online": "1"}], 1.0),
        ([{"type": "Battery", "status": "Discharging", "capacity": "37"}], 0.37),
        ([{"type": "Battery", "status": "Charging", "capacity": "37"}], 1.0),
        ([{"type": "Battery", "status": "Full", "capacity": "100"}], 1.0),
        ([{"type": "Battery", "status": "Discharging", "capacity": "20", "scope": "Device"}], 1.0),
        ([{"type": "Battery", "status": "Discharging", "capacity": "20", "scope": "System"}], 0.2),
        ([{"type": "Battery", "status": "Discharging", "capacity": "104"}], 1.0),
        ([{"type": "Battery", "status": "Discharging", "capacity": "?"}], 1.0),
        ([{"type": "Battery", "status": "Discharging"}], 1.0),
        ([{"type": "Battery", "status": "Discharging", "capacity": c} for c in ("20", "60")], 0.4),
    ],
)
def test_the_share_that_is_left_is_the_mean_of_the_batteries_that_run_down(tmp_path: Path, supplies, share) -> None:
    for number, files in enumerate(supplies):
        supply(tmp_path, f"BAT{number}", **files)
    assert Battery(folder=tmp_path).share == pytest.approx(share)


def test_a_machine_that_reports_nothing_is_on_mains(tmp_path: Path) -> None:
    assert Battery(folder=tmp_path / "none").share == 1.0
    (tmp_path / "odd").mkdir()
    (tmp_path / "odd" / "type").write_bytes(b"\xff\xfe")
    assert Battery(folder=tmp_path).share == 1.0


def test_the_battery_is_read_once_a_minute(tmp_path: Path) -> None:
    now = [100.0]
    supply(tmp_path, "BAT0", type="Battery", status="Discharging", capacity="80")
    battery = Battery(folder=tmp_path, clock=lambda: now[0])
    assert battery.share == 0.8
    (tmp_path / "BAT0" / "capacity").write_text("70")
    now[0] += 59
    assert battery.share == 0.8
    now[0] += 2
    assert battery.share == 0.7


def test_a_configured_share_counts(tmp_path: Path) -> None:
    supply(tmp_path, "BAT0", type="Battery", status="Discharging", capacity="80")
    assert Battery(fixed=0.0, folder=tmp_path).share == 0.0


@pytest.mark.parametrize("battery", [-0.1, 1.5, math.nan])
def test_a_charge_that_is_no_share_is_refused(battery: float) -> None:
    with pytest.raises(ConfigError, match="is not") as caught:
        EdgeConfig(coordinator="127.0.0.1:1", battery=battery)
    assert caught.value.field == "battery"


# --- steering ---


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


# --- drafts made at the verifier ---


FILE = tokenizer_file(target_folder("reference"))


@pytest.mark.parametrize("drafts", [None, 0, 8])
async def test_the_open_asks_for_what_the_option_says(drafts: int | None) -> None:
    opened: list[Open] = []

    def script(frame: Open) -> list[CommittedToken]:
        opened.append(frame)
        return [CommittedToken(5), CommittedToken(6)]

    client, channels = scripted_client(FILE, drafts_here=drafts)
    channels.script = script
    async with client:
        await client.complete([3, 4], Sampling(max_tokens=2))
    assert [frame.drafts_here for frame in opened] == [drafts]


def test_the_verifier_decides_unless_the_option_is_set() -> None:
    arguments = ["edge", "--verifier", "127.0.0.1:1", "--model", "m"]
    assert parse(arguments)(EdgeConfig).drafts_here is None
    assert parse([*arguments, "--drafts-here", "0"])(EdgeConfig).drafts_here == 0
    with pytest.raises(ConfigError, match="drafts_here: -1 is below 0"):
        EdgeConfig(**WHERE, drafts_here=-1)
