"""The path of one's own models by the commands of the README: what the target says, train, steer, export, run."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from outrider.deploy.cli import main

FILES = {"manifest.json", "model.onnx", "tokenizer.json"}
SMALL = ["--hidden", "32", "--layers", "1", "--mlp", "32"]
SHORT = ["--steps", "1", "--block", "64", "--threads", "1"]


@pytest.fixture
def corpus(tmp_path: Path) -> str:
    path = tmp_path / "corpus.jsonl"
    lines = [{"id": str(i), "text": f"def f{i}(x):\n    return x + {i}\n" * 15} for i in range(12)]
    path.write_text("\n".join(json.dumps(line) for line in lines))
    return str(path)


def printed_folder(out: str) -> Path:
    """Return the folder of the first drafter that the last lines of a training name for export."""
    line = next(line for line in out.splitlines() if line.startswith("next: outrider export "))
    return Path(shlex.split(line)[3])


def tokens(drafter: str, *more: str, capfd: pytest.CaptureFixture[str]) -> list[int]:
    assert main(["run", "def f(x):", "--json", "--max-tokens", "12", "--drafter", drafter, *more]) == 0
    return json.loads(capfd.readouterr().out)["tokens"]


def test_a_drafter_with_a_window_is_steered_exported_and_drafts(corpus: str, tmp_path: Path, capfd) -> None:
    training, steered, package = tmp_path / "training", tmp_path / "steered", tmp_path / "package"
    says = ["--teacher", str(tmp_path / "says")]
    few = ["--tokens", "1200", "--read", "1", "--rows", "4", "--threads", "1"]
    assert main(["train", "teacher", "--texts", corpus, "--output", says[1], *few]) == 0
    window = ["--window", "4"]
    assert main(["train", "drafter", *says, "--output", str(training), *window, *SMALL, *SHORT]) == 0
    start = printed_folder(capfd.readouterr().out)
    assert json.loads((start / "config.json").read_text())["sliding_window"] == 4
    steer = ["--drafter", str(start), "--rank", "8"]
    assert main(["train", "steer", *says, "--output", str(steered), *steer, *SHORT]) == 0
    folder = printed_folder(capfd.readouterr().out)
    assert json.loads((folder / "config.json").read_text())["sliding_window"] == 4
    assert main(["export", str(folder), str(package), "--name", "mine"]) == 0
    assert {path.name for path in package.iterdir()} == FILES | {"steering.onnx"}
    assert "a verifier makes them with --steering" in capfd.readouterr().out
    by_codes = tokens(str(package), "--steering", str(folder), "--steer", "on", capfd=capfd)
    assert by_codes == tokens("none", capfd=capfd)
