"""Result of a client's preparation, made once and completed when the first drafter is loaded."""

from __future__ import annotations

import asyncio

from outrider.edge.config import EdgeConfig
from outrider.edge.link import Channels
from outrider.edge.preparation import Preparation, Ready
from outrider.proto.session import DrafterSteering
from outrider.proto.types import SteeringRequest


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

    async def find(self, channels: Channels) -> Ready:
        """Find everything, once, and leave a large drafter to load; see `Preparation.run`."""
        async with self._lock:
            ready = self.ready
            if ready is None:
                ready = self._take(await self._preparation.run())
                if ready.pending is not None:
                    self._loading = asyncio.create_task(self._load(ready))
                if (expected := ready.route.expected()) is not None:  # the first text waits for no handshake
                    channels.connect(expected.address, expected.tls_name if expected.tls else None)
            return ready

    async def load(self, channels: Channels) -> Ready:
        """Find everything, and wait for the first drafter."""
        ready = await self.find(channels)
        return ready if self._loading is None else await asyncio.shield(self._loading)

    async def close(self) -> None:
        """Close drafters and local texts; a drafter that loads is dropped when it is there."""
        if self._loading is not None:
            self._loading.cancel()
            await asyncio.gather(self._loading, return_exceptions=True)
        if self.ready is not None:
            self.ready.close_drafters()
        if self.ready is not None and self.ready.local_texts is not None:
            await asyncio.to_thread(self.ready.local_texts.close)

    async def _load(self, ready: Ready) -> Ready:
        return self._take(await ready.with_drafters())

    def _take(self, ready: Ready) -> Ready:
        self.ready = ready
        shape = ready.drafters.steering if ready.drafters is not None else None
        policy = self._config.steering_policy(shape.rank, shape.gain) if shape is not None else None
        if shape is not None and policy is not None:
            self.steering = DrafterSteering(shape.rank, policy)
            self.steering_request = SteeringRequest(shape.projection)
        return ready
