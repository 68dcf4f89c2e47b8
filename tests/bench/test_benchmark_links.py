"""The links of a benchmark, from its options."""

from __future__ import annotations

import pytest

from outrider.bench.bench_settings import LinkListSettings
from outrider.bench.links import links_of
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


def test_a_list_of_another_length_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="has 2 entries where --rtt has 3") as refused:
        links_of(options(rtt=(1.0, 2.0, 3.0), up=(1.0, 2.0)))
    assert refused.value.field == "up"
