"""The client SDK: `async for event in client.generate(...)`."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import AsyncGenerator, Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import aclosing
from dataclasses import replace
from types import TracebackType
from typing import Any, Self, TypeVar

from outrider.edge.config import EdgeConfig
from outrider.edge.control import CoordinatorClient
from outrider.edge.decoding import Decoding, Journal
from outrider.edge.drafters import ProposalRule
from outrider.edge.drafters.protocol import Drafter
from outrider.edge.events import Completion, Event, Finished, Tokens
from outrider.edge.link import Channels
from outrider.edge.preparation import Preparation, Ready
from outrider.edge.routes import Route
from outrider.edge.text import TextStream
from outrider.proto.errors import ConfigError, DeadlineExceeded, InvalidArgument
from outrider.proto.policy import Experience
from outrider.proto.session import Done, EdgeSession, Emit
from outrider.proto.types import FinishReason, Open, Provenance, Sampling, SessionReport

REPORT_WITHIN_S = 1.0

T = TypeVar("T")


class Client:
    """Decodes texts on verifiers, drafting here. Safe for many generations at once in one event loop.

    Args:
        config: where, and with what.
        route: instead of what the config says about where (tests, embedding).
        drafter: instead of the config's (tests, drafters of your own).
    """

    def __init__(self, config: EdgeConfig, *, route: Route | None = None, drafter: Drafter | None = None) -> None:
        self.config = config
        self._coordinator = CoordinatorClient(config.coordinator, config.open_timeout_s) if config.coordinator else None
        self._preparation = Preparation(config, self._coordinator, route, drafter)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-drafter")
        self._ready: Ready | None = None
        self._preparing = asyncio.Lock()
        self._reports: set[asyncio.Task[None]] = set()
        self._channels = Channels()
        # A drafter's confidence means one thing where the most likely token is taken and another where one is drawn.
        self._experience = {greedy: Experience() for greedy in (True, False)}

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
        if self._coordinator is not None:
            await self._coordinator.close()
        self._thread.shutdown(wait=False)

    @property
    def drafter(self) -> Drafter | None:
        """The drafter in use; None without one, or before `prepare`."""
        return self._ready.drafter if self._ready else None

    @property
    def drafter_name(self) -> str:
        """Of the drafter in use; `none` without one."""
        return self._ready.drafter.name if self._ready and self._ready.drafter else "none"

    async def prepare(self) -> None:
        """Find the target, fetch its tokenizer and a drafter; done by the first generation otherwise.

        Raises:
            OutriderError: nobody answers, no such model or drafter, or content with the wrong hash.
        """
        async with self._preparing:
            if self._ready is None:
                self._ready = await self._preparation.run()

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        stop: Sequence[str] = (),
        deadline_s: float | None = None,
        journal: Journal | None = None,
        **overrides: Any,
    ) -> AsyncGenerator[Event]:
        """Decode one text. Leaving the loop early (`aclose`) cancels it on both sides.

        Args:
            prompt: text, or token ids of the target's tokenizer.
            sampling: parameters; `overrides` replace single ones, such as `max_tokens=64`.
            stop: strings that end the text and are not part of it.
            deadline_s: for the whole text.
            journal: is told what happens and when (benchmarks, tracing).
            overrides: fields of `Sampling`.

        Yields:
            `Tokens` as they are committed, then `Finished`.

        Raises:
            InvalidArgument: bad parameters or prompt, with the field named.
            DeadlineExceeded: what came until then has been yielded.
            OutriderError: the text cannot be finished anywhere.
        """
        began = time.monotonic()
        await _within(self.prepare(), deadline_s)
        frame = self._open(prompt, sampling or Sampling(), overrides)
        stop = _checked_stop(stop)
        ready = self._ready_now()
        text = TextStream(ready.tokenizer, stop)
        machine = EdgeSession(
            frame,
            self.config.window_policy,
            self.config.retry,
            self._experience[frame.sampling.temperature == 0],
            send_q=self.config.send_q,
        )
        machine.statistics.drafter_error = ready.drafter_error
        first_token_s = 0.0
        decoding = self._decoding(machine, frame, journal)
        items = _until(decoding.run(), None if deadline_s is None else began + deadline_s)
        try:
            async for item in items:
                if isinstance(item, Emit) and text.stopped:
                    continue  # it was on its way when the stop string was seen
                if isinstance(item, Emit):
                    first_token_s = first_token_s or time.monotonic() - began
                    yield _tokens_event(item, text)
                    if text.stopped:
                        decoding.stop(FinishReason.STOP_STRING)
                elif item.error is not None:
                    raise item.error
                else:
                    self._report(frame.session, machine, time.monotonic() - began)
                    reason = item.finish or FinishReason.CANCELLED
                    yield Finished(reason, text.finish(), machine.statistics, time.monotonic() - began, first_token_s)
                    return
        finally:
            await items.aclose()

    async def complete(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        stop: Sequence[str] = (),
        deadline_s: float | None = None,
        **overrides: Any,
    ) -> Completion:
        """`generate`, collected."""
        return await self.collect(
            prompt, self.generate(prompt, sampling, stop=stop, deadline_s=deadline_s, **overrides)
        )

    async def collect(
        self,
        prompt: str | Sequence[int],
        events: AsyncGenerator[Event],
        on_event: Callable[[Event], None] = lambda _: None,
    ) -> Completion:
        """The whole text of `generate(prompt, ...)`; `on_event` sees each event as it comes."""
        tokens: list[int] = []
        provenance: list[Provenance] = []
        text = ""
        async with aclosing(events):
            async for event in events:
                on_event(event)
                text += event.text
                if isinstance(event, Tokens):
                    tokens += event.tokens
                    provenance += event.provenance
                else:
                    return Completion(
                        prompt_tokens=len(self.encode(prompt)),
                        tokens=tuple(tokens),
                        provenance=tuple(provenance),
                        text=text,
                        finish_reason=event.reason,
                        statistics=event.statistics,
                        seconds=event.seconds,
                        first_token_s=event.first_token_s,
                    )
        raise AssertionError("generate ends with Finished or an error")

    def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """The prompt's token ids; needs `prepare`."""
        if isinstance(prompt, str):
            return tuple(self._ready_now().tokenizer.encode(prompt).ids)
        return tuple(prompt)

    # --- one text ---

    def _open(self, prompt: str | Sequence[int], sampling: Sampling, overrides: dict[str, Any]) -> Open:
        ready = self._ready_now()
        unknown = set(overrides) - set(Sampling.__dataclass_fields__)
        if unknown:
            raise InvalidArgument(f"has no {', '.join(sorted(unknown))}", field="sampling")
        return Open(
            model=ready.model,
            tokenizer_sha256=ready.tokenizer_sha256,
            prompt=self.encode(prompt),
            sampling=replace(sampling, **overrides),
            session=uuid.uuid4().hex,
            patience=self.config.patience,
            drafting=ready.drafter is not None,
            window=self.config.window or 0,
            max_drafts=self.config.max_drafts,
            logp=self.config.logprobs,
        )

    def _decoding(self, machine: EdgeSession, frame: Open, journal: Journal | None) -> Decoding:
        ready = self._ready_now()
        rule = ProposalRule(frame.sampling, prompt_length=len(frame.prompt))
        return Decoding(
            machine,
            ready.route,
            frame.session,
            channels=self._channels,
            journal=journal or Journal(),
            drafter=ready.drafter.open(rule) if ready.drafter is not None else None,
            thread=self._thread,
            open_timeout_s=self.config.open_timeout_s,
        )

    def _report(self, session: str, machine: EdgeSession, seconds: float) -> None:
        """Hand the figures in beside the text, which must not wait for it."""
        ready, statistics = self._ready_now(), machine.statistics
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
                judged_tokens=statistics.judged,
                steps=statistics.steps,
                seconds=seconds,
                uplink_bytes=statistics.uplink_bytes,
                downlink_bytes=statistics.downlink_bytes,
                resumes=statistics.resumes,
                round_trip_s=statistics.round_trip_s,
            )
        )
        task = asyncio.create_task(handing_in)
        self._reports.add(task)
        task.add_done_callback(self._reports.discard)

    def _ready_now(self) -> Ready:
        if self._ready is None:
            raise ConfigError("the client is not prepared; await prepare() or use `async with`", field="client")
        return self._ready


async def _until(items: AsyncGenerator[Emit | Done], until: float | None) -> AsyncGenerator[Emit | Done]:
    """The same items, or DeadlineExceeded once the monotonic clock passes `until`."""
    async with aclosing(items):
        while True:
            left_s = None if until is None else max(0.0, until - time.monotonic())
            try:
                yield await _within(anext(items), left_s)
            except StopAsyncIteration:
                return


async def _within(waited_for: Awaitable[T], seconds: float | None) -> T:
    try:
        async with asyncio.timeout(seconds):
            return await waited_for
    except TimeoutError as error:
        raise DeadlineExceeded("the time allowed for the whole text is over", field="deadline_s") from error


def _tokens_event(item: Emit, text: TextStream) -> Tokens:
    """The event of what was emitted, as far as a stop string lets it be part of the text."""
    pieces = text.push(item.tokens)
    n = len(pieces)
    provenance = tuple(Provenance.DRAFT if drafted else Provenance.TARGET for drafted in item.drafted[:n])
    return Tokens(item.start, item.tokens[:n], provenance, item.logp[:n], pieces)


def _checked_stop(stop: Sequence[str]) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = (stop,)
    if any(not text for text in stop):
        raise InvalidArgument("holds an empty string, which would stop any text", field="stop")
    return tuple(stop)
