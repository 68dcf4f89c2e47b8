"""Three switches, of verifier, edge and API key: texts are kept where all are on, and the same in any case."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from types import SimpleNamespace

import pytest
import ray
from fleets import SECRET, fleet
from kept_lessons import KeptLessons

from outrider.cloud.learning import lessons
from outrider.cloud.learning import trainer_actor as trainers
from outrider.cloud.learning.inclusion import Inclusion
from outrider.cloud.learning.lesson_record import LessonRecord
from outrider.cloud.learning.lessons import TICK_S
from outrider.cloud.serving.verifier_actor import VerifierActor
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.coordinator.coordinator_config import CoordinatorConfig, StaticVerifier
from outrider.coordinator.coordinator_server import CoordinatorServer
from outrider.deploy.cli import main
from outrider.deploy.local import fleet as ray_fleet
from outrider.edge import Client, EdgeConfig
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.access import Key, secret_sha256
from outrider.proto.salts import salted
from outrider.proto.testing import write_keys

PROMPT, TOKENS = (5, 6, 7, 8), 24


def keys_file(path: Path, *learning: str) -> Path:
    """Keys of alice and bob; those named allow learning."""
    return write_keys(
        path, *(Key(name, secret_sha256(f"{name}s"), learning=name in learning) for name in ("alice", "bob"))
    )


async def decode(coordinator: str, cache: Path, key: str, *, share: bool, turns: int = 1, **more) -> list[int]:
    config = EdgeConfig(coordinator=coordinator, cache=cache, drafter="none", api_key=key, share_texts=share)
    settings = {"max_tokens": TOKENS, "temperature": 1.0, "seed": 3, "ignore_eos": True, **more}
    async with Client(config) as client:
        if turns == 1:
            return list((await client.complete(PROMPT, **settings)).ids)
        said: list[int] = []
        async with client.conversation(keep_s=30.0, **settings) as chat:
            for _ in range(turns):
                said += (await chat.complete(PROMPT)).ids
        return said


@pytest.fixture(autouse=True)
def every_row(monkeypatch) -> None:
    """Let lessons cost what they may: steps of a tiny target would pay for few."""
    monkeypatch.setattr(lessons, "Inclusion", lambda positions_s, _, now: Inclusion(positions_s, 1e6, now))


@asynccontextmanager
async def served(folder: Path, learn: bool, keys: Path | None = None) -> AsyncIterator[tuple[str, list[LessonRecord]]]:
    """A coordinator's address, and the records that its verifier has made when this is over."""
    kept, records = KeptLessons(), list[LessonRecord]()
    learning = {"learn": learn}
    async with fleet("a", tiny=folder, verifier=learning, sink=kept if learn else None, api_keys=keys) as found:
        yield found.address, records
        await asyncio.sleep(4 * TICK_S)
    records += kept.records


async def test_a_text_is_kept_where_verifier_edge_and_key_allow_it_and_is_always_the_same(folder, tmp_path) -> None:
    keys = keys_file(tmp_path / "keys.toml", "alice")
    asked = [*itertools.product((False, True), ("bobs", "alices"))]
    told: dict[bool, list[list[int]]] = {False: [], True: []}
    for learn, texts in told.items():
        async with served(folder, learn, keys) as (address, records):
            for share, key in asked:
                texts.append(await decode(address, tmp_path, key, share=share, seed=int(share)))
            texts.append(await decode(address, tmp_path, "alices", share=False, seed=1))
        assert [record.tokens.tolist() for record in records] == [[*PROMPT, *texts[3]]] * learn
        assert all(record.key_salt == salted(SECRET, "key alice") for record in records)
    assert told[False] == told[True]
    assert [len(text) for text in texts] == [TOKENS] * 5
    assert texts[0] == texts[1] != texts[2] == texts[3] == texts[4]


async def test_without_api_keys_all_texts_that_are_shared_are_kept_but_constrained_ones(folder, tmp_path) -> None:
    async with served(folder, learn=True) as (address, records):
        for share in (True, False):
            await decode(address, tmp_path, "", share=share, turns=3)
        await decode(address, tmp_path, "", share=True, logit_bias=((5, 1.0),))
        await decode(address, tmp_path, "", share=True, allowed_tokens=tuple(range(5, 30)))
    assert [record.key_salt for record in records] == [salted(SECRET, "key ")] * 3


def test_a_verifier_that_shall_learn_needs_somebody_who_does(folder) -> None:
    with pytest.raises(ConfigError, match="needs a trainer") as refused:
        VerifierServer(VerifierConfig(target=str(folder), model="tiny", learn=True), SECRET)
    assert refused.value.field == "learn"


class Handle:
    """An actor in this process, in place of Ray's handle."""

    def __init__(self, actor: VerifierActor) -> None:
        self.forget_lessons = SimpleNamespace(remote=actor.forget_lessons)


def test_an_operator_lets_every_verifier_and_its_trainer_forget_a_key(folder, tmp_path, monkeypatch, capsys) -> None:
    kept = KeptLessons()
    monkeypatch.setattr(trainers, "TrainerLink", lambda _: kept)
    monkeypatch.setattr(ray_fleet, "connect_ray", lambda _: None)
    monkeypatch.setattr(ray, "get", lambda answer, **_: answer)
    names = ("a", "b")
    settings = {"target": str(folder), "model": "tiny", "threads": 1, "learn": True}
    actors = {name: VerifierActor(VerifierConfig(name=name, **settings), SECRET) for name in names}
    monkeypatch.setattr(ray_fleet, "verifier_names", lambda: names)
    monkeypatch.setattr(ray_fleet, "_actor", lambda name: Handle(actors[name]))
    tokenizer = (folder / "tokenizer.json").read_text(encoding="utf-8")
    fixed = tuple(StaticVerifier(name, actor.info()["address"], "tiny", tokenizer) for name, actor in actors.items())
    keys = keys_file(tmp_path / "keys.toml", "alice", "bob")

    async def decode_all() -> None:
        coordinator = CoordinatorServer(
            CoordinatorConfig(lease_secret=SECRET, listen="127.0.0.1:0", verifiers=fixed, api_keys=keys)
        )
        address = await coordinator.start()
        for key in ("alices", "bobs", "alices"):
            await decode(address, tmp_path, key, share=True)
        await coordinator.stop(0)

    try:
        asyncio.run(asyncio.wait_for(decode_all(), 60))
        assert len(kept.wait_for(3)) == 3
        assert main(["key", "alice", "--forget"]) == 0
        assert f"{2 * TOKENS} positions of alice are forgotten" in capsys.readouterr().out
        assert [record.key_salt for record in kept.records] == [salted(SECRET, "key bob")]
        monkeypatch.setattr(ray_fleet, "verifier_names", lambda: ())
        assert main(["key", "alice", "--forget"]) == 1
        assert "no verifier runs" in capsys.readouterr().err
    finally:
        for actor in actors.values():
            actor.stop()
