"""Preparation of a client's first text: the route, the tokenizer, the drafters."""

from __future__ import annotations

import asyncio
import logging
import math
import time
import uuid
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from tokenizers import Tokenizer

from outrider.drafters import DrafterCache, DrafterPackage, RetrievalDrafter
from outrider.drafters.packages import FOR_ANY_SUBJECT
from outrider.drafters.pool import BROKEN, DrafterPool, Member
from outrider.drafters.protocol import Drafter
from outrider.drafters.search import RETRIEVAL, DrafterSearch, own_member
from outrider.drafters.suffix_index import SuffixIndex
from outrider.edge.edge_config import EdgeConfig, edge_of_this_process
from outrider.edge.link.control_client import CoordinatorClient, file_fetcher
from outrider.edge.link.routes import CoordinatorRoute, DirectRoute, Route
from outrider.edge.pool.kept_answers import KeptAnswers
from outrider.edge.pool.local_texts import LocalFiles, LocalTexts
from outrider.edge.pool.pending import FoundDrafters, PendingDrafter
from outrider.edge.prompts import FIELD, PromptEncoder, checked, encode
from outrider.proto.drafter_format import ON_TRIAL
from outrider.proto.errors import (
    ConfigError,
    ModelRefused,
    NotFound,
    ResourceExhausted,
    TokenizerMismatch,
    Unavailable,
)
from outrider.proto.session import DrafterName
from outrider.proto.tokenizer import tokenizer_hash
from outrider.proto.types import DrafterManifest, Lease, LeaseRequest, RemoteFile

MAX_TEMPLATE_BYTES = 1 << 20

_MEMORY_OF_GRAPHS = 3.0  # bytes of memory at most for each of a drafter's graphs on disk

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Ready:
    """Result of a preparation: where to decode, in which tokens, with which drafters.

    Attributes:
        drafters: pool whose first drafter is loaded; None: there are none.
        drafter_error: reason for that where drafters were requested.
        pending: first drafter while it loads, until `with_drafters`; None: nothing loads.
        chat_template: content of a template file, as `daemon.chat_template` reads it; empty: the target has none.
        local_texts: texts of this machine that drafts are copied from; None: none.
        own_versions: versions of drafters that were trained on this machine.
        prompts: encoder of prompts, which knows how many tokens can fit.
    """

    route: Route
    model: str
    tokenizer: Tokenizer
    tokenizer_sha256: str
    drafters: DrafterPool | None
    drafter_error: str = ""
    chat_template: str = ""
    pending: PendingDrafter | None = None
    local_texts: LocalTexts | None = None
    own_versions: frozenset[str] = frozenset()
    prompts: PromptEncoder = field(default_factory=PromptEncoder)

    @property
    def drafter(self) -> Drafter | None:
        """First of the drafters that are loaded."""
        return self.drafters.first if self.drafters is not None else None

    @property
    def drafter_names(self) -> str:
        """Names of the drafters in use, with commas between; `none` without one."""
        if self.pending is not None:
            return self.pending.name
        return ",".join(self.drafters.names) if self.drafters is not None else "none"

    @property
    def offered(self) -> tuple[DrafterName, ...]:
        """Name and version of each drafter that texts can have, once it is loaded."""
        if self.drafters is not None:
            return tuple(zip(self.drafters.names, self.drafters.versions, strict=True))
        return ((self.pending.name, self.pending.version),) if self.pending is not None else ()

    def loaded_drafters(self) -> tuple[tuple[Drafter, ...], int | None]:
        """Return the drafters that are loaded and which of them is steered; the others load for later texts."""
        pool = self.drafters
        if pool is None:
            return (self.pending,) if self.pending is not None else (), None
        pool.want(range(len(pool)))
        loaded = {index: drafter for index in range(len(pool)) if (drafter := pool.loaded(index)) is not None}
        return tuple(loaded.values()), list(loaded).index(pool.steered) if pool.steered in loaded else None

    def few_of(self, drafters: tuple[Drafter, ...]) -> tuple[Drafter, ...]:
        """Return the first of a text's drafters, and the one that copies: for many texts at once on one thread."""
        return (*drafters[:1], *(one for one in drafters[1:] if isinstance(one, RetrievalDrafter)))

    def drafters_of_text(self, prediction: SuffixIndex | None) -> tuple[tuple[Drafter, ...], int | None]:
        """Return what `loaded_drafters` does, with one of the text's own to copy from what is here and `prediction`."""
        drafters, steered = self.loaded_drafters()
        if self.pending is not None and prediction is not None:
            drafters = ()  # nothing can be chosen among while one of them loads
        own = RetrievalDrafter(
            tuple if self.local_texts is None else self.local_texts.sources,
            prediction,
            vocab_size=self.tokenizer.get_vocab_size(),
        )
        drafters = tuple(own if isinstance(drafter, RetrievalDrafter) else drafter for drafter in drafters)
        if prediction is not None and own not in drafters:
            drafters = (*drafters, own)
        return drafters, steered

    async def with_drafters(self) -> Ready:
        """Return this once the first drafter is loaded, or is known not to be loadable.

        Raises:
            OutriderError: what `Preparation.run` raises for a mistake in the request for drafters.
        """
        if self.pending is None:
            return self
        drafting = await asyncio.wrap_future(self.pending.loading)
        return replace(self, drafters=drafting.drafters, drafter_error=drafting.error, pending=None)

    def close_drafters(self) -> None:
        """Evict the drafters, and the one that loads when it is there."""
        if self.drafters is not None:
            self.drafters.close()
        if self.pending is not None:
            self.pending.close()

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
    """Search for route, tokenizer and drafters, once a client.

    Args:
        config: settings of the edge.
        coordinator: client of the coordinator that the config names; None: it names none.
        route: replaces the config's.
        drafters: replace the config's unless empty.

    Attributes:
        learnable: package of the first drafter that can learn, as others have it too; None: there is none yet.
        own: version that was trained here from one of the drafters; None: there is none.
    """

    def __init__(
        self,
        config: EdgeConfig,
        coordinator: CoordinatorClient | None,
        route: Route | None,
        drafters: Sequence[Drafter],
    ) -> None:
        self._config = config
        self._coordinator = coordinator
        self._route = route
        self._drafters = drafters
        self._offers: tuple[DrafterManifest, ...] = ()  # the newest
        self.learnable: DrafterPackage | None = None
        self.own: DrafterPackage | None = None
        self._cache = DrafterCache(config.cache)
        self._tokenizer_json = ""  # the target's, as soon as it is known

    async def run(self) -> Ready:
        """Find everything; a drafter that is large goes on loading afterwards.

        Raises:
            NotFound: no such model, drafter or file.
            TokenizerMismatch: drafter, tokenizer and target do not belong together.
            Unavailable: the coordinator does not answer.
            ConfigError: a setting is missing that nothing else can replace.
        """
        ready = await (self._direct() if self._coordinator is None else self._leased(self._coordinator))
        texts = self._local_texts(ready) if self._copies else None
        if texts is not None:
            await asyncio.to_thread(texts.load)
        return replace(ready, local_texts=texts)

    @property
    def _copies(self) -> bool:
        """Whether drafts are copied from texts of this machine."""
        config = self._config
        return config.drafter != "none" and bool(config.draft_from or config.draft_answers)

    def _local_texts(self, ready: Ready) -> LocalTexts:
        config, files, answers = self._config, None, None
        if config.draft_from:
            files = LocalFiles(config.draft_from, ready.tokenizer, config.draft_from_limit_mb * 1e6)
        if config.draft_answers is not None:
            limit_bytes, vocab_size = config.draft_answers_limit_mb * 1e6, ready.tokenizer.get_vocab_size()
            answers = KeptAnswers(config.draft_answers, ready.tokenizer_sha256, vocab_size, limit_bytes)
            if config.forget_answers:
                log.info("forgot %d answers", answers.forget())
        return LocalTexts(files, answers)

    async def _direct(self) -> Ready:
        own = self._config.tokenizer
        self._tokenizer_json = _read(own, "tokenizer") if own else ""
        own_sha256 = tokenizer_hash(self._tokenizer_json) if own else ""
        drafting = await self._load_drafter((), own_sha256)
        path = own or (drafting.package.tokenizer_path if drafting.package else None)
        if path is None:
            raise ConfigError("is needed: without coordinator and drafter package nothing has it", field="tokenizer")
        text, config = _read(path, "tokenizer"), self._config
        sha256 = tokenizer_hash(text)
        route = self._route or DirectRoute((config.verifier,), config.model, sha256, config.security)
        template = _read(config.chat_template, "chat_template") if config.chat_template else ""
        return _ready(route, config.model, text, sha256, drafting, template)

    async def _leased(self, coordinator: CoordinatorClient) -> Ready:
        lease = await self._first_lease(coordinator)
        self._tokenizer_json = text = await asyncio.to_thread(self._fetch_tokenizer, lease)
        drafting = await self._load_drafter(_any_subject_first(lease.drafters), lease.tokenizer_sha256)
        sha256 = tokenizer_hash(text)
        if sha256 != lease.tokenizer_sha256:
            raise TokenizerMismatch("is not the one of the target; leave it to the coordinator", field="tokenizer")
        route = self._route or CoordinatorRoute(coordinator, lease.model, sha256)
        template = await asyncio.to_thread(self._fetch_chat_template, lease)
        ready = _ready(route, lease.model, text, sha256, drafting, template)
        ready.prompts.meet(lease)
        return ready

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
        return _read(leased_tokenizer(self._config, lease, self._cache), "tokenizer")

    def _fetch_chat_template(self, lease: Lease) -> str:
        path = self._config.chat_template
        if path is None and lease.chat_template is not None:
            if lease.chat_template.bytes > MAX_TEMPLATE_BYTES:
                raise ModelRefused(f"has more than {MAX_TEMPLATE_BYTES} bytes", field="chat_template")
            path = self._cache.ensure_file(lease.chat_template, self._fetcher())
        return _read(path, "chat_template") if path else ""

    def _fetcher(self) -> Callable[[RemoteFile, int], Iterator[bytes]]:
        return file_fetcher(self._config.coordinator, security=self._config.security)

    async def _load_drafter(self, offers: tuple[DrafterManifest, ...], tokenizer_sha256: str) -> FoundDrafters:
        """Return the requested drafters.

        One that cannot be had at present, or is broken, is no reason not to decode: others go on without it, and where
        there is none the text goes on as plain cloud streaming and its statistics say why. A name that nobody knows,
        or a wrong tokenizer, is a mistake.
        """
        if self._drafters:
            return FoundDrafters(DrafterPool.of(*self._drafters, *self._copier()))
        if self._config.drafter == "none":
            return FoundDrafters(None)
        try:
            return await asyncio.to_thread(self._found, offers, tokenizer_sha256)
        except BROKEN as error:
            return self._without_drafter(error)

    def _found(self, offers: tuple[DrafterManifest, ...], tokenizer_sha256: str) -> FoundDrafters:
        found, limit_bytes = self._members(offers, tokenizer_sha256)
        return self._pool(found, limit_bytes, tokenizer_sha256)

    def _without_drafter(self, error: Exception) -> FoundDrafters:
        log.warning("decoding without a drafter: %s", error)
        pool = DrafterPool.of(*self._copier()) if self._copies else None
        return FoundDrafters(pool, error=str(error).splitlines()[0])

    def _copier(self) -> tuple[Drafter, ...]:
        """Return the drafter that copies where there is something to copy from, else none."""
        return (RetrievalDrafter(),) if self._copies else ()

    def offers(self, tokenizer_sha256: str) -> AsyncIterator[tuple[DrafterManifest, ...]]:
        """Yield the drafters that the coordinator offers now, and again each time they change."""
        if self._coordinator is None:
            raise ConfigError("is needed to watch drafters", field="coordinator")
        return self._coordinator.watch_drafters(tokenizer_sha256)

    def renewed(
        self, pool: DrafterPool | None, offers: tuple[DrafterManifest, ...] | None, tokenizer_sha256: str
    ) -> DrafterPool | None:
        """Return a pool of what the coordinator offers now, for the texts to come; None: it offers what is in `pool`.

        Without `offers` they are what they were, and a version that was trained here may be new. Blocks while new
        versions load. What cannot be had stays as it is; see `DrafterPool.renewed`.

        Raises:
            OutriderError, OSError: none of the drafters can be had.
        """
        offers = self._offers if offers is None else _any_subject_first(offers)
        found, limit_bytes = self._members(offers, tokenizer_sha256)
        if pool is None:
            return self._loaded(found, limit_bytes, None).drafters
        known = list(zip(pool.names, pool.versions, strict=True))
        if [(member.name, member.version) for member in found] == known:
            return None
        return pool.renewed(found, limit_bytes=limit_bytes)

    @property
    def offers_change(self) -> bool:
        """Whether the drafters depend on what a coordinator offers, which may change while the client lives."""
        return bool(self._config.coordinator) and self._config.drafter != "none" and not self._drafters

    def _members(self, offers: tuple[DrafterManifest, ...], tokenizer_sha256: str) -> tuple[list[Member], float]:
        """Return the requested drafters, and the limit of their memory in bytes."""
        self._offers = offers
        find = self._any_drafters if self._config.drafter == "auto" else self._named_drafters
        found, limit_bytes = find(offers, tokenizer_sha256)
        plain = (member for member in found if member.steering is None and ON_TRIAL not in member.name)
        learning = (member.package for member in plain if not member.by_text)  # texts are the target's tokens
        self.learnable = next((package for package in learning if package is not None), None)
        return [self._own_version(member) or member for member in found], limit_bytes

    def _own_version(self, parent: Member) -> Member | None:
        own = self.own
        if own is None or (own.name, own.parent) != (parent.name, parent.version):
            return None
        return own_member(own, self._config.threads)

    def _named_drafters(self, offers: tuple[DrafterManifest, ...], tokenizer_sha256: str) -> tuple[list[Member], float]:
        """Return the drafters that the config names."""
        names = self._config.drafters
        if self._copies and RETRIEVAL not in names:
            names = (*names, RETRIEVAL)
        search = self._search(offers)
        if names[0] == "all":
            found = search.all(tokenizer_sha256) + search.named(names[1:], tokenizer_sha256)
        else:
            found = search.named(names, tokenizer_sha256)
        several = names[0] == "all" or len(names) > 1
        return found, self._limit_bytes if several else math.inf

    def _any_drafters(self, offers: tuple[DrafterManifest, ...], tokenizer_sha256: str) -> tuple[list[Member], float]:
        """Return all drafters that fit, of which none but the first is steered.

        Replayed over all links, a steered one among others gains nothing, and its vectors cost bytes of every commit.
        The first goes alone, with what copies, where it would fill the memory for several.
        """
        search = self._search(offers)
        first, *others = search.all(tokenizer_sha256)
        copying = search.named((RETRIEVAL,), tokenizer_sha256) if self._copies else []
        if _MEMORY_OF_GRAPHS * first.bytes > self._limit_bytes:
            return [first, *copying], math.inf
        plain = (member for member in others if member.steering is None)
        return [first, *plain, *copying], self._limit_bytes

    @property
    def _limit_bytes(self) -> float:
        return self._config.drafter_memory_mb * 1e6

    def _search(self, offers: tuple[DrafterManifest, ...]) -> DrafterSearch:
        edge = self._config.edge or edge_of_this_process()
        return DrafterSearch(
            offers, self._cache, self._fetcher(), self._config.threads, edge, tokenizer_json=self._tokenizer_json
        )

    def _pool(self, found: list[Member], limit_bytes: float, tokenizer_sha256: str) -> FoundDrafters:
        """Begin to load: a large drafter while texts begin, unless they need the tokenizer that is checked with it."""
        package = next((member.package for member in found if member.package is not None and not member.by_text), None)
        if not (found[0].bytes and tokenizer_sha256):
            return self._loaded(found, limit_bytes, package)

        def load() -> FoundDrafters:
            try:
                return self._loaded(found, limit_bytes, package)
            except BROKEN as error:
                return self._without_drafter(error)

        return FoundDrafters(None, package, pending=PendingDrafter(found[0], load))

    def _loaded(self, found: list[Member], limit_bytes: float, package: DrafterPackage | None) -> FoundDrafters:
        """Load the first that can be and those without graphs, and begin to load the others."""
        while True:
            pool = DrafterPool(found, limit_bytes=limit_bytes)
            try:
                pool.load(0)
            except BROKEN as error:
                pool.close()
                if len(found) == 1:
                    raise
                log.warning("going on without the drafter %s: %s", found[0].name, error)
                del found[0]
                continue
            for index, member in enumerate(found):
                if not member.bytes:
                    pool.load(index)  # quick, and the first text has it too
            pool.want(range(len(pool)))
            return FoundDrafters(pool, package)


def _ready(route: Route, model: str, tokenizer: str, sha256: str, drafting: FoundDrafters, template: str) -> Ready:
    return Ready(
        route,
        model,
        Tokenizer.from_str(tokenizer),
        sha256,
        drafting.drafters,
        drafting.error,
        template,
        drafting.pending,
    )


def leased_tokenizer(config: EdgeConfig, lease: Lease, cache: DrafterCache) -> Path:
    """Return the path of the config's own tokenizer, or else of the one that the lease names, fetched into `cache`.

    Raises:
        ConfigError: neither has one.
        OutriderError: it cannot be fetched.
    """
    if config.tokenizer is not None:
        return config.tokenizer.expanduser()
    if lease.tokenizer is None:
        raise ConfigError("is needed: the coordinator does not serve the target's", field="tokenizer")
    return cache.ensure_file(lease.tokenizer, file_fetcher(config.coordinator, security=config.security))


def _any_subject_first(offers: tuple[DrafterManifest, ...]) -> tuple[DrafterManifest, ...]:
    """Return the drafter for any subject first, the others in the coordinator's order."""
    return tuple(sorted(offers, key=lambda offer: offer.name != FOR_ANY_SUBJECT))


def _read(path: Path, field: str) -> str:
    try:
        return path.expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise NotFound(f"cannot read {path}: {reason}", field=field) from error
