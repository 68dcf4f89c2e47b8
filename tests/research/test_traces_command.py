"""`python -m research traces`: recordings agree with real runs, and replays with recordings."""

from __future__ import annotations

import json
import math
from dataclasses import asdict, replace
from pathlib import Path

import pytest
import torch
from recorded import link_of, run_command, written
from scripted_drafters import ScriptedDrafter

from outrider.bench.bench_settings import WARM_UP_TOKENS
from outrider.cloud.testing import save_tiny_target
from outrider.deploy.built_in_prompts import Prompt
from outrider.drafters import NgramDrafter
from outrider.proto.errors import ConfigError
from outrider.proto.policy import Window
from outrider.proto.types import Goal, Sampling
from research.simulator.clock import Costs
from research.text_writer import TextRequest, TextWriter, WrittenText
from research.traces.recordings import (
    CostSheet,
    DrafterCosts,
    HitTrace,
    Recording,
    TargetCosts,
    costs_path,
    load_recording,
)
from research.traces.sweep import Sweep
from research.traces.trace_recording import DrafterProbe, Recorder, hits_of
from research.traces.traced import Policy, synchronous, tokens_per_second
from research.traces.traced import replay as replay_texts

GREEDY = Sampling(temperature=0.0, max_tokens=12)
WORDS = "w3 w9 w4 w3 w9 w4"
SHEET = CostSheet(
    TargetCosts(0.010, 0.001, 0.0005), {"good": DrafterCosts(0.001, 0.0001), "bad": DrafterCosts(0.002, 0.0)}
)
MODEL = {
    "hidden_size": 32,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,
    "vocab_size": 20,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


@pytest.fixture(scope="module")
def target_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small random model with a word a token."""
    return save_tiny_target(tmp_path_factory.mktemp("target"), seed=0, sharpness=1, **MODEL)


@pytest.fixture(scope="module")
def target(target_folder):
    from outrider.cloud.target.target_loading import load_target

    return load_target(str(target_folder), kv_tokens=512)


@pytest.fixture(scope="module")
def prompt_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("prompts") / "words.jsonl"
    records = [{"id": str(i), "domain": f"d{i % 2}", "prompt": f"{WORDS} w{i + 2}"} for i in range(5)]
    path.write_text("".join(json.dumps(record) + "\n" for record in records))
    return path


def trace_of(drafter: str, hits: str, *, name: str = "t", domain: str = "code") -> HitTrace:
    """Return a trace; `hits`: 1 where the drafter is right, 0 where it is not."""
    n = len(hits)
    tokens = tuple(range(200, 200 + n))
    return HitTrace(name, domain, drafter, "1", 0.0, 30, tokens, tuple(h == "1" for h in hits), (math.nan,) * n)


def recording_of(texts: int = 2, tokens: int = 40) -> Recording:
    """Return a recording of a drafter that hits three times in four, and of one that never does; a domain a text."""
    shape = {"good": ("1110" * tokens)[:tokens], "bad": "0" * tokens}
    return Recording(
        {
            name: [trace_of(name, hits, name=str(i), domain=f"d{i}") for i in range(texts)]
            for name, hits in shape.items()
        },
        SHEET,
    )


# --- recording ---


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_hits_are_those_of_the_targets_own_texts(target, temperature) -> None:
    sampling = replace(GREEDY, temperature=temperature, seed=3)
    prompts = [Prompt(str(i), f"{WORDS} w{i + 2}", "words") for i in range(3)]
    drafters = {"seven": ScriptedDrafter(lambda _: 7), "mine": NgramDrafter()}
    traces, sheet = Recorder(target, drafters, sampling).record(prompts)
    tokens = [(3, 9, 4, 3, 9, 4, i + 2) for i in range(3)]
    requests = [TextRequest(ids, sampling, p.id, p.domain) for p, ids in zip(prompts, tokens, strict=True)]
    texts = {text.request: text.tokens for text in TextWriter(target).write(requests)}
    expected = [
        trace
        for request in requests
        for trace in hits_of(drafters, request, texts[request], ended=texts[request][-1] in target.eos_tokens)
    ]
    assert repr([replace(trace, agreement=()) for trace in traces]) == repr(expected)  # NaN is not equal to itself
    assert set(sheet.drafters) == {"seven", "mine"}


@pytest.mark.parametrize("temperature", [0.0, 0.7])
def test_agreement_is_the_targets_probability_of_a_draft_over_the_drafters(target, target_folder, temperature) -> None:
    from transformers import LlamaForCausalLM

    sampling = replace(GREEDY, temperature=temperature, seed=3)
    drafter = ScriptedDrafter(lambda prefix: None if len(prefix) % 4 == 0 else 7, q=0.05)
    [trace], _ = Recorder(target, {"seven": drafter}, sampling).record([Prompt("p", WORDS)])
    transcript = (3, 9, 4, 3, 9, 4, *trace.tokens)
    with torch.inference_mode():
        logits = LlamaForCausalLM.from_pretrained(target_folder)(torch.tensor([transcript])).logits[0, 5:-1]
    p = torch.softmax(logits / (temperature or 1.0), dim=-1)[:, 7].tolist()
    assert min(p) < 0.05 < max(p), "both sides of the minimum are met"
    for i, (found, chance) in enumerate(zip(trace.agreement, p, strict=True)):
        if (6 + i) % 4 == 0:
            assert trace.silent[i]
            assert math.isnan(found)
        else:
            assert found == pytest.approx(min(1.0, chance / 0.05), abs=1e-3)


def test_texts_of_several_seeds_equal_those_alone_though_a_page_is_read_once(
    target, target_folder, monkeypatch
) -> None:
    from outrider.cloud.target.target_loading import load_target

    words = Prompt("p", f"{WORDS} " * 3), Prompt("q", f"{WORDS} w5 " * 3)
    sampling = replace(GREEDY, temperature=1.0)
    alone = [
        trace
        for prompt in words
        for seed in (3, 4, 5)
        for trace in Recorder(target, {"n": NgramDrafter()}, replace(sampling, seed=seed)).record([prompt])[0]
    ]
    read = []
    fresh = load_target(str(target_folder), kv_tokens=512)
    forward = fresh.forward
    monkeypatch.setattr(fresh, "forward", lambda batch: read.extend(len(r.tokens) for r in batch) or forward(batch))
    monkeypatch.setattr("research.traces.trace_recording.target_costs", lambda *_: SHEET.target)
    traces, _ = Recorder(fresh, {"n": NgramDrafter()}, sampling, (3, 4, 5)).record(words)
    assert repr(traces) == repr(alone)
    assert [(trace.id, trace.seed) for trace in traces] == [(p, s) for p in "pq" for s in (3, 4, 5)]
    assert len({trace.tokens for trace in traces}) > 2
    assert [rows for rows in read if rows > 1] == [18, 2, 2, 15, 5, 5], "a page holds 16; q begins with six of p"
    assert fresh.pool.free_pages == fresh.pool.page_count


def test_only_texts_whose_logits_have_room_are_written_at_once(target, monkeypatch) -> None:
    requests = [TextRequest((3, 9, i), replace(GREEDY, ignore_eos=True), str(i)) for i in range(2, 7)]
    at_once: list[int] = []
    forward = target.forward
    monkeypatch.setattr(target, "forward", lambda batch: at_once.append(len(batch)) or forward(batch))
    many = {each.request: each for each in TextWriter(target).write(requests)}
    assert max(at_once) == 5
    at_once.clear()
    monkeypatch.setattr("research.text_writer.LOGITS_BYTES", 2 * 12 * target.vocab_size * 4)
    few = {each.request: each for each in TextWriter(target).write(requests)}
    assert max(at_once) == 2
    for request in requests:
        assert few[request].transcript == many[request].transcript
        assert many[request].logits.shape == (12, target.vocab_size)
        assert many[request].logits.argmax(dim=-1).tolist() == list(many[request].tokens)


def test_every_drafter_is_closed_and_says_how_well_it_fits_the_prompt() -> None:
    opened: list[str] = []
    closed: list[str] = []

    class Noted(ScriptedDrafter):
        def open(self, rule):
            state = super().open(rule)
            opened.append(self.name)
            state.close = lambda: closed.append(self.name)
            return state

    drafters = {name: Noted((5,) * 30, name=name) for name in ("a", "b")}
    for prompt, log_q in (((3, 9), math.log(0.1)), ((4, 5, 6), math.log(0.9 * 0.1) / 2)):
        _, trace = hits_of(drafters, TextRequest(prompt, GREEDY), (5, 6))
        assert trace.prompt_log_q == pytest.approx(log_q, abs=1e-4)
        assert (trace.drafter, trace.hits, trace.silent) == ("b", (True, False), ())
    assert opened == closed == ["a", "b"] * 2


def test_costs_are_of_this_target_and_these_drafters(target) -> None:
    def slow(prefix):
        return sum(range(20_000)) % 7 + len(prefix) % 2

    drafters = {"slow": ScriptedDrafter(slow), "fast": ScriptedDrafter((7,) * 100), "silent": ScriptedDrafter(())}
    _, sheet = Recorder(target, drafters, GREEDY).record([Prompt("p", WORDS), Prompt("q", f"{WORDS} w5")])
    assert 0 < sheet.target.step_s < 10
    assert sheet.target.row_s >= 0
    assert sheet.target.prefill_row_s >= 0
    assert sheet.drafters["slow"].drafting_s > 3 * sheet.drafters["fast"].drafting_s > 0
    assert sheet.drafters["silent"].drafting_s == Costs().drafting_s  # not known
    assert target.pool.free_pages == target.pool.page_count


def test_a_prompt_that_fills_the_context_but_for_a_token_can_be_recorded(target) -> None:
    prompt = Prompt("long", " ".join(["w5"] * (target.context_length - 1)))
    [trace], _ = Recorder(target, {"n": NgramDrafter()}, replace(GREEDY, max_tokens=1)).record([prompt])
    assert len(trace.tokens) == 1


def test_a_probe_separates_reading_from_drafting(monkeypatch) -> None:
    # Only the drafter moves the clock: 2 ms a drafted token, 0.5 ms a token read.
    now = 0.0

    class Clocked(ScriptedDrafter):
        def open(self, rule):
            state = super().open(rule)
            extend, propose = state.extend, state.propose

            def extend_slowly(tokens):
                nonlocal now
                now += 0.0005 * max(0, len(tokens) - 1)
                extend(tokens)

            def propose_slowly(n):
                nonlocal now
                now += 0.002 * n
                state.extend = extend
                return propose(n)

            state.extend, state.propose = extend_slowly, propose_slowly
            return state

    monkeypatch.setattr("research.traces.trace_recording.time.thread_time", lambda: now)
    probe = DrafterProbe(Clocked((5,) * 200), GREEDY)

    for length in (30, 50):
        probe.after(WrittenText(TextRequest(tuple(range(length)), GREEDY, "p"), tuple(range(length + 9))))
    costs = probe.costs()
    assert costs.drafting_s == pytest.approx(0.002)
    assert costs.catch_up_s == pytest.approx(0.0005)


def test_the_command_writes_what_replay_reads(target_folder, prompt_file, tmp_path, capfd) -> None:
    out_file = tmp_path / "new" / "t.jsonl"
    arguments = ["--target", str(target_folder), "--drafter", "ngram", "--prompts", str(prompt_file)]
    sizes = ["--per-domain", "2", "--max-tokens", "9", "--seed", "4", "--threads", "1"]
    status, out, err = run_command(["record", *arguments, *sizes, "--output", str(out_file)], capfd)
    assert status == 0
    assert f"4 traces in {out_file}" in out
    assert "writing 4 texts" in err
    recording = load_recording(out_file)
    assert [text.prompt for text in recording.texts] == [("d0", "0"), ("d0", "2"), ("d1", "1"), ("d1", "3")]
    assert set(recording.costs.drafters) == {"ngram"}
    assert recording.costs.environment["seed"] == 4
    assert all(len(trace.agreement) == len(trace.tokens) for text in recording.texts for trace in text.traces)
    status, out, err = run_command(["replay", str(out_file), "--rtt", "10", "--window", "adaptive"], capfd)
    assert status == 0
    assert "ngram" in out


# --- replaying ---


def test_every_cell_is_there_once_and_replays_its_own_drafter_window_and_link() -> None:
    recording = recording_of(texts=2)
    links, windows = [link_of(5), link_of(120)], ["adaptive", "4", "sync4"]
    grid = Sweep(recording, links, windows, goal=Goal.EFFICIENCY, min_step_s=0.02)
    cells = list(grid.results())
    assert len(cells) == 2 * (1 + 2 * 3)
    names = [(f.link.rtt_ms, f.drafter, f.window) for f in cells]
    drafted = [(d, w) for d in ("good", "bad") for w in windows]
    assert names == [(ms, d, w) for ms in (5, 120) for d, w in [(None, None), *drafted]]
    policies = {
        "adaptive": Policy(goal=Goal.EFFICIENCY),
        "4": Policy(window=Window(4), goal=Goal.EFFICIENCY),
        "sync4": replace(synchronous(4), goal=Goal.EFFICIENCY),
    }
    by_link = {link.record: link for link in links}
    for whole in cells:
        if whole.drafter is None:
            continue
        costs = SHEET.of(whole.drafter, min_step_s=0.02)
        traces, shape_at = recording.traces[whole.drafter], by_link[whole.link].shape_at
        outcomes = replay_texts(traces, shape_at, costs, policies[whole.window], warm_up_tokens=WARM_UP_TOKENS)
        assert whole.tokens_per_second == tokens_per_second(outcomes)
        assert whole.uplink_bytes_per_token == sum(o.uplink_bytes for o in outcomes) / whole.tokens
        cloud = next(f for f in cells if f.link == whole.link and f.drafter is None)
        assert whole.ratio == pytest.approx(whole.tokens_per_second / cloud.tokens_per_second)


def test_a_fixed_window_asks_for_its_length_and_an_adaptive_one_more_of_better_ones() -> None:
    grid = Sweep(recording_of(tokens=120), [link_of(60)], ["4", "adaptive"], min_step_s=0.03)
    mean = {(f.drafter, f.window): f.window_mean for f in grid.results()}
    assert mean["good", "4"] == mean["bad", "4"] == 4.0
    assert mean["good", "adaptive"] > mean["bad", "adaptive"]


def test_the_command_prints_writes_and_draws_the_whole_grid(tmp_path, capfd) -> None:
    path = written(recording_of(), tmp_path)
    links = ["--rtt", "2,60", "--up", "1,20", "--trace", "lte-motion"]
    arguments = ["replay", str(path), *links, "--window", "adaptive,8"]
    outputs = ["--json", str(tmp_path / "a" / "r.json")]
    status, out, err = run_command([*arguments, "--min-step", "30", *outputs], capfd)
    assert status == 0, err
    assert max(map(len, out.splitlines())) <= 100
    assert out.count("(cloud)") == 3
    assert sum("  * " in line for line in out.splitlines()) == 3  # the best of each link
    for words in ("a target step at least 30 ms", "1/100", "lte-motion"):
        assert words in out
    record = json.loads((tmp_path / "a" / "r.json").read_text())
    assert len(record["results"]) == 3 * (1 + 2 * 2)
    assert record["costs"] == asdict(SHEET)
    assert (record["min_step_ms"], record["goal"], record["seed"]) == (30, "latency", 0)
    assert "replaying 2 texts with every window: " in err


# --- mistakes ---


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["record"], 2, "--output"),
        (["record", "--output", "t.json"], 1, "output: t.json does not end in .jsonl; call it t.jsonl"),
        (["record", "--output", "/proc/t.jsonl"], 1, "output: cannot write /proc/t.jsonl"),
        (["record", "--output", "t.jsonl", "--drafter", ""], 1, "drafter: names none; name an embedded drafter"),
        (["record", "--output", "t.jsonl", "--drafter", "nobody"], 1, "drafter: no drafter 'nobody': give a folder"),
        (["record", "--output", "t.jsonl", "--drafter", "ngram,ngram"], 1, "drafter: names 'ngram' twice"),
        (["record", "--output", "t.jsonl", "--prompts", "nowhere"], 1, "prompts: cannot read nowhere"),
        (["record", "--output", "t.jsonl", "--temperature", "hot"], 2, "--temperature: 'hot' is not a number"),
        (["record", "--output", "t.jsonl", "--seeds", "3"], 1, "seeds: has no effect at temperature 0; set --temper"),
        (["replay"], 2, "FILE"),
        (["replay", "nowhere.jsonl"], 1, "traces: cannot read nowhere.jsonl"),
        (["replay", "T", "--drafter", "best"], 1, "drafter: 'best' was not recorded; name some of good, bad"),
        (["replay", "T", "--drafter", "bad,bad"], 1, "drafter: names 'bad' twice; once is enough"),
        (["replay", "T", "--window", "wide"], 1, "window: 'wide' is none of adaptive, N and syncN with N from 1 on"),
        (["replay", "T", "--window", "0"], 1, "window: '0' is none of"),
        (["replay", "T", "--window", "4,4"], 1, "window: names '4' twice; once is enough"),
        (["replay", "T", "--window", ""], 1, "window: names no policy; name adaptive"),
        (["replay", "T", "--rtt", ""], 1, "rtt: names no link, nor does --trace; name a round trip"),
        (["replay", "T", "--rtt", "2,2"], 1, "rtt: names '2 ms 20/100 Mbit/s' twice"),
        (["replay", "T", "--rtt", "far"], 2, "--rtt: 'far' is not a number"),
        (["replay", "T", "--jitter", ""], 1, "jitter: is empty; give one number"),
        (["replay", "T", "--up", "1,2,3"], 1, "up: has 3 entries where --rtt has 4"),
        (["replay", "T", "--trace", "moon"], 1, "moon"),
        (["replay", "T", "--goal", "joy"], 2, "--goal"),
        (["replay", "T", "--json", "/proc/r.json"], 1, "json: cannot write /proc/r.json"),
        ([], 2, "WHAT"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_clear_line(arguments, status, message, tmp_path, monkeypatch, capfd) -> None:
    path = written(recording_of(), tmp_path)
    monkeypatch.chdir(tmp_path)
    before = sorted(tmp_path.iterdir())
    got, out, err = run_command([str(path) if word == "T" else word for word in arguments], capfd)
    assert got == status
    assert message in err
    assert len(err.strip().splitlines()) == 1
    assert out == ""
    assert sorted(tmp_path.iterdir()) == before  # nothing is left there


def test_an_output_that_cannot_be_written_is_found_before_the_work(tmp_path, monkeypatch, capfd) -> None:
    monkeypatch.setattr(
        "research.traces.trace_recording.load_target", lambda *_, **__: pytest.fail("the work has begun")
    )
    (tmp_path / "t.costs.json").mkdir()
    status, _, err = run_command(["record", "--drafter", "ngram", "--output", str(tmp_path / "t.jsonl")], capfd)
    assert status == 1
    assert f"output: cannot write {tmp_path / 't.costs.json'}: Is a directory; name another file" in err


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"format": "other/1"}, r"costs\.format: .*'other/1' is none of outrider-trace-costs/1; record"),
        ({"target": 3}, r"costs\.target: must be an object, not 3; record"),
        ({"drafters": {"good": {"drafting_s": 0.1}}}, r"costs\.drafters\.good\.catch_up_s: is missing; record"),
        (
            {"target": {"step_s": -1, "row_s": 0, "prefill_row_s": 0}},
            r"costs\.target\.step_s: must be 0 or more, not -1; record",
        ),
        ({"target": asdict(SHEET.target) | {"joy_s": 1}}, r"costs\.target\.joy_s: is unknown; record the traces again"),
        ({"drafters": {}}, r"costs\.drafters: says nothing of 'good'; record the traces again"),
    ],
)
def test_a_wrong_cost_is_named(tmp_path, change, message) -> None:
    path = written(recording_of(), tmp_path)
    costs = costs_path(path, "output")
    costs.write_text(json.dumps(json.loads(costs.read_text()) | change))
    with pytest.raises(ConfigError, match=message):
        load_recording(path)


def test_traces_without_their_costs_are_refused_by_name(tmp_path) -> None:
    path = written(recording_of(), tmp_path)
    costs_path(path, "output").unlink()
    with pytest.raises(
        ConfigError, match=r"costs: cannot read .*t\.costs\.json, which `python -m research traces record` writes"
    ):
        load_recording(path)


def test_drafters_of_different_texts_are_not_compared() -> None:
    good, bad = trace_of("good", "1111"), trace_of("bad", "11111")
    with pytest.raises(ConfigError, match=r"traces: 'bad' has other texts than 'good'; record them together"):
        Recording({"good": [good], "bad": [bad]}, SHEET)
    with pytest.raises(ConfigError, match=r"traces: holds no trace; record some"):
        Recording({}, SHEET)
