"""Estimators of `outrider rule-bench` against enumeration on tiny vocabularies, and the command itself."""

from __future__ import annotations

import itertools
import json
import math

import numpy as np
import pytest

from outrider.bench.record import from_json
from outrider.bench.rules import couplings
from outrider.bench.rules.paths import runs_of
from outrider.bench.rules.record import RuleRecord
from outrider.deploy.cli import main

P, Q = np.array([0.5, 0.25, 0.15, 0.1, 0.0]), np.array([0.1, 0.3, 0.2, 0.0, 0.4])


def some_pairs(count: int = 20, vocab: int = 6) -> list[tuple[np.ndarray, np.ndarray]]:
    rng = np.random.default_rng(1)
    return [(rng.dirichlet(np.full(vocab, 0.5)), rng.dirichlet(np.full(vocab, 0.5))) for _ in range(count)]


def test_shared_noise_wins_both_races_as_often_as_its_formula_says_for_each_token() -> None:
    for p, q in [(P, Q), *some_pairs()]:
        tokens = [t for t in range(len(p)) if p[t] and q[t]]
        each = [1 / sum(max(p[s] / p[t], q[s] / q[t]) for s in range(len(p))) for t in tokens]
        assert couplings.shared_noise(p, q) == pytest.approx(sum(each))
        most = couplings.maximal(p, q)
        assert most / (2 - most) - 1e-12 <= couplings.shared_noise(p, q) <= most + 1e-12
    assert couplings.shared_noise(P, P) == pytest.approx(1)
    assert couplings.shared_noise(np.array([1.0, 0.0]), np.array([0.0, 1.0])) == 0


def test_races_with_the_same_noise_agree_with_the_formula_and_others_do_not() -> None:
    rng, draws = np.random.default_rng(2), 40_000
    ranks = couplings.ranks_under_shared_noise(P, Q, draws, rng)
    assert (ranks == 1).mean() == pytest.approx(couplings.shared_noise(P, Q), abs=4 * 0.5 / math.sqrt(draws))
    assert set(ranks) <= set(range(1, 6))
    assert abs(float(P @ Q) - couplings.shared_noise(P, Q)) > 0.05, "the chance of independent draws"


def test_transport_is_the_least_cut_of_all_sets_of_tokens() -> None:
    for p, q in [(P, Q), *some_pairs()]:
        sets = [list(chosen) for n in range(len(p) + 1) for chosen in itertools.combinations(range(len(p)), n)]
        for drafts in (1, 2, 4):
            least = min(p[chosen].sum() + 1 - q[chosen].sum() ** drafts for chosen in sets)
            assert couplings.best_of_transport(p, q, drafts) == pytest.approx(least)
        assert couplings.best_of_transport(p, q, 1) == pytest.approx(couplings.maximal(p, q))


def test_no_rule_of_one_list_passes_the_bound_of_transport() -> None:
    for p, q in [(P, Q), *some_pairs()]:
        best = [couplings.best_of_transport(p, q, drafts) for drafts in (1, 2, 4, 64)]
        assert best == sorted(best)
        in_turn, left = 0.0, p.copy()  # speculative sampling with one draft after the other
        chance = 1.0
        for _ in range(2):
            accepted = couplings.maximal(left, q)
            in_turn, chance = in_turn + chance * accepted, chance * (1 - accepted)
            rest = np.maximum(left - q, 0)
            left = rest / rest.sum() if rest.sum() > 1e-15 else left
        assert in_turn <= best[1] + 1e-12


def enumerated_blocks(p: np.ndarray, q: np.ndarray, length: int) -> tuple[float, float, float]:
    """Return the accepted drafts by the algorithm of block verification, by `accepted_by_blocks`, and by tokens.

    p, q [vocab, vocab] are the distributions after each token; all chains are enumerated.
    """
    algorithm = by_blocks = by_tokens = 0.0
    for path in itertools.product(range(len(p)), repeat=length):
        before = (0, *path)
        q_of = math.prod(q[a, b] for a, b in itertools.pairwise(before))
        ratios = [p[a, b] / q[a, b] for a, b in itertools.pairwise(before)]
        chance, stops = 1.0, []
        for i, ratio in enumerate(ratios, 1):
            chance = min(1.0, chance * ratio)
            surplus = float(np.maximum(chance * p[path[i - 1]] - q[path[i - 1]], 0).sum())
            stops.append(chance if i == length else surplus / (surplus + 1 - chance) if surplus + 1 > chance else 1.0)
        algorithm += q_of * sum(1 - math.prod(1 - stop for stop in stops[i:]) for i in range(length))
        by_blocks += q_of * couplings.accepted_by_blocks(ratios)
        by_tokens += q_of * couplings.accepted_by_tokens(ratios)
    return algorithm, by_blocks, by_tokens


def test_blocks_accept_what_their_algorithm_does_and_no_less_than_tokens() -> None:
    rng = np.random.default_rng(3)
    more = []
    for _ in range(10):
        p, q = (rng.dirichlet(np.ones(3), size=3) for _ in range(2))
        algorithm, by_blocks, by_tokens = enumerated_blocks(p, q, 4)
        assert by_blocks == pytest.approx(algorithm)
        more.append(by_blocks - by_tokens)
    assert min(more) > -1e-12
    assert max(more) > 0.01


def test_drafts_judged_by_tokens_end_at_the_first_that_is_refused() -> None:
    assert couplings.accepted_by_tokens([1.5, 0.5, 2.0, 0.0, 9.0]) == pytest.approx(1 + 0.5 + 0.5)
    assert couplings.accepted_by_blocks([1.5, 0.5, 2.0, 0.0, 9.0]) == pytest.approx(1 + 0.5 + 1.0)


def test_runs_are_the_hits_before_the_first_miss_of_every_chain_that_fits() -> None:
    assert runs_of([True, True, False, True], 2) == [2, 1, 0]
    assert runs_of([True], 2) == []


def test_the_command_judges_the_targets_texts_and_writes_a_record(tmp_path, capsys) -> None:
    prompts, record = tmp_path / "one.jsonl", tmp_path / "rules.json"
    prompts.write_text(json.dumps({"id": "one", "prompt": "def main():\n    "}) + "\n")
    options = ["--max-tokens", "12", "--draws", "4", "--blocks", "2,4", "--json", str(record)]
    assert main(["rule-bench", "--prompts", str(prompts), *options]) == 0
    found = from_json(RuleRecord, record.read_text(), "json")
    assert found.positions == 12
    assert found.shared_noise <= found.maximal
    by_condition = {(entry.temperature, entry.drafts): entry for entry in found.lists}
    assert by_condition[1.0, 1].transport == pytest.approx(found.maximal)
    assert by_condition[0.0, 1].shared_noise == found.greedy
    assert [entry.drafts for entry in found.blocks] == [2, 4]
    assert all(entry.by_tokens <= entry.by_blocks + 1e-9 for entry in found.blocks)
    whole = found.layers[-1]
    assert (whole.layers, whole.greedy, whole.shared_noise) == (8, 1.0, pytest.approx(1.0))
    assert all(entry.step_ms > 0 for entry in found.layers)
    assert [entry.tokens for entry in found.passes] == [1, 4, 8, 16]
    assert "maximal coupling" in capsys.readouterr().out
