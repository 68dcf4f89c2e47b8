"""A verifier's figures for Prometheus, read from what its engine counts whenever somebody asks."""

from __future__ import annotations

from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry

from outrider.cloud.counts import StreamCounts
from outrider.proto import speculation
from outrider.proto.figures import Figure, FigureCollector, Page

if TYPE_CHECKING:
    from outrider.cloud.engine import Engine  # brings torch, which a table of the figures does not need

PART = "verifier"
_WHOSE = ("model_name", "verifier")
_REFUSED_FOR_ROOM = "ResourceExhausted"

RUNNING = Figure("gauge", "outrider:num_requests_running", "Sessions in the newest step.", _WHOSE)
WAITING = Figure(
    "gauge", "outrider:num_requests_waiting", "Sessions not in it: they wait for drafts, or have just ended.", _WHOSE
)
KV_USAGE = Figure("gauge", "outrider:kv_cache_usage_perc", "Share of the KV pages in use, 0 to 1.", _WHOSE)
SUCCESS = Figure("counter", "outrider:request_success", "Texts that have ended, by why.", (*_WHOSE, "finished_reason"))
MOST_SESSIONS = Figure("gauge", "outrider:verifier_max_sessions", "Sessions admitted at once, at most.", _WHOSE)
KEPT = Figure("gauge", "outrider:verifier_kept_sessions", "Sessions kept between the turns of conversations.", _WHOSE)
ADMITTED = Figure("counter", "outrider:verifier_admitted_sessions", "Sessions taken.", _WHOSE)
REFUSED = Figure("counter", "outrider:verifier_refused_sessions", "Sessions refused, by error.", (*_WHOSE, "error"))
SHEDS = Figure("counter", "outrider:verifier_sheds", "Sessions refused because the verifier was full.", _WHOSE)
FAILED = Figure("counter", "outrider:verifier_failed_sessions", "Sessions ended by an error.", (*_WHOSE, "error"))
GOAWAYS = Figure("counter", "outrider:verifier_goaways", "Sessions sent elsewhere.", _WHOSE)
ROWS = Figure("histogram", "outrider:verifier_step_rows", "Rows of a target step; its count is the steps.", _WHOSE)
STEP = Figure(
    "histogram",
    "outrider:verifier_step_seconds",
    "Time of a target step: forward (the model), sample (logits to tokens), overhead (all else but waiting).",
    (*_WHOSE, "stage"),
)
PATIENCE = Figure(
    "histogram",
    "outrider:verifier_patience_seconds",
    "From a session's commit to its next step: its patience, its company, and other sessions' steps.",
    _WHOSE,
)
LINGERS = Figure("counter", "outrider:verifier_lingers", "Steps held back for the drafts of others.", _WHOSE)
CODES = Figure("counter", "outrider:verifier_steering_codes", "Steering codes sent with commits.", _WHOSE)
CODE_BYTES = Figure("counter", "outrider:verifier_steering_bytes", "Bytes of the numbers of these codes.", _WHOSE)
CREDIT = Figure("gauge", "outrider:verifier_credit_tokens", "Unverified tokens that a session may have.", _WHOSE)
PAGES = Figure("gauge", "outrider:verifier_kv_pages", "KV pages, by state (used, free).", (*_WHOSE, "state"))
DRAINING = Figure("gauge", "outrider:verifier_draining", "1 while sessions are sent elsewhere.", _WHOSE)

FIGURES = (
    *speculation.FIGURES,
    *(RUNNING, WAITING, KV_USAGE, SUCCESS),
    *(
        MOST_SESSIONS,
        KEPT,
        ADMITTED,
        REFUSED,
        SHEDS,
        FAILED,
        GOAWAYS,
        ROWS,
        STEP,
        PATIENCE,
        LINGERS,
        CODES,
        CODE_BYTES,
        CREDIT,
        PAGES,
        DRAINING,
    ),
)


def register_verifier(registry: CollectorRegistry, engine: Engine, streams: StreamCounts, *, max_sessions: int) -> None:
    """Make `registry` show the figures of an engine and its streams; nothing is done until somebody asks for them.

    Raises:
        ValueError: the registry has these names already.
    """
    registry.register(FigureCollector(FIGURES, lambda page: _fill(page, engine, streams, max_sessions)))


def _fill(page: Page, engine: Engine, streams: StreamCounts, max_sessions: int) -> None:
    counts, sessions, free = engine.counts, engine.session_count, engine.free_pages
    whose = (engine.rules.model, engine.rules.name)
    shared = (PART, engine.rules.model, "")  # which drafter it was, only the edge knows
    counts.show(page, shared)
    page.put(speculation.GENERATED, shared, counts.committed)
    running = min(counts.running, sessions)
    page.put(RUNNING, whose, running)
    page.put(WAITING, whose, sessions - running)
    page.put(KV_USAGE, whose, 1 - free / engine.page_count)
    page.put(MOST_SESSIONS, whose, max_sessions)
    page.put(KEPT, whose, engine.parked_count)
    page.put(ADMITTED, whose, counts.admitted)
    page.put(SHEDS, whose, streams.refused.get(_REFUSED_FOR_ROOM, 0))
    page.put(GOAWAYS, whose, streams.goaways)
    page.put(ROWS, whose, counts.rows)
    for stage, tally in (("forward", counts.forward), ("sample", counts.sample), ("overhead", counts.overhead)):
        page.put(STEP, (*whose, stage), tally)
    page.put(PATIENCE, whose, counts.waits)
    page.put(LINGERS, whose, counts.lingers)
    page.put(CODES, whose, counts.codes)
    page.put(CODE_BYTES, whose, counts.code_bytes)
    page.put(CREDIT, whose, engine.credit)
    page.put(PAGES, (*whose, "free"), free)
    page.put(PAGES, (*whose, "used"), engine.page_count - free)
    page.put(DRAINING, whose, float(engine.draining))
    by_kind = ((REFUSED, streams.refused), (FAILED, streams.failed), (SUCCESS, counts.finished))
    for figure, counted in by_kind:
        for kind, sessions_of_kind in list(counted.items()):
            page.put(figure, (*whose, kind), sessions_of_kind)
