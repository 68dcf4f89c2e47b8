"""Spans of a text for OpenTelemetry, built afterwards from what an observer saw.

    session                              from the request to the end
    ├── draft      making the tokens of one message
    ├── flight     the message's way up
    ├── queue      at the verifier, before its step
    ├── verify     the target step
    └── downlink   the commit's way down

The last five come with every commit; one that echoes no new message has no draft and no flight. In a conversation every
turn after the first has a span `turn` under the session. No clock is compared across machines: the link's time is
divided equally between up and down, so flight, queue, verify and downlink together last exactly from sending to
receiving. Spans carry positions and counts, never tokens or text.
"""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from outrider.edge.decoding import Observer, Subject
from outrider.proto.errors import OutriderError
from outrider.proto.session import Done, EdgeSession, SentMessages
from outrider.proto.tracing import TRACEPARENT, tracer_provider
from outrider.proto.types import CloudFrame, Commit, Draft, EdgeFrame, Open, Opened

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import TracerProvider
    from opentelemetry.trace import Span

AT_ONCE = 32  # commits whose spans are made together, so that few commits wait for them
MAX_COMMITS = 2000  # of one text that get spans; the session's span counts the others


class Tracing:
    """Maker of observers that turn into spans; `provider` decides which sessions are sampled, and where spans go."""

    def __init__(self, provider: TracerProvider) -> None:
        self._provider = provider
        self._tracer = provider.get_tracer("outrider.edge")

    @classmethod
    def to(cls, endpoint: str, ratio: float) -> Tracing:
        """Trace a share `ratio` of all sessions by OTLP over gRPC to `endpoint`.

        Raises:
            ConfigError: OpenTelemetry is not installed.
        """
        return cls(tracer_provider("outrider-edge", endpoint, ratio))

    def observer(self, inner: Observer) -> Observer:
        """Return an observer that calls `inner` and makes spans; `inner` itself where the session is not sampled."""
        span = self._tracer.start_span("session")
        return _TracedObserver(self._tracer, span, inner) if span.is_recording() else inner

    def close(self) -> None:
        """Export what waits; blocks for some seconds where the collector does not answer."""
        self._provider.shutdown()


@dataclass(slots=True)
class _Message:
    """Times of a Draft message and of the drafting jobs before it, in monotonic seconds."""

    sent_at: float
    drafting_from: float
    drafting_until: float


class _TracedObserver(Observer):
    def __init__(self, tracer: Any, span: Span, inner: Observer) -> None:
        from opentelemetry.trace import set_span_in_context
        from opentelemetry.trace.propagation.tracecontext import TraceContextTextMapPropagator

        self._tracer = tracer
        self._span = span
        self._inner = inner
        self._session = self._context = set_span_in_context(span)
        carrier: dict[str, str] = {}
        TraceContextTextMapPropagator().inject(carrier, self._context)
        self.metadata = (*inner.metadata, (TRACEPARENT, carrier[TRACEPARENT]))
        self._offset_ns = time.time_ns() - time.monotonic_ns()
        self._messages = SentMessages[_Message]()
        self._drafting: tuple[float, float] | None = None  # jobs since the newest message
        self._opening_at = 0.0
        self._link_s = 0.0
        self._waiting: list[tuple[Commit, float, float, _Message | None]] = []
        self._commits = 0

    # --- events ---

    def began(self, subject: Subject, machine: EdgeSession, at: float) -> None:
        self._inner.began(subject, machine, at)
        self._messages.clear()
        if not self._span.is_recording():  # the turn before has ended it
            from opentelemetry.trace import set_span_in_context

            self._span = self._tracer.start_span("turn", self._session, start_time=self._ns(at))
            self._context = set_span_in_context(self._span)
            self._commits = 0
        self._span.set_attributes(
            {"outrider.session": subject.session, "outrider.model": subject.model, "outrider.drafter": subject.drafter}
        )

    def drafted(self, began: float, ended: float, tokens: int) -> None:
        self._inner.drafted(began, ended, tokens)
        self._drafting = (self._drafting[0] if self._drafting else began, ended)

    def sent(self, frame: EdgeFrame, at: float) -> None:
        self._inner.sent(frame, at)
        match frame:
            case Draft():
                began, ended = self._drafting or (at, at)
                self._messages.append(_Message(at, began, ended))
                self._drafting = None
            case Open():
                self._opening_at = at

    def received(self, frame: CloudFrame, at: float) -> None:
        self._inner.received(frame, at)
        match frame:
            case Opened():
                self._messages.clear()
                self._link_s = at - self._opening_at
                self._span.set_attribute("outrider.verifier", frame.verifier)
            case Commit() if frame.tokens:
                self._note(frame, at)

    def lost(self, error: OutriderError, at: float) -> None:
        self._inner.lost(error, at)
        self._span.add_event("stream lost", {"outrider.error": type(error).__name__}, self._ns(at))

    def ended(self, done: Done | None, at: float) -> None:
        self._inner.ended(done, at)
        self._make_spans()
        self._span.set_attribute("outrider.commits", self._commits)
        self._span.set_attribute("outrider.untraced_commits", max(0, self._commits - MAX_COMMITS))
        if done is not None and done.error is not None:
            from opentelemetry.trace import StatusCode

            self._span.set_status(StatusCode.ERROR, type(done.error).__name__)
        elif done is not None and done.finish is not None:
            self._span.set_attribute("outrider.finish_reason", done.finish.name.lower())
        self._span.end(self._ns(at))

    # --- spans ---

    def _note(self, commit: Commit, at: float) -> None:
        message = self._messages.take(commit.timing.echo)
        if message is not None:
            self._link_s = max(0.0, at - message.sent_at - commit.timing.hold_s)
        self._commits += 1
        if self._commits <= MAX_COMMITS:
            self._waiting.append((commit, at, self._link_s, message))
        if len(self._waiting) >= AT_ONCE:
            self._make_spans()

    def _make_spans(self) -> None:
        for waiting in self._waiting:
            self._make_spans_of(*waiting)
        self._waiting.clear()

    def _make_spans_of(self, commit: Commit, at: float, link_s: float, message: _Message | None) -> None:
        """Make the spans of a commit that came at `at`, over a link that took `link_s`; first to echo `message`."""
        committed_at = at - link_s / 2
        step_from = committed_at - commit.timing.verify_s
        queued_from = step_from - commit.timing.queue_s
        about = {
            "outrider.position": commit.start,
            "outrider.tokens": len(commit.tokens),
            "outrider.verified": commit.verified,
            "outrider.accepted": commit.accepted,
            "outrider.accepted_here": commit.accepted_here,
        }
        if message is not None:
            landed_at = message.sent_at + link_s / 2
            step_from = max(step_from, landed_at)  # else the message came while the step ran
            queued_from = landed_at
            self._make_span("draft", message.drafting_from, message.drafting_until, about)
            self._make_span("flight", message.sent_at, landed_at, about)
        self._make_span("queue", queued_from, step_from, about)
        self._make_span("verify", step_from, committed_at, about)
        self._make_span("downlink", committed_at, at, about)

    def _make_span(self, name: str, began: float, ended: float, about: dict[str, int]) -> None:
        span = self._tracer.start_span(name, self._context, attributes=about, start_time=self._ns(began))
        span.end(self._ns(ended))

    def _ns(self, at: float) -> int:
        """Return monotonic seconds as nanoseconds since 1970."""
        return round(at * 1e9) + self._offset_ns
