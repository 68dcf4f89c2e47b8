"""The table of all metrics: `python -m outrider.deploy.metrics_table > deploy/grafana/METRICS.md`."""

from __future__ import annotations

from outrider.proto.figures import Figure

_INTRODUCTION = """# Metrics

Where: `/metrics` of the edge daemon (`outrider edge`), and of verifiers and coordinators that were started with
`--metrics-listen HOST:PORT`. Prometheus text, or OpenMetrics where the scraper asks for it.

Metrics of speculative decoding have vLLM's names and meaning with `outrider:` in place of `vllm:`. Edges and verifiers
both show them, told apart by the label `part`. No label holds a session, a request, a prompt or a text.

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

This page is made from the code: `python -m outrider.deploy.metrics_table > deploy/grafana/METRICS.md`.
"""


def figures_by_part() -> dict[str, tuple[Figure, ...]]:
    """What each kind of process shows."""
    from outrider.cloud.metrics import FIGURES as VERIFIER
    from outrider.coordinator.metrics import FIGURES as COORDINATOR
    from outrider.edge.daemon.figures import FIGURES as HTTP
    from outrider.edge.metrics import FIGURES as EDGE

    return {"Edge": EDGE, "Edge daemon's HTTP": HTTP, "Verifier": VERIFIER, "Coordinator": COORDINATOR}


def table() -> str:
    """All metrics in Markdown, by the process that shows them."""
    parts = [_INTRODUCTION]
    for part, figures in figures_by_part().items():
        rows = [f"| `{f.exposed_name}` | {f.kind} | {', '.join(f.labels)} | {f.meaning} |" for f in figures]
        parts.append("\n".join([f"## {part}", "", "| metric | kind | labels | meaning |", "|---|---|---|---|", *rows]))
    return "\n".join([parts[0], *("\n\n".join(parts[1:]), "")])


if __name__ == "__main__":
    print(table(), end="")
