"""A browser, and a scripted daemon with the page's own routes."""

from __future__ import annotations

import asyncio
import json
import shutil
import threading
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from outrider.edge.daemon.app import page_routes

Piece = tuple[str, bool]  # text, and whether it was an accepted draft


def speculation(pieces: list[Piece], tokens: int, **others: Any) -> dict[str, Any]:
    """Return the `speculation` of a chunk with `pieces`, after `tokens` tokens."""
    return {
        "pieces": [{"text": text, "accepted": accepted} for text, accepted in pieces],
        "tokens": tokens,
        "accepted": max(0, tokens - max(1, tokens // 2)),
        "accepted_cloud": 0,
        "tokens_per_second": 48.0,
        "cloud_tokens_per_second": 20.0,
        "window": 7,
        "acceptance": 0.75,
        "round_trip_ms": 42.5,
        "drafter": "general",
        "uplink_bytes": 20 * tokens,
        "downlink_bytes": 30 * tokens,
        "steps": max(1, tokens // 2),
        **others,
    }


@dataclass
class FakeDaemon:
    """Answers with `pieces`, one a chunk; `hold` keeps the text from ending, `refusals` come before any answer."""

    pieces: list[Piece] = field(default_factory=lambda: [("Once", False), (" upon", True), (" a time", True)])
    hold: bool = False
    break_off: bool = False
    refusals: list[Response] = field(default_factory=list)
    health: tuple[int, dict[str, Any]] = (200, {"status": "ok"})
    versions: list[dict[str, Any]] = field(default_factory=list)
    requests: list[tuple[str, dict[str, Any], dict[str, str]]] = field(default_factory=list)
    disconnects: int = 0
    key: str = ""
    figures: dict[str, Any] = field(default_factory=dict)
    address: str = ""

    def routes(self) -> list[Route]:
        return [
            *page_routes(),
            Route("/health", self._health),
            Route("/drafters", self._drafters),
            Route("/v1/models", self._models),
            Route("/v1/chat/completions", self._answer, methods=["POST"]),
            Route("/v1/completions", self._answer, methods=["POST"]),
        ]

    async def _health(self, request: Request) -> Response:
        status, body = self.health
        return JSONResponse(body, status)

    async def _drafters(self, request: Request) -> Response:
        return JSONResponse({"versions": self.versions})

    async def _models(self, request: Request) -> Response:
        if self.key and request.headers.get("authorization") != f"Bearer {self.key}":
            return JSONResponse({"error": {"message": "no API key", "code": "missing_api_key"}}, 401)
        return JSONResponse({"object": "list", "data": [{"id": "reference", "object": "model"}]})

    async def _answer(self, request: Request) -> Response:
        self.requests.append((request.url.path, await request.json(), dict(request.headers)))
        if self.refusals:
            return self.refusals.pop(0)
        return StreamingResponse(self._events("chat" in request.url.path), media_type="text/event-stream")

    async def _events(self, chat: bool) -> AsyncIterator[str]:
        try:
            for i, piece in enumerate(self.pieces):
                text = {"delta": {"content": piece[0]}} if chat else {"text": piece[0]}
                yield _event(
                    {"choices": [{"index": 0, **text}], "speculation": speculation([piece], i + 1, **self.figures)}
                )
                await asyncio.sleep(0.01)
            while self.hold:
                yield ": still here\n\n"
                await asyncio.sleep(0.05)
        except asyncio.CancelledError:
            self.disconnects += 1
            raise
        if self.break_off:
            error = {"message": "the verifier went away", "type": "server_error", "code": "unavailable"}
            yield _event({"error": error})
            return
        done = {} if not chat else {"delta": {}}
        yield _event({"choices": [{"index": 0, "finish_reason": "stop", **done}]})
        yield _event({"choices": [], "usage": {}, "speculation": speculation([], len(self.pieces), **self.figures)})
        yield "data: [DONE]\n\n"


def _event(content: dict[str, Any]) -> str:
    return f"data: {json.dumps(content)}\n\n"


@pytest.fixture(scope="module")
def served() -> Iterator[FakeDaemon]:
    fake = FakeDaemon()
    config = uvicorn.Config(Starlette(routes=fake.routes()), host="127.0.0.1", port=0, log_level="error")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        thread.join(0.01)
    fake.address = f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    yield fake
    server.should_exit = True
    thread.join(10)


@pytest.fixture
def daemon(served: FakeDaemon) -> Iterator[FakeDaemon]:
    """The daemon, as if it were new."""
    vars(served).update(vars(FakeDaemon(address=served.address)))
    yield served
    served.hold = False


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    """Headless Chromium, the system's."""
    playwright = pytest.importorskip("playwright.sync_api", reason="needs playwright: pip install --group dev")
    path = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
    if path is None:
        pytest.skip("needs Chromium on the PATH: apt-get install chromium")
    with playwright.sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=path, args=["--no-sandbox"])
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def tab(browser: Any) -> Iterator[Any]:
    """A tab of the browser, which notes in `complaints` what its console complains of."""
    tab = browser.new_page()
    tab.complaints = []
    tab.on("pageerror", lambda error: tab.complaints.append(str(error)))
    tab.on("console", lambda line: tab.complaints.append(line.text) if line.type == "error" else None)
    yield tab
    tab.close()


@pytest.fixture
def page(tab: Any, daemon: FakeDaemon) -> Iterator[Any]:
    """The page, open as if for the first time; whatever its console complains of fails the test."""
    tab.set_viewport_size({"width": 1200, "height": 800})
    tab.emulate_media(color_scheme="light")
    tab.goto(f"{daemon.address}/health")
    tab.evaluate("localStorage.clear()")
    tab.complaints.clear()
    tab.goto(daemon.address)
    yield tab
    assert [complaint for complaint in tab.complaints if "Failed to load resource" not in complaint] == []


@pytest.fixture
def ask(page: Any) -> Callable[..., None]:
    """Asks the page's daemon something."""

    def ask(text: str = "Hello") -> None:
        page.get_by_label("Message", exact=True).fill(text)
        page.get_by_label("Message", exact=True).press("Enter")

    return ask
