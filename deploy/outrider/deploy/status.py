"""`outrider status`, a cluster's state as tables or as one JSON object, and `outrider drain`.

The JSON object has the fields of `ClusterStatus`. In it

- a verifier has `step_ms` and `gap_ms` in place of `step_s` and `gap_s`, and beside its own fields `load`
  (sessions / max_sessions), `share_here` (accepted_here / committed_tokens; null without any text) and `links` (over
  its newest reports);
- an edge has `age_s`, `sessions`, and of its newest session `verifier`, `model`, `drafter`, `drafter_version`, `links`;
- an entry of `acceptance` is a drafter in one kind of text, `prompt_class` (prose, docs, code, math, numbers, foreign;
  unknown without one), over one kind of link, `link_class` (1 to 5: round trips below 4, 16, 64, 256 ms, or more;
  0: unknown);
- `links` are those of `Links`, or null without a report; a report in `recent` lacks what `acceptance` sums up.

Later releases may add keys.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections import defaultdict
from collections.abc import AsyncIterator, Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.table import Table
from rich.text import Text

from outrider.deploy.arguments import Given
from outrider.deploy.commands.operating import DrainSettings, StatusSettings
from outrider.deploy.credentials import security
from outrider.edge.edge_config import EdgeConfig
from outrider.edge.features import class_name
from outrider.edge.link.control_client import CoordinatorClient
from outrider.proto.address import address_of_server
from outrider.proto.cluster_status import ClusterStatus, TrainerStatus, VerifierStatus, VersionStatus
from outrider.proto.errors import Unavailable
from outrider.proto.types import SessionReport

DRAIN_TIMEOUT_S = 60.0
MAX_EDGES = 20
SUMMED_UP = ("drafter_hits", "prompt_class", "link_class")
# Columns of words; all others hold numbers.
WORDS = ("verifier", "state", "address", "link", "drafter", "own drafter", "version", "made for", "why", "trainer")
GUARANTEES = {
    "bytes": "a text keeps its bytes whatever shares its steps",
    "bytes_by_tiles": "a text keeps its bytes whatever shares its steps, by slow tiles",
    "distribution": "near-ties of a text may fall either way",
}
STATE_STYLES = {
    **dict.fromkeys(("ready", "current", "training"), "green"),
    **dict.fromkeys(("draining", "previous"), "yellow"),
    **dict.fromkeys(("sick", "down", "retired"), "red"),
}
DIGITS = {"age_s": 1, "waited_s": 1, "evidence": 3, "trials": 1, "drafting_here_s": 3}  # others: 4
SHORT = 12  # characters of a version, which is a hash


def status(given: Given) -> int:
    """Run `outrider status`."""
    return asyncio.run(_status(given))


async def _status(given: Given) -> int:
    """Show the status, again and again with `--watch`; while the coordinator is away, the last one stays."""
    settings = given(StatusSettings)
    show: Callable[[ClusterStatus], None] = _print_json if settings.json else _print_tables
    async with _coordinator(given) as client:
        seen = await client.status()
        with contextlib.ExitStack() as stack:
            if settings.watch and not settings.json and Console().is_terminal:
                live = stack.enter_context(Live(screen=True, auto_refresh=False))
                show = lambda seen: live.update(tables(seen), refresh=True)  # noqa: E731
            show(seen)
            while settings.watch:
                await asyncio.sleep(settings.watch)
                with contextlib.suppress(Unavailable):
                    seen = await client.status()
                show(seen)
    return 0


def drain(given: Given) -> int:
    """Run `outrider drain`."""
    return asyncio.run(_drain(given))


async def _drain(given: Given) -> int:
    name = given(DrainSettings).name
    async with _coordinator(given, timeout_s=DRAIN_TIMEOUT_S) as client:
        sessions = await client.drain(name)
    print(f"{name} takes no more sessions; {sessions} were asked to move")
    return 0


@contextlib.asynccontextmanager
async def _coordinator(given: Given, **options: Any) -> AsyncIterator[CoordinatorClient]:
    fields = given.fields(EdgeConfig)
    address = address_of_server(fields["coordinator"], "coordinator", has_tls=fields["tls_ca"] is not None)
    client = CoordinatorClient(address, security=security(given), **options)
    try:
        yield client
    finally:
        await client.close()


def _print_json(status: ClusterStatus) -> None:
    print(json.dumps(as_json(status)), flush=True)


def _print_tables(status: ClusterStatus) -> None:
    Console().print(tables(status))


@dataclass(frozen=True, slots=True)
class Links:
    """Metrics of sessions over their links: totals of all sessions, and the mean of their round trips."""

    sessions: int
    round_trip_ms: float
    acceptance: float | None
    tokens_per_s: float
    uplink_bytes_per_token: float
    downlink_bytes_per_token: float
    resumes: int


def links_of(reports: Sequence[SessionReport]) -> Links | None:
    """Sum up the reports of sessions; None without any."""
    if not reports:
        return None
    tokens = max(1, sum(report.committed_tokens for report in reports))
    seconds = sum(report.seconds for report in reports)
    verified = sum(report.verified_tokens for report in reports)
    return Links(
        sessions=len(reports),
        round_trip_ms=round(1e3 * sum(report.round_trip_s for report in reports) / len(reports), 2),
        acceptance=round(sum(report.accepted_tokens for report in reports) / verified, 4) if verified else None,
        tokens_per_s=round(tokens / seconds, 2) if seconds else 0.0,
        uplink_bytes_per_token=round(sum(report.uplink_bytes for report in reports) / tokens, 1),
        downlink_bytes_per_token=round(sum(report.downlink_bytes for report in reports) / tokens, 1),
        resumes=sum(report.resumes for report in reports),
    )


def as_json(status: ClusterStatus) -> dict[str, Any]:
    """Return the object that the module's docstring describes."""
    reports = _by_verifier(status.recent)
    return {
        "verifiers": [_verifier(v, links_of(reports[v.name])) for v in status.verifiers],
        "drafters": [
            {
                **{key: getattr(d, key) for key in ("name", "version", "target", "tokenizer_sha256")},
                "bytes": sum(file.bytes for file in d.files),
            }
            for d in status.drafters
        ],
        "edges": [
            {
                "edge": edge.edge,
                "age_s": round(edge.age_s, 1),
                "sessions": edge.sessions,
                **{key: getattr(edge.last, key) for key in ("verifier", "model", "drafter", "drafter_version")},
                "links": _object(links_of([edge.last])),
            }
            for edge in status.edges
        ],
        "acceptance": [
            {
                "model": cell.model,
                "prompt_class": class_name(cell.prompt_class),
                "link_class": cell.link_class,
                **_object(cell.prior),
            }
            for cell in status.acceptance
        ],
        "versions": [_object(version) for version in status.versions],
        "trainers": [_object(trainer) for trainer in status.trainers],
        "leases_granted": status.leases_granted,
        "relay": asdict(status.relay) if status.relay else None,
        "release": status.release,
        "recent": [{k: v for k, v in asdict(report).items() if k not in SUMMED_UP} for report in status.recent],
    }


def _verifier(v: VerifierStatus, links: Links | None) -> dict[str, Any]:
    shown: dict[str, Any] = _object(v)
    del shown["step_s"], shown["gap_s"]
    return shown | {
        "gap_ms": round(1e3 * v.gap_s, 3),
        "step_ms": round(1e3 * v.step_s, 3),
        "load": round(v.sessions / v.max_sessions, 4) if v.max_sessions else 0.0,
        "share_here": round(v.accepted_here / v.committed_tokens, 4) if v.committed_tokens else None,
        "links": _object(links),
    }


def _object(shown: Any) -> Any:
    """Return the fields of a dataclass, with numbers rounded; None of None."""
    if shown is None:
        return None
    return {k: round(v, DIGITS.get(k, 4)) if isinstance(v, float) else v for k, v in asdict(shown).items()}


def tables(status: ClusterStatus) -> RenderableType:
    """Return tables for a terminal of 80 columns."""
    parts: list[RenderableType] = [_verifiers(status.verifiers)]
    if any(v.drafter_here or v.drafted_here for v in status.verifiers):
        parts += ["", _drafting_here(status.verifiers)]
    if status.recent:
        parts += ["", _links(status)]
    parts += ["", _drafters(status)]
    if any(version.state != "current" for version in status.versions):
        parts += ["", _versions(status.versions)]
    if status.trainers:
        parts += ["", _trainers(status.trainers)]
    return Group(*parts, "", _sums(status))


def _verifiers(verifiers: Sequence[VerifierStatus]) -> Table:
    table = _table("verifier", "state", "address", "sessions", "step ms", "KV used", "restarts")
    kinds = sorted({(v.model, v.release) for v in verifiers})
    for model, release in kinds:
        table.add_row(Text(model or "model not known yet", "bold"), "", Text(f"Outrider {release or '?'}", "dim"))
        for v in verifiers:
            if (v.model, v.release) == (model, release):
                table.add_row(*_verifier_row(v))
    return table


def _verifier_row(v: VerifierStatus) -> tuple[RenderableType, ...]:
    used = f"{1 - v.kv_pages_free / v.kv_pages:.0%}" if v.kv_pages and v.state != "down" else "-"
    return (
        f"  {v.name}",
        Text(v.state, STATE_STYLES.get(v.state, "")),
        v.address or "-",
        f"{v.sessions}/{v.max_sessions}" if v.max_sessions else str(v.sessions),
        f"{1e3 * v.step_s:.1f}" if v.step_s else "-",
        used,
        str(v.restarts),
    )


def _drafting_here(verifiers: Sequence[VerifierStatus]) -> Table:
    """Return the work of the verifiers' own drafters since the verifiers started."""
    table = _table("verifier", "own drafter", "drafted", "verified", "accepted", "of text", "seconds")
    for v in verifiers:
        if v.drafter_here or v.drafted_here:
            table.add_row(
                v.name,
                v.drafter_here or Text("given up", "yellow"),
                str(v.drafted_here),
                str(v.verified_here),
                str(v.accepted_here),
                f"{v.accepted_here / v.committed_tokens:.0%}" if v.committed_tokens else "-",
                f"{v.drafting_here_s:.1f}",
            )
    return table


def _links(status: ClusterStatus) -> Table:
    """Return the metrics of each verifier, and below it those of the edges whose last session it had."""
    table = _table("link", "drafter", "round trip", "accepted", "tok/s", "B up", "B down", "ago")
    reports = _by_verifier(status.recent)
    edges = status.edges[:MAX_EDGES]
    for verifier in sorted({report.verifier for report in status.recent} | {edge.last.verifier for edge in edges}):
        if (links := links_of(reports[verifier])) is not None:
            label = f"{verifier or '-'}, last {links.sessions}"
            table.add_row(Text(label, "bold"), "", *_metrics(links), "")
        for edge in edges:
            if edge.last.verifier == verifier and (links := links_of([edge.last])) is not None:
                drafter = edge.last.drafter or "none"
                table.add_row(f"  {edge.edge}", drafter, *_metrics(links), _ago(edge.age_s))
    if len(status.edges) > MAX_EDGES:
        table.caption = f"{len(status.edges) - MAX_EDGES} more edges are in --json"
    return table


def _metrics(links: Links) -> tuple[str, ...]:
    return (
        f"{links.round_trip_ms:.1f} ms",
        "-" if links.acceptance is None else f"{links.acceptance:.0%}",
        f"{links.tokens_per_s:.1f}",
        f"{links.uplink_bytes_per_token:.0f}",
        f"{links.downlink_bytes_per_token:.0f}",
    )


def _drafters(status: ClusterStatus) -> Table:
    table = _table("drafter", "version", "made for", "MB")
    for d in status.drafters:
        table.add_row(d.name, d.version, d.target, f"{sum(file.bytes for file in d.files) / 1e6:.1f}")
    return table


def _versions(versions: Sequence[VersionStatus]) -> Table:
    """Return the versions of every drafter that has several, with what decided on each."""
    several = {version.drafter for version in versions if version.state != "current"}
    table = _table("drafter", "version", "state", "edges", "hits", "compared", "ago", "why")
    for version in versions:
        if version.drafter in several:
            table.add_row(
                version.drafter,
                version.version[:SHORT],
                Text(version.state, STATE_STYLES.get(version.state, "")),
                f"{version.share:.0%}",
                f"{version.acceptance:.0%}" if version.trials else "-",
                f"{version.difference:+.3f} in {version.texts}" if version.texts else "-",
                _ago(version.age_s),
                version.why or "-",
            )
    return table


def _trainers(trainers: Sequence[TrainerStatus]) -> Table:
    """Return what each trainer does and has done, and the version that it tries."""
    table = _table("trainer", "state", "load", "of a core", "steps", "on trial", "better", "dropped")
    for t in trainers:
        table.add_row(
            t.model,
            Text(t.state + (f" for {_ago(t.waited_s)}" if t.waited_s else ""), STATE_STYLES.get(t.state, "")),
            f"{t.load:.0%}",
            f"{t.cpu_share:.0%}/{t.max_cpu_share:.0%}",
            str(t.steps),
            f"{t.candidate}: {t.candidate_difference:+.3f} in {t.candidate_texts}" if t.candidate else "-",
            str(t.published),
            str(t.dropped),
        )
    return table


def _sums(status: ClusterStatus) -> str:
    line = f"{status.leases_granted} leases granted, {sum(v.sessions for v in status.verifiers)} sessions now"
    if status.relay is not None:
        line += f"; {status.relay.streams} of them relayed, {1e3 * status.relay.forward_p50_s:.2f} ms a frame"
    servers = [f"{v.name}: asks {v.server}" for v in status.verifiers if v.server]
    if status.release:
        line += f"\nthe coordinator is Outrider {status.release}"
    return "\n".join([line, *_guarantees(status.verifiers), *_precisions(status.verifiers), *servers])


def _guarantees(verifiers: Sequence[VerifierStatus]) -> list[str]:
    """Return a sentence on every guarantee that some verifiers give."""
    return [
        f"{', '.join(v.name for v in verifiers if v.guarantee == guarantee)}: {sentence}"
        for guarantee, sentence in GUARANTEES.items()
        if any(v.guarantee == guarantee for v in verifiers)
    ]


def _precisions(verifiers: Sequence[VerifierStatus]) -> list[str]:
    """Return a sentence on every precision, and one on models that have several."""
    by_model: defaultdict[str, set[str]] = defaultdict(set)
    names: defaultdict[str, list[str]] = defaultdict(list)
    for v in verifiers:
        if v.precision:
            by_model[v.model].add(v.precision)
            names[v.precision].append(v.name)
    mixed = ", ".join(sorted(model for model, found in by_model.items() if len(found) > 1))
    lines = [f"{', '.join(names[precision])}: computing in {precision}" for precision in sorted(names)]
    return [*lines, f"{mixed}: a text that has begun goes on in its own precision alone"] if mixed else lines


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for name in columns:
        table.add_column(name, justify="left" if name in WORDS else "right", overflow="fold")
    return table


def _ago(age_s: float) -> str:
    for unit, seconds in (("d", 86400), ("h", 3600), ("m", 60)):
        if age_s >= seconds:
            return f"{age_s / seconds:.0f} {unit}"
    return f"{age_s:.0f} s"


def _by_verifier(reports: Iterable[SessionReport]) -> defaultdict[str, list[SessionReport]]:
    found: defaultdict[str, list[SessionReport]] = defaultdict(list)
    for report in reports:
        found[report.verifier].append(report)
    return found
