"""The client SDK: `async for event in client.generate(...)`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Any, Self

import numpy as np
from tokenizers import Tokenizer

from outrider.edge.battery import Battery
from outrider.edge.config import EdgeConfig, edge_of_this_process
from outrider.edge.control import CoordinatorClient
from outrider.edge.conversation import Conversation
from outrider.edge.decoding import Decoding, Observer, Subject
from outrider.edge.drafters import ProposalRule
from outrider.edge.drafters.pool import DrafterPool
from outrider.edge.drafters.protocol import Drafter
from outrider.edge.event_stream import collect, stream_events, within
from outrider.edge.events import Completion, Event, Finished
from outrider.edge.features import TOKENS_LOOKED_AT, TextFeatures, told_hits
from outrider.edge.link import Channels
from outrider.edge.policies.selection import default_selector, selector_named
from outrider.edge.preparation import Preparation, Ready
from outrider.edge.request import checked_sampling, checked_stop, request_probabilities
from outrider.edge.routes import Route
from outrider.edge.text import TextStream
from outrider.edge.tracing import Tracing
from outrider.edge.warm_start import OwnTexts, TextKind
from outrider.proto.errors import ConfigError
from outrider.proto.policy.selection import StaticSelector
from outrider.proto.session import DrafterSteering, EdgeSession, Selection, SharedMeasurements
from outrider.proto.types import LeaseRequest, Open, Sampling, SessionReport, SteeringRequest

REPORT_WITHIN_S = 1.0


class Client:
    """Decodes texts on verifiers, drafting here. Safe for many generations at once in one event loop.

    Args:
        config: where, and with what.
        route: instead of what the config says about where (tests, embedding).
        drafter: instead of the config's (tests, drafters of your own).
        drafters: several instead of the config's, among which is selected.
    """

    def __init__(
        self,
        config: EdgeConfig,
        *,
        route: Route | None = None,
        drafter: Drafter | None = None,
        drafters: Sequence[Drafter] = (),
    ) -> None:
        self.config = config
        self._coordinator: CoordinatorClient | None = None
        if config.coordinator:
            self._coordinator = CoordinatorClient(config.coordinator, config.open_timeout_s, config.security)
        given = (drafter, *drafters) if drafter is not None else drafters
        self._preparation = Preparation(config, self._coordinator, route, given)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-drafter")
        self._ready: Ready | None = None
        self._preparing = asyncio.Lock()
        self._reports: set[asyncio.Task[None]] = set()
        self._channels = Channels(config.security)
        self._tracing = Tracing.to(config.trace_endpoint, config.trace_ratio) if config.trace_endpoint else None
        # A drafter's confidence means one thing where the most likely token is taken and another where one is drawn.
        self._measured = {greedy: SharedMeasurements() for greedy in (True, False)}
        self._own_texts = OwnTexts()
        self._battery = Battery(config.battery)
        self._steering: DrafterSteering | None = None
        self._steering_request: SteeringRequest | None = None

    async def __aenter__(self) -> Self:
        await self.prepare()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Give channels and the drafting thread back."""
        if self._reports:
            await asyncio.wait(self._reports, timeout=REPORT_WITHIN_S)
        await self._channels.close()
        if self._tracing is not None:
            await asyncio.to_thread(self._tracing.close)
        if self._coordinator is not None:
            await self._coordinator.close()
        if self._ready is not None and self._ready.drafters is not None:
            self._ready.drafters.close()
        self._thread.shutdown(wait=False)

    @property
    def ready(self) -> Ready | None:
        """What `prepare` found: route, model, tokenizer, drafters, chat template; None before it."""
        return self._ready

    @property
    def drafter(self) -> Drafter | None:
        """The first drafter in use; None without one, or before `prepare`."""
        return self._ready.drafter if self._ready else None

    @property
    def drafter_name(self) -> str:
        """Of the drafter in use, or of all of them with commas; `none` without one."""
        return ",".join(self._ready.drafters.names) if self._ready and self._ready.drafters else "none"

    async def prepare(self) -> None:
        """Find the target, fetch its tokenizer and a drafter; done by the first generation otherwise.

        Raises:
            OutriderError: nobody answers, no such model or drafter, or content with the wrong hash.
        """
        async with self._preparing:
            if self._ready is None:
                ready = await self._preparation.run()
                self._prepare_steering(ready.drafters)
                self._ready = ready

    def _prepare_steering(self, drafters: DrafterPool | None) -> None:
        shape = drafters.steering if drafters is not None else None
        policy = self.config.steering_policy(shape.rank, shape.gain) if shape is not None else None
        if shape is not None and policy is not None:
            self._steering = DrafterSteering(shape.rank, policy)
            self._steering_request = SteeringRequest(shape.projection)

    async def inquire(self) -> str:
        """Where a text would be decoded now, as host:port; takes no session's place. Needs `prepare`.

        Raises:
            OutriderError: nowhere, and why.
        """
        ready = self._ready_now()
        if self._coordinator is None:
            return (await ready.route.lease("inquiry", ())).address
        request = LeaseRequest(
            model=ready.model, session=uuid.uuid4().hex, tokenizer_sha256=ready.tokenizer_sha256, inquiry=True
        )
        lease = await self._coordinator.open_lease(request)
        return self._coordinator.address if lease.relayed else lease.address

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
        **overrides: Any,
    ) -> AsyncGenerator[Event]:
        """Decode one text. Leaving the loop early (`aclose`) cancels it on both sides.

        Args:
            prompt: text, or token ids of the target's tokenizer.
            sampling: parameters; `overrides` replace single ones, such as `max_tokens=64`.
            stop: strings that end the text and are not part of it.
            deadline_s: for the whole text.
            observer: is told what happens and when (benchmarks, tracing).
            logprobs: True: `CommittedToken.logprob` too, of the target's own distribution; False: no log probability of
                any kind, which saves bytes; None: as `top_logprobs` needs and the config says.
            top_logprobs: 0 to 20; so many likeliest tokens of every position in `CommittedToken.top`.
            request_id: begins the session's id, so that logs on all sides tell whose it is; letters, digits, - and _.
            overrides: fields of `Sampling`.

        Yields:
            `Tokens` as they are committed, then `Finished`.

        Raises:
            InvalidArgument: bad parameters or prompt, with the field named.
            DeadlineExceeded: what came until then has been yielded.
            OutriderError: the text cannot be finished anywhere.
        """
        began = time.monotonic()
        await within(self.prepare(), deadline_s)
        frame = request_probabilities(self.open(prompt, sampling or Sampling(), overrides), logprobs, top_logprobs)
        if request_id:
            frame = replace(frame, session=f"{request_id[:47]}-{frame.session[:16]}")
        text = TextStream(self._ready_now().tokenizer, checked_stop(stop))
        decoding = self.begin(frame, observer)
        reported = False
        try:
            async with aclosing(stream_events(decoding, decoding.run(), text, began, deadline_s)) as events:
                async for event in events:
                    if isinstance(event, Finished):
                        self.report(frame.session, decoding.machine, event.seconds)
                        reported = True
                    yield event
        finally:
            if not reported and decoding.machine.verifier:  # left or failed: its API key has room again
                self.report(frame.session, decoding.machine, time.monotonic() - began)

    async def complete(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        stop: str | Sequence[str] = (),
        deadline_s: float | None = None,
        logprobs: bool | None = None,
        top_logprobs: int = 0,
        **overrides: Any,
    ) -> Completion:
        """`generate`, collected."""
        events = self.generate(
            prompt,
            sampling,
            stop=stop,
            deadline_s=deadline_s,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            **overrides,
        )
        return await self.collect(prompt, events)

    async def collect(
        self,
        prompt: str | Sequence[int],
        events: AsyncGenerator[Event],
        on_event: Callable[[Event], None] = lambda _: None,
    ) -> Completion:
        """The whole text of `generate(prompt, ...)`; `on_event` sees each event as it comes."""
        return replace(await collect(events, on_event), prompt_tokens=len(self.encode(prompt)))

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
        **overrides: Any,
    ) -> Conversation:
        """Several turns on one session, each sending only what is new; see `Conversation`.

        Args:
            sampling: of every turn, unless it says otherwise.
            stop: strings that end a turn, unless it says otherwise.
            keep_s: how long a verifier may keep the session between turns, as far as it allows that; it is a cache and
                nothing else: a turn that finds it gone sends the whole transcript.
            observer: is told what happens and when.
            logprobs: as of `generate`.
            top_logprobs: as of `generate`.
            request_id: as of `generate`.
            overrides: fields of `Sampling`.
        """
        return Conversation(
            self,
            checked_sampling(sampling or Sampling(), overrides),
            stop=checked_stop(stop),
            keep_s=keep_s,
            observer=observer,
            logprobs=logprobs,
            top_logprobs=top_logprobs,
            request_id=request_id,
        )

    def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """The prompt's token ids; needs `prepare`."""
        if isinstance(prompt, str):
            return tuple(self._ready_now().tokenizer.encode(prompt).ids)
        return tuple(prompt)

    def encode_more(self, text: str | Sequence[int]) -> tuple[int, ...]:
        """Token ids of what follows other text, without what the tokenizer puts before a prompt; needs `prepare`."""
        if isinstance(text, str):
            return tuple(self._ready_now().tokenizer.encode(text, add_special_tokens=False).ids)
        return tuple(text)

    def decode(self, tokens: Sequence[int]) -> str:
        """Their text, special tokens left out; needs `prepare`."""
        return str(self._ready_now().tokenizer.decode(list(tokens), skip_special_tokens=True))

    @property
    def tokenizer(self) -> Tokenizer:
        """The target's; needs `prepare`."""
        return self._ready_now().tokenizer

    # --- one text ---

    def open(self, prompt: str | Sequence[int], sampling: Sampling, overrides: dict[str, Any]) -> Open:
        """What to open a new session with; needs `prepare`."""
        ready = self._ready_now()
        return Open(
            model=ready.model,
            tokenizer_sha256=ready.tokenizer_sha256,
            prompt=self.encode(prompt),
            sampling=checked_sampling(sampling, overrides),
            session=uuid.uuid4().hex,
            patience=self.config.patience,
            drafting=ready.drafter is not None,
            window=self.config.window if isinstance(self.config.window, int) else 0,
            max_drafts=self.config.max_drafts,
            logp=self.config.logprobs,
            steering=self._steering_request,
        )

    def begin(self, frame: Open, observer: Observer | None) -> Decoding:
        """The decoding of a new session; needs `prepare`."""
        ready = self._ready_now()
        drafters, steered = self._loaded_drafters(ready)
        measured = self.measured(frame.sampling)
        features = self._features(frame.prompt, measured.newest.round_trip.base)
        machine = EdgeSession(
            frame,
            self.config.window_policy,
            self.config.retry,
            measured.snapshot(),
            send_q=self.config.send_q,
            steering=self._steering,
            selection=self._selection(frame.sampling, features, drafters, steered) if drafters else None,
            battery=self._battery.share,
        )
        machine.statistics.drafter_error = ready.drafter_error
        return Decoding(
            machine,
            ready.route.about(features),
            Subject(frame.session, ready.model, self.drafter_name),
            channels=self._channels,
            observer=self._traced(observer or Observer()),
            drafters=drafters,
            rule=ProposalRule(frame.sampling, prompt_length=len(frame.prompt)),
            thread=self._thread,
            open_timeout_s=self.config.open_timeout_s,
            measured=measured,
        )

    @staticmethod
    def _loaded_drafters(ready: Ready) -> tuple[tuple[Drafter, ...], int | None]:
        """Those that can draft now, and which of them is steered; the others are loaded meanwhile, for later texts."""
        pool = ready.drafters
        if pool is None:
            return (), None
        pool.want(range(len(pool)))
        loaded = {index: drafter for index in range(len(pool)) if (drafter := pool.loaded(index)) is not None}
        return tuple(loaded.values()), list(loaded).index(pool.steered) if pool.steered in loaded else None

    def _selection(
        self, sampling: Sampling, features: TextFeatures, drafters: Sequence[Drafter], steered: int | None
    ) -> Selection:
        """Among the drafters of a text that begins."""
        names = tuple(drafter.name for drafter in drafters)
        if len(drafters) == 1:
            return Selection(StaticSelector(), names, steered=steered)
        if self.config.selector == "leader":
            versions = [(drafter.name, drafter.version) for drafter in drafters]
            fleet = self._ready_now().route.prior(features)
            prior = self._own_texts.acceptances(self._kind(features, sampling), versions, fleet)
            return Selection(default_selector(len(drafters), prior), names, steered=steered)
        make = selector_named(self.config.selector)
        return Selection(make(len(drafters), np.random.default_rng()), names, steered=steered)

    @staticmethod
    def _kind(features: TextFeatures, sampling: Sampling) -> TextKind:
        return TextKind(features.prompt_class, sampling.temperature == 0)

    def _traced(self, observer: Observer) -> Observer:
        return observer if self._tracing is None else self._tracing.observer(observer)

    def measured(self, sampling: Sampling) -> SharedMeasurements:
        """Return the measurements of texts of such sampling."""
        return self._measured[sampling.temperature == 0]

    def _features(self, prompt: Sequence[int], round_trip_s: float) -> TextFeatures:
        """What kind of text begins or has ended: for a coordinator, and for the choice among drafters."""
        pool = self._ready_now().drafters
        if self._coordinator is None and (pool is None or len(pool) == 1):
            return TextFeatures()  # nobody asks
        return TextFeatures.of(self.decode(prompt[-TOKENS_LOOKED_AT:]), round_trip_s)

    def report(self, session: str, machine: EdgeSession, seconds: float) -> None:
        """Hand the figures in beside the text, which must not wait for it."""
        ready, statistics = self._ready_now(), machine.statistics
        features = self._features(machine.transcript[: machine.prompt_length], machine.round_trip_s)
        self._own_texts.learn(self._kind(features, machine.sampling), statistics.of_drafters)
        pool = ready.drafters
        versions = dict(zip(pool.names, pool.versions, strict=True)) if pool is not None else {}
        handing_in = ready.route.report(
            SessionReport(
                session=session,
                model=ready.model,
                verifier=machine.verifier,
                drafter=ready.drafter.name if ready.drafter else "",
                drafter_version=ready.drafter.version if ready.drafter else "",
                committed_tokens=statistics.committed,
                accepted_tokens=statistics.accepted,
                drafted_tokens=statistics.drafted,
                verified_tokens=statistics.verified,
                steps=statistics.steps,
                seconds=seconds,
                uplink_bytes=statistics.uplink_bytes,
                downlink_bytes=statistics.downlink_bytes,
                resumes=statistics.resumes,
                round_trip_s=statistics.round_trip_s,
                edge=self.config.edge or edge_of_this_process(),
                drafter_hits=told_hits(statistics.of_drafters, versions),
                prompt_class=features.prompt_class,
                link_class=features.link_class,
            )
        )
        task = asyncio.create_task(handing_in)
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    def _ready_now(self) -> Ready:
        if self._ready is None:
            raise ConfigError("the client is not prepared; await prepare() or use `async with`", field="client")
        return self._ready
