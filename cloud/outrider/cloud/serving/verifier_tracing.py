"""A verifier's spans for OpenTelemetry: `queue` and `verify` of every commit, in the trace that the edge began."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Any

from outrider.proto.tracing import TRACEPARENT, tracer_provider
from outrider.proto.types import Commit

if TYPE_CHECKING:
    from opentelemetry.context import Context
    from opentelemetry.sdk.trace import TracerProvider


class VerifierTracing:
    """The part of the verifier of a name in the traces of edges; `provider` takes the spans."""

    def __init__(self, provider: TracerProvider, verifier: str) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("outrider.cloud")
        self._verifier = verifier

    @classmethod
    def to(cls, endpoint: str, verifier: str) -> VerifierTracing:
        """Send spans by OTLP over gRPC to `endpoint`.

        Raises:
            ConfigError: OpenTelemetry is not installed.
        """
        return cls(tracer_provider("outrider-verifier", endpoint, 0.0), verifier)  # it begins no traces of its own

    def parent(self, metadata: Any) -> Context | None:
        """Return the span that a stream's metadata names; None: there is none, or it is not sampled."""
        from opentelemetry.trace import get_current_span
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        carrier = {key: value for key, value in metadata or () if key == TRACEPARENT and isinstance(value, str)}
        context = TraceContextTextMapPropagator().extract(carrier)
        return context if get_current_span(context).get_span_context().trace_flags.sampled else None

    def commit(self, parent: Context, session: str, commit: Commit) -> None:
        if not commit.tokens:
            return
        ended = time.time_ns()
        step_from = ended - round(commit.timing.verify_s * 1e9)
        queued_from = step_from - round(commit.timing.queue_s * 1e9)
        about: dict[str, str | int] = {
            "outrider.session": session,
            "outrider.verifier": self._verifier,
            "outrider.position": commit.start,
            "outrider.verified": commit.verified,
            "outrider.accepted": commit.accepted,
        }
        for name, began, until in (("queue", queued_from, step_from), ("verify", step_from, ended)):
            self._tracer.start_span(name, parent, attributes=about, start_time=began).end(until)

    def close(self) -> None:
        """Export pending spans; this blocks for some seconds where the collector does not answer."""
        self._provider.shutdown()
