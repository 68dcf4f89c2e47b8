"""Length rules: each formula by hand or against brute force, their names, their weights, and that no text changes."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from checked_simulation import CheckedSimulation, open_frame, own_text, rules
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.edge.policies.length import RULES, rule_by_name
from outrider.edge.policies.length.features import BLOCK_INPUTS, DRAFT_INPUTS, block_inputs, draft_inputs
from outrider.edge.policies.length.network import Network, Trained, load_trained, save_trained, shipped
from outrider.edge.policies.length.rules import (
    AimdWindow,
    FlexSpecWindow,
    PearlWindow,
    SpecDecWindow,
    SpecKvWindow,
    ThresholdWindow,
    draft_s,
    expected_in_flight,
    waiting_s,
)
from outrider.proto.errors import ConfigError, InvalidArgument
from outrider.proto.policy import EdgeView, FixedWindow, LearningRule, SurvivalWindow
from outrider.proto.types import DraftToken, Goal, Patience, Sampling
from research.simulator.faults import Faults
from research.simulator.scripted import drafter_of, hashing_oracle

NAN = math.nan
USUAL = EdgeView(
    in_flight=0,
    survival=1.0,
    acceptance=0.8,
    drafting_s=0.002,
    step_s=0.03,
    row_s=0.001,
    round_trip_s=0.04,
    byte_s=0.0005,
    token_s=0.0,
    goal=Goal.LATENCY,
)


def in_flight(*chances: float, **fields) -> EdgeView:
    """Drafts with these chances, of which the drafter says the same."""
    n = len(chances)
    usual = {"confidence": chances, "entropy": [NAN] * n, "perturbed": [NAN] * n}
    signs = [fields.pop(name, sign) for name, sign in usual.items()]
    said = {"chances": chances, "drafts": tuple(map(DraftToken, range(n), *signs)), "survival": math.prod(chances)}
    return replace(USUAL, in_flight=n, **(said | fields))


# === what a round takes and gives ===============================================================================


def test_a_round_takes_round_trip_and_step_and_per_draft_its_drafting_row_and_bytes() -> None:
    assert waiting_s(USUAL) == pytest.approx(0.04 + 0.03 + 0.001)
    assert draft_s(USUAL) == pytest.approx(0.002 + 0.001 + 2 * 0.0005)


def test_drafts_in_flight_are_worth_the_sum_of_their_chances_to_be_reached() -> None:
    assert expected_in_flight(in_flight(0.9, 0.5, 0.8)) == pytest.approx(0.9 + 0.9 * 0.5 + 0.9 * 0.5 * 0.8)
    assert expected_in_flight(USUAL) == 0
    evenly = replace(USUAL, in_flight=3, survival=0.5**3)
    assert expected_in_flight(evenly) == pytest.approx(0.5 + 0.25 + 0.125), "where only the chance of all is known"


# === threshold ==================================================================================================


@pytest.mark.parametrize(
    ("view", "more"),
    [
        (USUAL, 4),
        (in_flight(0.4), 4),
        (in_flight(0.39), 0),
        (in_flight(0.1, 0.9), 4),  # the last alone counts
        (in_flight(0.9, 0.1), 0),
        (in_flight(*[0.9] * 18), 2),
        (in_flight(*[0.9] * 20), 0),
        (in_flight(0.9, 0.39, confidence=(NAN, NAN)), 0),
        (in_flight(0.1, 0.4, confidence=(NAN, NAN)), 4),
        (replace(USUAL, in_flight=2, acceptance=0.5), 4),
        (replace(USUAL, in_flight=2, acceptance=0.3), 0),
    ],
)
def test_the_threshold_rule_drafts_on_while_the_last_draft_is_sure_enough(view: EdgeView, more: int) -> None:
    assert ThresholdWindow(0.4, max_tokens=20, stride=4).more(view) == more


def test_the_threshold_rule_looks_every_stride_drafts() -> None:
    assert [ThresholdWindow(0.4, stride=stride).more(USUAL) for stride in (1, 2, 7)] == [1, 2, 7]


# === SpecDec++ ==================================================================================================


class Said:
    """A stand-in for a network: it answers with given chances and keeps the inputs."""

    def __init__(self, *chances: float) -> None:
        self._chances = np.array(chances)
        self.asked: list[np.ndarray] = []

    def chances(self, inputs: np.ndarray) -> np.ndarray:
        self.asked.append(inputs)
        return self._chances[: len(inputs)]


@pytest.mark.parametrize("threshold", [0.1, 0.3, 0.5, 0.7, 0.9, 0.97])
@pytest.mark.parametrize("chances", [(), (0.9,), (0.9, 0.7), (0.6, 0.45), (0.95, 0.9, 0.8, 0.3), (0.99,) * 9])
@pytest.mark.parametrize("acceptance", [0.31, 0.8, 0.95])
def test_specdec_stops_once_a_rejection_is_likelier_than_the_threshold(threshold, chances, acceptance) -> None:
    """Against drafting one by one; drafts that are not made yet agree with the chance of late."""
    wanted = 0
    drafts = [*chances]
    while 1 - math.prod(drafts) <= threshold and len(drafts) < 32:
        drafts.append(acceptance)
        wanted += 1
    rule = SpecDecWindow(threshold, max_tokens=32, head=Said(*chances))
    assert rule.more(in_flight(*chances, acceptance=acceptance)) == wanted


def test_specdec_never_stops_at_threshold_1_and_makes_one_draft_at_threshold_0() -> None:
    view = in_flight(0.5)
    assert SpecDecWindow(1.0, max_tokens=10, head=Said(0.5)).more(view) == 9
    assert SpecDecWindow(0.0, head=Said(0.5)).more(view) == 0
    assert SpecDecWindow(0.0, head=Said()).more(USUAL) == 1


def test_specdec_asks_its_head_once_about_all_that_is_known_of_each_draft() -> None:
    head = Said(0.9, 0.9)
    rule = SpecDecWindow(0.5, head=head)
    view = in_flight(0.8, 0.5, perturbed=(0.7, NAN), entropy=(1.5, 2.5), temperature=0.7)
    assert {rule.more(view) for _ in range(3)} == {rule.more(replace(view, byte_s=0.1))}
    (asked,) = head.asked
    log_odds = [math.log(0.8 / 0.2), math.log(0.7 / 0.3), 0.0]
    wanted = [[log_odds[0], log_odds[1], 1.5, 0.7, 0.0], [log_odds[2], NAN, 2.5, 0.7, math.log(2)]]
    assert asked == pytest.approx(np.array(wanted), nan_ok=True)


def test_what_a_drafter_does_not_say_is_not_known_to_the_head() -> None:
    inputs = draft_inputs((), (), (0.5, 1.0), 1.0, range(2))
    assert np.isnan(inputs[:, :2]).all()
    assert inputs[:, 2:] == pytest.approx(np.array([[0.5, 1.0, 0.0], [1.0, 1.0, math.log(2)]]))
    sure = draft_inputs((0.0, 1.0), (), (), 0.0, range(2))[:, 0]
    assert sure == pytest.approx([-math.log(9999), math.log(9999)], rel=1e-3), "no draft is certain"


# === SpecKV =====================================================================================================


class Shares:
    """In a network's place: the share of a block that is accepted, by its length."""

    def __init__(self, share_of) -> None:
        self._share_of = share_of
        self.asked: list[np.ndarray] = []

    def chances(self, inputs: np.ndarray) -> np.ndarray:
        self.asked.append(inputs)
        lengths = np.exp(inputs[:, BLOCK_INPUTS.index("length")])
        return np.array([self._share_of(length) for length in lengths])


@pytest.mark.parametrize("acceptance", [0.3, 0.6, 0.8, 0.95])
@pytest.mark.parametrize("round_trip_s", [0.0, 0.04, 0.3])
@pytest.mark.parametrize("drafting_s", [0.0005, 0.01])
@pytest.mark.parametrize("drafts", [0, 1, 3, 8, 40])
def test_speckv_goes_to_the_length_of_most_tokens_a_second(acceptance, round_trip_s, drafting_s, drafts) -> None:
    def share(length: float) -> float:
        return sum(acceptance**k for k in range(1, round(length) + 1)) / length

    def rate(length: int) -> float:
        taken_s = round_trip_s + 0.03 + 0.001 * (1 + length) + length * (drafting_s + 2 * 0.0005)
        return (1 + length * share(length)) / taken_s

    view = replace(USUAL, in_flight=drafts, round_trip_s=round_trip_s, drafting_s=drafting_s)
    lengths = (1, 2, 3, 4, 6, 8, 12, 16, 24, 32)
    allowed = [n for n in (*lengths, *([drafts] if drafts else [])) if n >= drafts]
    more = SpecKvWindow(lengths, Shares(share)).more(view)
    assert drafts + more in allowed
    assert rate(drafts + more) == pytest.approx(max(map(rate, allowed)))


def test_speckv_reads_mean_and_extreme_signals_of_the_drafts_in_flight() -> None:
    network = Shares(lambda length: 0.5)
    rule = SpecKvWindow((2, 4), network)
    view = in_flight(0.9, 0.3, 0.6, entropy=(1.0, NAN, 2.0), temperature=0.7)
    assert {rule.more(view) for _ in range(3)} == {1}
    (asked,) = network.asked
    signals = [0.6, 0.3, 1.5, 2.0, 0.7, math.log(4)]
    assert asked == pytest.approx(np.array([[*signals, math.log(3)], [*signals, math.log(4)]]))


def test_a_block_without_drafts_and_one_whose_drafter_says_nothing_have_no_signals() -> None:
    for known, said in ((0, ()), (3, ()), (2, (NAN, NAN))):
        inputs = block_inputs(said, said, 0.5, known, [4])
        assert inputs == pytest.approx(
            np.array([[NAN, NAN, NAN, NAN, 0.5, math.log(1 + known), math.log(4)]]), nan_ok=True
        )


# === FlexSpec ===================================================================================================


@settings(max_examples=150, deadline=None)
@given(
    chances=st.lists(st.floats(0.05, 0.99), max_size=6),
    acceptance=st.floats(0.02, 0.98),
    times=st.tuples(st.floats(1e-4, 0.05), st.floats(0.005, 0.1), st.floats(0, 0.01), st.floats(0, 0.3)),
    byte_s=st.floats(0, 0.002),
    battery=st.floats(0.01, 1),
)
def test_flexspec_goes_to_the_length_of_most_tokens_for_time_and_energy(
    chances, acceptance, times, byte_s, battery
) -> None:
    """Against every length, by the objective as it is written down."""
    drafting_s, step_s, row_s, round_trip_s = times
    view = in_flight(*chances, acceptance=acceptance, byte_s=byte_s, battery=battery)
    view = replace(view, drafting_s=drafting_s, step_s=step_s, row_s=row_s, round_trip_s=round_trip_s)
    energy_s = 0.5 * (4.0 * drafting_s + 2 * 1e-4) * (1 - battery) / battery

    def worth(length: int) -> float:
        agree = itertools.accumulate([*chances, *[acceptance] * (length - len(chances))], lambda a, b: a * b)
        each_s = drafting_s + row_s + 2 * byte_s + energy_s
        return (1 + sum(agree)) / (round_trip_s + step_s + row_s + length * each_s)

    more = FlexSpecWindow(max_tokens=24, drafting_w=4.0, byte_j=1e-4, joule_s=0.5).more(view)
    best = max(worth(n) for n in range(len(chances), 25))
    if not chances and more == 1:
        assert worth(1) == pytest.approx(best) or worth(0) == pytest.approx(best), "one draft is made to find out"
    else:
        assert worth(len(chances) + more) == pytest.approx(best)


def test_a_joule_is_worth_nothing_on_mains_and_ever_more_as_the_battery_falls() -> None:
    rule = FlexSpecWindow(drafting_w=3.0, byte_j=1e-3, joule_s=2.0)
    prices = [rule.energy_s(replace(USUAL, battery=battery)) for battery in (1.0, 0.5, 0.25, 0.0)]
    joules = 3.0 * 0.002 + 2 * 1e-3
    assert prices == [0.0, pytest.approx(2.0 * joules), pytest.approx(6.0 * joules), math.inf]


def test_flexspec_drafts_less_as_the_battery_falls_and_not_at_all_when_it_is_empty() -> None:
    far = replace(USUAL, drafting_s=0.0005)
    lengths = [FlexSpecWindow().more(replace(far, battery=battery)) for battery in (1.0, 0.3, 0.05, 0.005, 0.0)]
    assert lengths == sorted(lengths, reverse=True)
    assert lengths[0] > lengths[1] > lengths[2] > lengths[4] == 0
    free = FlexSpecWindow(drafting_w=0.0, byte_j=0.0)
    assert free.more(replace(far, battery=0.0)) == free.more(far), "what takes no energy has no price"


def test_flexspec_makes_one_draft_to_find_out_unless_a_usual_one_would_not_pay() -> None:
    """A round without drafts takes 71 ms, so one that agrees in 7 of 10 cases may take 49.7 ms, 2 for row and bytes."""
    assert FlexSpecWindow().more(replace(USUAL, acceptance=0.02, drafting_s=0.047)) == 1
    assert FlexSpecWindow().more(replace(USUAL, acceptance=0.02, drafting_s=0.048)) == 0
    assert FlexSpecWindow().more(in_flight(0.02, acceptance=0.02, drafting_s=0.047)) == 0
    tired = replace(USUAL, acceptance=0.02, drafting_s=0.002, battery=0.1)
    assert FlexSpecWindow().more(replace(tired, battery=0.2)) == 1
    assert FlexSpecWindow().more(tired) == 0


# === AIMD =======================================================================================================


def test_aimd_adds_after_a_window_of_hits_and_shrinks_by_its_factor_on_a_miss() -> None:
    rule = AimdWindow(start=8, increase=2, decrease=0.5, max_tokens=64)
    rule.observe(8, False)
    assert rule.tokens == pytest.approx(10)
    rule.observe(5, False)
    assert rule.tokens == pytest.approx(11), "half a window of hits is half the increase"
    rule.observe(0, True)
    assert rule.tokens == pytest.approx(5.5)
    assert [rule.more(replace(USUAL, in_flight=n)) for n in (0, 3, 5, 9)] == [5, 2, 0, 0]
    rule.observe(11, True)
    assert rule.tokens == pytest.approx((5.5 + 2 * 11 / 5.5) / 2), "hits before the miss count"


def test_aimd_stays_between_one_draft_and_the_most() -> None:
    rule = AimdWindow(start=4, max_tokens=6)
    for _ in range(50):
        rule.observe(6, False)
    assert rule.more(USUAL) == 6
    for _ in range(50):
        rule.observe(0, True)
    assert rule.more(USUAL) == 1


@pytest.mark.parametrize("hits", [1, 3, 8])
def test_aimd_settles_where_growth_and_cut_weigh_the_same(hits: int) -> None:
    rule, widths = AimdWindow(start=30), []
    for _ in range(400):
        for _ in range(hits):
            rule.observe(1, False)
        widths.append(rule.tokens)
        rule.observe(0, True)
    assert sum(widths[-50:]) / 50 == pytest.approx(math.sqrt(4.0 * hits / 0.2), rel=0.25)


def test_only_a_rule_that_learns_observes_the_fate_of_its_drafts() -> None:
    assert [name for name in RULES if isinstance(rule_by_name(NUMBERED.get(name, name)), LearningRule)] == ["aimd"]


# === names ======================================================================================================

NUMBERED = {"fixed": "fixed:8", "pearl": "pearl:8"}


@pytest.mark.parametrize(
    ("text", "rule"),
    [
        ("survival", SurvivalWindow()),
        ("fixed:8", FixedWindow(8)),
        ("threshold", ThresholdWindow()),
        ("threshold:0.25", ThresholdWindow(0.25)),
        ("specdec++", SpecDecWindow()),
        ("specdec++:0.3", SpecDecWindow(0.3)),
        ("speckv", SpecKvWindow()),
        ("flexspec", FlexSpecWindow()),
        ("flexspec:2.5", FlexSpecWindow(joule_s=2.5)),
        ("aimd", AimdWindow()),
        ("pearl:8", PearlWindow(8)),
    ],
)
def test_rules_have_names(text: str, rule: object) -> None:
    assert rule_by_name(text) == rule


def test_trained_rules_take_weights_from_a_file(tmp_path) -> None:
    path = tmp_path / "my@own:weights.json"
    weights = replace(shipped(), head=replace(shipped().head, output_bias=50.0))
    save_trained(weights, path)
    rule = rule_by_name(f"specdec++:0.3@{path}")
    assert (rule.threshold, rule.head.output_bias) == (0.3, 50.0)
    assert rule_by_name(f"speckv@{path}").network.inputs == BLOCK_INPUTS


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("", "none of survival, fixed:N"),
        ("quick", "'quick' is none of"),
        ("fixed", "is not fixed:N"),
        ("fixed:", "no number"),
        ("fixed:1.5", "no number"),
        ("fixed:-1", "0 or more"),
        ("threshold:x", "no number"),
        ("threshold:1.2", "0 to 1"),
        ("threshold:nan", "0 to 1"),
        ("specdec++:-0.1", "0 to 1"),
        ("aimd:3", "is not aimd"),
        ("pearl", "is not pearl:N"),
        ("pearl:0", "1 draft or more"),
        ("flexspec@weights.json", "is not flexspec"),
        ("flexspec:-1", "0 or more"),
        ("flexspec:inf", "finite"),
    ],
)
def test_a_name_that_is_no_rule_is_refused_in_one_line_that_names_the_option(text: str, says: str) -> None:
    with pytest.raises(InvalidArgument, match=says.replace("+", r"\+")) as caught:
        rule_by_name(text)
    assert caught.value.field == "window"
    assert "\n" not in caught.value.message


@pytest.mark.parametrize(
    "make",
    [
        lambda: ThresholdWindow(max_tokens=0),
        lambda: ThresholdWindow(stride=0),
        lambda: SpecDecWindow(max_tokens=0, head=Said()),
        lambda: SpecKvWindow((), Said()),
        lambda: SpecKvWindow((0, 4), Said()),
        lambda: FlexSpecWindow(max_tokens=0),
        lambda: FlexSpecWindow(byte_j=-1.0),
        lambda: AimdWindow(start=0.5),
        lambda: AimdWindow(start=65),
        lambda: AimdWindow(increase=0),
        lambda: AimdWindow(decrease=1.0),
    ],
)
def test_a_rule_that_makes_no_sense_is_refused(make) -> None:
    with pytest.raises(InvalidArgument) as caught:
        make()
    assert caught.value.field == "window"


def test_every_rule_goes_in_pieces_as_far_as_its_window_and_no_further() -> None:
    unmeasured = replace(USUAL, step_s=0.0, round_trip_s=0.0, drafting_s=0.0, row_s=0.0)
    for name, usual in itertools.product(RULES, (USUAL, unmeasured)):
        rule, drafts = rule_by_name(NUMBERED.get(name, name)), 0
        for _ in range(100):
            more = rule.more(replace(usual, in_flight=drafts, survival=0.8**drafts, chances=(0.8,) * drafts))
            assert more >= 0
            drafts += more
        assert 1 <= drafts <= 64, name
        assert rule.more(replace(usual, in_flight=200, survival=0.0, chances=(0.8,) * 200)) == 0, name


# === networks and weights =======================================================================================

NETWORK = Network(
    ("a", "b"),
    np.array([1.0, -2.0]),
    np.array([2.0, 0.5]),
    np.array([[0.3, -0.7, 0.2], [1.1, 0.4, -0.5], [0.6, 0.1, -0.9], [-0.2, 0.8, 0.5]]),
    np.array([0.1, -0.2, 0.3]),
    np.array([0.9, -1.2, 0.4]),
    0.25,
)


def by_hand(network: Network, z: list[float]) -> float:
    units = [
        math.tanh(sum(z[i] * network.hidden[i][j] for i in range(len(z))) + network.hidden_bias[j])
        for j in range(len(network.output))
    ]
    return 1 / (1 + math.exp(-sum(u * w for u, w in zip(units, network.output, strict=True)) - network.output_bias))


@pytest.mark.parametrize(
    ("inputs", "z"),
    [
        ((1.0, -2.0), [0, 0, 0, 0]),
        ((2.0, -2.5), [0.5, -1, 0, 0]),
        ((NAN, -2.5), [0, -1, 1, 0]),
        ((2.0, NAN), [0.5, 0, 0, 1]),
        ((NAN, NAN), [0, 0, 1, 1]),
        ((99.0, -99.0), [4, -4, 0, 0]),
    ],
)
def test_a_network_reckons_as_its_formula_says_and_marks_what_is_not_known(inputs, z) -> None:
    assert NETWORK.standardised(np.array([inputs])) == pytest.approx(np.array([z], dtype=float))
    known_beside = np.array([inputs, (2.0, -2.5)])
    assert NETWORK.chances(known_beside) == pytest.approx([by_hand(NETWORK, z), by_hand(NETWORK, [0.5, -1, 0, 0])])


def test_an_input_that_never_varied_in_training_says_nothing() -> None:
    blind = replace(NETWORK, scales=np.array([2.0, 0.0]))
    chances = blind.chances(np.array([(2.0, value) for value in (-2.0, 7.0, NAN)]))
    assert chances == pytest.approx([by_hand(NETWORK, [0.5, 0, 0, 1])] * 3)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("means", np.zeros(3)),
        ("scales", np.array([1.0, -1.0])),
        ("hidden", np.zeros((2, 3))),
        ("hidden_bias", np.zeros((3, 1))),
        ("output", np.array([1.0, NAN, 0.0])),
        ("output_bias", math.inf),
    ],
)
def test_a_network_of_a_wrong_shape_is_refused_with_the_field_named(field, value) -> None:
    with pytest.raises(InvalidArgument) as caught:
        replace(NETWORK, **{field: value})
    assert caught.value.field == field


def test_weights_come_back_from_their_file_as_they_went(tmp_path) -> None:
    before, path = shipped(), tmp_path / "weights.json"
    version = save_trained(before, path)
    after = load_trained(path)
    assert after.made == before.made
    assert json.loads(path.read_text())["version"] == version
    inputs = np.array([[0.5, 0.2, 1.5, 1.0, 0.7], [NAN] * 3 + [0.0, 0.0]])
    assert after.head.chances(inputs) == pytest.approx(before.head.chances(inputs), abs=1e-4)
    assert save_trained(Trained(after.head, after.block), path) == version, "it is of the weights alone"


def test_the_shipped_weights_are_small_and_a_surer_draft_has_the_better_chance() -> None:
    trained = shipped()
    assert (trained.head.inputs, trained.block.inputs) == (DRAFT_INPUTS, BLOCK_INPUTS)
    unsure, sure = trained.head.chances(draft_inputs((0.05, 0.95), (), (), 0.0, (0, 0)))
    assert unsure + 0.2 < sure
    shares = trained.block.chances(block_inputs((0.9,), (), 0.0, 1, [1, 4, 16, 32])).tolist()
    assert shares == sorted(shares, reverse=True)
    assert len(json.dumps(trained.made)) < 4000


def damaged(change) -> str:
    numbers = {"means": [0.0], "scales": [1.0], "hidden": [[0.0], [0.0]], "hidden_bias": [0.0], "output": [0.0]}

    def page(names):
        many = {"means": [0.0] * len(names), "scales": [1.0] * len(names), "hidden": [[0.0]] * (2 * len(names))}
        return {"inputs": list(names), **numbers, **many, "output_bias": 0.0}

    whole = {"format": "outrider-window-weights/1", "head": page(DRAFT_INPUTS), "block": page(BLOCK_INPUTS)}
    change(whole)
    return json.dumps(whole)


@pytest.mark.parametrize(
    ("text", "field"),
    [
        ("{", "weights"),
        ("[]", "weights.format"),
        (damaged(lambda page: page.update(format="outrider-window-weights/9")), "weights.format"),
        (damaged(lambda page: page.update(made=3)), "weights.made"),
        (damaged(lambda page: page.pop("head")), "weights.head"),
        (damaged(lambda page: page["block"]["inputs"].pop()), "weights.block.inputs"),
        (damaged(lambda page: page["block"].pop("output")), "weights.block.output"),
        (damaged(lambda page: page["head"].update(output=["x"])), "weights.head.output"),
        (damaged(lambda page: page["head"].update(hidden=[[0.0], [0.0, 1.0]])), "weights.head.hidden"),
        (damaged(lambda page: page["head"]["means"].pop()), "weights.head.means"),
        (damaged(lambda page: page["head"].update(output_bias=[1.0])), "weights.head.output_bias"),
        (damaged(lambda page: page["head"].update(output_bias=None)), "weights.head.output_bias"),
    ],
)
def test_a_bad_file_of_weights_is_refused_in_one_line_that_names_file_and_field(tmp_path, text, field) -> None:
    path = tmp_path / "bad.json"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_trained(path)
    assert caught.value.field == field
    assert str(path) in caught.value.message
    assert "\n" not in caught.value.message
    with pytest.raises(ConfigError, match=r"bad\.json"):
        rule_by_name(f"speckv@{path}")


def test_a_file_of_weights_that_is_whole_is_taken_and_one_that_is_not_there_is_not(tmp_path) -> None:
    path = tmp_path / "good.json"
    path.write_text(damaged(lambda page: None))
    assert load_trained(path).head.chances(np.zeros((1, 5))) == pytest.approx([0.5])
    with pytest.raises(ConfigError, match="cannot read"):
        load_trained(tmp_path / "none.json")


# === the text ===================================================================================================


@pytest.mark.parametrize("name", RULES)
@pytest.mark.parametrize(("seed", "temperature"), [(1, 0.0), (2, 1.0)])
@pytest.mark.parametrize("confidence", ["none", "telling"])
def test_no_rule_changes_the_text(name: str, seed: int, temperature: float, confidence: str) -> None:
    frame = open_frame(sampling=Sampling(max_tokens=40, temperature=temperature))
    oracle, link = hashing_oracle(seed, eos_odds=0.0), Faults(delay_s=0.04, jitter_s=0.02, breaks_every_s=0.8)
    simulation = CheckedSimulation(
        frame,
        oracle,
        drafter_of(oracle, seed, right=0.7, silent=0.1, confidence=confidence),
        window=rule_by_name(NUMBERED.get(name, name)),
        link=link,
        seed=seed,
    )
    assert simulation.run() == own_text(oracle, frame, rules())
    assert simulation.edge.statistics.drafted > 0


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("after_miss_s", [None, 0.0])
def test_blocks_whose_verifier_waits_for_them_change_no_text(temperature: float, after_miss_s: float | None) -> None:
    patience = Patience(0.2, after_miss_s=after_miss_s)
    frame = open_frame(sampling=Sampling(max_tokens=40, temperature=temperature), patience=patience, max_drafts=4)
    oracle, link = hashing_oracle(5, eos_odds=0.0), Faults(delay_s=0.04, jitter_s=0.02, breaks_every_s=0.8)
    drafter = drafter_of(oracle, 5, right=0.7)
    simulation = CheckedSimulation(frame, oracle, drafter, window=PearlWindow(4), link=link, seed=5)
    assert simulation.run() == own_text(oracle, frame, rules())
    assert simulation.edge.statistics.hits > 0
