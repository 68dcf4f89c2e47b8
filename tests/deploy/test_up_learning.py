"""`outrider up --learn`: a trainer beside the verifiers, whose versions the coordinator offers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from outrider.deploy import servers
from outrider.deploy.cli import parse
from outrider.deploy.cluster import LocalCluster


@pytest.mark.parametrize(
    ("options", "min_keys"),
    [([], None), (["--learn"], 1), (["--learn", "--api-keys", "keys.toml"], 8)],
    ids=["without learning", "without keys", "with keys"],
)
def test_a_trainer_runs_where_it_is_asked_for(options, min_keys, monkeypatch, capsys, tmp_path: Path) -> None:
    asked = []

    @asynccontextmanager
    async def cluster(config, *, verifiers, coordinator, trainer) -> AsyncIterator[LocalCluster]:
        asked.append((config.learn, trainer))
        yield LocalCluster("127.0.0.1:7000", {}, {})

    async def at_once() -> None:
        pass

    (tmp_path / "keys.toml").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(servers, "local_cluster", cluster)
    monkeypatch.setattr(servers, "until_stopped", at_once)
    assert servers.up(parse(["up", *options, "--learn-folder", "here", "--learn-loss", "opd"])) == 0
    ((learns, trainer),) = asked
    assert learns is (min_keys is not None)
    if learns:
        assert (trainer.min_keys, trainer.folder, trainer.loss) == (min_keys, Path("here"), "opd")
    else:
        assert trainer is None
    assert ("--share-texts" in capsys.readouterr().out) is learns
