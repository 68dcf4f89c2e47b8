"""Result of a client's preparation, made once and completed when the first drafter is loaded."""

from __future__ import annotations

import asyncio
import logging
import uuid
from dataclasses import replace

from outrider.drafters.packages import DrafterPackage
from outrider.drafters.pool import DrafterPool
from outrider.edge.edge_config import EdgeConfig
from outrider.edge.link.link import Channels
from outrider.edge.pool.preparation import Preparation, Ready
from outrider.proto.errors import ConfigError, OutriderError
from outrider.proto.session import DrafterSteering
from outrider.proto.types import DrafterManifest, Open, Sampling, SteeringRequest

DESCRIBED_WITHIN_S = 1.0  # by a verifier without a coordinator; if not, its first text tells as much
WATCH_AGAIN_S = 5.0  # after a coordinator went away, or cannot be watched

log = logging.getLogger(__name__)


def _close_pool(renewing: asyncio.Task[DrafterPool | None]) -> None:
    if not renewing.cancelled() and renewing.exception() is None and (pool := renewing.result()) is not None:
        pool.close()


class Prepared:
    """Preparation of one client, and what came of it.

    Attributes:
        ready: what was found; None: nothing yet.
        steering: steering of the drafter that takes vectors; None: none does.
        steering_request: request for these vectors.
    """

    def __init__(self, config: EdgeConfig, preparation: Preparation) -> None:
        self.ready: Ready | None = None
        self.steering: DrafterSteering | None = None
        self.steering_request: SteeringRequest | None = None
        self._config = config
        self._preparation = preparation
        self._lock = asyncio.Lock()
        self._loading: asyncio.Task[Ready] | None = None  # waits for the first drafter
        self._watching: asyncio.Task[None] | None = None  # for other drafters of the coordinator
        self._renewing = asyncio.Lock()

    async def find(self, channels: Channels) -> Ready:
        """Find everything, once, and leave a large drafter to load; see `Preparation.run`."""
        async with self._lock:
            ready = self.ready
            if ready is None:
                ready = self._take(await self._preparation.run())
                if ready.pending is not None:
                    self._loading = asyncio.create_task(self._load(ready))
                if self._preparation.offers_change:
                    self._watching = asyncio.create_task(self._watch(ready))
                if (expected := ready.route.expected()) is not None:  # the first text waits for no handshake
                    channels.connect(expected.address, expected.tls_name if expected.tls else None)
            return ready

    async def load(self, channels: Channels) -> Ready:
        """Find everything, and wait for the first drafter."""
        ready = await self.find(channels)
        return ready if self._loading is None else await asyncio.shield(self._loading)

    async def inquire(self, channels: Channels) -> str:
        """Return the address of the route's next text, and learn what its verifier says of its target."""
        ready = self.ready_now()
        lease = await ready.route.lease("inquiry", ())
        if not ready.prompts.context_length:
            ready.prompts.meet(await channels.described(lease, DESCRIBED_WITHIN_S))
        return lease.address

    def open(self, prompt: tuple[int, ...], sampling: Sampling) -> Open:
        """Return the frame that opens a new session; raises `ConfigError` before anything is found."""
        ready, config = self.ready_now(), self._config
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
            steering=self.steering_request,
            trees=not config.chains,
        )

    def ready_now(self) -> Ready:
        """Return what was found; raises `ConfigError` before anything is."""
        if self.ready is None:
            raise ConfigError("the client is not prepared; await prepare() or use `async with`", field="client")
        return self.ready

    async def close(self) -> None:
        """Close drafters and local texts; a drafter that loads is dropped when it is there."""
        for task in (self._loading, self._watching):
            if task is not None:
                task.cancel()
                await asyncio.gather(task, return_exceptions=True)
        if self.ready is not None:
            self.ready.close_drafters()
        if self.ready is not None and self.ready.local_texts is not None:
            await asyncio.to_thread(self.ready.local_texts.close)

    async def _load(self, ready: Ready) -> Ready:
        return self._take(await ready.with_drafters())

    @property
    def learnable(self) -> DrafterPackage | None:
        """Package of the first drafter that can learn, without what was learned here; None: there is none yet."""
        return self._preparation.learnable

    async def take_own(self, package: DrafterPackage | None) -> None:
        """Give the texts to come a version that was trained here, for as long as its parent would be in its place.

        None: they get the parent again.
        """
        if self._loading is not None:
            await asyncio.wait((self._loading,))
        async with self._renewing:
            ready = self.ready_now()
            if package is not None:
                self.ready = replace(ready, own_versions=ready.own_versions | {package.version})
            self._preparation.own = package
            await self._renew(None)

    async def _watch(self, ready: Ready) -> None:
        """Give the texts to come the drafters that the coordinator offers; texts that run keep theirs."""
        if self._loading is not None:
            await asyncio.wait((self._loading,))
        while True:
            try:
                async for offers in self._preparation.offers(ready.tokenizer_sha256):
                    async with self._renewing:
                        await self._renew(offers)
            except OutriderError as error:
                log.info("the coordinator's drafters are not watched: %s", error)
            await asyncio.sleep(WATCH_AGAIN_S)

    async def _renew(self, offers: tuple[DrafterManifest, ...] | None) -> None:
        ready = self.ready
        if ready is None:
            return
        renewing = asyncio.create_task(
            asyncio.to_thread(self._preparation.renewed, ready.drafters, offers, ready.tokenizer_sha256)
        )
        try:
            pool = await asyncio.shield(renewing)
        except asyncio.CancelledError:
            renewing.add_done_callback(_close_pool)
            raise
        except (OutriderError, OSError) as error:
            log.warning("keeping the drafters: %s", error)
            return
        if pool is not None:
            self.swap(pool)

    def swap(self, pool: DrafterPool) -> None:
        """Give the texts and turns that begin from now on the drafters of `pool`; those that run keep theirs."""
        ready = self.ready_now()
        self._take(replace(ready, drafters=pool, drafter_error="", pending=None))
        pool.want(range(len(pool)))
        if ready.drafters is not None:
            ready.drafters.close()
        log.info("texts from now on have the drafters %s", ", ".join(map("@".join, self.ready_now().offered)))

    def _take(self, ready: Ready) -> Ready:
        self.ready = ready
        shape = ready.drafters.steering if ready.drafters is not None else None
        policy = self._config.steering_policy(shape.rank, shape.gain) if shape is not None else None
        self.steering = self.steering_request = None
        if shape is not None and policy is not None:
            self.steering = DrafterSteering(shape.rank, policy)
            self.steering_request = SteeringRequest(shape.projection)
        return ready
