"""The table of all metrics: `python -m outrider.deploy.metrics_table > deploy/grafana/METRICS.md`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from prometheus_client import CollectorRegistry

_INTRODUCTION = """# Metrics

Where: `/metrics` of the edge daemon (`outrider edge`), and of verifiers and coordinators that were started with
`--metrics-listen HOST:PORT`. Prometheus text, or OpenMetrics where the scraper asks for it.

Metrics of speculative decoding have vLLM's names and meaning with `outrider:` in place of `vllm:`. Edges and verifiers
both show them, distinguished by the label `part`. No label holds a session, a request, a prompt or a text.

Grafana: import `outrider.json`, or provision it:

```yaml
# /etc/grafana/provisioning/dashboards/outrider.yaml
apiVersion: 1
providers:
  - name: outrider
    type: file
    options:
      path: /var/lib/grafana/dashboards  # holds outrider.json
```

Prometheus:

```yaml
scrape_configs:
  - job_name: outrider
    static_configs:
      - targets: [127.0.0.1:8080, 127.0.0.1:9100, 127.0.0.1:9101]  # edge daemon, verifier, coordinator
```

`alerts.yaml` has rules for Prometheus: `rule_files: [/etc/prometheus/outrider/alerts.yaml]`.

This page is made from the code: `python -m outrider.deploy.metrics_table > deploy/grafana/METRICS.md`.
"""


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
    """Return all metrics in Markdown, by the process that shows them."""
    parts = [_INTRODUCTION]
    for part, shown in metrics_by_part().items():
        rows = [f"| `{each.shown_name}` | {each.kind} | {', '.join(each.labels)} | {each.meaning} |" for each in shown]
        parts.append("\n".join([f"## {part}", "", "| metric | kind | labels | meaning |", "|---|---|---|---|", *rows]))
    return "\n".join([parts[0], *("\n\n".join(parts[1:]), "")])


if __name__ == "__main__":
    print(table(), end="")
