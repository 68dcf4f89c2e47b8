"""What a process tells Prometheus: figures declared once, filled in from plain numbers when somebody asks.

Nothing here is touched while tokens flow. Names follow vLLM where it has the same figure, with `outrider:` in place of
`vllm:`, so that its dashboards work after a replacement.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import choose_encoder
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.openmetrics.exposition import ALLOWUTF8
from prometheus_client.registry import Collector
from prometheus_client.utils import floatToGoString

from outrider.proto.tally import Tally

_FAMILIES = {"counter": CounterMetricFamily, "gauge": GaugeMetricFamily, "histogram": HistogramMetricFamily}


@dataclass(frozen=True, slots=True)
class Figure:
    """One metric: its kind, its name without a counter's `_total`, what it means, and the names of its labels."""

    kind: Literal["counter", "gauge", "histogram"]
    name: str
    meaning: str
    labels: tuple[str, ...] = ()

    @property
    def exposed_name(self) -> str:
        """As Prometheus shows it."""
        return f"{self.name}_total" if self.kind == "counter" else self.name

    def family(self) -> Metric:
        """Without values."""
        return _FAMILIES[self.kind](self.name, self.meaning, labels=self.labels)


class Page:
    """The values of one scrape."""

    def __init__(self, figures: Iterable[Figure]) -> None:
        self._families: dict[Figure, Any] = {figure: figure.family() for figure in figures}

    def put(self, figure: Figure, labels: tuple[str, ...], value: float | Tally) -> None:
        """The value of a declared figure with these label values; a `Tally` for a histogram."""
        family = self._families[figure]
        if isinstance(value, Tally):
            names = (*map(floatToGoString, value.bounds), "+Inf")
            family.add_metric(labels, list(zip(names, value.cumulative(), strict=True)), value.total)
        else:
            family.add_metric(labels, value)

    @property
    def families(self) -> list[Metric]:
        """All, with what was put into them."""
        return list(self._families.values())


class FigureCollector(Collector):
    """Asks `fill` for the values of `figures` at every scrape."""

    def __init__(self, figures: tuple[Figure, ...], fill: Callable[[Page], None]) -> None:
        self._figures = figures
        self._fill = fill

    def describe(self) -> list[Metric]:
        """The figures without values: what a registry checks for names that stand twice."""
        return [figure.family() for figure in self._figures]

    def collect(self) -> list[Metric]:
        """The figures as they are now."""
        page = Page(self._figures)
        self._fill(page)
        return page.families


def exposition(registry: CollectorRegistry, accept: str = "") -> tuple[bytes, str]:
    """Body and content type of a scrape: OpenMetrics where the Accept header asks for it, else Prometheus text."""
    encode: Callable[[CollectorRegistry], bytes]
    encode, content_type = choose_encoder(accept)
    if content_type.startswith("application/openmetrics-text"):
        # prometheus_client 0.26 would turn the colon of every sample's name into an underscore, which no escaping asks
        # for. All names are plain ones, so that leaving UTF-8 alone is right whatever was asked.
        encode = partial(encode, escaping=ALLOWUTF8)  # type: ignore[call-arg]
    return encode(registry), content_type
