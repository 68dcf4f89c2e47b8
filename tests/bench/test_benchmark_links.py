"""The links of a benchmark, from its options."""

from __future__ import annotations

import pytest

from outrider.bench.links import link_name, links_of
from outrider.bench.settings import LinkListSettings
from outrider.deploy.link.shape import PacketFaults
from outrider.deploy.loss import PacketLoss
from outrider.proto.errors import ConfigError


def options(**given: tuple[float | str, ...]) -> LinkListSettings:
    """Return the default options with one round trip, but for those given."""
    return LinkListSettings(**{"rtt": (2.0,), **given})


def test_a_benchmark_may_have_traces_alone() -> None:
    (link,) = links_of(options(rtt=(), trace=("step",), jitter=(1.5,)))
    assert link.trace is not None
    assert link.record.trace == "step"
    assert link.shape_at(0.0).jitter_s == pytest.approx(0.0015)


def test_fixed_links_come_before_traces() -> None:
    links = links_of(options(rtt=(0.0, 60.0), trace=("wifi",)))
    assert [link.label for link in links] == ["0 ms", "60 ms", "trace wifi"]


def test_with_packets_every_link_has_every_loss() -> None:
    losses = (PacketLoss(), PacketLoss(0.005), PacketLoss(0.02, 0.1))
    links = links_of(options(rtt=(0.0, 60.0)), tun=True, losses=losses)
    assert [link_name(link.record) for link in links] == [
        "0 ms TUN",
        "0 ms TUN 0.5 % lost",
        "0 ms TUN 2 % lost in 100 ms",
        "60 ms 20/100 Mbit/s TUN",
        "60 ms 20/100 Mbit/s TUN 0.5 % lost",
        "60 ms 20/100 Mbit/s TUN 2 % lost in 100 ms",
    ]
    assert [link.faults for link in links] == [PacketFaults(loss) for loss in losses] * 2
    assert not any(link.is_none for link in links), "a link of packets without delay is still a link"
    assert links[2].label == "0 ms, TUN, 2 % lost, in 100 ms"


def test_a_loss_needs_packets() -> None:
    with pytest.raises(ConfigError, match="--tun") as refused:
        links_of(options(), losses=(PacketLoss(0.01),))
    assert refused.value.field == "loss"


def test_a_list_of_another_length_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="has 2 entries where --rtt has 3") as refused:
        links_of(options(rtt=(1.0, 2.0, 3.0), up=(1.0, 2.0)))
    assert refused.value.field == "up"
