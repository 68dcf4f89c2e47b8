"""What the daemon counts of its HTTP requests; the texts themselves are counted by `edge.metrics`."""

from __future__ import annotations

from collections import Counter

from prometheus_client import CollectorRegistry

from outrider.proto.figures import Figure, FigureCollector, Page
from outrider.proto.tally import SECONDS, Tally

_LONG = (*SECONDS, 20.0, 50.0, 100.0, 200.0, 500.0)

REQUESTS = Figure("counter", "outrider:http_requests", "HTTP requests answered.", ("route", "status"))
RUNNING = Figure("gauge", "outrider:num_requests_running", "Requests for texts that are being answered.")
FIRST_TOKEN = Figure(
    "histogram", "outrider:http_time_to_first_token_seconds", "From a request's arrival to its first token."
)
PER_TOKEN = Figure(
    "histogram",
    "outrider:request_time_per_output_token_seconds",
    "Mean time between the tokens of a request, after its first.",
)
LATENCY = Figure("histogram", "outrider:e2e_request_latency_seconds", "From a request's arrival to its end.")
PROMPT = Figure("counter", "outrider:prompt_tokens", "Tokens of prompts.")
FIGURES = (REQUESTS, RUNNING, FIRST_TOKEN, PER_TOKEN, LATENCY, PROMPT)


class HttpFigures:
    """Counts of one daemon, shown by `registry`."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self.running = 0
        self._requests: Counter[tuple[str, str]] = Counter()
        self._first_token = Tally(SECONDS)
        self._per_token = Tally(SECONDS)
        self._latency = Tally(_LONG)
        self._prompt_tokens = 0
        registry.register(FigureCollector(FIGURES, self._fill))

    def answered(self, route: str, status: int) -> None:
        """A request has its status; `route` is one of the daemon's, never what a client wrote."""
        self._requests[route, str(status)] += 1

    def finished(self, prompt_tokens: int, tokens: int, first_token_s: float, seconds: float) -> None:
        """A request for texts has been answered in full."""
        self._prompt_tokens += prompt_tokens
        self._first_token.add(first_token_s)
        self._latency.add(seconds)
        if tokens > 1:
            self._per_token.add((seconds - first_token_s) / (tokens - 1))

    def _fill(self, page: Page) -> None:
        for labels, count in list(self._requests.items()):
            page.put(REQUESTS, labels, count)
        page.put(RUNNING, (), self.running)
        page.put(FIRST_TOKEN, (), self._first_token)
        page.put(PER_TOKEN, (), self._per_token)
        page.put(LATENCY, (), self._latency)
        page.put(PROMPT, (), self._prompt_tokens)
