"""Counts of the daemon's HTTP requests; the texts themselves are counted by `edge.metrics`."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from outrider.proto.plumbing.metrics import SECONDS

_LONG = (*SECONDS, 20.0, 50.0, 100.0, 200.0, 500.0)


class HttpMetrics:
    """Metrics of one daemon's requests, shown by `registry`.

    Attributes:
        running: requests for texts that are being answered.
    """

    def __init__(self, registry: CollectorRegistry) -> None:
        self.running = 0
        self._requests = Counter(
            "outrider:http_requests", "HTTP requests answered.", ("route", "status"), registry=registry
        )
        running = Gauge(
            "outrider:num_requests_running", "Requests for texts that are being answered.", registry=registry
        )
        running.set_function(lambda: self.running)
        self._first_token = Histogram(
            "outrider:http_time_to_first_token_seconds",
            "From a request's arrival to its first token.",
            registry=registry,
            buckets=SECONDS,
        )
        self._per_token = Histogram(
            "outrider:request_time_per_output_token_seconds",
            "Mean time between the tokens of a request, after its first.",
            registry=registry,
            buckets=SECONDS,
        )
        self._latency = Histogram(
            "outrider:e2e_request_latency_seconds",
            "From a request's arrival to its end.",
            registry=registry,
            buckets=_LONG,
        )
        self._prompt_tokens = Counter("outrider:prompt_tokens", "Tokens of prompts.", registry=registry)

    def answered(self, route: str, status: int) -> None:
        """Count a request that has its status; `route` is one of the daemon's, never what a client wrote."""
        self._requests.labels(route, str(status)).inc()

    def finished(self, prompt_tokens: int, tokens: int, first_token_s: float, seconds: float) -> None:
        """Count a request for texts that has been answered in full."""
        self._prompt_tokens.inc(prompt_tokens)
        self._first_token.observe(first_token_s)
        self._latency.observe(seconds)
        if tokens > 1:
            self._per_token.observe((seconds - first_token_s) / (tokens - 1))
