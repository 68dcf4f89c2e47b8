"""OpenTelemetry where it is wanted: an exporter to an OTLP collector, made only when an endpoint is given."""

from __future__ import annotations

from typing import TYPE_CHECKING

from outrider.proto.errors import ConfigError

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider

TRACEPARENT = "traceparent"  # W3C Trace Context, as gRPC metadata of a decoding stream
MOST_WAITING = 1 << 15  # spans of one process that wait for their export


def check_tracing(endpoint: str, ratio: float) -> None:
    """Raise `ConfigError` unless both can be used; an empty endpoint is off."""
    if not 0 <= ratio <= 1:
        raise ConfigError(f"{ratio} is not in 0..1", field="trace_ratio")
    if endpoint and not endpoint.startswith(("http://", "https://")):
        raise ConfigError(f"{endpoint!r} is not http://HOST:PORT or https://HOST:PORT", field="trace_endpoint")


def tracer_provider(service: str, endpoint: str, ratio: float = 1.0) -> TracerProvider:
    """Where spans of `service` go: by OTLP over gRPC to `endpoint`, of a share `ratio` of the traces that begin here.

    A trace that another process began is followed where that one sampled it.

    Raises:
        ConfigError: OpenTelemetry is not installed.
    """
    try:
        from opentelemetry.exporter.otlp.proto.grpc.trace_exporter import OTLPSpanExporter
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.trace import TracerProvider
        from opentelemetry.sdk.trace.export import BatchSpanProcessor
        from opentelemetry.sdk.trace.sampling import ParentBasedTraceIdRatio
    except ImportError as error:
        raise ConfigError(
            f"needs OpenTelemetry ({error.name} is missing); pip install 'outrider[tracing]'", field="trace_endpoint"
        ) from error
    provider = TracerProvider(
        resource=Resource.create({"service.name": service}), sampler=ParentBasedTraceIdRatio(ratio)
    )
    exporter = OTLPSpanExporter(endpoint=endpoint, insecure=endpoint.startswith("http://"))
    provider.add_span_processor(BatchSpanProcessor(exporter, max_queue_size=MOST_WAITING))
    return provider
