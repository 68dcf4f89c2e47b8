"""A key's sessions over two verifiers and their coordinator: one limit for all, and what happens at revocation."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from collections.abc import AsyncGenerator, AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from fleets import SECRET, Fleet, LeasedRoute, fleet, until

from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.testing import save_tiny_target
from outrider.cloud.verifier_config import VerifierConfig
from outrider.edge import Client, EdgeConfig, Tenant
from outrider.edge.daemon import DaemonConfig
from outrider.edge.daemon.http_server import Daemon
from outrider.edge.link.control_client import CoordinatorClient
from outrider.edge.link.security import Security
from outrider.proto.errors import ResourceExhausted, Unauthenticated
from outrider.proto.plumbing.access import Key, new_secret, secret_sha256
from outrider.proto.session import EdgeSession
from outrider.proto.testing import write_keys
from outrider.proto.types import LeaseRequest, Open, SessionReport

PROMPT = "def main(argv):\n"
LONG: dict[str, Any] = {"max_tokens": 1200, "ignore_eos": True}


@dataclass
class Cluster:
    """Two verifiers and a coordinator, whose key alice has a limit."""

    fleet: Fleet
    keys: Path
    folder: Path

    def write_keys(self, max_sessions: int | None, *, name: str = "alice") -> None:
        write_keys(self.keys, Key(name, secret_sha256(f"{name}s"), max_sessions=max_sessions))

    @property
    def service(self) -> Any:
        return self.fleet.coordinator.service

    def client(self) -> Client:
        return self.fleet.client(self.folder, api_key="alices")

    def texts(self) -> int:
        return sum(len(texts) for v in self.fleet.verifiers.values() for texts in v.texts_of_keys.values())


@asynccontextmanager
async def cluster(folder: Path, max_sessions: int | None) -> AsyncIterator[Cluster]:
    keys = folder / "keys.toml"
    write_keys(keys, Key("alice", secret_sha256("alices"), max_sessions=max_sessions))
    # Slow enough for a text to go on while the coordinator looks at it twice.
    async with fleet("a", "b", verifier={"min_step_s": 0.02}, api_keys=keys, poll_s=0.1) as found:
        yield Cluster(found, keys, folder)


async def take(events: AsyncGenerator[Any], into: list[int]) -> None:
    async for event in events:
        into += getattr(event, "ids", ())


async def test_a_text_counts_at_every_verifier_though_its_edge_says_that_it_has_ended(tmp_path) -> None:
    async with cluster(tmp_path, max_sessions=1) as made, made.client() as client:
        control = CoordinatorClient(made.fleet.address, security=Security(api_key="alices"))
        running = client.generate(PROMPT, **LONG)
        await anext(running)
        (decoding,) = client._decodings
        await control.report(SessionReport(session=decoding.session, model="reference", verifier="a"))
        request = LeaseRequest(model="reference", session="another", avoid=("a",))
        admission = made.service.admission
        await until(lambda: admission.running() == {"alice": 1})
        with pytest.raises(ResourceExhausted, match="1 sessions running"):
            await control.open_lease(request)
        await running.aclose()
        await until(lambda: admission.running() == {})
        assert (await control.open_lease(request)).verifier == "b"
        await control.close()


async def test_kept_conversations_at_two_verifiers_have_one_limit_and_lose_no_text(tmp_path) -> None:
    async with (
        cluster(tmp_path, max_sessions=2) as made,
        made.client() as client,
        client.conversation(**LONG) as one,
        client.conversation(**LONG) as other,
    ):
        first = [talk.say(PROMPT) for talk in (one, other)]
        for turn in first:
            await anext(turn)
        assert {talk._decoding.machine.verifier for talk in (one, other)} == {"a", "b"}  # type: ignore[union-attr]
        for turn in first:
            await turn.aclose()  # the verifiers keep both
        await until(lambda: made.texts() == 0)
        made.write_keys(max_sessions=1)

        before = [talk.transcript.tokens for talk in (one, other)]
        tokens: list[list[int]] = [[], []]
        turns = [
            asyncio.create_task(take(talk.say("\n# more\n"), into))
            for talk, into in zip((one, other), tokens, strict=True)
        ]
        await until(lambda: made.texts() == 2)
        await until(lambda: made.texts() == 1 or any(turn.done() for turn in turns))
        assert not any(turn.done() for turn in turns), "both went on to their end"

        # Once the one that stayed is left, the other goes on.
        going = [len(text) for text in tokens]
        await until(lambda: any(len(text) > had + 10 for text, had in zip(tokens, going, strict=True)))
        stayed = max((0, 1), key=lambda i: len(tokens[i]) - going[i])
        waited, had = 1 - stayed, len(tokens[1 - stayed])
        turns[stayed].cancel()
        await until(lambda: len(tokens[waited]) > had + 10)
        turns[waited].cancel()
        await asyncio.wait(turns)
        for start, text, talk in zip(before, tokens, (one, other), strict=True):
            prompt = talk.transcript.tokens[: len(talk.transcript.tokens) - len(text)]
            assert prompt[: len(start)] == start
            oracle = await client.complete(prompt, max_tokens=len(text), ignore_eos=True)
            assert list(oracle.ids) == text, "nothing is lost, repeated or changed"


async def test_a_revoked_keys_text_ends_at_its_verifier_long_before_its_lease(tmp_path) -> None:
    async with cluster(tmp_path, max_sessions=None) as made, made.client() as client:
        tokens: list[int] = []
        running = client.generate(PROMPT, **LONG)
        tokens += (await anext(running)).ids
        await until(lambda: made.service.verifiers[0].texts_of_keys)
        made.write_keys(None, name="bob")
        with pytest.raises(Unauthenticated, match="not known"):
            await take(running, tokens)
        assert 0 < len(tokens) < LONG["max_tokens"]
        await until(lambda: made.texts() == 0)
        made.write_keys(None)
        assert list((await client.complete(PROMPT, **LONG | {"max_tokens": len(tokens)})).ids) == tokens


async def test_a_coordinator_without_ray_knows_how_many_sessions_its_verifiers_have(tmp_path) -> None:
    async with cluster(tmp_path, max_sessions=None) as made, made.client() as client:
        service = made.service
        running = [client.generate(PROMPT, **LONG) for _ in range(3)]
        for text in running:
            await anext(text)
        await until(lambda: sum(v.sessions for v in service.verifiers) == 3)
        assert {v.sessions for v in service.verifiers} == {1, 2}
        expected = [(v.rules.name, 32, v.incarnation) for v in made.fleet.verifiers.values()]
        assert [(v.name, v.max_sessions, v.incarnation) for v in service.verifiers] == expected
        assert all(v.step_s > 0 and v.kv_pages > 0 for v in service.verifiers)
        for text in running:
            await text.aclose()
        await until(lambda: sum(v.sessions for v in service.verifiers) == 0)


# --- keys of one daemon: none learns from another's, and none is learned from that did not agree ---

ASKED = [3 + (7 * i) % 50 for i in range(45)]
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
            answer = await asyncio.to_thread(post, url, name, ASKED)
            cached[name].append(answer["usage"]["prompt_tokens_details"]["cached_tokens"])
            told.add(answer["choices"][0]["text"])
        await asyncio.to_thread(post, url, "bob", [9, *ASKED])
        assert len(told) == 1
        assert cached == {name: [0, len(ASKED) - 1] for name in cached}, "to each its own"
    finally:
        await daemon.stop()
        await server.stop(0)
    assert texts.prompts == [ASKED[0]] * 2
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
                text = await client.complete(ASKED, max_tokens=4, tenant=Tenant(mark))
                found.append(text.statistics.cached_tokens)
    finally:
        await server.stop(0)
    assert found == [0, 0, 0, 0, len(ASKED) - 1]
