"""Keys of one daemon: none learns from another's what it has asked, and none is learned from that did not agree."""

from __future__ import annotations

import asyncio
import json
import urllib.request

import pytest
from fleets import SECRET, LeasedRoute

from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.testing import save_tiny_target
from outrider.cloud.verifier_config import VerifierConfig
from outrider.edge import Client, EdgeConfig, Tenant
from outrider.edge.daemon import DaemonConfig
from outrider.edge.daemon.http_server import Daemon
from outrider.proto.plumbing.access import Key, new_secret, secret_sha256
from outrider.proto.session import EdgeSession
from outrider.proto.testing import write_keys
from outrider.proto.types import Open

PROMPT = [3 + (7 * i) % 50 for i in range(45)]
SECRETS = {name: new_secret() for name in ("alice", "bob")}


class Texts:
    """A trainer that notes whose texts it gets, by the first token of their prompts."""

    def __init__(self) -> None:
        self.prompts: list[int] = []

    def take(self, text) -> None:
        self.prompts.append(text.tokens[0])


def post(url: str, name: str, prompt: list[int]) -> dict:
    headers = {"Content-Type": "application/json", "Authorization": f"Bearer {SECRETS[name]}"}
    body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 1, "seed": 3}
    request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return json.load(answer)


@pytest.fixture
def opened(monkeypatch) -> list[Open]:
    """Return the list of the frames that open sessions."""
    frames: list[Open] = []

    class Noted(EdgeSession):
        def __init__(self, frame: Open, *args: object, **options: object) -> None:
            frames.append(frame)
            super().__init__(frame, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr("outrider.edge.client.EdgeSession", Noted)
    return frames


async def test_no_key_of_a_daemon_finds_what_another_has_asked_or_is_learned_from_unasked(tmp_path, opened) -> None:
    keys = write_keys(
        tmp_path / "keys.toml",
        *(Key(name, secret_sha256(secret), learning=name == "alice") for name, secret in SECRETS.items()),
    )

    target = save_tiny_target(tmp_path / "target")
    server = VerifierServer(VerifierConfig(target=str(target), model="tiny", threads=1, kv_tokens=4096))
    edge = EdgeConfig(
        verifier=await server.start(),
        model="tiny",
        tokenizer=target / "tokenizer.json",
        drafter="ngram",
        draft_answers=tmp_path / "answers",
        cache=tmp_path / "cache",
        share_texts=True,
    )
    client, texts = Client(edge), Texts()
    client.trainer = texts.take
    daemon = Daemon(DaemonConfig(listen="127.0.0.1:0", api_keys=keys), client)
    url = await daemon.start()
    try:
        await asyncio.wait_for(daemon.cloud.found.wait(), 60)
        cached: dict[str, list[int]] = {"alice": [], "bob": []}
        told = set()
        for name in ("alice", "bob", "alice", "bob"):
            answer = await asyncio.to_thread(post, url, name, PROMPT)
            cached[name].append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            told.add(answer["choices"][0]["text"])
        await asyncio.to_thread(post, url, "bob", [9, *PROMPT])
        assert len(told) == 1
        assert cached == {name: [0, len(PROMPT) - 1] for name in cached}, "to each its own"
    finally:
        await daemon.stop()
        await server.stop(0)
    assert texts.prompts == [PROMPT[0]] * 2
    assert len(list((tmp_path / "answers").rglob("*.tokens"))) == 2
    assert [frame.learning is not None for frame in opened] == [True, False, True, False, False]
    assert len({frame.isolation for frame in opened}) == 2


async def test_a_mark_of_an_edge_adds_to_the_api_key_of_its_lease_and_never_replaces_it(tmp_path) -> None:
    target = save_tiny_target(tmp_path)
    config = VerifierConfig(name="v", target=str(target), model="tiny", threads=1, kv_tokens=4096)
    server = VerifierServer(config, SECRET)
    edge = EdgeConfig(verifier=await server.start(), model="tiny", tokenizer=target / "tokenizer.json", drafter="none")
    route = LeasedRoute((edge.verifier,), "tiny", server.tokenizer_sha256)
    found = []
    try:
        async with Client(edge, route=route) as client:
            for route.api_key, mark in (("one", b""), ("one", b"m"), ("two", b"m"), ("two", b""), ("one", b"m")):
                text = await client.complete(PROMPT, max_tokens=4, tenant=Tenant(mark))
                found.append(text.statistics.cached_tokens)
    finally:
        await server.stop(0)
    assert found == [0, 0, 0, 0, len(PROMPT) - 1]
