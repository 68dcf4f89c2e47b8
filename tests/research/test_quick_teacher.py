"""The quick way to write what a Llama says writes what the plain way does."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
import torch

from outrider.cloud.models.family_index import load_causal_lm
from outrider.cloud.testing import save_tiny_target
from outrider.cloud.training.teacher import TeacherFolder
from outrider.cloud.training.teacher_writing import write_rows
from research.gpu import quick_teacher
from research.gpu.quick_teacher import QuickLlama


def test_it_writes_the_rows_of_the_plain_way(tmp_path: Path) -> None:
    """Prompts of several lengths, padded to the left; some texts end early, and the rooms end at a graph's width."""
    folder = save_tiny_target(tmp_path, vocab_size=4096, hidden_size=64, num_attention_heads=4, num_key_value_heads=2)
    model = load_causal_lm(folder, "none", field="target").eval().requires_grad_(False)
    generator = torch.Generator().manual_seed(3)
    lengths = (3, 9, 9, 20, 31, 40)
    prompts = [torch.randint(8, 4096, (length,), generator=generator, dtype=torch.int32) for length in lengths]
    greedy = torch.ones(len(prompts), dtype=torch.bool)
    free = QuickLlama(model, rows=len(prompts), room=100, steps=50, ends=[0]).say(prompts, greedy, 50)
    ends = [int(free.tokens[4, 0]), int(free.tokens[11, 3])]  # so that some texts end, early
    quick = QuickLlama(model, rows=len(prompts), room=100, steps=50, ends=ends)
    for _ in range(2):  # a second round begins from nothing
        said = quick.say(prompts, greedy, 50)
    rows, best = write_rows(
        model, [each.tolist() for each in prompts], greedy, new_tokens=50, ends=ends, generator=torch.Generator()
    )
    counts = said.lengths.tolist()
    assert len(set(counts)) > 1
    at = 0
    for row, (prompt, count) in enumerate(zip(prompts, counts, strict=True)):
        assert said.tokens[:count, row].tolist() == rows[row][len(prompt) :].tolist()
        assert torch.equal(said.best[:count, row], best.tokens[at : at + count])
        assert (said.logprobs[:count, row].float() - best.logprobs[at : at + count].float()).abs().max() < 0.02
        at += count
    assert at == len(best)


def test_its_command_writes_a_folder_that_drafters_learn_from(tmp_path: Path, monkeypatch) -> None:
    """One round of prompts and texts, and one of questions that the target thinks up."""
    prompts, says = tmp_path / "prompts.jsonl", tmp_path / "says"
    lines = [{"prompt": "What is 2 + 3?"}, {"prompt": "Name a river."}, {"text": "def main():\n    return 0\n" * 20}]
    prompts.write_text("\n".join(map(json.dumps, lines)))
    command = f"quick_teacher {prompts} --output {says} --target reference --device cpu --most 6 --question 6"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--rows", "3", "--rounds", "2"])
    quick_teacher.main()
    folder = TeacherFolder(says)
    rows, best = folder.rows(), folder.best()
    assert len(folder.counts()) == 2
    assert len(rows) == 6
    assert len(best) == int((rows.slots() >= 0).sum()) == sum(folder.counts())
    written = torch.cat([rows[row][rows.firsts[row] :] for row in range(6) if rows.greedy[row]])
    greedy = torch.cat(
        [
            rows.slots()[rows.starts[row] + rows.firsts[row] : rows.starts[row + 1]]
            for row in range(6)
            if rows.greedy[row]
        ]
    )
    assert torch.equal(written, best.tokens[greedy, 0]), "at T = 0 it writes the best token"
    monkeypatch.setattr(sys, "argv", [*command.split(), "--rows", "4"])
    with pytest.raises(SystemExit, match="3 prompts are too few for --rows 4"):
        quick_teacher.main()
