"""Write prompts of Spec-Bench (arXiv 2401.07851), in a target's chat template, for `outrider bench --prompts`.

    python research/spec_bench.py question.jsonl --target smollm2 --output chats.jsonl

`question.jsonl` is `data/spec_bench/question.jsonl` of github.com/hemingkx/Spec-Bench, Apache 2.0; the first turn of
each question is asked.
"""

from __future__ import annotations

import argparse
import json
import random
from pathlib import Path
from typing import Any

from outrider.cloud.models.family_index import find_target, load_tokenizer


def sample(questions: list[dict[str, Any]], per_group: int, seed: int) -> list[dict[str, Any]]:
    """Return `per_group` questions of each category: the first ones of a sample of ten."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for question in questions:
        groups.setdefault(question["category"], []).append(question)
    choose = random.Random(seed)
    drawn = [choose.sample(groups[name], 10) for name in sorted(groups)]
    return [question for group in drawn for question in group[:per_group]]


def main() -> None:
    """Read the questions, and write the prompts."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("questions", type=Path)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--per-group", type=int, default=1)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--output", type=Path, required=True)
    options = parser.parse_args()
    tokenizer = load_tokenizer(find_target(options.target))
    questions = [json.loads(line) for line in options.questions.read_text(encoding="utf-8").splitlines()]
    with options.output.open("w", encoding="utf-8") as file:
        for question in sample(questions, options.per_group, options.seed):
            asked = [{"role": "user", "content": question["turns"][0]}]
            text = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
            name = question["category"]
            file.write(json.dumps({"id": f"{name}/{question['question_id']}", "domain": name, "prompt": text}) + "\n")


if __name__ == "__main__":
    main()
