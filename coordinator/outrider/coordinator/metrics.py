"""A coordinator's figures for Prometheus, read from what its service knows whenever somebody asks."""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from outrider.coordinator.cluster import VerifierState
from outrider.coordinator.relay import RelayCounts
from outrider.coordinator.service import ControlService
from outrider.proto.figures import Figure, FigureCollector, Page

_MODEL = ("model_name",)
_VERIFIER = ("model_name", "verifier")

GRANTED = Figure("counter", "outrider:coordinator_leases_granted", "Leases given out.", _MODEL)
REFUSED = Figure("counter", "outrider:coordinator_leases_refused", "Leases asked for in vain, by error.", ("error",))
REFUSED_CALLS = Figure("counter", "outrider:coordinator_refused_calls", "Calls answered with an error.", ("error",))
VERIFIERS = Figure("gauge", "outrider:coordinator_verifiers", "Verifiers by state (ready, draining, down).", ("state",))
UP = Figure("gauge", "outrider:coordinator_verifier_up", "1 where a verifier takes sessions.", _VERIFIER)
SESSIONS = Figure("gauge", "outrider:coordinator_verifier_sessions", "Sessions that a verifier reports.", _VERIFIER)
STEP = Figure("gauge", "outrider:coordinator_verifier_step_seconds", "Smoothed target step of a verifier.", _VERIFIER)
FREE = Figure("gauge", "outrider:coordinator_verifier_kv_pages_free", "KV pages that no session holds.", _VERIFIER)
RESTARTS = Figure("counter", "outrider:coordinator_verifier_restarts", "Restarts seen of a verifier.", _VERIFIER)
DRAFTERS = Figure("gauge", "outrider:coordinator_drafters", "Drafter packages served.")
REPORTED = Figure("counter", "outrider:coordinator_reported_sessions", "Finished sessions reported by edges.", _MODEL)
COMMITTED = Figure("counter", "outrider:coordinator_reported_committed_tokens", "Tokens committed in them.", _MODEL)
ACCEPTED = Figure("counter", "outrider:coordinator_reported_accepted_tokens", "Drafts accepted in them.", _MODEL)
DRAFTED = Figure("counter", "outrider:coordinator_reported_drafted_tokens", "Tokens drafted in them.", _MODEL)
JUDGED = Figure("counter", "outrider:coordinator_reported_judged_tokens", "Drafts judged in them.", _MODEL)
STEPS = Figure("counter", "outrider:coordinator_reported_steps", "Target steps taken in them.", _MODEL)
RESUMES = Figure("counter", "outrider:coordinator_reported_resumes", "Streams lost and opened again in them.", _MODEL)
UPLINK = Figure("counter", "outrider:coordinator_reported_uplink_bytes", "Bytes that edges sent in them.", _MODEL)
DOWNLINK = Figure("counter", "outrider:coordinator_reported_downlink_bytes", "Bytes that edges received.", _MODEL)
SECONDS = Figure("counter", "outrider:coordinator_reported_seconds", "Seconds from request to end of them.", _MODEL)
RELAY_STREAMS = Figure("gauge", "outrider:relay_streams", "Decoding streams being relayed.")
RELAYED = Figure("counter", "outrider:relay_streams_opened", "Decoding streams relayed.")
RELAY_REFUSED = Figure("counter", "outrider:relay_streams_refused", "Decoding streams not relayed: no lease, or full.")
RELAY_BROKEN = Figure("counter", "outrider:relay_streams_broken", "Relayed streams that lost their verifier.")
RELAY_FRAMES = Figure("counter", "outrider:relay_frames", "Frames relayed, by direction (up, down).", ("direction",))
RELAY_BYTES = Figure("counter", "outrider:relay_bytes", "Bytes of frames relayed, by direction.", ("direction",))
RELAY_LATENCY = Figure(
    "histogram",
    "outrider:relay_forward_seconds",
    "Latency that the relay adds to a frame: from having it to having passed it on.",
)

_SUMS = (
    *((REPORTED, "sessions"), (COMMITTED, "committed"), (ACCEPTED, "accepted"), (DRAFTED, "drafted")),
    *((JUDGED, "judged"), (STEPS, "steps"), (RESUMES, "resumes"), (UPLINK, "uplink_bytes")),
    *((DOWNLINK, "downlink_bytes"), (SECONDS, "seconds")),
)
FIGURES = (
    *(GRANTED, REFUSED, REFUSED_CALLS, VERIFIERS, UP, SESSIONS, STEP, FREE, RESTARTS, DRAFTERS),
    *(figure for figure, _ in _SUMS),
    *(RELAY_STREAMS, RELAYED, RELAY_REFUSED, RELAY_BROKEN, RELAY_FRAMES, RELAY_BYTES, RELAY_LATENCY),
)


def register_coordinator(registry: CollectorRegistry, service: ControlService) -> None:
    """Make `registry` show the figures of `service`; nothing is done until somebody asks for them.

    Raises:
        ValueError: the registry has these names already.
    """
    registry.register(FigureCollector(FIGURES, lambda page: _fill(page, service)))


def _fill(page: Page, service: ControlService) -> None:
    for model, leases in list(service.counts.granted.items()):
        page.put(GRANTED, (model,), leases)
    for error, refusals in list(service.counts.refused.items()):
        page.put(REFUSED, (error,), refusals)
    for error, refusals in list(service.counts.refused_calls.items()):
        page.put(REFUSED_CALLS, (error,), refusals)
    verifiers = service.verifiers
    for state in VerifierState:
        page.put(VERIFIERS, (state.value,), sum(verifier.state is state for verifier in verifiers))
    for verifier in verifiers:
        whose = (verifier.model, verifier.name)
        page.put(UP, whose, float(verifier.state is VerifierState.READY))
        page.put(SESSIONS, whose, verifier.sessions)
        page.put(STEP, whose, verifier.step_s)
        page.put(FREE, whose, verifier.kv_pages_free)
        page.put(RESTARTS, whose, verifier.restarts)
    page.put(DRAFTERS, (), len(service.catalogue.manifests))
    for model, sums in list(service.counts.reported.items()):
        for figure, name in _SUMS:
            page.put(figure, (model,), getattr(sums, name))
    if service.relay_counts is not None:
        _fill_relay(page, service.relay_counts)


def _fill_relay(page: Page, counts: RelayCounts) -> None:
    page.put(RELAY_STREAMS, (), counts.streams)
    page.put(RELAYED, (), counts.streams_total)
    page.put(RELAY_REFUSED, (), counts.refused)
    page.put(RELAY_BROKEN, (), counts.broken)
    page.put(RELAY_FRAMES, ("up",), counts.uplink_frames)
    page.put(RELAY_FRAMES, ("down",), counts.downlink_frames)
    page.put(RELAY_BYTES, ("up",), counts.uplink_bytes)
    page.put(RELAY_BYTES, ("down",), counts.downlink_bytes)
    page.put(RELAY_LATENCY, (), counts.forward_s)
