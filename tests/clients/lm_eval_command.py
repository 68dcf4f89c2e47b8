"""lm-eval, local-completions: the harness's command, with tasks built from a file."""

# /// script
# dependencies = ["lm-eval[api]==0.4.13", "transformers==5.23.0"]
# ///

from __future__ import annotations

import json
import math
import os
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from cases import BASE_URL, MODEL, case, run

QUESTIONS = [
    {"begun": "import numpy as", "choices": [" np", " carrots"], "right": 0},
    {"begun": "for i in range(10", "choices": [" zebra zebra", "):"], "right": 1},
    {"begun": "def __init__(self", "choices": ["):", "}{ 7 &&"], "right": 0},
    {"begun": "if __name__ ==", "choices": [" %%%%", " '__main__':"], "right": 1},
]
TASK = """task: {task}
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
doc_to_text: "{{{{begun}}}}"
target_delimiter: ""
{rest}
"""
CHOICE = """output_type: multiple_choice
doc_to_target: right
doc_to_choice: choices
metric_list: [{metric: acc, aggregation: mean, higher_is_better: true}]"""
LIKELIHOOD = """output_type: loglikelihood
doc_to_target: "{{choices[right]}}"
metric_list:
  - {metric: perplexity, aggregation: perplexity, higher_is_better: false}
  - {metric: acc, aggregation: mean, higher_is_better: true}"""


def results(task: str, rest: str, **options: Any) -> dict[str, Any]:
    """Return what the harness reports of a task over QUESTIONS."""
    folder = Path(tempfile.mkdtemp())
    data = folder / "questions.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    (folder / f"{task}.yaml").write_text(TASK.format(task=task, data=data, rest=rest))
    arguments = {"model": MODEL, "base_url": f"{BASE_URL}/completions", "tokenizer": os.environ["TOKENIZER"]} | options
    command = ["lm_eval", "--model", "local-completions", "--tasks", task, "--include_path", str(folder)]
    command += ["--model_args", ",".join(f"{name}={value}" for name, value in arguments.items())]
    offline = {"HF_HOME": str(folder / "hub"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    subprocess.run(
        [*command, "--output_path", str(folder / "out")],
        check=True,
        stdout=subprocess.DEVNULL,
        env=os.environ | offline,
    )
    (written,) = (folder / "out").rglob("results_*.json")
    found: dict[str, Any] = json.loads(written.read_text())["results"][task]
    return found


@case("loglikelihood of choices")
def _choices() -> None:
    found = results("outrider_choices", CHOICE, tokenizer_backend="huggingface")
    assert found["acc,none"] == 1, found


@case("loglikelihood of one continuation")
def _continuation() -> None:
    found = results("outrider_continuations", LIKELIHOOD, tokenizer_backend="huggingface", num_concurrent=2)
    assert 0 <= found["acc,none"] <= 1, found
    assert 1 < found["perplexity,none"] < math.inf, found


if __name__ == "__main__":
    run("lm-eval")
