"""The client SDK: `async for event in client.generate(...)`, and a synchronous twin."""

from __future__ import annotations

import asyncio
import queue
import threading
import time
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Coroutine, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import Any, Self, TypeVar

from tokenizers import Tokenizer

from outrider.edge.config import EdgeConfig
from outrider.edge.control import CoordinatorClient, file_fetcher
from outrider.edge.decoding import Decoding
from outrider.edge.drafters import DrafterCache, DrafterPackage, NgramDrafter, ProposalRule, embedded_packages
from outrider.edge.drafters.packages import find_package, load_package
from outrider.edge.drafters.protocol import Drafter
from outrider.edge.routes import CoordinatorRoute, DirectRoute, Route
from outrider.edge.text import TextStream
from outrider.proto.errors import (
    ConfigError,
    DeadlineExceeded,
    InvalidArgument,
    NotFound,
    OutriderError,
    TokenizerMismatch,
)
from outrider.proto.session import Done, EdgeSession, EdgeStatistics, Emit
from outrider.proto.tokenizer import tokenizer_hash
from outrider.proto.types import FinishReason, Lease, LeaseRequest, Open, Provenance, Sampling, SessionReport

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Tokens:
    """Committed tokens, for ever part of the text.

    Attributes:
        position: absolute, of tokens[0].
        tokens: [n] ids.
        provenance: [n] whether each was an accepted draft or the target's own.
        logp: [n] natural log of the target's processed probability of each.
        pieces: [n] text that each adds for certain; lags behind while a character or a stop string is incomplete.
    """

    position: int
    tokens: tuple[int, ...]
    provenance: tuple[Provenance, ...]
    logp: tuple[float, ...]
    pieces: tuple[str, ...]

    @property
    def text(self) -> str:
        """All pieces."""
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Finished:
    """The text is whole. `text` here is only what was still held back; `seconds` runs from `generate` to now."""

    reason: FinishReason
    text: str
    statistics: EdgeStatistics
    seconds: float
    first_token_s: float


Event = Tokens | Finished


@dataclass(frozen=True, slots=True)
class Completion:
    """A whole text at once."""

    prompt_tokens: int
    tokens: tuple[int, ...]
    provenance: tuple[Provenance, ...]
    text: str
    finish_reason: FinishReason
    statistics: EdgeStatistics
    seconds: float
    first_token_s: float


@dataclass(frozen=True, slots=True)
class _Ready:
    """What the first use finds out: where to decode, in which tokens, with which drafter."""

    route: Route
    model: str
    tokenizer: Tokenizer
    tokenizer_sha256: str
    drafter: Drafter | None


class Client:
    """Decodes texts on verifiers, drafting here. Safe for many generations at once in one event loop.

    Args:
        config: where, and with what.
        route: instead of what the config says about where (tests, embedding).
        drafter: instead of the config's (tests, drafters of your own).
    """

    def __init__(self, config: EdgeConfig, *, route: Route | None = None, drafter: Drafter | None = None) -> None:
        self.config = config
        self._given_route = route
        self._given_drafter = drafter
        self._coordinator = CoordinatorClient(config.coordinator, config.open_timeout_s) if config.coordinator else None
        self._cache = DrafterCache(config.cache)
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="outrider-drafter")
        self._ready: _Ready | None = None
        self._preparing = asyncio.Lock()

    async def __aenter__(self) -> Self:
        await self.prepare()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.close()

    async def close(self) -> None:
        """Give channels and the drafting thread back."""
        if self._coordinator is not None:
            await self._coordinator.close()
        self._thread.shutdown(wait=False)

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
                self._ready = await (self._prepare_direct() if self._coordinator is None else self._prepare_leased())

    async def generate(
        self,
        prompt: str | Sequence[int],
        sampling: Sampling | None = None,
        *,
        stop: Sequence[str] = (),
        deadline_s: float | None = None,
        **overrides: Any,
    ) -> AsyncGenerator[Event]:
        """Decode one text. Leaving the loop early (`aclose`) cancels it on both sides.

        Args:
            prompt: text, or token ids of the target's tokenizer.
            sampling: parameters; `overrides` replace single ones, such as `max_tokens=64`.
            stop: strings that end the text and are not part of it.
            deadline_s: for the whole text.
            overrides: fields of `Sampling`.

        Yields:
            `Tokens` as they are committed, then `Finished`.

        Raises:
            InvalidArgument: bad parameters or prompt, with the field named.
            DeadlineExceeded: what came until then has been yielded.
            OutriderError: the text cannot be finished anywhere.
        """
        began = time.monotonic()
        await self.prepare()
        frame = self._open(prompt, sampling or Sampling(), overrides)
        stop = _checked_stop(stop)
        ready = self._ready_now()
        text = TextStream(ready.tokenizer, stop)
        machine = EdgeSession(frame, self.config.window_policy, self.config.retry, send_q=self.config.send_q)
        first_token_s = 0.0
        decoding = self._decoding(machine, frame)
        items = _until(decoding.run(), deadline_s)
        try:
            async for item in items:
                if isinstance(item, Emit):
                    first_token_s = first_token_s or time.monotonic() - began
                    yield _tokens_event(item, text)
                    if text.stopped:
                        decoding.stop(FinishReason.STOP_STRING)
                elif item.error is not None:
                    raise item.error
                else:
                    await self._report(frame.session, machine, time.monotonic() - began)
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
        events: AsyncIterator[Event],
        on_event: Callable[[Event], None] = lambda _: None,
    ) -> Completion:
        """The whole text of `generate(prompt, ...)`; `on_event` sees each event as it comes."""
        tokens: list[int] = []
        provenance: list[Provenance] = []
        text = ""
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
        )

    def _decoding(self, machine: EdgeSession, frame: Open) -> Decoding:
        ready = self._ready_now()
        rule = ProposalRule(frame.sampling, prompt_length=len(frame.prompt))
        return Decoding(
            machine,
            ready.route,
            frame.session,
            drafter=ready.drafter.open(rule) if ready.drafter is not None else None,
            thread=self._thread,
            open_timeout_s=self.config.open_timeout_s,
            silence_s=self.config.silence_s,
        )

    async def _report(self, session: str, machine: EdgeSession, seconds: float) -> None:
        ready, statistics = self._ready_now(), machine.statistics
        await ready.route.report(
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

    # --- getting ready ---

    def _ready_now(self) -> _Ready:
        if self._ready is None:
            raise ConfigError("the client is not prepared; await prepare() or use `async with`", field="client")
        return self._ready

    async def _prepare_direct(self) -> _Ready:
        drafter, package = await self._load_drafter(())
        path = self.config.tokenizer or (package.tokenizer_path if package else None)
        if path is None:
            raise ConfigError(
                "is needed: without a coordinator and a drafter package nothing else has it", field="tokenizer"
            )
        text = _read_tokenizer(path)
        sha256 = tokenizer_hash(text)
        if package is not None and package.tokenizer_sha256 != sha256:
            raise TokenizerMismatch(f"the drafter {package.name!r} was made for another tokenizer", field="drafter")
        route = self._given_route or DirectRoute((self.config.verifier,), self.config.model, sha256)
        return _Ready(route, self.config.model, Tokenizer.from_str(text), sha256, drafter)

    async def _prepare_leased(self) -> _Ready:
        assert self._coordinator is not None  # noqa: S101 - the caller looked
        lease = await self._coordinator.open_lease(LeaseRequest(model=self.config.model, session=uuid.uuid4().hex))
        drafter, _ = await self._load_drafter((lease,))
        text = await asyncio.to_thread(self._fetch_tokenizer, lease)
        sha256 = tokenizer_hash(text)
        if sha256 != lease.tokenizer_sha256:
            raise TokenizerMismatch("the coordinator served another tokenizer than the target's", field="tokenizer")
        route = self._given_route or CoordinatorRoute(self._coordinator, lease.model, sha256)
        return _Ready(route, lease.model, Tokenizer.from_str(text), sha256, drafter)

    def _fetch_tokenizer(self, lease: Lease) -> str:
        if self.config.tokenizer is not None:
            return _read_tokenizer(self.config.tokenizer)
        if lease.tokenizer is None:
            raise ConfigError("is needed: the coordinator does not serve the target's", field="tokenizer")
        return _read_tokenizer(self._cache.ensure_file(lease.tokenizer, file_fetcher(self.config.coordinator)))

    async def _load_drafter(self, lease: tuple[Lease, ...]) -> tuple[Drafter | None, DrafterPackage | None]:
        """The drafter, and its package where it has one."""
        if self._given_drafter is not None:
            return self._given_drafter, None
        if self.config.drafter == "none":
            return None, None
        if self.config.drafter == "ngram":
            return NgramDrafter(), None
        package = await asyncio.to_thread(self._find_package, lease)
        if package is None:
            return NgramDrafter(), None
        return await asyncio.to_thread(_load_onnx, package, self.config.threads), package

    def _find_package(self, lease: tuple[Lease, ...]) -> DrafterPackage | None:
        """The package that the config names; with `auto` the first that fits, None where none does."""
        wanted = self.config.drafter
        if "/" in wanted or Path(wanted).is_dir():
            return load_package(Path(wanted).expanduser())
        for offer in lease[0].drafters if lease else ():
            if wanted in ("auto", offer.name):
                return self._cache.ensure(offer, file_fetcher(self.config.coordinator))
        if wanted != "auto":
            package = find_package(wanted)
            if lease and package.tokenizer_sha256 != lease[0].tokenizer_sha256:
                raise TokenizerMismatch(
                    f"{wanted!r} was made for another tokenizer than the target's; try `auto` or `ngram`",
                    field="drafter",
                )
            return package
        fitting = (find_package(name) for name in embedded_packages())
        hashes = {lease[0].tokenizer_sha256} if lease else {self._configured_tokenizer_hash()}
        return next((package for package in fitting if package.tokenizer_sha256 in hashes), None)

    def _configured_tokenizer_hash(self) -> str:
        if self.config.tokenizer is None:
            return ""
        return tokenizer_hash(_read_tokenizer(self.config.tokenizer))


class SyncClient:
    """`Client` without async: a thread of its own runs the event loop. Use as a context manager."""

    def __init__(self, config: EdgeConfig) -> None:
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, name="outrider-client", daemon=True)
        self._thread.start()
        self._client = self._call(_make(config))

    def __enter__(self) -> Self:
        self._call(self._client.prepare())
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """End the loop and its thread."""
        self._call(self._client.close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join()
        self._loop.close()

    def complete(self, prompt: str | Sequence[int], sampling: Sampling | None = None, **options: Any) -> Completion:
        """As `Client.complete`."""
        return self._call(self._client.complete(prompt, sampling, **options))

    def generate(
        self, prompt: str | Sequence[int], sampling: Sampling | None = None, **options: Any
    ) -> Iterator[Event]:
        """As `Client.generate`; closing the iterator cancels the text."""
        events: queue.Queue[Event | BaseException | None] = queue.Queue()
        pump = asyncio.run_coroutine_threadsafe(
            _pump(self._client.generate(prompt, sampling, **options), events), self._loop
        )
        try:
            while (event := events.get()) is not None:
                if isinstance(event, BaseException):
                    raise event
                yield event
        finally:
            pump.cancel()

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result()


async def _make(config: EdgeConfig) -> Client:
    return Client(config)


async def _pump(events: AsyncGenerator[Event], into: queue.Queue[Event | BaseException | None]) -> None:
    try:
        async for event in events:
            into.put(event)
    except OutriderError as error:
        into.put(error)
    finally:
        await events.aclose()
        into.put(None)


async def _until(
    items: AsyncGenerator[Emit | Done], deadline_s: float | None
) -> AsyncGenerator[Emit | Done]:
    """The same items, or DeadlineExceeded once `deadline_s` seconds are over."""
    try:
        if deadline_s is None:
            async for item in items:
                yield item
            return
        until = time.monotonic() + deadline_s
        while True:
            try:
                yield await asyncio.wait_for(anext(items), max(0.0, until - time.monotonic()))
            except StopAsyncIteration:
                return
            except TimeoutError as error:
                raise DeadlineExceeded(f"the text took longer than {deadline_s:g} s", field="deadline_s") from error
    finally:
        await items.aclose()


def _tokens_event(item: Emit, text: TextStream) -> Tokens:
    provenance = tuple(Provenance.DRAFT if drafted else Provenance.TARGET for drafted in item.drafted)
    return Tokens(item.start, item.tokens, provenance, item.logp, text.push(item.tokens))


def _checked_stop(stop: Sequence[str]) -> tuple[str, ...]:
    if isinstance(stop, str):
        stop = (stop,)
    if any(not text for text in stop):
        raise InvalidArgument("holds an empty string, which would stop any text", field="stop")
    return tuple(stop)


def _read_tokenizer(path: Path) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except OSError as error:
        raise NotFound(f"cannot read {path}: {error.strerror}", field="tokenizer") from error


def _load_onnx(package: DrafterPackage, threads: int) -> Drafter:
    from outrider.edge.drafters.onnx import OnnxDrafter

    return OnnxDrafter(package, threads=threads)
