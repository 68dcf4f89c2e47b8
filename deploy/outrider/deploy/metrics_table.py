"""The tables of deploy/grafana/METRICS.md, which `python -m outrider.deploy.metrics_table` renews."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client import CollectorRegistry

PAGE = Path(__file__).parents[2] / "grafana" / "METRICS.md"  # of a checkout


@dataclass(frozen=True, slots=True)
class Described:
    """One metric: its kind, its name without a counter's `_total`, its labels, and what it means."""

    kind: str
    name: str
    labels: tuple[str, ...]
    meaning: str

    @property
    def shown_name(self) -> str:
        """The name that Prometheus shows."""
        return f"{self.name}_total" if self.kind == "counter" else self.name


def metrics_by_part() -> dict[str, tuple[Described, ...]]:
    """Return the metrics of each kind of process."""
    from outrider.cloud.serving.verifier_metrics import VerifierMetrics
    from outrider.coordinator.coordinator_metrics import CoordinatorMetrics, FleetMetrics, RelayMetrics
    from outrider.edge.daemon.daemon_metrics import HttpMetrics
    from outrider.edge.edge_metrics import EdgeMetrics

    http = CollectorRegistry()
    HttpMetrics(http)
    coordinator = CoordinatorMetrics().registry
    coordinator.register(FleetMetrics(tuple, tuple, int, tuple))
    RelayMetrics(coordinator)
    registries = {
        "Edge": EdgeMetrics().registry,
        "Edge daemon's HTTP": http,
        "Verifier": VerifierMetrics("", "").registry,
        "Coordinator": coordinator,
    }
    return {part: tuple(_described(registry)) for part, registry in registries.items()}


def _described(registry: CollectorRegistry) -> Iterator[Described]:
    # The library has no public way to the labels of a metric without values.
    collectors: list[Any] = list(registry._collector_to_names)
    for collector in collectors:
        for family in collector.describe():
            source = collector if hasattr(collector, "_labelnames") else family
            yield Described(family.type, family.name, tuple(source._labelnames), family.documentation)


def table() -> str:
    """Return the page: its introduction as it is, and all metrics in Markdown by the process that shows them."""
    introduction, _, _ = PAGE.read_text(encoding="utf-8").partition("\n## ")
    parts = []
    for part, shown in metrics_by_part().items():
        rows = [f"| `{each.shown_name}` | {each.kind} | {', '.join(each.labels)} | {each.meaning} |" for each in shown]
        parts.append("\n".join([f"## {part}", "", "| metric | kind | labels | meaning |", "|---|---|---|---|", *rows]))
    return "\n".join([introduction, "\n\n".join(parts), ""])


if __name__ == "__main__":
    PAGE.write_text(table(), encoding="utf-8")
