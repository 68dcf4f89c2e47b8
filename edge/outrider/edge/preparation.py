"""Preparation of a client's texts: the route, the tokenizer, the drafters."""

from __future__ import annotations

import asyncio
import logging
import random
import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import Tokenizer

from outrider.drafters import DrafterCache, DrafterPackage, RetrievalDrafter
from outrider.drafters.packages import Fetch
from outrider.drafters.protocol import Drafter
from outrider.drafters.search import BROKEN, RETRIEVAL, DrafterSearch, own_member
from outrider.drafters.shelf import DrafterShelf, Member
from outrider.edge.edge_config import EdgeConfig, edge_of_this_process
from outrider.edge.link.control_client import CoordinatorClient, file_fetcher
from outrider.edge.link.link import Channels
from outrider.edge.link.routes import CoordinatorRoute, DirectRoute, Route
from outrider.edge.local_texts import KeptAnswers, LocalFiles, LocalTexts
from outrider.edge.prompts import FIELD, PromptEncoder, checked, encode
from outrider.proto.drafter_format import ON_TRIAL
from outrider.proto.errors import (
    ConfigError,
    ModelRefused,
    NotFound,
    OutriderError,
    ResourceExhausted,
    TokenizerMismatch,
    Unavailable,
)
from outrider.proto.tokenizer import tokenizer_hash
from outrider.proto.types import DrafterManifest, Lease, LeaseRequest

MAX_TEMPLATE_BYTES = 1 << 20
WATCH_AGAIN_S = 40.0  # on average, after a coordinator went away, or cannot be watched: drafters are not urgent

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ready:
    """Result of a preparation: where to decode, in which tokens, with which drafters.

    Attributes:
        shelf: drafters that texts begin with, as they are now.
        chat_template: content of a template file, as `daemon.chat_template` reads it; empty: the target has none.
        local_texts: texts of this machine that drafts are copied from; None: none.
        own_versions: versions of drafters that were trained on this machine.
        prompts: encoder of prompts, which knows how many tokens can fit.
    """

    route: Route
    model: str
    tokenizer: Tokenizer
    tokenizer_sha256: str
    shelf: DrafterShelf
    chat_template: str = ""
    local_texts: LocalTexts | None = None
    own_versions: set[str] = field(default_factory=set)
    prompts: PromptEncoder = field(default_factory=PromptEncoder)

    def encode(self, text: str | Sequence[int], *, special: bool) -> tuple[int, ...]:
        """Return token ids of `text`, with the tokenizer's special tokens around it or not; token ids stay.

        Raises:
            InvalidArgument: it is neither text nor token ids.
        """
        text = checked(text, FIELD)
        return encode(self.tokenizer, text, special=special) if isinstance(text, str) else text

    async def encode_prompt(self, prompt: str | Sequence[int], *, special: bool) -> tuple[int, ...]:
        """Do what `encode` does for a prompt of any length, without holding up the event loop.

        Raises:
            PromptTooLong: the target's context cannot hold it.
            InvalidArgument: it is neither text nor token ids.
        """
        return await self.prompts.encode(self.tokenizer, prompt, special=special)

    def decode(self, tokens: Sequence[int]) -> str:
        """Return the text of tokens without special ones."""
        return str(self.tokenizer.decode(list(tokens), skip_special_tokens=True))


class Preparation:
    """Preparation of a client's texts, once, and what keeps it up to date.

    Args:
        config: settings of the edge.
        coordinator: client of the coordinator that the config names; None: it names none.
        route: replaces the config's.
        drafters: replace the config's unless empty.

    Attributes:
        learnable: package of the first drafter that can learn, as others have it too; None: there is none yet.
    """

    def __init__(
        self,
        config: EdgeConfig,
        coordinator: CoordinatorClient | None,
        route: Route | None,
        drafters: Sequence[Drafter],
    ) -> None:
        self.ready: Ready | None = None
        self.learnable: DrafterPackage | None = None
        self._config = config
        self._coordinator = coordinator
        self._route = route
        self._drafters = drafters
        self._cache = DrafterCache(config.cache)
        self._tokenizer_json = ""  # the target's, as soon as it is known
        self._offers: tuple[DrafterManifest, ...] = ()  # the coordinator's newest
        self._own: DrafterPackage | None = None  # version that was trained here from one of the drafters
        self._finding = asyncio.Lock()
        self._renewing = asyncio.Lock()
        self._watching: asyncio.Task[None] | None = None  # for other drafters of the coordinator

    async def find(self, channels: Channels) -> Ready:
        """Find everything, once; a drafter that is large goes on loading afterwards.

        Raises:
            NotFound: no such model, drafter or file.
            TokenizerMismatch: drafter, tokenizer and target do not belong together.
            Unavailable: the coordinator does not answer.
            ConfigError: a setting is missing that nothing else can replace.
        """
        async with self._finding:
            if self.ready is None:
                ready = await (self._direct() if self._coordinator is None else self._leased(self._coordinator))
                if ready.local_texts is not None:
                    await asyncio.to_thread(ready.local_texts.load)
                self.ready = ready
                if self._coordinator is not None and self._config.drafter != "none" and not self._drafters:
                    self._watching = asyncio.create_task(self._watch(self._coordinator, ready))
                if (expected := ready.route.expected()) is not None:  # the first text waits for no handshake
                    channels.connect(expected)
            return self.ready

    async def load(self, channels: Channels) -> Ready:
        ready = await self.find(channels)
        await asyncio.wrap_future(ready.shelf.begun)
        return ready

    def ready_now(self) -> Ready:
        """Return what was found; raises `ConfigError` before anything is."""
        if self.ready is None:
            raise ConfigError("the client is not prepared; await prepare() or use `async with`", field="client")
        return self.ready

    async def take_own(self, package: DrafterPackage | None) -> None:
        """Give the texts to come a version that was trained here, for as long as its parent would be in its place.

        None: they get the parent again.
        """
        ready = self.ready_now()
        await asyncio.wrap_future(ready.shelf.begun)
        if package is not None:
            ready.own_versions.add(package.version)
        self._own = package
        await self._renew(ready, self._offers)

    async def close(self) -> None:
        """Close drafters and local texts; a drafter that loads is dropped when it is there."""
        if self._watching is not None:
            self._watching.cancel()
            await asyncio.gather(self._watching, return_exceptions=True)
        if self.ready is not None:
            self.ready.shelf.close()
            if self.ready.local_texts is not None:
                await asyncio.to_thread(self.ready.local_texts.close)

    # --- route, tokenizer, template and local texts ---

    async def _direct(self) -> Ready:
        own = self._config.tokenizer
        self._tokenizer_json = _read(own, "tokenizer") if own else ""
        shelf, package = await self._shelf((), tokenizer_hash(self._tokenizer_json) if own else "")
        path = own or (package.tokenizer_path if package else None)
        if path is None:
            message = "is needed: without coordinator and drafter package nothing has it"
            raise ConfigError(message, field="tokenizer", code="OUT-408")
        text, config = _read(path, "tokenizer"), self._config
        sha256 = tokenizer_hash(text)
        route = self._route or DirectRoute((config.verifier,), config.model, sha256, config.security)
        template = _read(config.chat_template, "chat_template") if config.chat_template else ""
        return self._found(route, config.model, text, shelf, template)

    async def _leased(self, coordinator: CoordinatorClient) -> Ready:
        lease = await self._first_lease(coordinator)
        self._tokenizer_json = text = await asyncio.to_thread(self._fetch_tokenizer, lease)
        shelf, _ = await self._shelf(lease.drafters, lease.tokenizer_sha256)
        sha256 = tokenizer_hash(text)
        if sha256 != lease.tokenizer_sha256:
            raise TokenizerMismatch("is not the one of the target; leave it to the coordinator", field="tokenizer")
        route = self._route or CoordinatorRoute(coordinator, lease.model, sha256)
        template = await asyncio.to_thread(self._fetch_chat_template, lease)
        ready = self._found(route, lease.model, text, shelf, template)
        ready.prompts.meet(lease)
        return ready

    def _found(self, route: Route, model: str, tokenizer_json: str, shelf: DrafterShelf, template: str) -> Ready:
        tokenizer, sha256, config = Tokenizer.from_str(tokenizer_json), tokenizer_hash(tokenizer_json), self._config
        texts = None
        if self._copies:
            files = LocalFiles(config.draft_from, tokenizer) if config.draft_from else None
            folder, vocab_size = config.draft_answers, tokenizer.get_vocab_size()
            texts = LocalTexts(files, None if folder is None else KeptAnswers(folder, sha256, vocab_size))
        return Ready(route, model, tokenizer, sha256, shelf, template, texts)

    @property
    def _copies(self) -> bool:
        """Whether drafts are copied from texts of this machine."""
        config = self._config
        return config.drafter != "none" and bool(config.draft_from or config.draft_answers)

    async def _first_lease(self, coordinator: CoordinatorClient) -> Lease:
        """Return a lease, after waiting for as long as the coordinator promises one."""
        until = time.monotonic() + self._config.retry.abandon_after_s
        while True:
            try:
                request = LeaseRequest(model=self._config.model, session=uuid.uuid4().hex, inquiry=True)
                return await coordinator.open_lease(request)
            except (ResourceExhausted, Unavailable) as error:
                if not error.retry_after_s or time.monotonic() + error.retry_after_s > until:
                    raise
                await asyncio.sleep(error.retry_after_s)

    def _fetch_tokenizer(self, lease: Lease) -> str:
        path = self._config.tokenizer
        if path is None:
            if lease.tokenizer is None:
                message = "is needed: the coordinator does not serve the target's"
                raise ConfigError(message, field="tokenizer", code="OUT-408")
            path = self._cache.ensure_file(lease.tokenizer, self._fetcher())
        return _read(path, "tokenizer")

    def _fetch_chat_template(self, lease: Lease) -> str:
        path = self._config.chat_template
        if path is None and lease.chat_template is not None:
            if lease.chat_template.bytes > MAX_TEMPLATE_BYTES:
                raise ModelRefused(f"has more than {MAX_TEMPLATE_BYTES} bytes", field="chat_template")
            path = self._cache.ensure_file(lease.chat_template, self._fetcher())
        return _read(path, "chat_template") if path else ""

    def _fetcher(self) -> Fetch:
        return file_fetcher(self._config.coordinator, security=self._config.security)

    # --- drafters ---

    async def _shelf(
        self, offers: tuple[DrafterManifest, ...], tokenizer_sha256: str
    ) -> tuple[DrafterShelf, DrafterPackage | None]:
        """Return the requested drafters, which begin to load, and the package of the first that has one.

        One that cannot be had at present, or is broken, is no reason not to decode: others go on without it, and where
        there is none the text goes on as plain cloud streaming and its statistics say why. A name that nobody knows,
        or a wrong tokenizer, is a mistake. Without a `tokenizer_sha256` the package is loaded, and so its tokenizer
        checked.
        """
        if self._drafters:
            return DrafterShelf(*self._drafters, *((RetrievalDrafter(),) if self._copies else ())), None
        shelf = DrafterShelf()
        if self._config.drafter == "none":
            shelf.offer(())
            return shelf, None
        try:
            members = await asyncio.to_thread(self._offer, shelf, offers, tokenizer_sha256)
        except BROKEN as error:
            log.warning("decoding without a drafter: %s", error)
            shelf.offer((), error=str(error).splitlines()[0])
            return shelf, None
        if not tokenizer_sha256:
            await asyncio.wrap_future(shelf.begun)
        package = next((each.package for each in members if each.package is not None and not each.by_text), None)
        return shelf, None if shelf.error else package

    async def _watch(self, coordinator: CoordinatorClient, ready: Ready) -> None:
        """Give the texts to come the drafters that the coordinator offers; texts that run keep theirs."""
        await asyncio.wrap_future(ready.shelf.begun)
        while True:
            try:
                async for offers in coordinator.watch_drafters(ready.tokenizer_sha256):
                    await self._renew(ready, offers)
            except OutriderError as error:
                log.info("the coordinator's drafters are not watched: %s", error)
            # Edges that lost their coordinator together come back one after the other.
            await asyncio.sleep(WATCH_AGAIN_S * random.uniform(0.5, 1.5))

    async def _renew(self, ready: Ready, offers: tuple[DrafterManifest, ...]) -> None:
        async with self._renewing:
            try:
                await asyncio.to_thread(self._offer, ready.shelf, offers, ready.tokenizer_sha256)
            except (OutriderError, OSError) as error:
                log.warning("keeping the drafters: %s", error)

    def _offer(self, shelf: DrafterShelf, offers: tuple[DrafterManifest, ...], tokenizer_sha256: str) -> list[Member]:
        """Put the requested drafters on the shelf, unless they stand there; return them, by their manifests."""
        members, limit_bytes = self._members(offers, tokenizer_sha256)
        if tuple(member.id for member in members) != shelf.offered:
            shelf.offer(members, limit_bytes)
            log.info("texts from now on have the drafters %s", ", ".join(map("@".join, shelf.offered)))
        return members

    def _members(self, offers: tuple[DrafterManifest, ...], tokenizer_sha256: str) -> tuple[list[Member], float]:
        self._offers, config = offers, self._config
        copier = (RETRIEVAL,) if self._copies and RETRIEVAL not in config.drafters else ()
        edge = config.edge or edge_of_this_process()
        search = DrafterSearch(offers, self._cache, self._fetcher(), config.threads, edge, self._tokenizer_json)
        found, limit_bytes = search.listed(
            (*config.drafters, *copier), tokenizer_sha256, config.drafter_memory_mb * 1e6
        )
        plain = (member for member in found if member.steering is None and ON_TRIAL not in member.name)
        learning = (member.package for member in plain if not member.by_text)  # texts are the target's tokens
        self.learnable = next((package for package in learning if package is not None), None)
        own = self._own
        if own is not None:
            parent = (own.name, own.parent)
            found = [own_member(own, config.threads) if member.id == parent else member for member in found]
        return found, limit_bytes


def _read(path: Path, field: str) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise NotFound(f"cannot read {path}: {reason}", field=field) from error
