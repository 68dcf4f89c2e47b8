"""The price of a local cluster's target and the link to it, as `up` and `demo` take them."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace
from typing import Any

import pytest
from echo_server import connected, echo_server

from outrider.coordinator.cluster import VerifierInfo, VerifierState
from outrider.deploy.cli import parse
from outrider.deploy.commands.serving_options import ConditionSettings
from outrider.deploy.demo import demo_conditions
from outrider.deploy.link.shape import LinkShape

RTT_S = 0.05


@pytest.mark.parametrize(
    ("text", "cable", "words"),
    [
        ("0", LinkShape(), "target at its own speed, no link between"),
        ("20", LinkShape.of(rtt_ms=20), "target at its own speed, link 20 ms"),
        (
            "20,10,50",
            LinkShape.of(rtt_ms=20, up_mbit=10, down_mbit=50),
            "target at its own speed, link 20 ms, 10/50 Mbit/s",
        ),
    ],
)
def test_a_link_is_named_by_round_trip_and_rates(text: str, cable: LinkShape, words: str) -> None:
    assert (LinkShape.parse(text), str(cable)) == (cable, text)
    assert bool(cable) is (text != "0")
    assert ConditionSettings(link=cable).words == words


@pytest.mark.parametrize("text", ["", "far", "20,10", "20,10,50,1", "20,0,1", "-5", "nan"])
def test_what_is_no_link_is_refused_by_its_form(text: str, capsys) -> None:
    with pytest.raises(ValueError, match="MS,UP,DOWN"):
        LinkShape.parse(text)
    with pytest.raises(SystemExit):
        parse(["up", f"--link={text}"])
    assert "--link" in capsys.readouterr().err


def test_the_demo_paces_what_is_too_quick_unless_told_otherwise() -> None:
    assert demo_conditions(parse(["demo"]), "reference") == ConditionSettings(pace=30, link=LinkShape.of(rtt_ms=20))
    assert demo_conditions(parse(["demo"]), "smollm2") == ConditionSettings(link=LinkShape.of(rtt_ms=30))
    given = parse(["demo", "--pace", "0", "--link", "5"])
    assert demo_conditions(given, "reference") == ConditionSettings(link=LinkShape.of(rtt_ms=5))
    assert demo_conditions(parse(["demo", "--pace", "9"]), "smollm2") == ConditionSettings(
        pace=9, link=LinkShape.of(rtt_ms=30)
    )
    assert parse(["up"])(ConditionSettings) == ConditionSettings()
    assert ConditionSettings(pace=30, link=LinkShape.of(rtt_ms=20)).words == "target paced at 30 ms, link 20 ms"


def test_edges_see_each_verifier_behind_a_link_of_its_own(monkeypatch) -> None:
    pytest.importorskip("ray", reason="needs Ray: pip install --editable '.[all]'")
    from outrider.coordinator import ray_cluster
    from outrider.deploy.local.far_fleet import FarFleet

    async def scenario(own: str) -> None:
        async def refresh(_: Any) -> tuple[VerifierInfo, ...]:
            serving = VerifierInfo(name="v", address=own, model="m", state=VerifierState.READY, tokenizer_sha256="t")
            return (serving, replace(serving, name="w", address="", state=VerifierState.DOWN))

        monkeypatch.setattr(ray_cluster.ray, "is_initialized", lambda: True)
        monkeypatch.setattr(ray_cluster.RayCluster, "refresh", refresh)
        fleet = FarFleet(LinkShape(rtt_s=RTT_S), respawn=lambda _: None)
        try:
            far, down = await fleet.refresh()
            assert far.address not in ("", own)
            assert down.address == ""
            assert (await fleet.refresh())[0].address == far.address, "one link, not one a poll"
            assert await asyncio.to_thread(echo_s, far.address) >= RTT_S
            fleet.near = True
            assert (await fleet.refresh())[0].address == own
        finally:
            await fleet.close()
        with pytest.raises(OSError):
            echo_s(far.address)

    with echo_server() as own:
        asyncio.run(scenario(own))


def echo_s(address: str) -> float:
    """Time in which a byte comes back, in seconds."""
    with connected(address, 10.0) as edge:
        began = time.monotonic()
        edge.sendall(b"x")
        assert edge.recv(1) == b"x"
        return time.monotonic() - began
