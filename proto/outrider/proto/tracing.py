"""OpenTelemetry spans to an OTLP collector, where an endpoint is given."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from outrider.proto.errors import ConfigError
from outrider.proto.settings import option

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

TRACEPARENT = "traceparent"  # W3C Trace Context, as gRPC metadata of a decoding stream
MAX_WAITING = 1 << 15  # spans of a process that wait for export


def trace_endpoint_option() -> Any:
    """Declare where a process sends its spans."""
    return option(
        "",
        "OpenTelemetry collector (OTLP over gRPC), http://HOST:4317; empty: no spans",
        metavar="URL",
        check=_check_endpoint,
    )


def tracer_provider(service: str, endpoint: str, ratio: float = 1.0) -> TracerProvider:
    """Return a provider that sends spans of `service` by OTLP over gRPC to `endpoint`; raises `ConfigError`.

    A share `ratio` of the traces that begin here is sampled; one that began in another process is followed where that
    process sampled it.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    except ImportError as error:
        from outrider.proto.plumbing.extras import lacking

        raise ConfigError(lacking("tracing", error.name or ""), field="trace_endpoint") from error
    provider = TracerProvider(
        resource=Resource.create({"service.name": service}), sampler=ParentBasedTraceIdRatio(ratio)
    )
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MAX_WAITING))
    return provider


def _check_endpoint(endpoint: str) -> None:
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ValueError(f"{endpoint!r} is not http://HOST:PORT or https://HOST:PORT")
