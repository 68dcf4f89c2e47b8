"""The verifiers of a local cluster as edges at the other end of an emulated link see them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AsyncExitStack
from dataclasses import replace

from outrider.coordinator.cluster import VerifierInfo
from outrider.coordinator.ray_cluster import RayCluster
from outrider.deploy.link.link_process import LinkProcess
from outrider.deploy.link.shape import LinkShape


class FarFleet(RayCluster):
    """A Ray cluster's fleet, with a link in front of each verifier.

    Args:
        shape: shape of each link.
        respawn: as `RayCluster` takes it.

    Attributes:
        near: whether edges are given the verifiers' own addresses for now.
    """

    def __init__(self, shape: LinkShape, respawn: Callable[[str], object]) -> None:
        super().__init__(respawn=respawn)
        self.near = False
        self._shape = shape
        self._links: dict[str, str] = {}  # addresses of links by those of verifiers
        self._processes = AsyncExitStack()
        self._opening = asyncio.Lock()

    async def refresh(self) -> tuple[VerifierInfo, ...]:
        """Return the fleet, each verifier at its link's address; raises `Unavailable` if Ray itself does not answer."""
        infos = await super().refresh()
        if self.near:
            return infos
        return tuple([replace(info, address=await self._far(info.address)) for info in infos])

    async def close(self) -> None:
        await self._processes.aclose()
        await super().close()

    async def _far(self, address: str) -> str:
        """Return the address of the link to a verifier; the link of one that is gone stays until the end."""
        if not address:
            return ""
        async with self._opening:
            if address not in self._links:
                link = await self._processes.enter_async_context(LinkProcess(to=address, shape=self._shape))
                self._links[address] = link.address
            return self._links[address]
