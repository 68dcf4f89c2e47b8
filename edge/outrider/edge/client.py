"""The client SDK: `async for event in client.generate(...)`, and conversations of several turns on one session."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Coroutine, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from types import AsyncGeneratorType
from typing import TYPE_CHECKING, Any, Self, cast

import numpy as np

from outrider.drafters.packages import DrafterPackage, load_package
from outrider.drafters.protocol import Drafter, steering_of
from outrider.drafters.retrieval import RetrievalDrafter
from outrider.drafters.search import RETRIEVAL
from outrider.drafters.suffix_index import SuffixIndex
from outrider.edge.battery import Battery
from outrider.edge.decoding import Decoding, Observer, Subject
from outrider.edge.drafter_states import TextDrafters
from outrider.edge.edge_config import EdgeConfig, edge_of_this_process
from outrider.edge.edge_tracing import Tracing
from outrider.edge.event_stream import Completion, Event, TextStream, Tokens, collect, within
from outrider.edge.features import TOKENS_LOOKED_AT, OwnTexts, TextFeatures, TextKind, prompt_class, reported_hits
from outrider.edge.link.control_client import CoordinatorClient
from outrider.edge.link.link import Channels
from outrider.edge.link.routes import Route
from outrider.edge.preparation import Preparation, Ready
from outrider.edge.prompts import Prediction, indexed_prediction
from outrider.edge.request import (
    ANYBODY,
    RequestOptions,
    ServiceLike,
    Tenant,
    checked_sampling,
    checked_service,
    checked_stop,
)
from outrider.edge.selectors import default_selector, selector_named
from outrider.proto.drafter_format import ON_TRIAL, published_name
from outrider.proto.errors import InvalidArgument, OutriderError
from outrider.proto.policy import Window
from outrider.proto.policy.selector import Selector, StaticSelector
from outrider.proto.policy.suspicion import ReopenBudget
from outrider.proto.session import DrafterSteering, EdgeSession, Selection, SharedMeasurements
from outrider.proto.session.quiet_wire import cells_of
from outrider.proto.types import (
    Learning,
    Lease,
    LeaseRequest,
    Open,
    QuietWire,
    Sampling,
    SessionReport,
    SteeringRequest,
)

if TYPE_CHECKING:
    from outrider.proto.cluster_status import VersionStatus

DESCRIBED_WITHIN_S = 1.0  # by a verifier without a coordinator; if not, its first text tells as much
REPORT_WITHIN_S = 1.0  # of the client's end

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class OwnText:
    """A text that has ended, for a trainer on this machine.

    Attributes:
        session: id of its session.
        tokens: [n] ids, prompt and text.
        first_generated: number of the prompt's.
        sampling: settings with the seed of the noise, by which any drafter's hits are known.
        prompt_class: kind of text.
    """

    session: str
    tokens: tuple[int, ...]
    first_generated: int
    sampling: Sampling
    prompt_class: int


class Client:
    """Client that decodes texts on verifiers and drafts here, many at once in one event loop.

    Attributes:
        trainer: takes texts that have ended, to learn from them on this machine; returns at once and raises nothing.
            None: nobody learns. It runs in another process (`outrider edge --learn-here`): the edge never loads torch.

    Args:
        config: target, drafters and policies.
        route: replaces the config's verifier or coordinator (tests, embedding).
        drafters: replace the config's (tests, drafters of your own); among several one is selected as a chain begins.
    """

    def __init__(self, config: EdgeConfig, *, route: Route | None = None, drafters: Sequence[Drafter] = ()) -> None:
        self.config = config
        self.trainer: Callable[[OwnText], None] | None = None
        self._coordinator: CoordinatorClient | None = None
        if config.coordinator:
            self._coordinator = CoordinatorClient(config.coordinator, config.open_timeout_s, config.security)
        self._preparation = Preparation(config, self._coordinator, route, drafters)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-drafter")
        self._decodings = weakref.WeakSet[Decoding]()  # for which the one thread drafts
        self._channels = Channels(config.security)
        if self._coordinator is not None:
            self._coordinator.on_renewed = self._channels.doubt
        self._tracing = Tracing.to(config.trace_endpoint, config.trace_ratio) if config.trace_endpoint else None
        self._battery = Battery(config.battery)
        # A drafter's confidence means one thing where the most likely token is taken and another where one is drawn.
        self._measured = {greedy: SharedMeasurements() for greedy in (True, False)}
        self._budget = ReopenBudget(config.silence)
        self._own_texts = OwnTexts()
        self._reports: set[asyncio.Task[None]] = set()

    async def __aenter__(self) -> Self:
        await self.prepare()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """Close channels, drafters and the drafting thread; one that loads is dropped when it is there."""
        if self._reports:
            await asyncio.wait(self._reports, timeout=REPORT_WITHIN_S)
        await self._channels.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        if self._coordinator is not None:
            await self._coordinator.close()
        await self._preparation.close()
        self._thread.shutdown(wait=False)

    @property
    def ready(self) -> Ready | None:
        """Route, model, tokenizer, drafters and chat template that `prepare` found; None before it."""
        return self._preparation.ready

    @property
    def drafter(self) -> Drafter | None:
        """First drafter in use; None without one, or before `prepare`."""
        return self.ready.shelf.first if self.ready else None

    @property
    def drafter_name(self) -> str:
        """Names of the drafters in use, with commas between; `none` without one."""
        return self.ready.shelf.names if self.ready else "none"

    async def versions(self) -> tuple[VersionStatus, ...]:
        """Return the versions of the coordinator's drafters, or those here where it cannot say, or may not.

        Of its own versions an edge knows no more than which of them were current before.
        """
        from outrider.proto.cluster_status import VersionStatus  # here, since clients seldom ask

        if self._coordinator is not None:
            try:
                return (await self._coordinator.status()).versions
            except OutriderError as error:
                log.debug("the coordinator does not say the versions of its drafters: %s", error)
        if self.ready is None:
            return ()
        return tuple(
            VersionStatus(published_name(name), version, "previous" if ON_TRIAL in name else "current")
            for name, version in self.ready.shelf.offered
        )

    async def prepare(self) -> Ready:
        """Find the target, fetch its tokenizer and load a drafter, once.

        The first generation finds the target otherwise, and has drafts once the drafter is loaded.

        Raises:
            OutriderError: nobody answers, there is no such model or drafter, or content has the wrong hash.
        """
        return await self._preparation.load(self._channels)

    async def find(self) -> Ready:
        """Prepare like `prepare`, but leave a large drafter to load while texts begin."""
        return await self._preparation.find(self._channels)

    async def inquire(self, avoid: Sequence[str] = ()) -> Lease:
        """Return where a text would be decoded now, without taking a slot; needs `prepare`.

        Args:
            avoid: verifiers that are taken only where no other has room.

        Raises:
            OutriderError: no verifier takes a text now.
        """
        ready = self._preparation.ready_now()
        request = LeaseRequest(ready.model, uuid.uuid4().hex, avoid=tuple(avoid), inquiry=True)
        lease = await ready.route.lease(request)
        if self._coordinator is None and not ready.prompts.context_length:
            ready.prompts.meet(await self._channels.described(lease, DESCRIBED_WITHIN_S))
        return lease

    async def wake(self) -> None:
        """Exchange a few bytes with the next text's verifier, which wakes a radio while a user types; never fail."""
        if self.ready and (lease := self.ready.route.expected()):
            await self._channels.wake(lease, self.config.open_timeout_s)

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        stop: str | Sequence[str] = (),
        deadline_s: float | None = None,
        observer: Observer | None = None,
        logprobs: bool | None = None,
        top_logprobs: int = 0,
        request_id: str = "",
        prediction: Prediction = None,
        shown: Collection[int] = (),
        prompt_logprobs: int | None = None,
        tenant: Tenant = ANYBODY,
        service: ServiceLike = None,
        **overrides: Any,
    ) -> AsyncGenerator[Event]:
        """Decode one text. Leaving the loop early (`aclose`) cancels it on both sides.

        Args:
            prompt: text, or token ids of the target's tokenizer.
            sampling: parameters; `overrides` replace single ones, such as `max_tokens=64`.
            stop: strings that end the text and are not part of it.
            deadline_s: seconds for the whole text.
            observer: sees what happens and when (benchmarks, tracing).
            logprobs: True: `CommittedToken.facts` too, by the target's own distribution; False: no log probabilities
                at all, which saves bytes; None: whatever `top_logprobs` needs and the config says.
            top_logprobs: likeliest tokens of every position in these facts, 0 to 20.
            request_id: prefix of the session's id, which logs on all sides show; letters, digits, - and _.
            prediction: text or token ids that the text may repeat, from which drafts are copied.
            shown: special tokens that the text has by their names; all others are left out.
            prompt_logprobs: likeliest tokens, 0 to 20, to name beside each token of the prompt, whose log probabilities
                come in `Tokens.prompt`; it is then computed whole, whatever is cached. None: none come.
            tenant: whom the text is for, where this client decodes for several who are to learn nothing of each other.
            service: when tokens should come: "interactive", "batch", or figures, {"gap_ms": 75, "first_token_ms": 500};
                `statistics.service` says what became of it. None: the config's.
            overrides: fields of `Sampling`.

        Yields:
            `Tokens` as they are committed, then `Finished`.

        Raises:
            InvalidArgument: bad parameters or prompt, with the field named.
            DeadlineExceeded: whatever came in time has been yielded.
            OutriderError: the text cannot be finished anywhere.
        """
        began = time.monotonic()
        deadline = None if deadline_s is None else began + deadline_s
        asked = checked_service(service)
        options = RequestOptions(logprobs, top_logprobs, request_id, prompt_logprobs, tenant, asked)
        ready = await within(self.find(), deadline)
        tokens = await within(ready.encode_prompt(prompt, special=True), deadline)
        frame = self._open(ready, tokens, checked_sampling(sampling or Sampling(), overrides), options)
        text = TextStream(ready.tokenizer, checked_stop(stop), shown, frame.sampling.min_tokens, tokens)
        decoding = self._begin(ready, frame, observer, await self._predicted(ready, prediction), tenant)
        async with aclosing(decoding.run(text, began, deadline)) as events:
            async for event in events:
                yield event

    async def complete(
        self, prompt: str | Sequence[int], sampling: Sampling | None = None, **options: Any
    ) -> Completion:
        """Decode one text, and return all of it at once; takes the arguments of `generate`."""
        return await collect(self.generate(prompt, sampling, **options))

    def conversation(
        self,
        sampling: Sampling | None = None,
        *,
        stop: str | Sequence[str] = (),
        keep_s: float = 300.0,
        observer: Observer | None = None,
        logprobs: bool | None = None,
        top_logprobs: int = 0,
        request_id: str = "",
        service: ServiceLike = None,
        **overrides: Any,
    ) -> Conversation:
        """Return several turns on one session, each of which sends only what is new; see `Conversation`.

        `sampling` and `stop` hold for every turn that brings none. A verifier may keep the session for `keep_s` seconds
        between turns, if it allows that; a turn that finds it gone sends the whole transcript. The other arguments are
        those of `generate`.
        """
        return Conversation(
            self,
            checked_sampling(sampling or Sampling(), overrides),
            stop=checked_stop(stop),
            keep_s=keep_s,
            observer=observer,
            options=RequestOptions(logprobs, top_logprobs, request_id, service=checked_service(service)),
        )

    def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Return the prompt's token ids; needs `prepare`."""
        return self._preparation.ready_now().encode(prompt, special=True)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special ones; needs `prepare`."""
        return self._preparation.ready_now().decode(tokens)

    def measured(self, sampling: Sampling) -> SharedMeasurements:
        """Return the measurements of texts of such sampling."""
        return self._measured[sampling.temperature == 0]

    @property
    def learnable(self) -> DrafterPackage | None:
        """Package of the drafter that can learn, as published; None: there is none, or nothing is prepared."""
        return self._preparation.learnable

    async def draft_with(self, folder: Path) -> None:
        """Let texts and turns to come draft with a version that was trained here, or with its parent again.

        What cannot be loaded changes nothing.

        Raises:
            OutriderError: the folder holds no whole package.
        """
        package, parent = load_package(folder), self.learnable
        is_parent = parent is not None and package.version == parent.version
        await self._preparation.take_own(None if is_parent else package)

    # --- the beginning of a text ---

    async def _predicted(self, ready: Ready, prediction: Prediction) -> SuffixIndex | None:
        """Return the index of a text's prediction, checked; None where there is none, or nothing is drafted."""
        index = await indexed_prediction(ready.tokenizer, prediction)
        return index if self.config.drafter != "none" else None

    def _open(self, ready: Ready, prompt: tuple[int, ...], sampling: Sampling, options: RequestOptions) -> Open:
        config, session = self.config, uuid.uuid4().hex
        return Open(
            model=ready.model,
            tokenizer_sha256=ready.tokenizer_sha256,
            prompt=prompt,
            sampling=sampling,
            session=f"{options.request_id[:47]}-{session[:16]}" if options.request_id else session,
            patience=config.patience,
            window=config.window or 0,
            max_drafts=config.max_drafts,
            drafts_here=config.drafts_here,
            logp=config.logprobs and options.logprobs is not False,
            logprobs=bool(options.logprobs) or options.top_logprobs > 0,
            top_logprobs=options.top_logprobs,
            prompt_logprobs=options.prompt_logprobs,
            trees=not config.chains,
            isolation=options.tenant.isolation,
            service=options.service or config.service,
            quiet=self._cells(options),
        )

    def _cells(self, options: RequestOptions) -> QuietWire | None:
        if not self.config.quiet_wire:
            return None
        facts, asked = bool(options.logprobs), options.prompt_logprobs is not None
        return cells_of(facts=facts or options.top_logprobs > 0, top_logprobs=options.top_logprobs, prompt=asked)

    def _begin(
        self,
        ready: Ready,
        frame: Open,
        observer: Observer | None,
        prediction: SuffixIndex | None,
        tenant: Tenant = ANYBODY,
    ) -> Decoding:
        """Return the decoding of the session that `frame` opens, whose first text may repeat `prediction`."""
        observer = observer or Observer()
        measured = self.measured(frame.sampling)
        features = self._features_of(ready, frame)
        own = self._drafters(ready, frame, features, prediction)
        shared = Learning(features.prompt_class) if self.config.share_texts and tenant.learning else None
        frame = replace(frame, drafting=bool(own.drafters), steering=own.steering_request, learning=shared)
        machine = EdgeSession(
            frame,
            Window(self.config.window),
            self.config.retry,
            measured.snapshot(),
            send_q=self.config.send_q,
            steering=own.steering,
            selection=own.selection,
            battery=self._battery.share,
        )
        machine.statistics.drafter_error = ready.shelf.error
        decoding = Decoding(
            machine,
            ready.route.about(features, frame.isolation),
            Subject(frame.session, ready.model, self.drafter_name),
            channels=self._channels,
            observer=observer if self._tracing is None else self._tracing.observer(observer),
            drafters=own,
            thread=self._thread,
            open_timeout_s=self.config.open_timeout_s,
            measured=measured,
            on_opened=ready.prompts.meet,
            on_ended=partial(self._ended, ready, tenant),
            budget=self._budget,
        )
        self._decodings.add(decoding)
        return decoding

    def _other_drafters(
        self, ready: Ready, decoding: Decoding, frame: Open, prediction: SuffixIndex | None
    ) -> TextDrafters | None:
        """Return the drafters that a kept session takes for its next turn, whose fresh session `frame` would open.

        None: the edge has no others than when the session began or last took some.
        """
        if ready.shelf.offered == decoding.has.offered:
            return None
        others = self._drafters(ready, frame, self._features_of(ready, frame), prediction)
        return others.with_those_of(decoding.has.drafters) if others.drafters else None

    def _features_of(self, ready: Ready, frame: Open) -> TextFeatures:
        """Return the features of a text that begins, for a coordinator and for the choice among drafters."""
        return self._features(ready, frame.prompt, self.measured(frame.sampling).newest.round_trip.base)

    def _features(self, ready: Ready, prompt: Sequence[int], round_trip_s: float) -> TextFeatures:
        unread = not (self.config.coordinator or self.config.share_texts)
        if unread and len(ready.shelf.offered) < 2:
            return TextFeatures()  # nobody reads them
        return TextFeatures.of(ready.decode(prompt[-TOKENS_LOOKED_AT:]), round_trip_s)

    def _drafters(
        self, ready: Ready, frame: Open, features: TextFeatures, prediction: SuffixIndex | None
    ) -> TextDrafters:
        if ready.local_texts is not None:
            ready.local_texts.refresh()
        offered = ready.shelf.offered
        drafters, steered = _with_copier(ready, prediction)
        busy = any(not decoding.machine.done for decoding in self._decodings)
        if self.config.drafter == "auto" and busy:  # many texts at once on one thread
            drafters = (*drafters[:1], *(one for one in drafters[1:] if isinstance(one, RetrievalDrafter)))
            steered = 0 if steered == 0 else None
        if not drafters:
            return TextDrafters((), None, offered)
        selection = Selection(
            self._selector(ready, frame.sampling, features, drafters),
            tuple(drafter.name for drafter in drafters),
            versions=tuple(drafter.version for drafter in drafters),
            steered=steered,
        )
        shape = steering_of(drafters[steered]) if steered is not None else None
        policy = self.config.steering_policy(shape.rank, shape.gain) if shape is not None else None
        if shape is None or policy is None:
            return TextDrafters(drafters, selection, offered)
        request = SteeringRequest(shape.projection)
        return TextDrafters(drafters, selection, offered, DrafterSteering(shape.rank, policy), request)

    def _selector(
        self, ready: Ready, sampling: Sampling, features: TextFeatures, drafters: Sequence[Drafter]
    ) -> Selector:
        if len(drafters) == 1:
            return StaticSelector()
        if self.config.selector == "leader":
            versions = [(drafter.name, drafter.version) for drafter in drafters]
            fleet = ready.route.prior(features)
            prior = self._own_texts.acceptances(_kind(features, sampling), versions, fleet)
            return default_selector(len(drafters), prior)
        return selector_named(self.config.selector)(len(drafters), np.random.default_rng())

    # --- the end of a text ---

    def _ended(self, ready: Ready, tenant: Tenant, decoding: Decoding, seconds: float) -> None:
        """Learn from a text that ended after `seconds`, report it in the background, and keep it if `tenant` allows.

        Of one that no verifier took it is only reported that its session has ended.
        """
        session, machine = decoding.session, decoding.machine
        if not machine.verifier:
            self._send(ready.route.give_back(session))
            return
        prompt, text = machine.transcript[: machine.prompt_length], machine.transcript[machine.prompt_length :]
        if tenant.learning and ready.local_texts is not None:
            ready.local_texts.keep(text)
        features = self._features(ready, prompt, machine.round_trip_s)
        self._own_texts.learn(_kind(features, machine.sampling), machine.statistics.of_drafters)
        self._send(ready.route.report(self._report(ready, session, machine, seconds, features)))
        if tenant.learning:
            self._teach(ready, session, machine)

    def _teach(self, ready: Ready, session: str, machine: EdgeSession) -> None:
        """Hand a text over that has ended, if somebody learns from it here."""
        if self.trainer is None or machine.sampling.constrains:
            return
        prompt = machine.transcript[: machine.prompt_length]
        kind = prompt_class(ready.decode(prompt[-TOKENS_LOOKED_AT:]))
        self.trainer(OwnText(session, tuple(machine.transcript), len(prompt), machine.sampling, kind))

    def _send(self, report: Coroutine[Any, Any, None]) -> None:
        task = asyncio.create_task(report)
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    def _report(
        self, ready: Ready, session: str, machine: EdgeSession, seconds: float, features: TextFeatures
    ) -> SessionReport:
        statistics = machine.statistics
        (drafter, version), *_ = machine.drafters  # the text's, though texts that begin now may have others
        # Hits of what copies, or has learned, here would tell of this edge's texts, and nobody else has these versions.
        own = ready.own_versions
        versions = {name: each for name, each in machine.drafters if name != RETRIEVAL and each not in own}
        return SessionReport(
            session=session,
            model=ready.model,
            verifier=machine.verifier,
            drafter=published_name(drafter),
            drafter_version="" if version in own else version,
            committed_tokens=statistics.committed,
            accepted_tokens=statistics.accepted - statistics.accepted_cloud,
            drafted_tokens=statistics.drafted,
            verified_tokens=statistics.verified - statistics.verified_cloud,
            steps=statistics.steps,
            seconds=seconds,
            uplink_bytes=statistics.uplink_bytes,
            downlink_bytes=statistics.downlink_bytes,
            resumes=statistics.resumes,
            round_trip_s=statistics.round_trip_s,
            edge=self.config.edge or edge_of_this_process(),
            drafter_hits=reported_hits(statistics.of_drafters, versions, machine.measurements),
            prompt_class=features.prompt_class,
            link_class=features.link_class,
        )


def _with_copier(ready: Ready, prediction: SuffixIndex | None) -> tuple[tuple[Drafter, ...], int | None]:
    """Return the shelf's drafters, and which is steered, with one of the text's own to copy from what is here."""
    begun = ready.shelf.begun.done()
    drafters, steered = ready.shelf.drafters()
    if prediction is not None and not begun:
        drafters = ()  # nothing can be chosen among while one of them loads
    own = RetrievalDrafter(
        tuple if ready.local_texts is None else ready.local_texts.sources,
        prediction,
        vocab_size=ready.tokenizer.get_vocab_size(),
    )
    drafters = tuple(own if isinstance(drafter, RetrievalDrafter) else drafter for drafter in drafters)
    if prediction is not None and own not in drafters:
        drafters = (*drafters, own)
    return drafters, steered


def _kind(features: TextFeatures, sampling: Sampling) -> TextKind:
    return TextKind(features.prompt_class, sampling.temperature == 0)


@dataclass(frozen=True, slots=True)
class Transcript:
    """Conversation so far.

    Attributes:
        tokens: [n] ids, prompts and texts in order.
        text: text of the tokens, without special ones.
    """

    tokens: tuple[int, ...]
    text: str


class Conversation:
    """Turns of one session, one after the other; made by `Client.conversation`; a context manager.

    The verifier keeps its cache between turns, and the drafter keeps its own, so that a turn costs the uplink, the
    target and the drafter only what is new. A turn gives the text of `Client.generate` with the whole transcript and
    the new prompt as its prompt: the same tokens with the same seed. Penalties that count text count that of the turn,
    and `max_tokens` and stop strings are the turn's own.

    The transcript is the edge's. Where the stream has broken, or the verifier has drained, restarted or needed the
    memory, the next turn sends all of it to whichever verifier there is; that takes longer, and nothing else changes.

    It holds exactly what the user was given: the prompt of every turn, and the tokens of every event that was yielded.
    So a turn that ends with a stop string ends with the token that completed it, and one that is left early ends with
    the last event; what the verifier decoded beyond is forgotten on both sides. EOS is part of it. A turn that was left
    or failed before its first event leaves no trace, not even its prompt.
    """

    def __init__(
        self,
        client: Client,
        sampling: Sampling,
        *,
        stop: tuple[str, ...],
        keep_s: float,
        observer: Observer | None,
        options: RequestOptions,
    ) -> None:
        if not keep_s >= 0:
            raise InvalidArgument("must be 0 seconds or more", field="keep_s")
        self._client = client
        self._sampling = sampling
        self._stop = stop
        self._keep_s = keep_s
        self._observer = observer
        self._options = options
        self._tokens: list[int] = []
        self._decoding: Decoding | None = None
        self._turn: AsyncGenerator[Event] | None = None
        self._closed = False

    async def __aenter__(self) -> Self:
        await self._client.prepare()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    async def close(self) -> None:
        """End the session here and at the verifier; the transcript can still be read."""
        await self._leave_turn()
        self._closed = True
        decoding, self._decoding = self._decoding, None
        if decoding is not None:
            await decoding.aclose()

    @property
    def transcript(self) -> Transcript:
        return Transcript(tuple(self._tokens), self._client.decode(self._tokens) if self._tokens else "")

    async def say(
        self,
        prompt: str | Sequence[int] = "",
        sampling: Sampling | None = None,
        *,
        stop: str | Sequence[str] | None = None,
        deadline_s: float | None = None,
        prediction: Prediction = None,
        **overrides: Any,
    ) -> AsyncGenerator[Event]:
        """Decode one turn; leaving the loop early cancels it on both sides, and the next turn goes on.

        Args:
            prompt: new text or token ids; empty: the text goes on. Text is encoded by itself, so that no
                token of the transcript ever changes.
            sampling: replaces the conversation's; `overrides` replace single ones, such as `max_tokens=64`.
            stop: replaces the conversation's.
            deadline_s: seconds for this turn.
            prediction: as in `Client.generate`, for this turn.
            overrides: fields of `Sampling`.

        Yields:
            `Tokens` as they are committed, then `Finished`, with the statistics of this turn.

        Raises:
            InvalidArgument: bad parameters or prompt, with the field named; or the conversation is closed, or another
                task is in the middle of a turn.
            DeadlineExceeded: whatever came in time has been yielded.
            OutriderError: the turn cannot be finished anywhere.
        """
        if self._closed:
            raise InvalidArgument("is closed; begin another", field="conversation")
        await self._leave_turn()
        wanted = checked_sampling(sampling or self._sampling, overrides)
        stops = self._stop if stop is None else checked_stop(stop)
        turn = self._turn = self._one_turn(prompt, wanted, stops, deadline_s, prediction)
        async with aclosing(turn):
            async for event in turn:
                yield event

    async def complete(
        self, prompt: str | Sequence[int] = "", sampling: Sampling | None = None, **options: Any
    ) -> Completion:
        """Decode one turn and return all of it; takes the arguments of `say`.

        Its prompt tokens are all that came before the text.
        """
        return await collect(self.say(prompt, sampling, **options))

    # --- one turn ---

    async def _leave_turn(self) -> None:
        """End a turn whose loop was left; Python itself closes a generator that was left only some time later."""
        turn = self._turn
        if turn is None:
            return
        if cast("AsyncGeneratorType[Event, None]", turn).ag_running:
            raise InvalidArgument("another task is in the middle of one; wait for it or cancel it", field="turn")
        self._turn = None
        await turn.aclose()

    async def _one_turn(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling,
        stop: tuple[str, ...],
        deadline_s: float | None,
        prediction: Prediction,
    ) -> AsyncGenerator[Event]:
        began = time.monotonic()
        deadline = None if deadline_s is None else began + deadline_s
        ready = await within(self._client.find(), deadline)
        start = len(self._tokens)
        new = await within(ready.encode_prompt(prompt, special=start == 0), deadline)
        decoding = await self._begin(ready, start, new, sampling, await self._client._predicted(ready, prediction))
        self._tokens += new
        said = False
        text = TextStream(ready.tokenizer, stop, min_tokens=sampling.min_tokens, before=self._tokens)
        try:
            async with aclosing(decoding.turn(text, began, deadline)) as events:
                async for event in events:
                    said = True
                    if isinstance(event, Tokens):
                        self._tokens += event.ids
                    yield event
        finally:
            if not said:
                del self._tokens[start:]

    async def _begin(
        self, ready: Ready, start: int, prompt: tuple[int, ...], sampling: Sampling, prediction: SuffixIndex | None
    ) -> Decoding:
        client = self._client
        frame = client._open(ready, (*self._tokens, *prompt), sampling, self._options)
        if self._decoding is not None:
            others = client._other_drafters(ready, self._decoding, frame, prediction)
            if self._decoding.may_take(others, prediction):
                self._decoding.begin_turn(start, prompt, sampling, client.measured(sampling), others)
                return self._decoding
            decoding, self._decoding = self._decoding, None  # another session
            await decoding.aclose()
        self._decoding = client._begin(
            ready, replace(frame, keep_s=0.0 if frame.quiet else self._keep_s), self._observer, prediction
        )
        return self._decoding
