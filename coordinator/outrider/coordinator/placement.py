"""The choice of a verifier for a session, as a pure function of the fleet's state."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence

from outrider.coordinator.cluster import VerifierInfo, VerifierState
from outrider.coordinator.queue import RETRY_WHEN_FULL_S
from outrider.proto.errors import NotFound, ResourceExhausted, TokenizerMismatch, Unavailable, did_you_mean

RETRY_WHEN_DOWN_S = 1.0
SHORT_OF_PAGES = 1 / 16  # share of a verifier's KV pages
PREFIXES_PER_SESSION = 4  # known beginnings that outweigh a session; a text of fourfold length has four more
MAX_IMBALANCE = 1 / 4  # of the sessions that a verifier admits
SLOW = 2.0  # times the fastest step


def place(
    verifiers: Sequence[VerifierInfo],
    model: str,
    tokenizer_sha256: str,
    avoid: Collection[str] = (),
    pending: Mapping[str, int] | None = None,
    prefixes: Mapping[str, int] | None = None,
    precision: str = "",
    context_length: int = 0,
) -> VerifierInfo:
    """Choose the least loaded verifier that can take one more session.

    Load is sessions first, then the time of a target step. A verifier has room while it reports fewer sessions than it
    admits; one whose KV pages are almost all held is chosen only where the others' are too. Pending leases only decide
    between verifiers with room, because most are opened before the next report.

    A verifier that has taken the beginning of the text may have more sessions than others: what it need not read again
    is weighed against a row in every step. The first 16 tokens only decide between equal loads, 64 are worth one
    session, each fourfold length one more, and never more than a quarter of the sessions that it admits. They are worth
    nothing where pending leases may fill the verifier, or where its step takes twice as long as the fastest.

    Args:
        verifiers: the fleet.
        model: target; empty: the first that is served.
        tokenizer_sha256: tokenizer of the edge; empty: it has none yet.
        avoid: names of verifiers to choose only if no other has room, and then the earlier ones first.
        pending: numbers of granted leases not yet reported as sessions, by verifier.
        prefixes: numbers of beginnings of the text that verifiers took before (see `PrefixMemory.find`), by verifier.
        precision: precision of the text so far, which no verifier of another one may change; empty: any.
        context_length: positions that the text needs. Where no verifier has so many, a text without a token goes to
            any, which says so; one that has a precision has tokens, and was promised them.

    Raises:
        NotFound: no verifier serves the model.
        TokenizerMismatch: its target has another tokenizer.
        Unavailable: the verifiers that serve it are all down or draining, compute in another precision, or have too
            few positions; has `retry_after_s`.
        ResourceExhausted: the ready verifiers are all full; has `retry_after_s`.
    """
    waiting = pending or {}
    fitting = verifiers_for(verifiers, model, tokenizer_sha256, precision, context_length)
    target = fitting[0].model
    ready = [v for v in fitting if v.state is VerifierState.READY]
    if not ready:
        names = ", ".join(f"{v.name} ({v.state})" for v in fitting)
        raise Unavailable(f"no verifier of {target!r} is ready: {names}", retry_after_s=RETRY_WHEN_DOWN_S)
    roomy = [v for v in ready if v.sessions < v.max_sessions]
    if not roomy:
        raise ResourceExhausted(f"all {len(ready)} verifiers of {target!r} are full", retry_after_s=RETRY_WHEN_FULL_S)
    known = prefixes or {}
    lost = {name: number for number, name in enumerate(avoid, 1)}
    fastest_s = min((v.step_s for v in roomy if v.step_s), default=0.0)

    def order(v: VerifierInfo) -> tuple[int, bool, float, int, float, str]:
        load = v.sessions + waiting.get(v.name, 0)
        welcome = load < v.max_sessions and v.step_s <= SLOW * fastest_s
        worth = min(known.get(v.name, 0) / PREFIXES_PER_SESSION, MAX_IMBALANCE * v.max_sessions) if welcome else 0.0
        return lost.get(v.name, 0), _is_short(v), load - worth, load, v.step_s, v.name

    return min(roomy, key=order)


def verifiers_for(
    verifiers: Sequence[VerifierInfo], model: str, tokenizer_sha256: str, precision: str, context_length: int
) -> list[VerifierInfo]:
    """Return the verifiers, ready or not, that have what a text needs; see `place` for arguments and errors."""
    same = _with_precision(_with_tokenizer(_with_model(verifiers, model), tokenizer_sha256), precision)
    long = [v for v in same if v.context_length >= context_length or not v.context_length]
    if precision and not long:
        there_is = ", ".join(f"{v.name} ({v.context_length})" for v in same)
        raise Unavailable(
            f"the text was promised {context_length} positions, and for {same[0].model!r} there is {there_is}; start "
            "one with the --context-length of the first",
            field="lease_request.context_length",
            retry_after_s=RETRY_WHEN_DOWN_S,
        )
    return long or same


def _is_short(verifier: VerifierInfo) -> bool:
    """Return whether a text is likely to wait for KV pages, or to be sent away for lack of them."""
    return verifier.kv_pages_free < SHORT_OF_PAGES * verifier.kv_pages


def _with_model(verifiers: Sequence[VerifierInfo], model: str) -> list[VerifierInfo]:
    known = [v for v in verifiers if v.model]
    wanted = model or (known[0].model if known else "")
    serving = [v for v in known if v.model == wanted]
    if serving:
        return serving
    # A verifier that never answered may serve it, so that a retry may succeed.
    if not known or len(known) < len(verifiers):
        raise Unavailable(f"no verifier of {wanted or 'any model'!r} has come up yet", retry_after_s=RETRY_WHEN_DOWN_S)
    models = sorted({v.model for v in known})
    raise NotFound(
        f"no verifier serves {model!r}; there is {', '.join(models)}{did_you_mean(model, models)}",
        field="lease_request.model",
    )


def _with_tokenizer(serving: list[VerifierInfo], tokenizer_sha256: str) -> list[VerifierInfo]:
    matching = [v for v in serving if tokenizer_sha256 in ("", v.tokenizer_sha256)]
    if not matching:
        raise TokenizerMismatch(
            f"{serving[0].model!r} has tokenizer {serving[0].tokenizer_sha256[:12]}, not {tokenizer_sha256[:12]}; "
            "leave it empty to get the right one with the lease",
            field="lease_request.tokenizer_sha256",
        )
    return matching


def _with_precision(serving: list[VerifierInfo], precision: str) -> list[VerifierInfo]:
    matching = [v for v in serving if not precision or v.precision in ("", precision)]
    if not matching:
        there_is = ", ".join(f"{v.name} ({v.precision})" for v in serving)
        raise Unavailable(
            f"the text was begun in {precision} and goes on in no other, and for {serving[0].model!r} there is "
            f"{there_is}; start one with the --engine, --dtype and other settings of the first",
            field="lease_request.precision",
            retry_after_s=RETRY_WHEN_DOWN_S,
        )
    return matching
