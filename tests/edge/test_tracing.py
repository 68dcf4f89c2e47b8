"""Spans of a text: a tree whose parts add up, joined by the verifier's spans, and nothing when tracing is off."""

from __future__ import annotations

import asyncio
import itertools
import sys

import pytest
from checked_simulation import open_frame
from opentelemetry.sdk.trace import TracerProvider
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.sdk.trace.sampling import ALWAYS_OFF, ALWAYS_ON

from outrider.edge import Client, EdgeConfig
from outrider.edge.decoding import Observer, Subject
from outrider.edge.edge_tracing import MAX_COMMITS, Tracing
from outrider.proto.errors import ConfigError, Unavailable
from outrider.proto.session import Done, EdgeSession
from outrider.proto.tracing import TRACEPARENT
from outrider.proto.types import Commit, CommittedToken, Draft, DraftToken, FinishReason, Opened, Timing

OPENED = Opened(committed=0, credit=16, max_tokens=40, verifier="v", context_length=512)


def tracing(sampler=ALWAYS_ON) -> tuple[Tracing, InMemorySpanExporter]:
    exporter = InMemorySpanExporter()
    provider = TracerProvider(sampler=sampler)
    provider.add_span_processor(SimpleSpanProcessor(exporter))
    return Tracing(provider), exporter


def begin(observer: Observer, at: float = 0.0) -> EdgeSession:
    frame = open_frame()
    machine = EdgeSession(frame)
    observer.began(Subject("s", "m", "d"), machine, at)
    observer.sent(frame, at)
    observer.received(OPENED, at + 0.04)
    return machine


def commit(start: int, echo: int, hold_s: float, queue_s: float, verify_s: float, *, verified: int = 0) -> Commit:
    return Commit(
        start,
        tuple(map(CommittedToken, (1,))),
        0,
        16,
        verified=verified,
        timing=Timing(echo, hold_s, queue_s, verify_s),
    )


def spans_by_name(exporter: InMemorySpanExporter) -> dict[str, list]:
    found: dict[str, list] = {}
    for span in exporter.get_finished_spans():
        found.setdefault(span.name, []).append(span)
    return found


def seconds(span) -> float:
    return (span.end_time - span.start_time) / 1e9


def test_a_commit_becomes_five_spans_that_add_up_to_the_round_trip() -> None:
    made, exporter = tracing()
    observer = made.observer(Observer())
    begin(observer)
    observer.drafted(1.00, 1.01, 2)
    observer.drafted(1.01, 1.03, 2)
    observer.sent(Draft(0, 3, tuple(map(DraftToken, (1, 2, 3, 4)))), 1.04)
    observer.received(commit(3, echo=1, hold_s=0.05, queue_s=0.07, verify_s=0.03, verified=4), 1.15)
    observer.ended(Done(FinishReason.EOS), 1.2)
    spans = spans_by_name(exporter)
    assert {name: len(found) for name, found in spans.items()} == dict.fromkeys(
        ("session", "draft", "flight", "queue", "verify", "downlink"), 1
    )
    root = spans["session"][0]
    parts = [spans[name][0] for name in ("draft", "flight", "queue", "verify", "downlink")]
    assert all(span.parent.span_id == root.context.span_id for span in parts)
    assert root.parent is None
    durations = [seconds(span) for span in parts]
    assert durations == pytest.approx([0.03, 0.03, 0.02, 0.03, 0.03], abs=1e-6)
    assert sum(durations[1:]) == pytest.approx(1.15 - 1.04, abs=1e-6)
    for earlier, later in itertools.pairwise(parts[1:]):
        assert earlier.end_time == later.start_time
    assert parts[3].attributes["outrider.verified"] == 4
    assert root.attributes["outrider.session"] == "s"
    assert root.attributes["outrider.finish_reason"] == "eos"


def test_a_commit_that_echoes_nothing_new_has_no_draft_and_no_flight() -> None:
    made, exporter = tracing()
    observer = made.observer(Observer())
    begin(observer)
    observer.received(commit(3, echo=0, hold_s=0.0, queue_s=0.001, verify_s=0.03), 0.1)
    observer.received(commit(4, echo=0, hold_s=0.0, queue_s=0.001, verify_s=0.03), 0.2)
    observer.ended(Done(FinishReason.EOS), 0.3)
    spans = spans_by_name(exporter)
    assert {name: len(found) for name, found in spans.items()} == {"session": 1, "queue": 2, "verify": 2, "downlink": 2}
    assert seconds(spans["downlink"][0]) == pytest.approx(0.02, abs=1e-6)  # half of what Open took
    assert seconds(spans["queue"][1]) == pytest.approx(0.001, abs=1e-6)


def test_losses_and_errors_are_on_the_sessions_span_without_their_messages() -> None:
    made, exporter = tracing()
    observer = made.observer(Observer())
    begin(observer)
    observer.lost(Unavailable("a secret"), 1.0)
    observer.ended(Done(error=Unavailable("a secret")), 2.0)
    (span,) = exporter.get_finished_spans()
    assert [event.name for event in span.events] == ["stream lost"]
    assert span.status.description == "Unavailable"
    assert "secret" not in span.to_json()


def test_the_turns_of_a_conversation_are_in_one_trace() -> None:
    made, exporter = tracing()
    observer = made.observer(Observer())
    begin(observer)
    observer.ended(Done(FinishReason.EOS), 1.0)
    observer.began(Subject("s", "m", "d"), EdgeSession(open_frame()), 5.0)
    observer.received(commit(3, echo=0, hold_s=0.0, queue_s=0.001, verify_s=0.03), 5.1)
    observer.ended(Done(FinishReason.EOS), 6.0)
    spans = spans_by_name(exporter)
    (session,), (turn,), (verify,) = spans["session"], spans["turn"], spans["verify"]
    assert turn.parent.span_id == session.context.span_id
    assert verify.parent.span_id == turn.context.span_id
    assert seconds(turn) == pytest.approx(1.0, abs=1e-6)


def test_the_number_of_spans_of_a_long_text_is_bounded() -> None:
    made, exporter = tracing()
    observer = made.observer(Observer())
    begin(observer)
    for step in range(MAX_COMMITS + 50):
        observer.received(commit(3 + step, echo=0, hold_s=0.0, queue_s=0.0, verify_s=0.03), 1.0 + step)
    observer.ended(None, 1e4)
    spans = spans_by_name(exporter)
    assert len(spans["verify"]) == MAX_COMMITS
    assert spans["session"][0].attributes["outrider.untraced_commits"] == 50


def test_a_session_that_is_not_sampled_costs_nothing_and_sends_no_trace() -> None:
    made, exporter = tracing(ALWAYS_OFF)
    inner = Observer()
    assert made.observer(inner) is inner
    assert inner.metadata == ()
    assert exporter.get_finished_spans() == ()


def test_the_inner_observer_sees_everything() -> None:
    heard: list[str] = []

    class Listener(Observer):
        def __getattribute__(self, name: str):
            if not name.startswith("_") and name != "metadata":
                heard.append(name)
            return super().__getattribute__(name)

    made, _ = tracing()
    observer = made.observer(Listener())
    begin(observer)
    observer.drafted(1.0, 1.1, 1)
    observer.lost(Unavailable("x"), 1.2)
    observer.ended(None, 1.3)
    assert heard == ["began", "sent", "received", "drafted", "lost", "ended"]


def test_the_verifiers_spans_join_the_edges_trace(tokenizer_file, monkeypatch) -> None:
    from outrider.cloud.serving.verifier_server import VerifierServer
    from outrider.cloud.serving.verifier_tracing import VerifierTracing
    from outrider.cloud.verifier_config import VerifierConfig

    edge_tracing, at_edge = tracing()
    at_verifier = InMemorySpanExporter()
    provider = TracerProvider()
    provider.add_span_processor(SimpleSpanProcessor(at_verifier))
    monkeypatch.setattr(VerifierTracing, "to", lambda _, verifier: VerifierTracing(provider, verifier))

    async def main() -> int:
        server = VerifierServer(VerifierConfig(threads=1, trace_endpoint="http://127.0.0.1:4317"))
        try:
            config = EdgeConfig(
                verifier=await server.start(), model="reference", tokenizer=tokenizer_file, drafter="ngram"
            )
            async with Client(config) as client:
                silent = await client.complete("a b a b a b a", max_tokens=2)
                assert silent.statistics.steps
                assert at_verifier.get_finished_spans() == ()
                client._tracing = edge_tracing
                return (await client.complete("a b a b a b a", max_tokens=12)).statistics.steps
        finally:
            await server.stop(0.2)

    steps = asyncio.run(main())
    here, there = spans_by_name(at_edge), spans_by_name(at_verifier)
    (root,) = here["session"]
    assert len(here["verify"]) == len(there["verify"]) == len(there["queue"]) == steps
    for span in (*there["verify"], *there["queue"]):
        assert span.context.trace_id == root.context.trace_id
        assert span.parent.span_id == root.context.span_id
    traced = sorted(span.attributes["outrider.position"] for span in there["verify"])
    assert traced == sorted(span.attributes["outrider.position"] for span in here["verify"])
    whole = 0
    for mine, its, waiting in zip(here["verify"], there["verify"], here["queue"], strict=True):
        assert seconds(mine) - seconds(its) < 1e-3
        if seconds(waiting) > 0:  # else drafts came while the step ran, and the edge counts from then on
            assert seconds(mine) - seconds(its) > -1e-3
            whole += 1
    assert whole


def test_spans_arrive_at_a_collector_that_speaks_otlp() -> None:
    from concurrent.futures import ThreadPoolExecutor

    import grpc
    from opentelemetry.proto.collector.trace.v1 import trace_service_pb2, trace_service_pb2_grpc

    arrived: list[str] = []

    class Collector(trace_service_pb2_grpc.TraceServiceServicer):
        def Export(self, request, context):  # noqa: N802 - gRPC's name
            scopes = [scope for resource in request.resource_spans for scope in resource.scope_spans]
            arrived.extend(span.name for scope in scopes for span in scope.spans)
            return trace_service_pb2.ExportTraceServiceResponse()

    server = grpc.server(ThreadPoolExecutor(1))
    trace_service_pb2_grpc.add_TraceServiceServicer_to_server(Collector(), server)
    port = server.add_insecure_port("127.0.0.1:0")
    server.start()
    made = Tracing.to(f"http://127.0.0.1:{port}", 1.0)
    try:
        observer = made.observer(Observer())
        begin(observer)
        observer.received(commit(3, echo=0, hold_s=0.0, queue_s=0.001, verify_s=0.03), 0.1)
        observer.ended(Done(FinishReason.EOS), 0.3)
        made.close()
    finally:
        server.stop(0)
    assert sorted(arrived) == ["downlink", "queue", "session", "verify"]


def test_a_verifier_ignores_what_is_no_trace() -> None:
    from outrider.cloud.serving.verifier_tracing import VerifierTracing

    joined = VerifierTracing(TracerProvider(), "v")
    unsampled = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-00"
    for metadata in (None, (), ((TRACEPARENT, "nonsense"),), ((TRACEPARENT, unsampled),), (("other", "x"),)):
        assert joined.parent(metadata) is None
    assert joined.parent(((TRACEPARENT, unsampled[:-2] + "01"),)) is not None


@pytest.mark.parametrize(
    ("endpoint", "ratio", "field"),
    [("localhost:4317", 1.0, "trace_endpoint"), ("", 1.5, "trace_ratio"), ("http://localhost:4317", -1, "trace_ratio")],
)
def test_wrong_options_are_named(endpoint, ratio, field) -> None:
    with pytest.raises(ConfigError) as caught:
        EdgeConfig(coordinator="127.0.0.1:1", trace_endpoint=endpoint, trace_ratio=ratio)
    assert caught.value.field == field


def test_where_the_extra_is_missing_one_line_says_how_to_get_it(monkeypatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "opentelemetry"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "opentelemetry", None)
    with pytest.raises(ConfigError, match=r"needs the extra \[tracing\]"):
        Tracing.to("http://localhost:4317", 1.0)
