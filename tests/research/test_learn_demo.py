"""`python -m research learn`: what it asks `outrider up` for, what it counts, and a whole run."""

from __future__ import annotations

import asyncio
import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from outrider.cloud.learning.trainer_settings import TrainerSettings
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy import cli
from outrider.deploy.commands.conditions import ConditionSettings
from outrider.drafters import find_package
from outrider.edge import Completion, EdgeConfig
from outrider.proto.errors import Unavailable
from outrider.proto.session import EdgeStatistics
from outrider.proto.types import CommittedToken, FinishReason, Sampling
from research.commands import main, parse
from research.learning import live
from research.learning.live import decoded_texts, up_options
from research.research_settings import LearnDemoSettings
from research.text_writer import TextRequest


def test_the_cluster_gets_the_options_of_the_command(tmp_path: Path) -> None:
    line = ["learn", "sums.jsonl", "--learn-drafter", "a/b", "--learn-loss", "dvi", "--learn-cpu-share", "0.25"]
    line += ["--learn-rehearsal", "x", "y z", "--steering", "p", "--min-step", "45", "--threads", "2"]
    (tmp_path / "up.toml").write_text("[up]\n" + "\n".join(up_options(parse(line))))
    up = cli.parse(["up", "--config", str(tmp_path / "up.toml")])
    trainer, verifier = up(TrainerSettings), up(VerifierConfig)
    assert (trainer.drafter, trainer.loss, trainer.cpu_share) == ("a/b", "dvi", 0.25)
    assert trainer.rehearsal == (Path("x"), Path("y z"))
    assert (verifier.learn, verifier.threads, verifier.draft_here) == (True, 2, "off")
    assert up(ConditionSettings).pace == 45
    assert verifier.steering == parse(line)(VerifierConfig).steering != ()
    assert up.values["relay"]


def test_what_texts_took_is_counted_by_temperature() -> None:
    def text(temperature: float, tokens: int, hits: int, seconds: float) -> tuple[TextRequest, Completion]:
        statistics = EdgeStatistics(steps=4, hits=hits, compared=10, steered_jobs=hits - 2)
        committed = tuple(CommittedToken(number) for number in range(tokens))
        result = Completion(3, committed, (), "", FinishReason.LENGTH, statistics, seconds, 0.1)
        return TextRequest((1, 2), Sampling(temperature=temperature)), result

    found = decoded_texts([text(0.0, 8, 6, 1.0), text(1.0, 12, 2, 4.0), text(1.0, 10, 3, 1.0)])
    assert (found.texts, found.tokens, found.tokens_per_second, found.tokens_per_step) == (3, 30, 5.0, 2.5)
    assert (found.greedy, found.sampled, found.steered) == (0.6, 0.25, 0.667)


def test_versions_of_an_earlier_run_are_not_learned_on(tmp_path: Path, capsys) -> None:
    (tmp_path / "drafters").mkdir()
    assert main(["learn", "sums.jsonl", "--learn-folder", str(tmp_path)]) == 1
    assert "learn-folder" in capsys.readouterr().err


def test_windows_are_of_texts_as_they_end_and_one_that_fails_ends_them(monkeypatch) -> None:
    running = []

    class Edge:
        """It takes as long for a text as its seed says, and fails on the seed 13."""

        def __init__(self, _: EdgeConfig) -> None:
            pass

        async def __aenter__(self) -> Edge:
            return self

        async def __aexit__(self, *_: object) -> None:
            pass

        async def complete(self, _: tuple[int, ...], sampling: Sampling) -> Completion:
            running.append(sampling.seed)
            most.append(len(running))
            for _ in range(sampling.seed):
                await asyncio.sleep(0)
            running.remove(sampling.seed)
            if sampling.seed == 13:
                raise Unavailable("the verifier is gone")
            return Completion(1, (CommittedToken(7),), (), "", FinishReason.LENGTH, EdgeStatistics(steps=1), 1.0, 0.1)

    class Watch:
        async def window(self, served, _since: float, tokens: int) -> tuple[list[int], int]:
            return [text.request.sampling.seed for text in served], tokens

    async def windows(*seeds: int) -> list[tuple[list[int], int]]:
        requests = [TextRequest((1,), Sampling(seed=seed)) for seed in seeds]
        options = LearnDemoSettings(stream=Path("x"), texts=len(seeds), every=2, sessions=2)
        return [found async for found in live._windows(EdgeConfig(coordinator="a:1"), requests, options, Watch())]

    most: list[int] = []
    monkeypatch.setattr(live, "Client", Edge)
    assert asyncio.run(windows(30, 5, 10, 2, 4)) == [([5, 10], 2), ([2, 4], 4), ([30], 5)]
    assert max(most) == 2
    with pytest.raises(Unavailable, match="gone"):
        asyncio.run(windows(1, 2, 13, 3, 4))


@pytest.mark.ray
@pytest.mark.soak
def test_an_edge_drafts_with_the_folders_drafter_and_its_texts_reach_the_trainer(tmp_path: Path, capsys) -> None:
    random = np.random.default_rng(0)
    words = ["the", "price", "of", "apples", "is", "twelve", "and", "pears", "are", "nine", "so", "we", "pay"]
    lines = [{"id": str(i), "text": " ".join(random.choice(words, 120))} for i in range(60)]
    (tmp_path / "train.sums.jsonl").write_text("\n".join(map(json.dumps, lines)))
    package = shutil.copytree(find_package("general").folder, tmp_path / "mine")
    manifest = json.loads((package / "manifest.json").read_text()) | {"name": "mine"}
    (package / "manifest.json").write_text(json.dumps(manifest))
    line = ["learn", str(tmp_path / "train.sums.jsonl"), "--learn-drafter", str(package), "--rtt", "2"]
    line += ["--learn-folder", str(tmp_path / "learned"), "--texts", "68", "--every", "34", "--fresh", "4"]
    line += ["--max-tokens", "16", "--min-step", "5", "--learn-cpu-share", "1", "--learn-max-load", "1"]
    line += ["--learn-publish-every", "1"]
    line += ["--json", str(tmp_path / "run.json")]
    assert main(line) == 0
    record = json.loads((tmp_path / "run.json").read_text())
    assert (record["drafter"], record["identical"], record["before"]["texts"]) == ("mine", 4, 4)
    assert [window["decoded"]["texts"] for window in record["windows"]] == [34, 34]
    version, *_ = record["windows"][0]["versions"]
    assert (version["sequence"], version["state"]) == (0, "current")
    assert list((tmp_path / "learned").glob("checkpoint-*")), "the edge's texts made a step, and that a candidate"
    assert record["windows"][-1]["cached_bytes"] > find_package("general").graph_bytes > record["downlink_bytes"] > 0
    assert "4 of 4 texts are the same" in capsys.readouterr().out
