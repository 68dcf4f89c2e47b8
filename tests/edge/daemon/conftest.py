"""A daemon over a scripted client: no verifier, no drafter, every error on demand."""

from __future__ import annotations

import asyncio
import http.client
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from loop_thread import LoopThread
from tokenizers import Tokenizer

from outrider.drafters import DrafterShelf
from outrider.edge.daemon import DaemonConfig
from outrider.edge.daemon.http_server import Daemon
from outrider.edge.event_stream import Event, Finished, Tokens
from outrider.edge.link.routes import DirectRoute
from outrider.edge.preparation import Ready
from outrider.proto.cluster_status import VersionStatus
from outrider.proto.errors import OutriderError
from outrider.proto.session import EdgeStatistics
from outrider.proto.tokenizer import tokenizer_hash
from outrider.proto.types import CommittedToken, FinishReason, Lease, Provenance, Sampling, TokenFacts

CHATTY = "{% for m in messages %}{{ m['role'] }}: {{ m['content'] }}\n{% endfor %}"


def scored(prompt: tuple[int, ...], top: int | None) -> tuple[TokenFacts, ...]:
    """Log probabilities of a prompt: -i of the token at i, rank 3, and tokens 50, 51, ... above it."""
    if top is None:
        return ()
    likeliest = tuple((50 + j, -0.1 * (j + 1)) for j in range(top))
    return tuple(TokenFacts(-float(i), 3, likeliest) for i in range(1, len(prompt)))


class ScriptedClient:
    """A `Client` as the daemon sees it; every text is `pieces`, one token each, or `error`."""

    def __init__(self, tokenizer_json: str, *, chat_template: str = CHATTY) -> None:
        self.renew()
        self.running = 0
        self.drafter_name = "scripted"
        self.ready: Ready | None = None
        self._tokenizer_json = tokenizer_json
        self._chat_template = chat_template
        self._listener: asyncio.Server | None = None
        self._address = ""

    def renew(self) -> None:
        """Return to the script of a new one."""
        self.pieces = ["Hello", ", ", "world"]
        self.error: OutriderError | None = None  # of texts, after what `pieces` holds
        self.away: OutriderError | None = None  # of the cloud
        self.asked: list[tuple[tuple[int, ...], Sampling, dict[str, Any]]] = []
        self.silent: tuple[str, ...] = ()  # verifiers at which nobody listens
        self.ask_again_s = 0.0
        self.hold = False  # texts begin and never end
        self.reason = FinishReason.EOS
        self.stop_string: str | None = None
        self.entropy: float | None = None

    async def prepare(self) -> None:
        if self.away is not None:
            raise self.away
        if self.ready is None:
            self._listener = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0)
            self._address = f"127.0.0.1:{self._listener.sockets[0].getsockname()[1]}"
            sha256 = tokenizer_hash(self._tokenizer_json)
            route = DirectRoute((self._address,), "tiny", sha256)
            tokenizer = Tokenizer.from_str(self._tokenizer_json)
            self.ready = Ready(route, "tiny", tokenizer, sha256, DrafterShelf(), chat_template=self._chat_template)

    async def versions(self) -> tuple[VersionStatus, ...]:
        return (VersionStatus(self.drafter_name, "1", "current"),)

    async def inquire(self, avoid: Sequence[str] = ()) -> Lease:
        """The verifiers that are silent first, then the one that answers."""
        if self.away is not None:
            raise self.away
        places = [*((name, "127.0.0.1:1") for name in self.silent if name not in avoid), ("v", self._address)]
        return Lease(b"", *places[0], 60.0, "tiny", "", ask_again_s=self.ask_again_s)

    async def generate(self, prompt: Any, sampling: Sampling, **options: Any) -> AsyncGenerator[Event]:
        self.asked.append((prompt, sampling, options))
        self.running += 1
        try:
            await asyncio.sleep(0)
            for i, piece in enumerate(self.pieces):
                top = ((5 + i, -0.5), (7, -1.5)) if options["top_logprobs"] else ()
                facts = TokenFacts(-0.5, 1, top, self.entropy) if options["logprobs"] else None
                token = CommittedToken(5 + i, facts and -0.5, facts)
                of_prompt = scored(prompt, options["prompt_logprobs"]) if i == 0 else ()
                yield Tokens(len(prompt) + i, (token,), (Provenance.TARGET,), (piece,), of_prompt)
            if self.error is not None:
                raise self.error
            while self.hold:  # noqa: ASYNC110 - until the test lets go
                await asyncio.sleep(0.01)
            yield Finished(self.reason, "", EdgeStatistics(), 0.1, 0.05, self.stop_string)
        finally:
            self.running -= 1

    async def close(self) -> None:
        if self._listener is not None:
            self._listener.close()


class Reply:
    """An HTTP answer."""

    def __init__(self, answer: http.client.HTTPResponse) -> None:
        self.status = answer.status
        self.headers = answer.headers
        self.body = answer.read()

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        """OpenAI's error object, whole."""
        assert self.headers["Content-Type"] == "application/json"
        (error,) = self.json.values()
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        return error

    @property
    def events(self) -> list[Any]:
        """The JSON of server-sent events; the end is `[DONE]` itself."""
        assert self.headers["Content-Type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in self.body.decode().split("\n\n") if line]
        return [line if line == "[DONE]" else json.loads(line) for line in lines]

    @property
    def named_events(self) -> list[dict[str, Any]]:
        """The JSON of server-sent events, each of which is named by its type."""
        assert self.headers["Content-Type"].startswith("text/event-stream")
        blocks = [block.split("\n") for block in self.body.decode().strip().split("\n\n")]
        read = [json.loads(data.removeprefix("data: ")) for _, data in blocks]
        assert [name for name, _ in blocks] == [f"event: {event['type']}" for event in read]
        return read


class LiveDaemon:
    """A daemon on an event loop of its own, spoken to from the test's thread."""

    def __init__(self, client: ScriptedClient, **config: Any) -> None:
        self.client = client
        self._loop = LoopThread()
        self.run = self._loop.run
        self.daemon = self.run(_make(client, config))
        self.url = self.run(self.daemon.start())
        self.port = int(self.url.rpartition(":")[2])
        self.until(lambda: client.away is not None or self.get("/health").status == 200)

    def until(self, holds: Callable[[], object]) -> None:
        async def wait() -> None:
            for _ in range(1000):
                if await asyncio.to_thread(holds):
                    return
                await asyncio.sleep(0.02)
            raise AssertionError("it never came to hold")

        self.run(wait())

    def request(self, method: str, path: str, body: bytes = b"", **headers: str) -> Reply:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=30)
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        try:
            connection.request(method, path, body or None, named)
            return Reply(connection.getresponse())
        finally:
            connection.close()

    def get(self, path: str, **headers: str) -> Reply:
        return self.request("GET", path, **headers)

    def post(self, path: str, body: Any, **headers: str) -> Reply:
        data = body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.request("POST", path, data, **{"Content_Type": "application/json", **headers})

    def complete(self, **fields: Any) -> Reply:
        return self.post("/v1/completions", {"model": "tiny", "prompt": "a prompt", **fields})

    def chat(self, **fields: Any) -> Reply:
        messages = [{"role": "user", "content": "hi"}]
        return self.post("/v1/chat/completions", {"model": "tiny", "messages": messages, **fields})

    @contextmanager
    def held(self, ask: Callable[[], Any], running: int = 1) -> Iterator[list[Any]]:
        """Ask for a text that is held meanwhile; its reply is in the list that is yielded, once it has come."""
        self.client.hold, replies = True, []
        asking = threading.Thread(target=lambda: replies.append(ask()))
        asking.start()
        self.until(lambda: self.client.running == running)
        yield replies
        asking.join(60)

    def close(self) -> None:
        self.run(self.daemon.stop())
        self._loop.close()


async def _make(client: ScriptedClient, config: dict[str, Any]) -> Daemon:
    daemon = Daemon(DaemonConfig(**{"listen": "127.0.0.1:0", "grace_s": 0.2, **config}), client)  # type: ignore[arg-type]
    daemon.cloud.every_s = 0.05
    return daemon


@pytest.fixture(scope="session")
def start(tokenizer_file: Path) -> Callable[..., Any]:
    """Start a daemon: `with start(max_requests=2) as live`; `client` is one made by the test."""

    @contextmanager
    def starting(client: ScriptedClient | None = None, **config: Any) -> Iterator[LiveDaemon]:
        live = LiveDaemon(client or ScriptedClient(tokenizer_file.read_text()), **config)
        try:
            yield live
        finally:
            live.close()

    return starting


@pytest.fixture(scope="session")
def scripted(tokenizer_file: Path) -> Callable[..., ScriptedClient]:
    def make(**options: Any) -> ScriptedClient:
        return ScriptedClient(tokenizer_file.read_text(), **options)

    return make


@pytest.fixture(scope="session")
def _shared(start: Callable[..., Any]) -> Iterator[LiveDaemon]:
    with start() as running:
        yield running


@pytest.fixture
def live(_shared: LiveDaemon) -> LiveDaemon:
    """A daemon with default options, its client as new."""
    _shared.client.renew()
    return _shared
