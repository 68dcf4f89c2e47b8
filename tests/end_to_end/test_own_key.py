"""A version of one API key: its edges draft with it, no text changes, and it is gone when forgotten."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import ray
from drafting_versions import DraftingVersions
from poisoned import HEAD

from outrider.cloud.actor import VerifierActor
from outrider.cloud.config import VerifierConfig
from outrider.cloud.learning import actor as trainers
from outrider.cloud.learning import lessons
from outrider.cloud.learning.actor import TrainerActor
from outrider.cloud.learning.lesson_budget import LessonBudget
from outrider.cloud.learning.settings import TrainerSettings
from outrider.cloud.server import VerifierServer
from outrider.coordinator.config import CoordinatorConfig, StaticVerifier
from outrider.coordinator.server import CoordinatorServer
from outrider.deploy import fleet
from outrider.deploy.cli import main
from outrider.drafters import find_package
from outrider.drafters.adapters import write_adapter_package
from outrider.drafters.packages import LearnedFrom, load_package
from outrider.edge import Client, EdgeConfig
from outrider.proto.errors import OutriderError
from outrider.proto.plumbing.access import Key, secret_sha256
from outrider.proto.salts import key_salt
from outrider.proto.testing import write_keys
from outrider.proto.types import Sampling

SECRET = b"a secret of the fleet"
ALICE, BOB = (key_salt(SECRET, name) for name in ("alice", "bob"))
PROMPT, TOKENS = "def count(words):\n    ", 24


LEARNERS = tuple(Key(name, secret_sha256(f"{name}s"), learning=True) for name in ("alice", "bob"))


def publish(folder: Path, sequence: int, **more: str) -> str:
    """Write an update of the embedded drafter that changes its head a little, and return its version."""
    parent, rng = find_package("general"), np.random.default_rng(sequence)
    matrices = {HEAD: (rng.standard_normal((8, 192)) / 192, rng.standard_normal((8192, 8)) * 0.05)}
    write_adapter_package(
        parent.folder, folder, matrices, sequence=sequence, learned_from=LearnedFrom(1, 1, {}), more=more
    )
    return load_package(folder).version


@pytest.mark.usefixtures("all_drafts_pay")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_texts_are_the_same_where_what_one_key_taught_drafts(tokenizer_file, tmp_path, temperature) -> None:
    catalogue = tmp_path / "drafters"
    for_all = publish(catalogue / "general" / "1", 1)
    own = publish(catalogue / ALICE.hex() / "2", 2, owner=ALICE.hex())

    async def scenario() -> None:
        verifier = VerifierServer(VerifierConfig(name="v", threads=1), SECRET)
        fixed = StaticVerifier("v", await verifier.start(), "reference", tokenizer_file.read_text(encoding="utf-8"))
        coordinator = CoordinatorServer(
            CoordinatorConfig(
                lease_secret=SECRET,
                listen="127.0.0.1:0",
                verifiers=(fixed,),
                drafters=(catalogue,),
                api_keys=write_keys(tmp_path / "keys.toml", *LEARNERS),
            )
        )
        where = {"coordinator": await coordinator.start(), "cache": tmp_path / "cache", "selector": "random"}

        async def texts(key: str, drafter: str) -> tuple[list[list[int]], set[str]]:
            """Return texts of several seeds, and the versions that drafted in them, each round one at random."""
            named = DraftingVersions()
            async with Client(EdgeConfig(**where, api_key=f"{key}s", drafter=drafter)) as client:
                made = []
                for seed in range(3):
                    sampling = Sampling(max_tokens=TOKENS, temperature=temperature, seed=seed, ignore_eos=True)
                    done = await client.complete(PROMPT, sampling, observer=named)
                    made.append(list(done.ids))
                    assert not done.statistics.drafter_error
            return made, named.versions

        try:
            plain, _ = await texts("alice", "none")
            drafted, named = await texts("alice", "general")
            assert named == {for_all, own}
            assert drafted == plain
            other, named = await texts("bob", "general")
            assert named == {for_all}, "it is alice's alone"
            assert other == plain
        finally:
            await coordinator.stop(0)
            await verifier.stop(0)

    asyncio.run(asyncio.wait_for(scenario(), 120))


# --- outrider learn forget ---


class Passed:
    """A verifier's way to a trainer in this process, in place of Ray's."""

    def __init__(self, trainer: TrainerActor) -> None:
        self._trainer = trainer

    def push(self, records: tuple[bytes, ...]) -> Future[object]:
        return self._answer(self._trainer.push, records)

    def forget(self, key: bytes) -> Future[int]:
        return self._answer(self._trainer.forget, key)

    def _answer(self, call: Callable[[Any], Any], argument: object) -> Future[Any]:
        answer: Future[Any] = Future()
        try:
            answer.set_result(call(argument))
        except OutriderError as error:
            answer.set_exception(error)
        return answer


class Handle:
    """An actor in this process; what it raises comes out of `get`, as Ray's."""

    def __init__(self, actor: VerifierActor) -> None:
        self.forget_lessons = SimpleNamespace(remote=lambda key: lambda: actor.forget_lessons(key))

    @staticmethod
    def get(answer: Callable[[], int], timeout: float) -> int:
        assert timeout > 0
        try:
            return answer()
        except OutriderError as error:
            raise ray.exceptions.RayError(str(error)) from error


def until(holds: Callable[[], object]) -> None:
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.02)


def traces(folder: Path, owner: bytes) -> list[str]:
    found = [os.path.join(at, name) for at, folders, files in os.walk(folder) for name in [*folders, *files]]
    return [path for path in found if owner.hex() in path]


@pytest.fixture
def trainer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[TrainerActor]:
    monkeypatch.setattr(os, "nice", lambda _: 0)
    monkeypatch.setattr(trainers, "IDLE_S", 0.01)
    settings = TrainerSettings(folder=tmp_path / "learned", rank=2, positions=96, texts=4, cpu_share=1.0)
    made = TrainerActor(settings)
    made.allow_own(frozenset({ALICE, BOB}))
    yield made
    made._stopped.set()
    made._thread.join()


def publish_all(trainer: TrainerActor) -> None:
    """Publish what each key's texts have taught, as if it had proved better."""
    with trainer._learning:
        for own in trainer._own._learners.values():
            own.learner.trainer.publish(own.learner.trainer.write_candidate())


def test_a_key_is_forgotten_from_the_command_down_to_its_files(tiny, tmp_path, trainer, monkeypatch, capsys) -> None:
    learned, names = tmp_path / "learned", ("a", "b")
    monkeypatch.setattr(trainers, "TrainerLink", lambda _: Passed(trainer))
    monkeypatch.setattr(lessons, "LessonBudget", lambda _share, now: LessonBudget(1e6, now))
    monkeypatch.setattr(fleet, "connect_ray", lambda _: None)
    monkeypatch.setattr(fleet, "verifier_names", lambda: names)
    monkeypatch.setattr(fleet, "_actor", lambda name: Handle(actors[name]))
    monkeypatch.setattr(ray, "get", Handle.get)
    settings = {"target": str(tiny), "model": "reference", "threads": 1, "learn": True}
    actors = {name: VerifierActor(VerifierConfig(name=name, **settings), SECRET) for name in names}
    tokenizer = (tiny / "tokenizer.json").read_text(encoding="utf-8")
    fixed = tuple(
        StaticVerifier(name, actor.info()["address"], "reference", tokenizer) for name, actor in actors.items()
    )
    keys = write_keys(tmp_path / "keys.toml", *LEARNERS)

    async def decode() -> None:
        coordinator = CoordinatorServer(
            CoordinatorConfig(lease_secret=SECRET, listen="127.0.0.1:0", verifiers=fixed, api_keys=keys)
        )
        where = {"coordinator": await coordinator.start(), "cache": tmp_path / "cache", "drafter": "none"}
        for key in ("alices", "bobs", "alices"):
            async with Client(EdgeConfig(**where, api_key=key, share_texts=True)) as client:
                await client.complete(PROMPT, max_tokens=TOKENS, temperature=1.0, seed=3, ignore_eos=True)
        await coordinator.stop(0)

    unlink = os.unlink

    def refuse(path: Any, *arguments: Any, **options: Any) -> None:
        if str(path).endswith("adapter.safetensors"):
            raise PermissionError(1, "Operation not permitted", path)
        unlink(path, *arguments, **options)

    try:
        asyncio.run(asyncio.wait_for(decode(), 60))
        until(lambda: trainer.info()["own_learners"] == 2 and trainer.info()["counts"]["records"] == 3)
        publish_all(trainer)
        assert traces(learned, ALICE)
        with monkeypatch.context() as patch:
            patch.setattr(os, "unlink", refuse)
            assert main(["learn", "forget", "--key", "alice"]) == 1
            said = capsys.readouterr().err
            assert "did not forget; try again" in said
            assert "Operation not permitted" in said
            assert traces(learned, ALICE)
        assert main(["learn", "forget", "--key", "alice"]) == 0
        assert "positions of alice are forgotten, and drafters of its own" in capsys.readouterr().out
        assert not traces(learned, ALICE)
        assert traces(learned, BOB)
        assert main(["learn", "forget", "--key", "bob"]) == 0
        assert f"{TOKENS} positions of bob are forgotten" in capsys.readouterr().out
        assert not traces(learned, BOB)
        assert trainer.info()["waiting"] == 0
    finally:
        for actor in actors.values():
            actor.stop()
