"""Output of `outrider status`: a cluster's status as one JSON object of a fixed shape, and as tables.

The JSON object:

    verifiers       list, by name
        name, state (ready, sick, draining, down), model, address ("" while down), release
        sessions, max_sessions, load (sessions / max_sessions)
        step_ms, restarts, kv_pages, kv_pages_free, context_length (positions of a text; 0: not known yet)
        guarantee (bytes, bytes_by_tiles, distribution; "": not known yet): what a text keeps whatever shares its steps
        precision (such as bfloat16; "": not known yet): a text that has begun goes on in the same alone
        drafter_here (of its own, name@version; "": none that works), and since the verifier started: committed_tokens
        (of all texts), drafted_here, verified_here, accepted_here (tokens of its own drafter that it proposed, that
        steps verified, that became text), drafting_here_s (of work, over all threads)
        share_here (accepted_here / committed_tokens; null without any text)
        links       see below, over the newest reports of its sessions; null without any
    drafters        list of name, version, target, tokenizer_sha256, bytes
    edges           list, the newest report first: edge, age_s, sessions, verifier, model, drafter, drafter_version
        links       see below, for its newest session
    acceptance      list, most trials first, by drafter and kind of text: model, drafter, drafter_version,
                    prompt_class (prose, docs, code, math, numbers, foreign; unknown without one),
                    link_class (1 to 5: round trips below 4, 16, 64, 256 ms, or more; 0: unknown),
                    acceptance (share of hits), trials (compared tokens, faded with age)
    versions        list by drafter: drafter, version, state (current, former, retired), share (of the edges that are
                    offered it), why (reason for its state), age_s (time in this state)
        against, texts, difference: version that it is compared with, texts so far, mean difference of hit rates
        evidence    natural log of the wealth that bets on its being worse have made
        acceptance, trials: share of hits over all texts, and the tokens that it rests on, faded with age
    trainers        list, by model
        model, drafter, version, sequence (of the newest version that proved better, or its parent), published, dropped
        (versions that proved better, and those that did not), steps, positions, keys, waiting (positions to learn)
        state (training, waiting for idle time, nothing to learn from, loading, down), load (share of its node's cores
        that verifiers took lately), waited_s, hurried (steps made without idle time)
        cpu_share, max_cpu_share: share of one core that it took lately, and its limit
        candidate (number of the version on trial; 0: none), candidate_texts, candidate_difference (of hit rates)
    leases_granted  since the coordinator started, or since its state file did
    relay           streams relayed by the coordinator (`RelayStatus`); null without a relay
    recent          newest reports (`SessionReport`, without the fields that `acceptance` sums up), newest last

Links are: sessions (reports that they come from), round_trip_ms, acceptance (of verified drafts; null without any),
tokens_per_s (per session), uplink_bytes_per_token, downlink_bytes_per_token, resumes. Later releases may add keys.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from outrider.edge.features import class_name
from outrider.proto.status import (
    ClassAcceptance,
    ClusterStatus,
    EdgeStatus,
    TrainerStatus,
    VerifierStatus,
    VersionStatus,
)
from outrider.proto.types import SessionReport

MAX_EDGES = 20
SUMMED_UP = ("drafter_hits", "prompt_class", "link_class")
# Columns; all others hold numbers.
TEXTS = {
    *("verifier", "state", "address", "link"),
    *("drafter", "own drafter", "version", "made for", "why", "trainer"),
}
GUARANTEES = {
    "bytes": "a text keeps its bytes whatever shares its steps",
    "bytes_by_tiles": "a text keeps its bytes whatever shares its steps, by slow tiles",
    "distribution": "near-ties of a text may fall either way",
}
STATE_STYLES = {
    "ready": "green",
    "sick": "red",
    "draining": "yellow",
    "down": "red",
    "current": "green",
    "former": "yellow",
    "retired": "red",
    "training": "green",
}
DIGITS = {"age_s": 1, "waited_s": 1, "evidence": 3, "trials": 1}  # others: 4
SHORT = 12  # characters of a version, which is a hash


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
                "name": d.name,
                "version": d.version,
                "target": d.target,
                "tokenizer_sha256": d.tokenizer_sha256,
                "bytes": sum(file.bytes for file in d.files),
            }
            for d in status.drafters
        ],
        "edges": [_edge(edge) for edge in status.edges],
        "acceptance": [_acceptance(cell) for cell in status.acceptance],
        "versions": [_rounded(version) for version in status.versions],
        "trainers": [_rounded(trainer) for trainer in status.trainers],
        "leases_granted": status.leases_granted,
        "relay": asdict(status.relay) if status.relay else None,
        "recent": [{k: v for k, v in asdict(report).items() if k not in SUMMED_UP} for report in status.recent],
    }


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


def _verifier(v: VerifierStatus, links: Links | None) -> dict[str, Any]:
    shown = asdict(v)
    return shown | {
        "step_ms": round(1e3 * shown.pop("step_s"), 3),
        "load": round(v.sessions / v.max_sessions, 4) if v.max_sessions else 0.0,
        "drafting_here_s": round(v.drafting_here_s, 3),
        "share_here": round(v.accepted_here / v.committed_tokens, 4) if v.committed_tokens else None,
        "links": asdict(links) if links else None,
    }


def _edge(edge: EdgeStatus) -> dict[str, Any]:
    links = links_of([edge.last])
    return {
        "edge": edge.edge,
        "age_s": round(edge.age_s, 1),
        "sessions": edge.sessions,
        "verifier": edge.last.verifier,
        "model": edge.last.model,
        "drafter": edge.last.drafter,
        "drafter_version": edge.last.drafter_version,
        "links": asdict(links) if links else None,
    }


def _acceptance(cell: ClassAcceptance) -> dict[str, Any]:
    return {
        "model": cell.model,
        "drafter": cell.prior.drafter,
        "drafter_version": cell.prior.drafter_version,
        "prompt_class": class_name(cell.prompt_class),
        "link_class": cell.link_class,
        "acceptance": round(cell.prior.acceptance, 4),
        "trials": round(cell.prior.trials, 1),
    }


def _rounded(shown: VersionStatus | TrainerStatus) -> dict[str, Any]:
    return {k: round(v, DIGITS.get(k, 4)) if isinstance(v, float) else v for k, v in asdict(shown).items()}


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
    return "\n".join([line, *_guarantees(status.verifiers), *_precisions(status.verifiers)])


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
        table.add_column(name, justify="left" if name in TEXTS else "right", overflow="fold")
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
