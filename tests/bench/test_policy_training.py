"""`outrider train policy`: what the networks learn from traces, and how they are evaluated."""

from __future__ import annotations

import json
import math
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from outrider.bench.length_training.command import split, train
from outrider.bench.length_training.evaluation import evaluate
from outrider.bench.length_training.fit import OPTIONAL_INPUTS, Fit, _gradients
from outrider.bench.length_training.rows import TrainingRows, block_rows, draft_rows
from outrider.bench.replay.traces import HitTrace, save_traces
from outrider.bench.traces.sweep import NotedWindow, policy_of
from outrider.deploy.cli import main, parse
from outrider.edge import EdgeConfig
from outrider.edge.policies.length.features import BLOCK_INPUTS, DRAFT_INPUTS, LENGTHS, block_inputs, draft_inputs
from outrider.edge.policies.length.network import load_trained
from outrider.edge.policies.length.rules import AimdWindow, SpecDecWindow, ThresholdWindow
from outrider.proto.errors import ConfigError
from outrider.proto.policy import FixedWindow, SurvivalWindow

NAN = math.nan


def trace_of(hits, confidence=(), **fields) -> HitTrace:
    n = len(hits)
    usual = {"id": "a", "domain": "code", "drafter": "d", "drafter_version": "1", "temperature": 0.0}
    texts = {"prompt_tokens": 3, "tokens": (5,) * n, "hits": tuple(map(bool, hits))}
    return HitTrace(**(usual | texts | {"confidence": tuple(confidence) or (NAN,) * n} | fields))


def chance_of(confidence, perturbed_probability, temperature):
    """Return the planted chance: confidence decides at T = 0, the perturbed probability at T = 1."""
    return 0.15 + 0.8 * (confidence if temperature == 0 else perturbed_probability)


def planted(prompts: int = 60, tokens: int = 100, seed: int = 0, measured: bool = True) -> list[HitTrace]:
    rng, traces = np.random.default_rng(seed), []
    for number in range(prompts):
        temperature = float(number % 2)
        confidence, perturbed_probability = rng.random(tokens), rng.random(tokens)
        hits = rng.random(tokens) < chance_of(confidence, perturbed_probability, temperature)
        measures = (
            {"perturbed_probability": tuple(perturbed_probability), "entropy": tuple(rng.random(tokens))}
            if measured
            else {}
        )
        traces.append(trace_of(hits, confidence, id=str(number), temperature=temperature, **measures))
    return traces


@pytest.fixture(scope="module")
def trained():
    return train(planted(), Fit(seed=1, steps=1500))


# === rows =======================================================================================================


def test_a_draft_row_holds_the_drafters_measures_and_whether_it_hit() -> None:
    measures = {"perturbed_probability": (0.6, 0.7, 0.8), "entropy": (1.0, 2.0, 3.0), "temperature": 0.5}
    rows = draft_rows([trace_of([1, 0, 1], (0.2, 0.3, 0.4), **measures)], np.random.default_rng(0))
    wanted = draft_inputs((0.2, 0.3, 0.4), (0.6, 0.7, 0.8), (1.0, 2.0, 3.0), 0.5, (0, 0, 0))
    assert rows.outcomes.tolist() == [1, 0, 1]
    assert rows.inputs[:, :4] == pytest.approx(wanted[:, :4])


def test_a_draft_may_follow_any_number_of_the_unverified_hits_right_before_it() -> None:
    hits = [1, 1, 0, 1, 1, 1, 1]
    depths = [
        np.expm1(draft_rows([trace_of(hits)], np.random.default_rng(seed)).inputs[:, 4]).round().astype(int)
        for seed in range(200)
    ]
    assert np.max(depths, axis=0).tolist() == [0, 1, 2, 0, 1, 2, 3]
    assert np.min(depths, axis=0).tolist() == [0] * 7
    assert np.mean([d[6] for d in depths]) == pytest.approx(1.5, abs=0.3), "evenly"


def test_where_a_drafter_was_silent_there_is_no_draft_to_learn_from() -> None:
    rows = draft_rows([trace_of([1, 0, 1], silent=(False, True, False))], np.random.default_rng(0))
    assert rows.outcomes.tolist() == [1, 1]


def test_a_block_row_has_the_share_up_to_a_miss_and_the_first_drafts_signals() -> None:
    rng = np.random.default_rng(3)
    hits = rng.random(120) < 0.7
    confidence, entropy = rng.random(120), rng.random(120)
    rows = block_rows([trace_of(hits, confidence, entropy=tuple(entropy))], np.random.default_rng(0))
    assert 60 < len(rows) < 120, "a block that the text ends in has no outcome"
    found = 0
    for inputs, outcome in zip(rows.inputs, rows.outcomes, strict=True):
        length, known = (round(value) for value in (np.exp(inputs[6]), np.expm1(inputs[5])))
        assert length in LENGTHS
        assert known <= length
        for start in range(120 - length + 1):  # its start is not in the row
            there = slice(start, start + known)
            wanted = block_inputs(tuple(confidence[there]), tuple(entropy[there]), 0.0, known, [length])
            run = next((i for i in range(length) if not hits[start + i]), length)
            if np.allclose(wanted[0], inputs, equal_nan=True) and outcome == pytest.approx(run / length):
                found += 1
                break
    assert found == len(rows)


# === training ===================================================================================================


def test_a_planted_dependency_is_learnt_and_the_chances_are_calibrated(trained) -> None:
    (weights, evaluations), unseen = trained, planted(prompts=40, seed=9)
    rows = draft_rows(unseen, np.random.default_rng(0))
    truth = np.concatenate(
        [chance_of(np.array(t.confidence), np.array(t.perturbed_probability), t.temperature) for t in unseen]
    )
    evaluation = evaluate(weights.head, rows, rows)
    least = -(truth * np.log(truth) + (1 - truth) * np.log(1 - truth)).mean()
    assert evaluation.loss_of_mean > 1.1 * least
    assert evaluation.loss < 1.03 * least
    assert evaluation.calibration_error < 0.03
    assert np.abs(weights.head.chances(rows.inputs) - truth).mean() < 0.06
    assert evaluations["head"].loss < evaluations["head"].loss_of_mean
    assert evaluations["head"].rows == 12 * 100, "a fifth of the prompts"


def test_a_head_without_some_of_its_inputs_gives_the_mean_of_what_it_knows(trained) -> None:
    head = trained[0].head
    silent = head.chances(draft_inputs((), (), (), 1.0, (0,)))
    assert silent == pytest.approx([0.55], abs=0.07)
    alone = head.chances(draft_inputs((0.1, 0.9), (), (), 0.0, (0, 0)))
    assert alone == pytest.approx(chance_of(np.array([0.1, 0.9]), 0.0, 0.0), abs=0.1)


def test_a_blocks_share_falls_with_its_length_and_rises_with_what_is_known_of_it(trained) -> None:
    weights, evaluations = trained
    shares = weights.block.chances(block_inputs((), (), 0.0, 0, [1, 2, 4, 8, 16])).tolist()
    expected = [sum(0.55**k for k in range(1, n + 1)) / n for n in (1, 2, 4, 8, 16)]
    assert shares == pytest.approx(expected, abs=0.08)
    unsure, sure = (weights.block.chances(block_inputs((q, q), (), 0.0, 2, [4]))[0] for q in (0.1, 0.9))
    assert unsure + 0.3 < sure
    block = evaluations["block"]
    assert block.loss_of_outcomes < block.loss < block.loss_of_mean
    assert block.calibration_error < 0.05


def test_the_same_seed_gives_the_same_weights_and_another_seed_others() -> None:
    def weights(seed: int) -> bytes:
        networks, _ = train(planted(prompts=10, tokens=50), Fit(steps=20, seed=seed))
        return b"".join(network.hidden.tobytes() for network in (networks.head, networks.block))

    assert weights(1) == weights(1) != weights(2)


def test_inputs_that_no_trace_knows_or_varies_have_no_effect() -> None:
    """Older recordings lack entropy and perturbed probability, and those at T = 0 alone teach nothing about others."""
    greedy = [trace for trace in planted(measured=False) if trace.temperature == 0]
    trained, _ = train(greedy, Fit(steps=200))
    same = [
        draft_inputs((0.5,), perturbed_probability, entropy, temperature, (0,))
        for perturbed_probability, entropy, temperature in (((), (), 0.0), ((0.99,), (4.0,), 0.0), ((), (), 1.5))
    ]
    chances = [trained.head.chances(inputs)[0] for inputs in same]
    assert chances == pytest.approx([chances[0]] * 3)
    shares = [trained.block.chances(block_inputs((0.5,), e, 0.0, 1, [4]))[0] for e in ((), (4.0,))]
    assert shares[0] == pytest.approx(shares[1])


def test_a_prompt_is_for_training_or_evaluation_whatever_the_drafter_and_seed() -> None:
    traces = [replace(t, drafter=d, seed=s) for t in planted(prompts=10, tokens=5) for d in "ab" for s in (1, 2)]
    known, unseen = split(traces, 0.3, 0)
    assert (len(known), len(unseen)) == (28, 12)
    assert not {t.id for t in known} & {t.id for t in unseen}


def test_rows_beyond_the_limit_are_drawn_at_random() -> None:
    rows = TrainingRows(np.arange(100.0)[:, None], np.arange(100.0))
    some = rows.some(30, np.random.default_rng(0))
    assert len(some) == len(set(some.outcomes)) == 30
    assert (some.inputs[:, 0] == some.outcomes).all()
    assert rows.some(100, np.random.default_rng(0)) is rows


def test_gradients_are_those_of_the_cross_entropy() -> None:
    rng = np.random.default_rng(0)
    weights = [rng.normal(size=shape) for shape in ((4, 3), (3,), (3,), (1,))]
    z, outcomes = rng.normal(size=(7, 4)), rng.random(7)

    def loss() -> float:
        chances = 1 / (1 + np.exp(-(np.tanh(z @ weights[0] + weights[1]) @ weights[2] + weights[3])))
        return float(-(outcomes * np.log(chances) + (1 - outcomes) * np.log(1 - chances)).mean())

    for weight, gradient in zip(weights, _gradients(weights, z, outcomes), strict=True):
        for at in np.ndindex(weight.shape):
            weight[at] += 1e-5
            above = loss()
            weight[at] -= 2e-5
            below = loss()
            weight[at] += 1e-5
            assert gradient[at] == pytest.approx((above - below) / 2e-5, abs=1e-7)


def test_only_a_drafters_measures_are_ever_hidden_in_training() -> None:
    assert set(DRAFT_INPUTS) - OPTIONAL_INPUTS == {"temperature", "depth"}
    assert set(BLOCK_INPUTS) - OPTIONAL_INPUTS == {"temperature", "known", "length"}


# === the command ================================================================================================


def test_the_command_writes_weights_that_rules_take(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, seed in (("one", 0), ("two", 5)):
        save_traces([replace(t, id=name + t.id) for t in planted(prompts=8, tokens=40, seed=seed)], tmp_path / name)
    output = tmp_path / "made" / "weights.json"
    files = [str(tmp_path / "one"), str(tmp_path / "two")]
    assert main(["train", "policy", *files, "--output", str(output), "--steps", "20", "--hidden", "4"]) == 0
    out = capsys.readouterr().out
    for word in ("head", "block", "one chance", "outcome", "--window specdec++@"):
        assert word in out
    made = json.loads(output.read_text())["made"]
    assert (made["prompts"], made["hidden"], made["temperatures"]) == (16, 4, [0.0, 1.0])
    assert len(made["traces_sha256"]) == 64
    assert output.stat().st_size < 20_000
    head = load_trained(output).head
    assert policy_of(f"specdec++:0.4@{output}").window.head.chances(np.zeros((1, 5))) == head.chances(np.zeros((1, 5)))


@pytest.mark.parametrize(
    ("prompts", "options", "message"),
    [
        (1, [], "traces: hold 1 prompts, too few"),
        (4, ["--held-out", "0"], "set --held-out"),
        (0, [], "traces: hold 0 prompts"),
        (5, ["--output", "/proc/none/weights.json"], "output: cannot write"),
    ],
)
def test_the_command_names_a_mistake_in_one_line(tmp_path: Path, capsys, prompts, options, message) -> None:
    save_traces(planted(prompts=prompts, tokens=10), tmp_path / "traces.jsonl")
    command = ["train", "policy", str(tmp_path / "traces.jsonl"), "--output", str(tmp_path / "w.json"), *options]
    assert main(command) == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line


def test_texts_too_short_for_a_block_are_refused() -> None:
    with pytest.raises(ConfigError, match="too few tokens"):
        Fit().network(BLOCK_INPUTS, block_rows([], np.random.default_rng(0)))


# === rules as options ===========================================================================================


def test_every_command_takes_a_number_or_a_rule_for_its_window(capsys: pytest.CaptureFixture[str]) -> None:
    def window(text: str):
        return parse(["edge", "--coordinator", "a:1", "--window", text]).values["window"]

    assert [window(text) for text in ("8", "specdec++:0.3", "aimd")] == [8, "specdec++:0.3", "aimd"]
    for wrong, message in (("0", "below 1"), ("fast", "is none of"), ("threshold:2", "0 to 1"), ("speckv@/no", "read")):
        with pytest.raises(SystemExit):
            window(wrong)
        assert message in capsys.readouterr().err


def test_an_edge_gets_a_rule_of_its_own_for_each_text() -> None:
    def policy(window: int | str | None):
        return EdgeConfig(coordinator="127.0.0.1:1", window=window).window_policy

    assert policy(None) == SurvivalWindow()
    assert policy(3) == policy("fixed:3") == FixedWindow(3)
    assert policy("threshold:0.2") == ThresholdWindow(0.2)
    config = EdgeConfig(coordinator="127.0.0.1:1", window="aimd")
    assert config.window_policy is not config.window_policy
    with pytest.raises(ConfigError, match="is none of") as caught:
        policy("quick")
    assert caught.value.field == "window"


@pytest.mark.parametrize("battery", [-0.1, 1.5, NAN])
def test_a_battery_is_a_share(battery: float) -> None:
    with pytest.raises(ConfigError, match="is not") as caught:
        EdgeConfig(coordinator="127.0.0.1:1", battery=battery)
    assert caught.value.field == "battery"


def test_a_sweep_takes_rules_by_name_and_passes_hits_on_to_those_that_learn() -> None:
    assert policy_of("specdec++:0.3").window == SpecDecWindow(0.3)
    assert policy_of("fixed:4").window == policy_of("4").window
    for wrong in ("fixed", "quick", "threshold:x"):
        with pytest.raises(ConfigError) as caught:
            policy_of(wrong)
        assert caught.value.field == "window"
    noted = NotedWindow(AimdWindow(start=8))
    noted.observe(0, True)
    assert noted.inner.tokens < 8
    NotedWindow(FixedWindow(3)).observe(1, True)
