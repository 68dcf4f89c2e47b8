"""Texts that repeat a document: how documents are made, and that the benchmark sees a text that differs."""

from __future__ import annotations

import itertools
import json

import pytest
from near_verifier import NearVerifier

from outrider.bench.edits import edited
from outrider.deploy.cli import main

TOKENS = list(range(4000))


@pytest.mark.parametrize("run", [1, 10])
def test_a_document_differs_in_runs_of_the_share_that_was_asked_for(run: int) -> None:
    document = edited(TOKENS, 0.1, run, seed=1)
    gone = sorted(set(TOKENS) - set(document))  # replaced or deleted, two edits of three
    runs = 1 + sum(later > earlier + 1 for earlier, later in itertools.pairwise(gone))
    assert 0.03 < len(gone) / len(TOKENS) < 0.1
    assert 0.5 * run < len(gone) / runs < 1.5 * run
    assert 0.9 < len(document) / len(TOKENS) < 1.1
    assert edited(TOKENS, 0.1, run, seed=1) == document
    assert edited(TOKENS, 0.1, run, seed=2) != document


def test_nothing_is_edited_where_no_share_is() -> None:
    assert edited(TOKENS, 0.0, 1, seed=1) == TOKENS


def test_every_mode_gives_the_same_text_and_copies_take_the_fewest_steps(
    tmp_path, capsys, monkeypatch, all_drafts_pay: None
) -> None:
    monkeypatch.setattr("outrider.bench.copying.VerifierProcess", NearVerifier)
    prompts, record = tmp_path / "prompts.jsonl", tmp_path / "copies.json"
    prompts.write_text(json.dumps({"id": "a", "prompt": "def main(argv):\n"}) + "\n", encoding="utf-8")
    options = ["--max-tokens", "32", "--temperature", "1", "--run", "4", "--target-threads", "1", "--json", str(record)]
    options += ["--rtt", "0", "--min-step", "15", "--patience", "1000,1"]
    assert main(["copy-bench", "--prompts", str(prompts), *options]) == 0
    runs = json.loads(record.read_text(encoding="utf-8"))["runs"]
    assert [(run["mode"], run["run"], run["tokens"]) for run in runs] == [
        ("cloud", 0, 32),
        ("drafter", 0, 32),
        ("colocated", 0, 32),
        ("both", 0, 32),
        ("copied", 4, 32),
        ("both-copied", 4, 32),
    ]
    assert all(run["identical"] for run in runs)
    cloud, drafter, colocated, both, copied, both_copied = runs
    assert copied["steps_per_token"] < cloud["steps_per_token"] == 1.0
    assert both_copied["steps_per_token"] < 1.0
    assert colocated["here_share"] > 0
    assert [run["here_share"] for run in (cloud, drafter, copied)] == [0, 0, 0], "the verifier drafts nothing there"
    assert [run["retrieval_share"] for run in (cloud, drafter, colocated, both)] == [0, 0, 0, 0]
    assert max(copied["retrieval_share"], both_copied["retrieval_share"]) > 0, (
        "which drafter has its turn is a matter of luck"
    )
    assert "edge, copying, edits of 4" in capsys.readouterr().out
