"""`research/systems/run_systems.py`: what it starts, asks and sums up; nothing is started here."""

from __future__ import annotations

import argparse
import json
import runpy
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="module")
def script(root) -> dict[str, Any]:
    return runpy.run_path(str(root / "research/systems/run_systems.py"), run_name="run_systems")


def options(tmp_path: Path, **named: Any) -> argparse.Namespace:
    (tmp_path / "model").mkdir()
    (tmp_path / "model/generation_config.json").write_text('{"eos_token_id": 2}')
    paths = ("llama_server", "gguf", "gguf_8bit", "draft_gguf", "vllm_python", "draft_model", "transformers")
    none = dict.fromkeys(paths)
    return argparse.Namespace(**{"model": tmp_path / "model", "drafter": "auto", "drafters": [], **none, **named})


def test_only_systems_that_the_options_name_are_started_each_with_its_plain_form(script, tmp_path) -> None:
    alone = list(script["systems"](options(tmp_path), tmp_path))
    assert [(each.name, each.drafting) for each in alone] == [("Outrider", "plain"), ("Outrider", "drafter auto")]
    assert all("{link}" in each.command and "127.0.0.1:{cloud}" in each.edge for each in alone)


def test_every_system_listens_on_loopback_and_has_a_plain_form(script, tmp_path) -> None:
    named = dict.fromkeys(("llama_server", "gguf", "gguf_8bit", "draft_gguf", "vllm_python", "draft_model"), Path("x"))
    every = list(script["systems"](options(tmp_path, transformers=Path("t"), **named), tmp_path))
    assert len(every) == 2 + 6 + 3 + 2
    assert {each.name for each in every} == {each.name for each in every if each.drafting == "plain"}
    assert all(any("127.0.0.1" in word for word in each.command) for each in every)
    looked_up = json.loads((tmp_path / "prompt-lookup/generation_config.json").read_text())
    assert looked_up["eos_token_id"] == 2
    assert looked_up["prompt_lookup_num_tokens"] > 0


def test_the_seed_chooses_a_question_of_each_category(script, tmp_path) -> None:
    rows = [
        {"category": name, "turns": [f"{name} {i}", "next"]} for name in (*script["CATEGORIES"], "qa") for i in range(9)
    ]
    path = tmp_path / "question.jsonl"
    path.write_text("\n".join(map(json.dumps, rows)))
    first = script["questions"](path, 8, 1)
    assert first == script["questions"](path, 8, 1) != script["questions"](path, 8, 2)
    assert [question.split()[0] for question in first] == list(script["CATEGORIES"])


def test_tokens_that_come_together_have_no_gap_and_the_quickest_system_stands_first(script) -> None:
    text, system = script["Text"], script["System"]
    answers = [text("abcd", [1.0, 1.5, 1.5, 2.0]), text("", [])]
    other = [text("abc", [0.5, 0.5, 1.0]), text("", [])]
    slow = script["summed_up"](system("s", "plain", [], "m"), 30.0, answers, 10.0, 0.0)
    assert (slow.first_s, slow.gap_median_s, slow.gap_p95_s, slow.tokens, slow.tokens_a_s) == (1.0, 0.5, 0.5, 4, 2.0)
    fast = script["summed_up"](system("s", "n-gram", [], "m"), 30.0, other, 10.0, 5.0)
    runs = script["compared"]([slow, fast])
    assert [run.same for run in runs] == [2, 1]
    rows = [line for line in script["page"](runs).splitlines() if line.startswith("| s |")]
    assert rows == [
        "| s | n-gram | 3.0 | 500 | 250.0 | 0.0 | 10 + 5 | 1 of 2 |",
        "| s | plain | 2.0 | 1000 | 500.0 | 500.0 | 10 | 2 of 2 |",
    ]
