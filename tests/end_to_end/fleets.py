"""Verifiers and their coordinator in this process, on loopback; what a test waits for, and what it has sent."""

from __future__ import annotations

import asyncio
import functools
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from outrider.cloud.models.family_index import target_folder, tokenizer_file
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.coordinator.coordinator_config import CoordinatorConfig, StaticVerifier
from outrider.coordinator.coordinator_server import CoordinatorServer
from outrider.edge import Client, EdgeConfig
from outrider.edge.decoding import Observer
from outrider.edge.link.routes import DirectRoute
from outrider.proto.lease import LeaseClaim, sign_lease
from outrider.proto.types import CloudFrame, Commit, Draft, EdgeFrame, Lease, LeaseRequest, Opened

SECRET = b"a secret of the whole fleet"


@dataclass(frozen=True)
class Fleet:
    """A coordinator with its verifiers, by name."""

    config: CoordinatorConfig
    coordinator: CoordinatorServer
    address: str
    verifiers: dict[str, VerifierServer]

    def edge(self, cache: Path, **config: Any) -> EdgeConfig:
        return EdgeConfig(**{"coordinator": self.address, "cache": cache, "drafter": "none"} | config)

    def client(self, cache: Path, **config: Any) -> Client:
        """A client that finds the verifiers by the coordinator; it has no drafter unless one is named."""
        return Client(self.edge(cache, **config))


@asynccontextmanager
async def fleet(
    *names: str,
    tiny: Path | None = None,
    verifier: dict[str, Any] | None = None,
    sink: Any = None,
    chat_template_json: str = "",
    **coordinator: Any,
) -> AsyncIterator[Fleet]:
    """Serve the embedded target, or `tiny` in its folder, at verifiers of these names, and coordinate them.

    Args:
        verifier: options of all verifiers.
        sink: takes what verifiers teach.
        chat_template_json: of their target, which the coordinator passes on.
        coordinator: options of the coordinator.
    """
    model = "tiny" if tiny else "reference"
    target = {"target": str(tiny), "model": model} if tiny else {}
    file = tiny / "tokenizer.json" if tiny else tokenizer_file(target_folder("reference"))
    tokenizer = await asyncio.to_thread(file.read_text, encoding="utf-8")
    async with AsyncExitStack() as stack:
        verifiers, fixed = {}, []
        for name in names:
            config = VerifierConfig(**{"name": name, "threads": 1} | target | (verifier or {}))
            verifiers[name] = VerifierServer(config, SECRET, sink=sink)
            stack.push_async_callback(verifiers[name].stop, 0)
            template = {"chat_template_json": chat_template_json}
            fixed.append(StaticVerifier(name, await verifiers[name].start(), model, tokenizer, **template))
        options = {"lease_secret": SECRET, "listen": "127.0.0.1:0", "verifiers": tuple(fixed)}
        asked = CoordinatorConfig(**options | coordinator)
        served = CoordinatorServer(asked)
        stack.push_async_callback(served.stop, 0)
        yield Fleet(asked, served, await served.start(), verifiers)


class LeasedRoute(DirectRoute):
    """Leases of the API key that is set, for the verifier `v` of the model `tiny`, which knows `SECRET`."""

    api_key = ""
    lasts_s = 60.0

    async def lease(self, request: LeaseRequest, transcript: Sequence[int] = ()) -> Lease:
        lease = await super().lease(request, transcript)
        claim = LeaseClaim("v", "tiny", request.session, time.time() + self.lasts_s, self.api_key, epoch=request.epoch)
        return replace(lease, token=sign_lease(claim, SECRET))


def run_by(fixture: str) -> Callable[[Callable[..., Any]], Callable[..., None]]:
    """Let a test, which is a coroutine, be run by one of its fixtures, on the event loop of what is shared."""

    def decorate(test: Callable[..., Any]) -> Callable[..., None]:
        @functools.wraps(test)
        def run(**fixtures: Any) -> None:
            fixtures[fixture].run(test(**fixtures))

        return run

    return decorate


async def until(holds: Callable[[], object]) -> None:
    """Wait until a condition holds, for four minutes at most."""
    async with asyncio.timeout(240):
        while not holds():  # noqa: ASYNC110 - the condition has no event
            await asyncio.sleep(0.01)


class SentFrames(Observer):
    """Keeps what an edge has sent, and what has come, by stream."""

    def __init__(self) -> None:
        self.frames: list[EdgeFrame] = []
        self.streams: list[tuple[Opened, list[Commit]]] = []

    def sent(self, frame: EdgeFrame, at: float) -> None:
        self.frames.append(frame)

    def received(self, frame: CloudFrame, at: float) -> None:
        if isinstance(frame, Opened):
            self.streams.append((frame, []))
        elif isinstance(frame, Commit):
            self.streams[-1][1].append(frame)

    def of(self, kind: type[Any]) -> list[Any]:
        return [frame for frame in self.frames if isinstance(frame, kind)]

    def versions(self) -> set[str]:
        """Versions of drafters that drafts name."""
        return {draft.drafter_version for draft in self.of(Draft) if draft.drafter}
