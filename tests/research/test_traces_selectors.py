"""`python -m research traces replay --selector`: texts of a run, results of each way of choosing, and their output."""

from __future__ import annotations

import itertools
import json
import math
from dataclasses import replace

import numpy as np
import pytest
from recorded import link_of, run_command, written

from outrider.bench.bench_settings import WARM_UP_TOKENS
from outrider.bench.links import BenchLink
from outrider.bench.record import from_json, to_json
from outrider.edge.selectors import SELECTORS, FixedShare, Hedge, MetaSdUcb
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.files import read_text
from outrider.proto.policy.selector import RoundOutcome, SelectionView, StaticSelector
from research.simulator.clock import Costs
from research.traces.pool_replay import (
    DRAFTER,
    ORACLE,
    SELECTOR,
    Aligned,
    Pool,
    PoolReplayed,
    PoolRow,
    Stage,
    row_names,
    run_texts,
    variants_of,
)
from research.traces.recordings import (
    CostSheet,
    DrafterCosts,
    HitTrace,
    Recording,
    TargetCosts,
    texts_of,
)
from research.traces.traced import Policy, replay, synchronous

DOMAINS = ("code", "prose", "math")
DRAFTERS = ("coder", "writer")
HITS = {("coder", "code"): 0.9, ("writer", "prose"): 0.9}  # elsewhere less
SHEET = CostSheet(TargetCosts(0.010, 0.001, 0.0005), {name: DrafterCosts(0.001, 0.0001) for name in DRAFTERS})
DRAFTS = 4


def recording_of(prompts: int = 3, seeds: int = 2, tokens: int = 90) -> Recording:
    """Return a recording of two drafters, each of them good in one domain, and neither in the third."""
    rng = np.random.default_rng(0)
    traces: dict[str, list[HitTrace]] = {name: [] for name in DRAFTERS}
    for domain, prompt, seed in itertools.product(DOMAINS, range(prompts), range(1, 1 + seeds)):
        text = tuple(rng.integers(3, 999, tokens).tolist())
        for name in DRAFTERS:
            hits = tuple(bool(hit) for hit in rng.random(tokens) < HITS.get((name, domain), 0.4))
            fields = {"confidence": (0.5,) * tokens, "agreement": (0.5,) * tokens, "seed": seed}
            traces[name].append(HitTrace(f"p{prompt}", domain, name, "1", 1.0, 20, text, hits, **fields))
    return Recording(traces, SHEET)


def rounds_of(costs: Costs, link: BenchLink) -> Stage:
    return Stage([costs] * len(DRAFTERS), link.shape_at, synchronous(DRAFTS))


def stage_of(recording: Recording, link: BenchLink) -> Stage:
    return rounds_of(recording.costs.of("coder"), link)


def pool_of(recording: Recording, selectors: str = "static,metasd-bd,leader", seeds: int = 2) -> Pool:
    return Pool(recording, {link_of().record: stage_of(recording, link_of())}, selectors.split(","), seeds)


@pytest.fixture(scope="module")
def rows() -> dict[str, PoolRow]:
    return {row.name: row for row in pool_of(recording_of()).rows()}


# --- texts of a run ---


def test_a_run_meets_each_prompt_of_its_row_once_in_random_order_with_seeds_in_turn() -> None:
    variants = variants_of(recording_of().texts)
    assert row_names(recording_of().domains) == (*DOMAINS, "mix")
    runs = [run_texts("mix", variants, seed) for seed in range(4)]
    for seed, run in enumerate(runs):
        assert {p.prompt for p in run} == {(d, f"p{i}") for d in DOMAINS for i in range(3)}
        assert len(run) == 9
        assert {p.traces[0].seed for p in run} == {1 + seed % 2}
    assert runs[0][0] == run_texts("mix", variants, 0)[0]
    assert len({tuple(p.prompt for p in run) for run in runs}) == 4
    assert {p.prompt[0] for p in run_texts("code", variants, 0)} == {"code"}


def test_one_domain_has_no_mix() -> None:
    recording = recording_of()
    code = Recording({name: [t for t in own if t.domain == "code"] for name, own in recording.traces.items()}, SHEET)
    assert row_names(code.domains) == ("code",)
    [row] = pool_of(code, seeds=1).rows()
    assert row.prompts == 3


def test_a_domain_with_the_name_of_a_row_is_refused() -> None:
    own = {name: [replace(t, domain="mix") for t in traces] for name, traces in recording_of(1, 1).traces.items()}
    with pytest.raises(ConfigError, match=r"traces: has a domain 'mix', which is the name of a row; rename it"):
        pool_of(Recording(own, SHEET))


# --- results ---


def test_a_cell_compares_cloud_streaming_with_its_drafter_on_the_same_texts(rows) -> None:
    recording = recording_of()
    stage = stage_of(recording, link_of())
    for arm, drafter in enumerate(DRAFTERS):
        seconds = cloud_s = 0.0
        for text in recording.texts:
            if text.traces[0].domain == "code":
                seconds += stage.alone([text], arm)[0].seconds
                cloud_s += stage.cloud_s(text)
        cell = rows["code"].of(DRAFTER, drafter)
        # The verifier's measurements of earlier texts make a little difference.
        assert cell.speed_up == pytest.approx(cloud_s / seconds, rel=0.02)
        assert cell.seconds == pytest.approx(seconds, rel=0.02)  # two runs, two texts of each prompt
        assert cell.tokens == 2 * 3 * 90
        assert cell.interval.low < cell.speed_up < cell.interval.high
        assert cell.shares == tuple(float(i == arm) for i in range(2))
        assert cell.switches == 0


def test_no_way_of_choosing_beats_the_oracle(rows) -> None:
    for row in rows.values():
        oracle = row.of(ORACLE, ORACLE)
        assert oracle.of_oracle == pytest.approx(1.0)
        for cell in row.cells:
            assert cell.of_oracle == pytest.approx(oracle.seconds / cell.seconds)
            assert sum(cell.shares) == pytest.approx(1.0)
            if cell.kind == DRAFTER:
                assert cell.of_oracle < 1.0 + 1e-9
    assert rows["code"].of(ORACLE, ORACLE).seconds == pytest.approx(rows["code"].of(DRAFTER, "coder").seconds)


def test_the_leader_is_near_the_best_everywhere_and_above_it_where_domains_change(rows) -> None:
    for domain in ("code", "prose"):
        best = max(rows[domain].of(DRAFTER, drafter).speed_up for drafter in DRAFTERS)
        assert rows[domain].of(SELECTOR, "leader").speed_up > 0.9 * best
    row = rows["mix"]
    best = max(row.of(DRAFTER, drafter).speed_up for drafter in DRAFTERS)
    assert row.of(SELECTOR, "leader").speed_up > best
    assert row.of(SELECTOR, "leader").speed_up > row.of(SELECTOR, "metasd-bd").speed_up


def test_a_selector_learns_within_a_run_and_forgets_between_runs(monkeypatch) -> None:
    made: list[MetaSdUcb] = []

    def make(arms, rng):
        made.append(MetaSdUcb(arms=arms))
        return made[-1]

    monkeypatch.setitem(SELECTORS, "mine", make)
    list(pool_of(recording_of(1, 2), "mine").rows())
    assert len(made) == 2 * 4
    assert len({round(sum(selector.pulls)) for selector in made[:2]}) == 2
    # All tokens of a run: three texts of 90, at most five a round.
    assert min(sum(selector.pulls) for selector in made[6:]) > 3 * 90 / 5


def test_on_the_stream_a_drafter_alone_is_its_replay_and_active_drafters_are_noted() -> None:
    recording = recording_of(2, 1)
    texts = recording.texts
    costs = [recording.costs.of(name, min_step_s=0.03) for name in DRAFTERS]
    shape_at = link_of(60).shape_at
    stage = Stage(costs, shape_at, Policy())
    outcomes = replay([text.traces[1] for text in texts], shape_at, costs[1], Policy(), warm_up_tokens=WARM_UP_TOKENS)
    assert stage.alone(texts, 1) == [replace(outcome, active=(1,) * 90) for outcome in outcomes]
    assert 90 * 0.03 < stage.cloud_s(texts[0]) < 90 * 0.04 + 0.1
    mixed = stage.chosen(texts, Hedge(FixedShare(arms=2), np.random.default_rng(0)))
    assert {arm for outcome in mixed for arm in outcome.active} == {0, 1}
    assert [len(outcome.active) for outcome in mixed] == [90] * 6
    best = stage.best(texts)
    for one, alone in zip(best, zip(*(stage.alone(texts, arm) for arm in (0, 1)), strict=True), strict=True):
        assert one.seconds == min(outcome.seconds for outcome in alone)


def test_between_texts_every_drafter_gets_as_many_tokens() -> None:
    view = SelectionView(4, (0.1, 0.1), (0.0, 0.0))
    experts = FixedShare(arms=2)
    aligned = Aligned(Hedge(experts, np.random.default_rng(0)), 2)
    for _ in range(2):
        assert aligned.begin_text() is aligned
        aligned.learn(RoundOutcome(view, 0, 3, 3, 2, math.nan, 0.1, hits=((True, True, False), (True,))))
        assert list(map(len, experts.unpaid)) == [2, 0]
    aligned.begin_text()
    assert list(map(len, experts.unpaid)) == [0, 0]
    assert (Aligned(MetaSdUcb(arms=2), 2).catches_up, aligned.catches_up) == (False, True)


def test_silence_reaches_the_selectors_as_misses() -> None:
    class Noting(StaticSelector):
        catches_up = True

        def score(self, view, chosen, unread):
            return tuple(arm for arm in view.arms if arm != chosen)

        def learn(self, outcome: RoundOutcome) -> None:
            heard.append(outcome)

    heard: list[RoundOutcome] = []
    n = 40
    trace = HitTrace("p", "d", "a", "1", 1.0, 1, tuple(range(5, 5 + n)), (True, False) * (n // 2))
    mute = replace(trace, drafter="b", hits=(False,) * n, silent=(False, True) * (n // 2))
    [text] = texts_of({"a": [trace], "b": [mute]})
    selector = Noting(0)
    stage = rounds_of(Costs(), link_of())
    stage.chosen([text, text], selector)
    [_, end] = [i for i, outcome in enumerate(heard) if not outcome.committed]
    del heard[end + 1 :]  # the second text adds nothing new
    mine, other = ([hit for outcome in heard for hit in outcome.hits[arm]] for arm in range(2))
    assert len(mine) == len(other) > n, "the warm-up's too"
    assert {True, False} <= set(mine)
    assert {False} <= set(other) <= {False, None}


# --- the command ---


def test_the_command_prints_and_writes_every_row_and_column(tmp_path, capfd) -> None:
    path = written(recording_of(2, 1, 70), tmp_path)
    outputs = ["--json", str(tmp_path / "r.json")]
    names = "static,hedge,metasd-bd"
    what = ["--drafter", "coder,writer", "--selector", names, "--seeds", "2", "--window", "sync4"]
    arguments = [str(path), "--rtt", "5,60", *what, "--min-step", "30"]
    status, out, err = run_command(["replay", *arguments, *outputs], capfd)
    assert status == 0, err
    assert max(map(len, out.splitlines())) <= 100
    for words in ("2 runs, window sync4", "at least 30 ms", "5 ms 20/100 Mbit/s", "coder", "metasd-bd"):
        assert words in out
    assert out.count("best drafter alone") == 2
    assert out.count("*") >= 2 * 4  # the best of every row of both links
    record = json.loads((tmp_path / "r.json").read_text())
    assert (record["drafters"], record["window"], record["seeds"]) == (list(DRAFTERS), "sync4", 2)
    assert record["min_step_ms"] == 30
    assert [(row["link"]["rtt_ms"], row["name"]) for row in record["rows"]] == [
        (rtt, name) for rtt in (5, 60) for name in (*DOMAINS, "mix")
    ]
    for row in record["rows"]:
        columns = [(cell["kind"], cell["name"]) for cell in row["cells"]]
        selectors = [("selector", name) for name in names.split(",")[1:]]
        assert columns == [("drafter", "coder"), ("drafter", "writer"), *selectors, ("oracle", "oracle")]
        by_name = {cell["name"]: cell for cell in row["cells"]}
        best = min(("coder", "writer"), key=lambda name: by_name[name]["seconds"])
        for cell in row["cells"]:
            for against, drafter in (("of_first", "coder"), ("of_best", best)):
                found = cell[against]
                assert found["drafter"] == drafter
                assert found["ratio"] == pytest.approx(by_name[drafter]["seconds"] / cell["seconds"], rel=1e-4)
                assert found["interval"]["low"] <= found["ratio"] <= found["interval"]["high"]
        assert by_name[best]["of_best"]["interval"] == {"low": 1.0, "high": 1.0}, "prompts are resampled in pairs"
    assert "runs of every selector: " in err


def test_the_session_is_played_with_the_first_window(tmp_path, capfd) -> None:
    path = written(recording_of(1, 1, 40), tmp_path)
    arguments = ["--rtt", "60", "--min-step", "30", "--selector", "static,leader", "--seeds", "1"]
    status, out, err = run_command(["replay", str(path), *arguments, "--window", "8,4"], capfd)
    assert status == 0, err
    assert "1 runs, window 8" in out
    lines = [line.split() for line in out.splitlines() if line.startswith("oracle  ") and "*" not in line]
    oracle = lines[1]  # over the best drafter
    assert all(float(share) > 0.99 for share in oracle[1:4]), "in a domain it is one drafter"
    assert {line.split()[0] for line in out.splitlines() if "." in line} >= {"coder", "writer", "leader", "oracle"}
    status, _, err = run_command(["replay", str(path), *arguments, "--window", "wide"], capfd)
    assert (status, "'wide' is none of" in err) == (1, True)


def test_one_text_of_one_prompt_has_no_intervals(tmp_path, capfd) -> None:
    recording = recording_of(1, 1)
    path = written(Recording({n: own[:1] for n, own in recording.traces.items()}, SHEET), tmp_path)
    arguments = ["--rtt", "5", "--selector", "leader", "--seeds", "1"]
    status, out, err = run_command(["replay", str(path), *arguments], capfd)
    assert status == 0, err
    line = next(line for line in out.splitlines() if line.startswith("leader"))
    assert "*" in line
    assert "±" not in line


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["--selector", "best"], 1, "selector: 'best' is none of leader, static"),
        (["--selector", "leader,leader"], 1, "selector: names 'leader' twice; once is enough"),
        (["--selector", "leader", "--seeds", "0"], 2, "--seeds: 0 is below 1"),
        (["--selector", "leader", "--drafter", "poet"], 1, "drafter: 'poet' was not recorded"),
        (["--selector", "leader", "--json", "/proc/r.json"], 1, "json: cannot write /proc/r.json"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_clear_line(arguments, status, message, tmp_path, capfd) -> None:
    got, out, err = run_command(["replay", str(written(recording_of(1, 1), tmp_path)), *arguments], capfd)
    assert got == status
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""


def test_the_committed_record_of_selectors_loads_and_is_written_as_it_is(root) -> None:
    path = root / "docs" / "figures" / "selection.json"
    found = from_json(PoolReplayed, read_text(path, "record"), "record")
    committed, written = (json.loads(text) for text in (path.read_text(encoding="utf-8"), to_json(found)))
    assert contains(written, committed)


def contains(whole: object, part: object) -> bool:
    """Return whether `whole` is `part` but for fields that were added to records later."""
    if isinstance(part, dict) and isinstance(whole, dict):
        return all(name in whole and contains(whole[name], value) for name, value in part.items())
    if isinstance(part, list) and isinstance(whole, list):
        return len(whole) == len(part) and all(map(contains, whole, part))
    return whole == part
