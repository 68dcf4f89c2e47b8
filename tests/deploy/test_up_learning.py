"""`outrider up --learn`: a trainer beside the verifiers, whose versions the coordinator offers."""

from __future__ import annotations

import asyncio
import json
import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import pytest
from other_tokenizer import byte_tokenizer, with_tokenizer

from outrider.cloud.learning import trainer_actor
from outrider.cloud.learning.trainer_settings import TrainerSettings
from outrider.coordinator import ray_cluster
from outrider.coordinator.catalogue import Catalogue
from outrider.deploy import targets
from outrider.deploy.cli import main, parse
from outrider.deploy.local import local_cluster, servers
from outrider.deploy.local.local_cluster import LocalCluster, catalogue_folders
from outrider.drafters import find_package


@pytest.mark.parametrize(
    ("options", "min_keys"),
    [([], None), (["--learn"], 1), (["--learn", "--api-keys", "keys.toml"], 8)],
    ids=["without learning", "without keys", "with keys"],
)
def test_a_trainer_runs_where_it_is_asked_for(options, min_keys, monkeypatch, capsys, tmp_path: Path) -> None:
    asked = []

    @asynccontextmanager
    async def running(config, *, verifiers, coordinator, trainer, link) -> AsyncIterator[LocalCluster]:
        asked.append((config.target, config.learn, trainer))
        yield LocalCluster("127.0.0.1:7000", {}, {})

    def at_once() -> asyncio.Event:
        stop = asyncio.Event()
        stop.set()
        return stop

    (tmp_path / "keys.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(servers, "local_cluster", running)
    monkeypatch.setattr(servers, "set_when_asked_to_end", at_once)
    monkeypatch.setattr(targets, "find_target", str)
    monkeypatch.delenv("OUTRIDER_UP_TARGET", raising=False)
    assert servers.up(parse(["up", *options, "--learn-folder", "here", "--learn-max-load", "0.5"])) == 0
    ((target, learns, trainer),) = asked
    assert target == ("reference" if learns else "smollm2"), "the drafter that learns is for the former"
    assert learns is (min_keys is not None)
    if learns:
        assert (trainer.min_keys, trainer.folder, trainer.max_load) == (min_keys, Path("here"), 0.5)
    else:
        assert trainer is None
    assert ("--share-texts" in capsys.readouterr().out) is learns


@pytest.fixture
def mine(tmp_path: Path) -> Path:
    """A drafter of one's own, in a folder."""
    package = Path(shutil.copytree(find_package("general").folder, tmp_path / "mine"))
    manifest = json.loads((package / "manifest.json").read_text()) | {"name": "mine"}
    (package / "manifest.json").write_text(json.dumps(manifest))
    return package


@pytest.mark.parametrize("own", [True, False], ids=["of a folder", "embedded"])
def test_edges_are_offered_the_drafter_that_learning_begins_with(own: bool, mine: Path, tmp_path: Path) -> None:
    trainer = TrainerSettings(drafter=str(mine) if own else "code", folder=tmp_path / "learned")
    catalogue = Catalogue(catalogue_folders((), trainer))
    catalogue.rescan()
    offered = [manifest.name for manifest in catalogue.manifests]
    assert ("mine" in offered) is own
    assert offered.count("code") == 1
    assert not catalogue.refused
    without = Catalogue(catalogue_folders((), None))
    without.rescan()
    assert "mine" not in [manifest.name for manifest in without.manifests]


class Teachers:
    """A fleet of a verifier of the drafter's target with this tokenizer, and of one of another target."""

    def __init__(self, tokenizer_sha256: str) -> None:
        self._tokenizer_sha256 = tokenizer_sha256

    async def refresh(self) -> tuple[SimpleNamespace, ...]:
        of = {"reference": self._tokenizer_sha256, "another": "cd" * 32}
        return tuple(SimpleNamespace(model=model, tokenizer_sha256=sha256) for model, sha256 in of.items())


def test_a_trainer_of_a_drafter_that_drafts_by_text_is_refused(tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(ray_cluster, "connect_ray", lambda _: None)
    monkeypatch.setattr(ray_cluster, "RayCluster", partial(Teachers, find_package("general").tokenizer_sha256))
    bytewise = with_tokenizer(tmp_path / "bytewise", byte_tokenizer())
    line = ["trainer", "--learn-drafter", str(bytewise), "--learn-folder", str(tmp_path / "learned")]
    assert main(line) == 1
    said = capsys.readouterr().err
    assert "learn-drafter: 'general' has another tokenizer than the target 'reference'" in said
    assert "name a drafter with the target's tokenizer" in said


def test_a_trainer_says_which_folders_its_coordinator_needs(mine: Path, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.setattr(ray_cluster, "connect_ray", lambda _: None)
    monkeypatch.setattr(ray_cluster, "RayCluster", partial(Teachers, find_package("general").tokenizer_sha256))
    monkeypatch.setattr(trainer_actor, "start_trainer_actor", lambda *_, **__: None)
    monkeypatch.setattr(local_cluster, "wait_until_loaded", lambda *_: {"drafter": "mine", "steps": 0})
    line = ["trainer", "--learn-drafter", str(mine), "--learn-folder", str(tmp_path / "learned")]
    assert servers.trainer(parse(line)) == 0
    learned = tmp_path / "learned" / "drafters"
    assert f"--drafters {mine} {learned}\n" in capsys.readouterr().out
    assert servers.trainer(parse(["trainer", "--learn-folder", str(tmp_path / "learned")])) == 0
    assert f"--drafters {learned}\n" in capsys.readouterr().out, "a coordinator has the embedded ones"
