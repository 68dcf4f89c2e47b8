"""A real browser with a page of another origin: it may read answers where that origin is allowed, and nothing else."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from loop_thread import LoopThread
from scripted_cloud import scripted_client

from outrider.edge.daemon import DaemonConfig
from outrider.edge.daemon.http_server import Daemon

ASK = """async (url) => {
  try {
    const headers = { "Content-Type": "application/json", Authorization: "Bearer x", "X-Stainless-Lang": "js" };
    const body = JSON.stringify({ model: "tiny", prompt: "x", temprature: 1 });
    const answer = await fetch(`${url}/v1/completions`, { method: "POST", headers, body });
    return [answer.status, answer.headers.get("X-Outrider-Ignored"), (await answer.json()).error.code];
  } catch (error) {
    return error.name;
  }
}"""


class _Blank(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200)
        self.send_header("Content-Type", "text/html")
        self.end_headers()
        self.wfile.write(b"<!doctype html><title>app</title>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture(scope="module")
def app() -> Iterator[str]:
    """Origin of a page that is not the daemon's."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Blank)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://localhost:{server.server_port}"
    server.shutdown()
    server.server_close()


@pytest.mark.parametrize(("allowed", "answer"), [(True, [503, "temprature", "unavailable"]), (False, "TypeError")])
def test_a_page_of_another_origin_reads_answers_where_it_is_allowed(
    browser: Any, app, tokenizer_file, allowed, answer
) -> None:
    loop = LoopThread()
    client, _ = scripted_client(tokenizer_file)  # whose cloud is away

    async def make() -> Daemon:
        return Daemon(DaemonConfig(listen="127.0.0.1:0", grace_s=0.1, allow_origin=(app,) if allowed else ()), client)

    daemon = loop.run(make())
    url = loop.run(daemon.start())
    page = browser.new_page()
    try:
        page.goto(app)
        assert page.evaluate(ASK, url) == answer
    finally:
        page.close()
        loop.run(daemon.stop())
        loop.close()
