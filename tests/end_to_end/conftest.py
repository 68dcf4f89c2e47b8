"""Verifiers and edges on loopback, and a relay that cuts streams at will."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from loop_thread import LoopThread

from outrider.cloud.models.family_index import target_folder, tokenizer_file
from outrider.cloud.serving import backends
from outrider.cloud.serving.local_source import LocalSource
from outrider.cloud.serving.own_drafter import DraftThreads, OwnDrafter
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.testing import save_tiny_target
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.built_in_prompts import DOMAINS, HELD_OUT, Prompt, read_prompts
from outrider.edge import Client, EdgeConfig
from outrider.edge.link.routes import DirectRoute

TOKENIZER = tokenizer_file(target_folder("reference"))


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory, tokenizer_file: Path) -> Path:
    """A tiny random Llama with the embedded target's tokenizer."""
    return save_tiny_target(
        tmp_path_factory.mktemp("tiny"),
        tokenizer=tokenizer_file.read_text(encoding="utf-8"),
        vocab_size=8192,
        num_hidden_layers=2,
        max_position_embeddings=2048,
        bos_token_id=0,
        eos_token_id=1,
    )


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Llama with a word a token."""
    return save_tiny_target(tmp_path_factory.mktemp("folder"))


@pytest.fixture(scope="session")
def prompts() -> Callable[[int], list[Prompt]]:
    """The first n held-out prompts of each domain."""

    def first(n: int) -> list[Prompt]:
        return [prompt for domain in DOMAINS for prompt in read_prompts(HELD_OUT / f"{domain}.jsonl", n)]

    return first


@asynccontextmanager
async def _serving(**config: Any) -> AsyncIterator[str]:
    served = VerifierServer(VerifierConfig(**{"threads": 1, **config}))
    try:
        yield await served.start()
    finally:
        await served.stop(0)


@pytest.fixture
def drafting(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A verifier with a drafter of its own, made from the target's facts, and its server to look into."""

    @asynccontextmanager
    async def serve(own: Callable[[Any], OwnDrafter], **config: Any) -> AsyncIterator[tuple[str, VerifierServer]]:
        with monkeypatch.context() as patch:
            threads = config.pop("draft_threads", 1)
            patch.setattr(backends, "local_source", lambda _, target: LocalSource(own(target), DraftThreads(threads)))
            served = VerifierServer(VerifierConfig(**{"threads": 1, **config}))
        try:
            yield await served.start(), served
        finally:
            await served.stop(0)

    return serve


@asynccontextmanager
async def _edge(*addresses: str, drafter: Any = None, **config: Any) -> AsyncIterator[Client]:
    """An edge that knows verifiers by address; `drafter` is a name or an object."""
    if isinstance(drafter, str):
        config["drafter"], drafter = drafter, None
    edge = EdgeConfig(**{"verifier": addresses[0], "model": "reference", "tokenizer": TOKENIZER, **config})
    client = Client(edge, drafters=() if drafter is None else (drafter,))
    await client.prepare()
    if len(addresses) > 1:
        ready = client.ready
        assert ready is not None
        object.__setattr__(ready, "route", DirectRoute(addresses, edge.model, ready.tokenizer_sha256))
    try:
        yield client
    finally:
        await client.close()


class Relay:
    """Bytes through a port of its own; `cut` breaks every connection that passes through it."""

    def __init__(self, target: str) -> None:
        self.address = ""
        self.cuts = 0
        self._host, _, port = target.partition(":")
        self._port = int(port)
        self._writers: set[asyncio.StreamWriter] = set()
        self._server: asyncio.Server | None = None

    async def __aenter__(self) -> Relay:
        self._server = await asyncio.start_server(self._serve, "127.0.0.1", 0)
        self.address = f"127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        self.cut()
        assert self._server is not None
        self._server.close()

    def cut(self) -> None:
        self.cuts += bool(self._writers)
        for writer in self._writers:
            writer.transport.abort()
        self._writers.clear()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        onward_reader, onward_writer = await asyncio.open_connection(self._host, self._port)
        self._writers |= {writer, onward_writer}
        with contextlib.suppress(ConnectionError, OSError):
            await asyncio.gather(self._copy(reader, onward_writer), self._copy(onward_reader, writer))

    async def _copy(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while data := await reader.read(65536):
            writer.write(data)
            await writer.drain()
        writer.close()


@pytest.fixture(scope="session")
def serving() -> Callable[..., Any]:
    return _serving


@pytest.fixture(scope="session")
def verifier() -> Iterator[str]:
    """Address of a verifier of the embedded target without options, which all tests share; it drafts nothing itself."""
    loop = LoopThread()

    async def start() -> tuple[VerifierServer, str]:
        served = VerifierServer(VerifierConfig(threads=1, draft_here="off"))
        return served, await served.start()

    served, address = loop.run(start())
    yield address
    loop.run(served.stop(0))
    loop.close()


@pytest.fixture(scope="session")
def edge() -> Callable[..., Any]:
    return _edge


@pytest.fixture(scope="session")
def relay() -> type[Relay]:
    return Relay
