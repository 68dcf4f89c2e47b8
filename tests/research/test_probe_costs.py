"""Prices of probes: those of a server, where they break even, and their table; and the model that walks."""

from __future__ import annotations

import json
import random

import pytest
import torch
from scoring_double import ScoringDouble
from tokenizers import Tokenizer
from tokenizers.models import WordLevel

from outrider.proto.policy.patience import expected_tokens
from research.gpu.walking_model import ROUND, prompts_of, walking_model, walks, words_of
from research.probes.probe_costs import DRAFTS, Price, even, price_blocks, prices


@pytest.mark.parametrize("runner", ["V1", "V2"])
async def test_a_server_is_priced_by_kind_context_and_texts_at_once(runner: str) -> None:
    async with ScoringDouble(runner=runner) as double:
        found = await prices(double.url, double.vocab, (24, 48), (1, 2))
    kinds = ("greedy", "sampled") if runner == "V2" else ("greedy",)
    expected = {(kind, c, n, k) for kind in kinds for c in (24, 48) for n in (1, 2) for k in DRAFTS}
    assert {(each.kind, each.context, each.sessions, each.drafts) for each in found} == expected
    assert all(each.token_ms > 0 and each.probe_ms > 0 for each in found)


@pytest.mark.parametrize("drafts", [1, 4, 32])
@pytest.mark.parametrize("chance", [0.1, 0.5, 0.9])
def test_a_probe_is_even_where_its_expected_tokens_are_the_streams(drafts: int, chance: float) -> None:
    assert even(drafts, expected_tokens(chance, drafts)) == pytest.approx(chance, abs=1e-6)
    assert even(drafts, drafts + 1.5) is None


def test_the_table_has_a_row_for_each_number_of_texts_and_a_block_for_each_context() -> None:
    found = [Price("greedy", c, n, k, 10.0, 20.0) for c in (128, 1024) for n in (1, 8) for k in DRAFTS]
    first, second = price_blocks(found)
    assert [row[:4] for row in first] == [("greedy", "128", "1", "10.0"), ("greedy", "128", "8", "10.0")]
    assert first[0][4:6] == ("20.0 (-)", "20.0 (0.52)")
    assert second[0][1] == "1024"


def test_the_walking_models_text_is_its_walk_and_half_of_the_prompts_come_round() -> None:
    letters = "abcdefghijklmnopqrstuvwxyz"
    words = [f"Ġ{a}{b}{c}" for a in letters for b in letters[:10] for c in letters[:8]]
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(words)}))
    chance = random.Random(0)
    after = walks(words_of(tokenizer), chance)
    shape = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "num_key_value_heads": 1}
    sizes = {"head_dim": 32, "intermediate_size": 64, "vocab_size": len(words), "max_position_embeddings": 256}
    model = walking_model(after, {**shape, **sizes, "tie_word_embeddings": False}, "cpu").float()
    lines = [json.loads(line) for line in prompts_of(after, tokenizer, 4, 10, chance)]
    assert [line["domain"] for line in lines] == ["round", "new", "round", "new"]
    for line in lines:
        prompt = [tokenizer.token_to_id(word) for word in line["prompt"].split()]
        walk = [prompt[-1]]
        for _ in range(ROUND + 6):
            walk.append(after[walk[-1]])
        text = model.generate(torch.tensor([prompt]), max_new_tokens=ROUND + 6, do_sample=False, eos_token_id=None)
        assert text[0, len(prompt) :].tolist() == walk[1:]
        assert (walk[ROUND] == walk[0]) is (line["domain"] == "round")
