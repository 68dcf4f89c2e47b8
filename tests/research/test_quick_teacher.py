"""The quick way to write what a Llama says writes what the plain way does."""

from __future__ import annotations

from pathlib import Path

import torch

from outrider.cloud.models.family_index import load_causal_lm
from outrider.cloud.testing import save_tiny_target
from outrider.cloud.training.teacher_writing import write_rows
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
