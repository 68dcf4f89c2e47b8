"""The path of one's own models, by the commands that the README names: train, export, run."""

from __future__ import annotations

import json
from pathlib import Path

from outrider.deploy.cli import main


def test_a_drafter_is_trained_exported_and_drafts(tmp_path, capfd) -> None:
    corpus = tmp_path / "corpus.jsonl"
    lines = [{"id": str(i), "text": f"def f{i}(x):\n    return x + {i}\n" * 30} for i in range(12)]
    corpus.write_text("\n".join(json.dumps(line) for line in lines))
    training = tmp_path / "training"
    small = ["--hidden", "32", "--layers", "1", "--mlp", "32", "--self-text", "0", "--threads", "1"]
    train = ["train", "drafter", "--corpus", str(corpus), "--output", str(training), "--steps", "3", *small]
    assert main(train) == 0
    out = capfd.readouterr().out
    folder = next(line for line in out.splitlines() if line.startswith("next: outrider export ")).split()[3]
    assert (Path(folder) / "model.safetensors").is_file()

    package = tmp_path / "package"
    assert main(["export", folder, str(package), "--name", "mine"]) == 0
    assert {path.name for path in package.iterdir()} == {"manifest.json", "model.onnx", "tokenizer.json"}
    assert "checked against torch" in capfd.readouterr().out

    def tokens(drafter: str) -> list[int]:
        assert main(["run", "def f(x):", "--json", "--max-tokens", "12", "--drafter", drafter]) == 0
        return json.loads(capfd.readouterr().out)["tokens"]

    assert tokens(str(package)) == tokens("none")
