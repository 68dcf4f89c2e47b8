"""The client SDK: `async for event in client.generate(...)`."""

from __future__ import annotations

import asyncio
import logging
import time
import uuid
import weakref
from collections.abc import AsyncGenerator, Callable, Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self

from outrider.drafters import ProposalRule
from outrider.drafters.protocol import Drafter
from outrider.drafters.suffix_index import SuffixIndex
from outrider.edge.battery import Battery
from outrider.edge.conversation import Conversation
from outrider.edge.decoding import Decoding, Observer, Subject
from outrider.edge.edge_config import EdgeConfig
from outrider.edge.edge_tracing import Tracing
from outrider.edge.event_stream import Completion, Event, Finished, collect, stream_events, within
from outrider.edge.link.control_client import CoordinatorClient
from outrider.edge.link.link import Channels
from outrider.edge.link.routes import Route
from outrider.edge.pool.history import TextHistory
from outrider.edge.pool.own_learning import OwnLearning
from outrider.edge.pool.prediction import Prediction, indexed_prediction
from outrider.edge.pool.preparation import Preparation, Ready
from outrider.edge.pool.text_drafters import TextDrafters
from outrider.edge.request import ANYBODY, RequestOptions, Tenant, checked_sampling, checked_stop
from outrider.edge.text import TextStream
from outrider.proto.drafter_format import ON_TRIAL, published_name
from outrider.proto.errors import OutriderError
from outrider.proto.policy import Window
from outrider.proto.policy.likely_branches import RUNNERS_UP
from outrider.proto.session import EdgeSession, SharedMeasurements
from outrider.proto.types import Learning, Open, Sampling

if TYPE_CHECKING:
    from outrider.proto.status import VersionStatus

DESCRIBED_WITHIN_S = 1.0  # by a verifier without a coordinator; if not, its first text tells as much

log = logging.getLogger(__name__)


class Client:
    """Client that decodes texts on verifiers and drafts here, many at once in one event loop.

    Attributes:
        own_learning: learning from this client's texts on this machine.

    Args:
        config: target, drafters and policies.
        route: replaces the config's verifier or coordinator (tests, embedding).
        drafters: replace the config's (tests, drafters of your own); among several one is selected as a chain begins.
    """

    def __init__(
        self,
        config: EdgeConfig,
        *,
        route: Route | None = None,
        drafters: Sequence[Drafter] = (),
    ) -> None:
        self.config = config
        self._coordinator: CoordinatorClient | None = None
        if config.coordinator:
            self._coordinator = CoordinatorClient(config.coordinator, config.open_timeout_s, config.security)
        self._preparation = Preparation(config, self._coordinator, route, drafters)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-drafter")
        self._decodings = weakref.WeakSet[Decoding]()  # for which the one thread drafts
        self._channels = Channels(config.security)
        self._tracing = Tracing.to(config.trace_endpoint, config.trace_ratio) if config.trace_endpoint else None
        self._history = TextHistory(config)
        self.own_learning = OwnLearning(self._preparation)
        self._battery = Battery(config.battery)

    async def __aenter__(self) -> Self:
        await self.prepare()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Close channels, drafters and the drafting thread; one that loads is dropped when it is there."""
        await self._history.close()
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
        from outrider.proto.status import VersionStatus  # here, since clients seldom ask

        if self._coordinator is not None:
            try:
                return (await self._coordinator.status()).versions
            except OutriderError as error:
                log.debug("the coordinator does not say the versions of its drafters: %s", error)
        if self.ready is None:
            return ()
        return tuple(
            VersionStatus(published_name(name), version, "former" if ON_TRIAL in name else "current")
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

    async def inquire(self) -> str:
        """Return the host:port where a text would be decoded now, without taking a slot; needs `prepare`.

        Raises:
            OutriderError: no verifier takes a text now.
        """
        ready = self._preparation.ready_now()
        if self._coordinator is not None:
            return await self._coordinator.inquire(ready.model, ready.tokenizer_sha256)
        lease = await ready.route.lease("inquiry", ())
        if not ready.prompts.context_length:
            ready.prompts.meet(await self._channels.described(lease, DESCRIBED_WITHIN_S))
        return lease.address

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
            overrides: fields of `Sampling`.

        Yields:
            `Tokens` as they are committed, then `Finished`.

        Raises:
            InvalidArgument: bad parameters or prompt, with the field named.
            DeadlineExceeded: whatever came in time has been yielded.
            OutriderError: the text cannot be finished anywhere.
        """
        began = time.monotonic()
        options = RequestOptions(logprobs, top_logprobs, request_id, prompt_logprobs, tenant)
        ready = await within(self.find(), deadline_s)
        tokens = await within(ready.encode_prompt(prompt, special=True), deadline_s)
        frame = options.applied_to(self.open(tokens, checked_sampling(sampling or Sampling(), overrides)))
        text = TextStream(ready.tokenizer, checked_stop(stop), shown, frame.sampling.min_tokens, tokens)
        decoding = self.begin(frame, observer, await self.predicted(prediction), tenant)
        reported = False
        try:
            async with aclosing(stream_events(decoding, decoding.run(), text, began, deadline_s)) as events:
                async for event in events:
                    if reported := isinstance(event, Finished):
                        self.report(frame.session, decoding.machine, event.seconds, tenant)
                    yield event
        finally:
            if not reported:
                self.report(frame.session, decoding.machine, time.monotonic() - began, tenant)

    async def complete(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        stop: str | Sequence[str] = (),
        deadline_s: float | None = None,
        logprobs: bool | None = None,
        top_logprobs: int = 0,
        prediction: Prediction = None,
        **overrides: Any,
    ) -> Completion:
        """Decode one text, and return all of it at once; see `generate`."""
        overrides |= {"logprobs": logprobs, "top_logprobs": top_logprobs, "prediction": prediction}
        events = self.generate(prompt, sampling, stop=stop, deadline_s=deadline_s, **overrides)
        return await self.collect(prompt, events)

    async def collect(
        self,
        prompt: str | Sequence[int],
        events: AsyncGenerator[Event],
        on_event: Callable[[Event], None] = lambda _: None,
    ) -> Completion:
        """Return the whole text of `generate(prompt, ...)`; `on_event` sees each event as it comes."""
        whole = await collect(events, on_event)
        return whole if whole.tokens else replace(whole, prompt_tokens=len(self.encode(prompt)))

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
            options=RequestOptions(logprobs, top_logprobs, request_id),
        )

    def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """Return the prompt's token ids; needs `prepare`."""
        return self._preparation.ready_now().encode(prompt, special=True)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special ones; needs `prepare`."""
        return self._preparation.ready_now().decode(tokens)

    async def predicted(self, prediction: Prediction) -> SuffixIndex | None:
        """Return the index of a text's prediction, as `indexed_prediction` does; None also where nothing is drafted."""
        index = await indexed_prediction(self._preparation.ready_now(), prediction)
        return index if self.config.drafter != "none" else None

    def open(self, prompt: tuple[int, ...], sampling: Sampling) -> Open:
        """Return the frame that opens a new session; needs `prepare`."""
        ready, config = self._preparation.ready_now(), self.config
        return Open(
            model=ready.model,
            tokenizer_sha256=ready.tokenizer_sha256,
            prompt=prompt,
            sampling=sampling,
            session=uuid.uuid4().hex,
            patience=config.patience,
            window=config.window or 0,
            max_drafts=config.max_drafts,
            drafts_here=config.drafts_here,
            logp=config.logprobs,
            trees=not config.chains,
        )

    def begin(
        self, frame: Open, observer: Observer | None, prediction: SuffixIndex | None = None, tenant: Tenant = ANYBODY
    ) -> Decoding:
        """Return the decoding of a new session, whose first text is expected to be `prediction`; needs `prepare`."""
        ready = self._preparation.ready_now()
        observer = observer or Observer()
        measured = self.measured(frame.sampling)
        features = self._history.features(ready, frame)
        own = self._history.drafters(ready, frame, features, prediction, busy=self._busy)
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
            rule=ProposalRule(frame.sampling, prompt_length=len(frame.prompt), runners_up=RUNNERS_UP),
            thread=self._thread,
            open_timeout_s=self.config.open_timeout_s,
            measured=measured,
            on_opened=ready.prompts.meet,
            budget=self._history.budget,
        )
        self._decodings.add(decoding)
        return decoding

    def other_drafters(self, decoding: Decoding, frame: Open, prediction: SuffixIndex | None) -> TextDrafters | None:
        """Return the drafters that a kept session takes for its next turn, whose fresh session `frame` would open.

        None: the edge has no others than when the session began or last took some.
        """
        ready = self._preparation.ready_now()
        if ready.shelf.offered == decoding.has.offered:
            return None
        others = self._history.drafters(ready, frame, self._history.features(ready, frame), prediction, busy=self._busy)
        return others.with_those_of(decoding.has.drafters) if others.drafters else None

    @property
    def _busy(self) -> bool:
        return any(not decoding.machine.done for decoding in self._decodings)

    def measured(self, sampling: Sampling) -> SharedMeasurements:
        """Return the measurements of texts of such sampling."""
        return self._history.measured(sampling)

    def report(self, session: str, machine: EdgeSession, seconds: float, tenant: Tenant = ANYBODY) -> None:
        """Learn from a text that has ended after `seconds`, and report it in the background."""
        ready = self._preparation.ready_now()
        self._history.learn(ready, session, machine, seconds, tenant)
        if tenant.learning and machine.verifier:
            self.own_learning.ended(ready, session, machine)
