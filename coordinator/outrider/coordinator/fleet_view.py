"""The fleet as it was at the last poll, with what was leased since, and the choice of verifiers from it: no I/O."""

from __future__ import annotations

import math
from collections import Counter, OrderedDict, deque
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cache

from outrider.coordinator.cluster import VerifierInfo, VerifierState
from outrider.coordinator.lease_admission import RESUME_S
from outrider.coordinator.queue import RETRY_WHEN_FULL_S, KeyShare, SlotQueue, SlotTicket
from outrider.proto.errors import (
    NotFound,
    OutriderError,
    ResourceExhausted,
    TokenizerMismatch,
    Unavailable,
    did_you_mean,
)
from outrider.proto.types import LeaseRequest, ServiceGoal

MAX_REMEMBERED = 1 << 16  # beginnings: those of some 3,000 long texts
MAX_HOLDERS = 4  # of one beginning
RETRY_WHEN_DOWN_S = 1.0
SHORT_OF_PAGES = 1 / 16  # share of a verifier's KV pages
PREFIXES_PER_SESSION = 4  # known beginnings that outweigh a session; a text of fourfold length has four more
MAX_IMBALANCE = 1 / 4  # of the sessions that a verifier admits
SLOW = 2.0  # times the fastest step
SERVICE_MARGIN = 0.9  # of a gap, in which a step should end where its verifier does not say what it can keep

# A restarted verifier has another address or number of restarts, and nothing in its cache.
_Holder = tuple[str, str, int]
_Wants = tuple[str, str, str, int]  # model, tokenizer, precision, context


@dataclass(slots=True)
class LeaseGrant:
    """A lease that may not be in a report yet.

    Attributes:
        is_open: whether it may still become a session.
    """

    at_s: float
    verifier: str
    tenant: str
    session: str
    epoch: int
    is_open: bool = True


class FleetView:
    """A coordinator's view of its verifiers; times are seconds of a monotonic clock.

    Attributes:
        granted: leases that may not be in a report yet, the oldest first.
        queue: texts that wait for a slot.
    """

    def __init__(self, poll_s: float, most: Callable[[], float] = lambda: math.inf) -> None:
        """View a fleet that is polled every `poll_s` seconds, and may have `most()` more streams in all."""
        self.granted: deque[LeaseGrant] = deque()
        self.queue = SlotQueue()
        self._known: tuple[VerifierInfo, ...] = ()
        self._poll_s = poll_s
        self._most = most
        self._draining: Counter[str] = Counter()
        self._texts: dict[str, Counter[str]] = {}  # that verifiers list, by key and session
        self._most_texts: Counter[str] = Counter()  # that keys had at once, in this `RESUME_S`
        self._most_before: Counter[str] | None = None  # in the last one; None: it was not watched
        self._counted_s = math.inf  # since when
        self._prefixes = PrefixMemory()

    @property
    def known(self) -> tuple[VerifierInfo, ...]:
        """Verifiers at the last poll."""
        return self._known

    def observe(self, verifiers: tuple[VerifierInfo, ...], now_s: float) -> None:
        """Take in a poll: leases that verifiers have admitted are sessions now; those of earlier starts are void."""
        before = {v.name: v.incarnation for v in self._known}
        self._known = verifiers
        of_name = {v.name: v for v in verifiers}
        for grant in self.granted:
            v = of_name.get(grant.verifier)
            restarted = v is not None and v.incarnation != before.get(v.name, v.incarnation)
            if v is None or restarted or v.admitted_epoch(grant.tenant, grant.session) >= grant.epoch:
                grant.is_open = False
        self._texts = {}
        for v in verifiers:
            if v.state in (VerifierState.READY, VerifierState.DRAINING):  # else none of its texts goes on
                for key, texts in v.texts_of_keys.items():
                    self._texts.setdefault(key, Counter()).update(texts.keys())
        self._count_texts(now_s)

    @property
    def verifiers(self) -> tuple[VerifierInfo, ...]:
        """Verifiers at the last poll, with those marked that are being drained."""
        return tuple(
            replace(v, state=VerifierState.DRAINING) if self._draining[v.name] and v.state is VerifierState.READY else v
            for v in self.known
        )

    @contextmanager
    def draining(self, name: str) -> Iterator[None]:
        """Mark a verifier as draining, until its new state is known."""
        self._draining[name] += 1
        try:
            yield
        finally:
            self._draining[name] -= 1

    def welcome(
        self,
        request: LeaseRequest,
        tenant: str,
        now_s: float,
        room: Callable[[str], float] = lambda _: math.inf,
        *,
        has_slot: bool = False,
    ) -> VerifierInfo | None:
        """Return the verifier for a session by the newest poll; None: poll once more, and then `choose`.

        That poll may be outdated, so another is due before a session is refused, or sent to a verifier that its edge
        has just lost. The arguments are those of `choose`.
        """
        try:
            chosen = self.choose(request, tenant, now_s, room, has_slot=has_slot)
        except (Unavailable, ResourceExhausted, NotFound):
            return None
        return None if chosen.name in request.avoid else chosen

    def choose(
        self,
        request: LeaseRequest,
        tenant: str,
        now_s: float,
        room: Callable[[str], float] = lambda _: math.inf,
        *,
        has_slot: bool = False,
    ) -> VerifierInfo:
        """Return the most suitable verifier for a session; if there is no slot for it, give it a ticket of the queue.

        Args:
            request: the edge's question.
            tenant: name of its API key; empty: none.
            now_s: present time.
            room: slots that a key, by its name, may have beside those it has.
            has_slot: whether the key has counted the session already.

        Raises:
            OutriderError: as `place` does, with the time of the next question where there is no slot.
        """
        if request.inquiry:
            return self._place(request, tenant, now_s, self.verifiers)
        self._take_back(tenant, request.session)
        contexts = [v.context_length for v in self.known if v.context_length >= request.context_length]
        enough = min(contexts, default=request.context_length)  # so that texts of one kind want the same
        wants = (request.model, request.tokenizer_sha256, request.precision, enough)
        has_run = self._has_run(request, tenant)
        ticket = self.queue.ask(
            tenant, request.session, wants, now_s, has_slot=has_slot, has_run=has_run, service=request.service
        )
        try:
            return self._place(request, tenant, now_s, self._with_slots_for(ticket, room, now_s))
        except (ResourceExhausted, Unavailable) as error:
            if request.suspected:  # its stream stands, and is left only where there is a slot at once
                self.queue.withdraw(tenant, request.session)
                raise
            slots = sum(v.max_sessions for v in self.known if v.name in self._fits(wants)) or math.inf
            retry_s = self.queue.wait(ticket, slots, now_s)
            if isinstance(error, ResourceExhausted):
                raise ResourceExhausted(error.message, retry_after_s=retry_s) from error
            ticket.due_s = now_s + RETRY_WHEN_FULL_S  # an edge comes when it likes where none is ready
            raise
        except OutriderError:
            self.queue.withdraw(tenant, request.session)
            raise

    def withdraw(self, tenant: str, session: str) -> None:
        """Note that a session does not wait now, and that nobody will use its lease."""
        self.queue.withdraw(tenant, session)
        self._take_back(tenant, session)

    def leave(self, tenant: str, session: str) -> None:
        """Forget a session whose text has ended."""
        self.queue.leave(tenant, session)
        self._take_back(tenant, session)

    def known_prefixes(self, request: LeaseRequest, tenant: str) -> dict[str, int]:
        """Return how many beginnings of the text each verifier has taken before."""
        return self._prefixes.find(tenant, request.prefixes, self.known)

    def grant(self, request: LeaseRequest, tenant: str, verifier: VerifierInfo, now_s: float) -> None:
        """Note that the session has a lease for `verifier`."""
        if request.prefixes:
            self._prefixes.note(tenant, request.prefixes, verifier)
        self.queue.serve(tenant, request.session, now_s)
        self.granted.append(LeaseGrant(now_s, verifier.name, tenant, request.session, request.epoch))
        self._count_texts(now_s)

    def _place(
        self, request: LeaseRequest, tenant: str, now_s: float, verifiers: Sequence[VerifierInfo]
    ) -> VerifierInfo:
        self._expire(now_s)
        return place(
            verifiers,
            request.model,
            request.tokenizer_sha256,
            request.avoid,
            Counter(grant.verifier for grant in self.granted),
            self.known_prefixes(request, tenant),
            request.precision,
            request.context_length,
            request.service,
        )

    def _with_slots_for(
        self, ticket: SlotTicket, room: Callable[[str], float], now_s: float
    ) -> tuple[VerifierInfo, ...]:
        """Return the fleet with those verifiers full whose free slots are kept for others."""
        self._expire(now_s)
        pending = Counter(grant.verifier for grant in self.granted if grant.is_open)
        free = {v.name: v.max_sessions - v.sessions - pending[v.name] for v in self.known}
        most = self._most() - pending.total()
        open_to = self.queue.open_to(ticket, free, self._share_of(), cache(self._fits), room, most, now_s)
        return tuple(v if v.name in open_to else replace(v, sessions=v.max_sessions) for v in self.verifiers)

    def _fits(self, wants: _Wants) -> frozenset[str]:
        """Return the names of the verifiers that are ready and have what a text wants."""
        try:
            serve = verifiers_for(self.verifiers, *wants)
        except OutriderError:
            return frozenset()
        return frozenset(v.name for v in serve if v.state is VerifierState.READY)

    def _has_run(self, request: LeaseRequest, tenant: str) -> bool:
        """Return whether a text that claims to have tokens is one that a verifier has had, by its own word.

        That is how to know a text of an earlier start of the coordinator, or a later turn of a kept conversation.
        """
        session = request.session
        return bool(request.precision) and (
            session in self._texts.get(tenant, ()) or any(v.admitted_epoch(tenant, session) >= 0 for v in self.known)
        )

    def _held(self) -> Counter[str]:
        """Return the slots that keys have, by name, so far as verifiers tell; a text that moves has one."""
        texts = self._texts
        coming = {(g.tenant, g.session) for g in self.granted if g.is_open and g.session not in texts.get(g.tenant, ())}
        return Counter({key: sessions.total() for key, sessions in texts.items()}) + Counter(key for key, _ in coming)

    def _share_of(self) -> Callable[[str], KeyShare]:
        held = cache(self._held)
        these, before = self._most_texts, self._most_before

        def share(key: str) -> KeyShare:
            # Without keys nobody lists the texts, and whoever has just started does not know what went on before.
            lately = math.inf if not key or before is None else max(these[key], before[key])
            return KeyShare(held()[key], lately, self._texts.get(key, ()))

        return share

    def _count_texts(self, now_s: float) -> None:
        """Note the texts that keys have now, where these are more than lately."""
        self._expire(now_s)
        self._counted_s = min(self._counted_s, now_s)
        if now_s > self._counted_s + RESUME_S:
            self._counted_s, self._most_texts, self._most_before = now_s, Counter(), self._most_texts
        doubled = Counter({key: texts.total() - len(texts) for key, texts in self._texts.items()})
        self._most_texts |= self._held() - doubled

    def _take_back(self, tenant: str, session: str) -> None:
        """Forget the leases of a session that nobody uses."""
        for grant in self.granted:
            if (grant.tenant, grant.session) == (tenant, session):
                grant.is_open = False

    def _expire(self, now_s: float) -> None:
        # A lease becomes a session after a round trip, and is in the verifier's report one poll later.
        while self.granted and self.granted[0].at_s < now_s - 2 * self._poll_s:
            self.granted.popleft()


class PrefixMemory:
    """Remembers which verifiers were given texts with which beginnings, the most recently leased ones.

    Beginnings are hashes (see `LeaseRequest.prefixes`). It is a guess: verifiers evict pages without a word, and a
    leased text may never have been opened.

    Args:
        max_remembered: beginnings at most; then the least recently leased are forgotten.
    """

    def __init__(self, max_remembered: int = MAX_REMEMBERED) -> None:
        self._max_remembered = max_remembered
        self._holders: OrderedDict[tuple[str, int], tuple[_Holder, ...]] = OrderedDict()  # newest holder first

    def __len__(self) -> int:
        return len(self._holders)

    def note(self, tenant: str, prefixes: Sequence[int], verifier: VerifierInfo) -> None:
        """Note that a text of `tenant` with these beginnings goes to `verifier`."""
        holder = _holder(verifier)
        for prefix in reversed(prefixes):  # so that a text's longest beginnings are forgotten first
            others = (other for other in self._holders.pop((tenant, prefix), ()) if other != holder)
            self._holders[tenant, prefix] = (holder, *others)[:MAX_HOLDERS]
        while len(self._holders) > self._max_remembered:
            self._holders.popitem(last=False)

    def find(self, tenant: str, prefixes: Sequence[int], verifiers: Sequence[VerifierInfo]) -> dict[str, int]:
        """Return the number of these beginnings, the shortest first, that each verifier took; those with none lack."""
        names = {_holder(verifier): verifier.name for verifier in verifiers}
        found: dict[str, int] = {}
        for count, prefix in enumerate(prefixes, 1):
            holders = self._holders.get((tenant, prefix))
            if holders is None:
                break
            found.update((names[holder], count) for holder in holders if holder in names)
        return found


def _holder(verifier: VerifierInfo) -> _Holder:
    return verifier.name, verifier.address, verifier.restarts


def place(
    verifiers: Sequence[VerifierInfo],
    model: str,
    tokenizer_sha256: str,
    avoid: Collection[str] = (),
    pending: Mapping[str, int] | None = None,
    prefixes: Mapping[str, int] | None = None,
    precision: str = "",
    context_length: int = 0,
    service: ServiceGoal | None = None,
) -> VerifierInfo:
    """Choose the least loaded verifier that can take one more session.

    Load is sessions first, then the time of a target step. A verifier has room while it reports fewer sessions than it
    admits; one whose KV pages are almost all held is chosen only where the others' are too. Pending leases only decide
    between verifiers with room, because most are opened before the next report.

    A verifier that has taken the beginning of the text may have more sessions than others: what it need not read again
    is weighed against a row in every step. The first 16 tokens only decide between equal loads, 64 are worth one
    session, each fourfold length one more, and never more than a quarter of the sessions that it admits. They are worth
    nothing where pending leases may fill the verifier, or where its step takes twice as long as the fastest.

    A verifier that is expected to keep the gap that a text asks for comes before others with room, however loaded.

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
        service: service that the text asks for; None: none.

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
        message = f"no verifier of {target!r} is ready: {names}"
        raise Unavailable(message, retry_after_s=RETRY_WHEN_DOWN_S, code="OUT-301")
    roomy = [v for v in ready if v.sessions < v.max_sessions]
    if not roomy:
        message = f"all {len(ready)} verifiers of {target!r} are full"
        raise ResourceExhausted(message, retry_after_s=RETRY_WHEN_FULL_S, code="OUT-302")
    known = prefixes or {}
    lost = {name: number for number, name in enumerate(avoid, 1)}
    fastest_s = min((v.step_s for v in roomy if v.step_s), default=0.0)

    def order(v: VerifierInfo) -> tuple[int, bool, bool, float, int, float, str]:
        load = v.sessions + waiting.get(v.name, 0)
        welcome = load < v.max_sessions and v.step_s <= SLOW * fastest_s
        worth = min(known.get(v.name, 0) / PREFIXES_PER_SESSION, MAX_IMBALANCE * v.max_sessions) if welcome else 0.0
        return lost.get(v.name, 0), _is_short(v), not keeps(v, service), load - worth, load, v.step_s, v.name

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
            code="OUT-306",
        )
    return long or same


def keeps(verifier: VerifierInfo, service: ServiceGoal | None) -> bool:
    """Return whether a verifier is expected to keep the gap that one text more asks for, as far as it has measured."""
    return service is None or not service.gap_s or (verifier.gap_s or verifier.step_s / SERVICE_MARGIN) <= service.gap_s


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
        message = f"no verifier of {wanted or 'any model'!r} has come up yet"
        raise Unavailable(message, retry_after_s=RETRY_WHEN_DOWN_S, code="OUT-301")
    models = sorted({v.model for v in known})
    message = f"no verifier serves {model!r}; there is {', '.join(models)}{did_you_mean(model, models)}"
    raise NotFound(message, field="lease_request.model", code="OUT-308")


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
            code="OUT-306",
        )
    return matching
