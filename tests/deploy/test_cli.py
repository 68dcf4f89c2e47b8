"""The command line: its output, and one clear line for every mistake."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys

import pytest

from outrider.deploy.cli import main

RECORD = {
    "id": str,
    "prompt_tokens": int,
    "cached_tokens": int,
    "tokens": list,
    "text": str,
    "accepted": int,
    "steps": int,
    "seconds": float,
    "uplink_bytes": int,
    "downlink_bytes": int,
    "finish_reason": str,
}


def run(*arguments: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str, str]:
    try:
        status = main(list(arguments))
    except SystemExit as ended:
        status = int(ended.code or 0)
    captured = capfd.readouterr()
    return status, captured.out, captured.err


def test_run_prints_one_json_object_a_prompt(tmp_path, capfd) -> None:
    prompts = tmp_path / "prompts.jsonl"
    prompts.write_text('{"id": "a", "prompt": "def main():"}\n\n{"id": "b", "prompt": "Once upon"}\n')
    arguments = ["run", "--prompts", str(prompts), "--json", "--max-tokens", "8", "--sessions", "2"]
    status, out, _ = run(*arguments, "--drafter", "ngram", capfd=capfd)
    records = [json.loads(line) for line in out.splitlines()]
    assert status == 0
    assert [record["id"] for record in records] == ["a", "b"]
    for record in records:
        assert {key: type(value) for key, value in record.items()} == RECORD
        assert len(record["tokens"]) == 8
        assert record["finish_reason"] == "length"
        assert record["uplink_bytes"] > 0
        assert record["downlink_bytes"] > 0
    _, again, _ = run(*arguments, "--drafter", "none", "--service", "batch", capfd=capfd)
    services = [json.loads(line)["service"] for line in again.splitlines()]
    assert [(each["goal"], each["missed"]) for each in services] == [("batch", False)] * 2
    assert all(each["gaps_kept"] == each["gaps"] == 7 for each in services)
    assert [json.loads(line)["tokens"] for line in again.splitlines()] == [record["tokens"] for record in records]


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["run"], 1, "prompt: is missing"),
        (["run", "x", "--target", "./nowhere"], 1, "target: there is no folder ./nowhere"),
        (["run", "x", "--drafter", "nobody"], 1, "nobody"),
        (["run", "x", "--warmth", "1"], 2, "--warmth"),
        (["run", "x", "--prompts", "y"], 1, "not both"),
        (["run", "--prompts", "nowhere.jsonl"], 1, "prompts: cannot read"),
        (["run", "x", "--config", "nowhere.toml"], 2, "nowhere.toml"),
        (["run", "x", "--device", "cuda:77"], 1, "device"),
        (["run", "x", "--coordinator", "127.0.0.1:1"], 1, "does not answer"),
        (["run", "x", "--model", "reference"], 1, "model: goes with --coordinator"),
        (["coordinator"], 1, "lease-secret-file: is missing"),
        (["train", "drafter", "--teacher", "x", "--output", "o", "--steps", "1", "--hidden", "33"], 1, "hidden"),
        (["verifier", "--listen", "0.0.0.0:0"], 1, "not a loopback address"),
        (["train"], 2, "WHAT"),
        (["train", "drafter", "--teacher", "nowhere", "--output", "o", "--steps", "1"], 1, "teacher"),
        (["export", "nowhere", "o", "--name", "n"], 1, "nowhere"),
        (["fly"], 2, "'fly'"),
        ([], 2, "COMMAND"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_clear_line_and_a_status_that_is_not_zero(arguments, status, says, capfd) -> None:
    got, out, err = run(*arguments, capfd=capfd)
    assert got == status
    assert says in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""


def test_a_verifier_and_a_coordinator_serve_as_processes_and_end_on_sigterm(tmp_path, capfd, tokenizer_file) -> None:
    secret = tmp_path / "secret"
    secret.write_text("0123456789abcdef0123456789abcdef")
    shared = ["--listen", "127.0.0.1:0", "--lease-secret-file", str(secret)]
    verifier = Served("verifier", *shared, "--name", "one", "--target-threads", "1", "--drain-grace", "1000")
    fixed = ["--verifier", f"one={verifier.address}", "--tokenizer", str(tokenizer_file)]
    coordinator = Served("coordinator", *shared, *fixed)
    try:
        decode = ["run", "--coordinator", coordinator.address, "--cache", str(tmp_path), "--json"]
        status, out, _ = run(*decode, "--max-tokens", "5", "def main():", capfd=capfd)
        assert status == 0
        assert len(json.loads(out)["tokens"]) == 5
        status, out, _ = run("status", "--coordinator", coordinator.address, "--json", capfd=capfd)
        shown = json.loads(out)
        assert [v["state"] for v in shown["verifiers"]] == ["ready"]
        assert shown["recent"][0]["committed_tokens"] == 5
    finally:
        assert coordinator.end() == 0
        assert verifier.end() == 0


@pytest.mark.parametrize("content", ["not JSON", "[]"])
def test_a_coordinator_says_that_a_file_is_no_tokenizer(tmp_path, capfd, content) -> None:
    secret, tokenizer = tmp_path / "secret", tmp_path / "tokenizer.json"
    secret.write_text("0123456789abcdef0123456789abcdef")
    tokenizer.write_text(content)
    fixed = ["--verifier", "one=127.0.0.1:1", "--tokenizer", str(tokenizer)]
    status, _, err = run("coordinator", "--lease-secret-file", str(secret), *fixed, capfd=capfd)
    assert status == 1
    assert err.startswith("outrider coordinator: tokenizer: ")
    assert len(err.splitlines()) == 1


class Served:
    """An `outrider` process that serves; the address is the last word of its first line."""

    def __init__(self, *arguments: str) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "outrider.deploy", *arguments],
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        assert line, f"outrider {' '.join(arguments)} said nothing"
        self.address = line.split()[-1]

    def end(self) -> int:
        self.process.send_signal(signal.SIGTERM)
        return self.process.wait(100)
