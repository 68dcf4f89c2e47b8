"""`python -m research engine`: what it times, and the record that it writes."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from outrider.bench.record import from_json
from outrider.cloud.serving.engine import Engine
from outrider.cloud.target import attention
from outrider.cloud.target.target import SessionRows, Target, load_model, load_target
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.testing import save_tiny_target
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto.session import VerifierRules
from outrider.proto.types import Sampling
from research.commands import main
from research.engine.engine_command import kv_positions
from research.engine.engine_record import LIBRARY, OURS, CaseResult, EngineRecord, EngineTimes, StepParts
from research.engine.engine_steps import decode, planning_s
from research.engine.engine_table import table
from research.engine.pass_parts import PassShares, pass_shares, shares_of
from research.engine.timed_steps import Case, LibrarySteps, Steps
from research.step_shape import StepShape

torch.set_num_threads(1)

GREEDY = Sampling(temperature=0.0)


class Clock:
    """A clock that goes on by one second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@dataclass
class Event:
    """An operator in a profile, as torch describes it."""

    name: str
    cpu_time_total: float
    cpu_children: list[Event] = field(default_factory=list)
    cpu_parent: Event | None = None


def profiled(*trees: Event) -> list[Event]:
    events: list[Event] = []

    def walk(event: Event) -> None:
        events.append(event)
        for child in event.cpu_children:
            child.cpu_parent = event
            walk(child)

    for tree in trees:
        walk(tree)
    return events


@pytest.fixture(scope="module")
def folder(tmp_path_factory) -> Path:
    """Return the folder of a tiny target."""
    return save_tiny_target(
        tmp_path_factory.mktemp("target"),
        hidden_size=32,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        intermediate_size=24,
        max_position_embeddings=192,
    )


@pytest.fixture
def target(folder) -> Target:
    return load_target(str(folder), kv_tokens=1024)


def test_a_case_is_a_step_with_logits_of_all_rows_or_a_prompt() -> None:
    step, prompt = Case(2, 3, 3, 4), Case(1, 9, 1, 0)
    assert (step.name, prompt.name) == ("2x3", "prefill 9")
    assert [step.text(8), step.text(8, 1), prompt.text(8)] == [[0, 5, 2, 7], [1, 6, 3, 0], []]
    assert prompt.prompt(8) == [3, 4, 5, 6, 7, 0, 1, 2, 3]
    assert [Case(4, 1, 1, 4).decodes, step.decodes, prompt.decodes] == [True, False, False]


def test_a_step_is_a_pass_and_sampling_on_one_clock(target) -> None:
    with Steps(target, Case(2, 3, 3, 20), GREEDY, Clock()) as steps:
        assert steps.turn(1, 2) == [2.0] * 2
        assert steps.step() == (1.0, 1.0)


def test_every_step_has_the_same_logits_and_a_prompt_those_of_its_last_row(target) -> None:
    with Steps(target, Case(2, 3, 3, 20), GREEDY, Clock()) as steps:
        first, second = steps.forward(), steps.forward()
        assert first.shape[0] == 6
        assert torch.equal(first, second)
    with Steps(target, Case(1, 24, 1, 0), GREEDY, Clock()) as steps:
        assert steps.forward().shape[0] == 1
        assert steps.token_after_context is None


def test_every_session_has_keys_and_values_of_its_own_as_if_it_had_read_them(target) -> None:
    case = Case(3, 1, 1, 20)
    with Steps(target, case, GREEDY, Clock()) as steps:
        assert len({page for cache in steps._caches for page in cache.pages}) == 3 * 2
        one, *others = steps.forward()
        for other in others:
            assert torch.equal(one, other)
        alone = target.pool.allocate(21)
        after = target.forward([SessionRows(alone, tuple(case.text(target.vocab_size)), 1)])
        assert steps.token_after_context == int(after.argmax())
        target.pool.release(alone)


@pytest.mark.parametrize("straight", [False, True])
def test_a_step_leaves_the_target_as_it_was(folder, straight) -> None:
    target = load_target(str(folder), kv_tokens=1024, straight=straight)
    before = target.model_pass
    with Steps(target, Case(1, 2, 2, 20), GREEDY, Clock()) as steps:
        steps.step()
        pass_shares(steps)
        assert target.pool.free_pages < target.pool.page_count
    assert target.pool.free_pages == target.pool.page_count
    assert target.model.config._attn_implementation == attention.NAME
    assert target.model_pass is before


@pytest.mark.parametrize("straight", [False, True])
def test_the_parts_of_a_pass_are_found_by_the_profiler(folder, straight) -> None:
    target = load_target(str(folder), kv_tokens=1024, straight=straight)
    with Steps(target, Case(2, 3, 3, 20), GREEDY, Clock()) as steps:
        shares = pass_shares(steps)
    assert min(shares.products, shares.attention, shares.operators) > 0
    assert shares.products + shares.attention + shares.operators + shares.python == pytest.approx(1)
    assert shares.calls > 100


def test_what_the_profiler_adds_is_taken_off_by_operator() -> None:
    events = profiled(
        Event("aten::linear", 5e6, [Event("aten::addmm", 3e6)]),
        Event("outrider_marked", 9e6, [Event("aten::index", 1e6, [Event("aten::empty", 1e6)])]),
        Event("aten::add", 2e6),
        *(Event("aten::mul", 0.0) for _ in range(10)),
    )
    # 16 events have added 16 seconds to a pass of 32: one for each that stands in another.
    assert shares_of(events, 32.0, 48.0) == PassShares(4 / 32, 7 / 32, 2 / 32, 19 / 32, 15)
    assert shares_of(events, 10.0, 26.0) == PassShares(4 / 13, 7 / 13, 2 / 13, 0.0, 15)


@pytest.mark.parametrize(("sessions", "rows"), [(1, 1), (2, 1), (2, 4)])
def test_planning_is_timed_in_steps_of_the_engine_with_all_rows(target, sessions, rows) -> None:
    seconds = planning_s(target, Case(sessions, rows, rows, 20), 4, GREEDY)
    assert seconds is not None
    assert seconds > 0
    assert target.pool.free_pages == target.pool.page_count


def test_planning_is_unknown_where_the_engine_makes_no_such_step(target) -> None:
    more_than_an_engine_verifies = 40
    assert planning_s(target, Case(1, more_than_an_engine_verifies, 40, 20), 3, GREEDY) is None


def test_an_engine_whose_drafts_are_wrong_makes_the_same_texts(target) -> None:
    rules = VerifierRules("v", "m", target.tokenizer_sha256, target.vocab_size, 192, target.eos_tokens)
    engine = Engine(TransformersBackend(target), rules, VerifierConfig(max_sessions=2))
    sampling, prompts = Sampling(max_tokens=12, ignore_eos=True), [[3] * 20, [4] * 20]
    engine.start()
    try:
        plain = decode(engine, prompts, [[], []], 0, sampling)
        wrong = [[(token + (i in (2, 3, 7))) % target.vocab_size for i, token in enumerate(text)] for text in plain]
        assert decode(engine, prompts, wrong, 3, sampling) == plain
    finally:
        engine.stop()


@pytest.fixture
def library(folder) -> Any:
    model = load_model(str(folder), "target", device="cpu", dtype="float32")
    model.generation_config.eos_token_id = list(range(model.config.vocab_size))  # every token would end the text
    return model


@pytest.mark.parametrize("case", [Case(2, 1, 1, 20), Case(2, 3, 3, 20), Case(1, 24, 1, 0)])
def test_the_library_repeats_a_step_from_the_same_context(library, case) -> None:
    steps = LibrarySteps(library, case, Clock())
    assert steps.turn(1, 2) == steps.turn(0, 2) == [1.0] * 2
    assert steps._cache.get_seq_length() == case.context


def test_the_library_reads_the_context_once_and_a_row_in_each_step(library, monkeypatch) -> None:
    seen, forward = list[tuple[int, ...]](), library.forward

    def watched(input_ids: torch.Tensor, **others: Any) -> Any:
        seen.append(tuple(input_ids.shape))
        return forward(input_ids, **others)

    monkeypatch.setattr(library, "forward", watched)
    LibrarySteps(library, Case(2, 1, 1, 20), Clock()).turn(0, 3)
    assert seen == [(1, 20), *[(2, 1)] * 3]


def test_the_record_holds_every_step_of_every_engine_once(folder, tmp_path, capsys) -> None:
    path = tmp_path / "engine.json"
    words = ["--steps", "1x1,2x3", "--prefill", "24", "--context", "20", "--repetitions", "2", "--json", str(path)]
    words += ["--parts"]
    assert main(["engine", "--target", str(folder), *words]) == 0
    record = from_json(EngineRecord, path.read_text(), "json")
    assert [(result.name, result.sessions, result.rows) for result in record.results] == [
        ("1x1", 1, 1),
        ("2x3", 2, 3),
        ("prefill 24", 1, 24),
    ]
    assert [result.context for result in record.results] == [20, 20, 0]
    assert [set(result.engines) for result in record.results] == [{OURS, LIBRARY}] * 3
    for result in record.results:
        parts = result.parts
        assert parts is not None
        of_pass = (parts.products_ms, parts.attention_ms, parts.operators_ms, parts.python_ms)
        assert sum(of_pass) == pytest.approx(parts.forward_ms)
        assert min(*of_pass[:3], parts.sampling_ms) > 0
        assert (parts.planning_ms is None) == result.name.startswith("prefill")
        assert result.engines[OURS].ratio == 1
        assert min(times.step_ms for times in result.engines.values()) > 0
        assert result.turns == 2
    assert record.clock == "cpu"
    assert len(record.packed_shapes) + len(record.plain_shapes) == 5
    assert record.environment.target == str(folder)
    assert record.environment.dtype == "float32"
    out, err = capsys.readouterr()
    assert "1x1 after 20 tokens: " in err
    assert "1x1" in out


def test_steps_are_timed_after_every_context_and_few_times_when_time_is_up(folder, tmp_path) -> None:
    path = tmp_path / "engine.json"
    words = ["--steps", "1x1,2x3", "--prefill", "0", "--context", "20,40", "--seconds", "0"]
    assert main(["engine", "--target", str(folder), *words, "--json", str(path)]) == 0
    results = from_json(EngineRecord, path.read_text(), "json").results
    assert [(result.name, result.context) for result in results] == [
        ("1x1", 20),
        ("2x3", 20),
        ("1x1", 40),
        ("2x3", 40),
    ]
    assert {result.turns for result in results} == {2}
    assert {result.parts for result in results} == {None}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--context", "191", "--steps", "1x1,1x2", "--prefill", "193"],
            " context: takes 193 positions with the rows, and the target has 192; take less",
        ),
        (
            ["--context", "9", "--prefill", "193"],
            " prefill: takes 193 positions with the rows, and the target has 192; take less",
        ),
        (["--json", "/proc/no/engine.json"], " json: cannot write"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(folder, capsys, words, message) -> None:
    assert main(["engine", "--target", str(folder), *words]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["5", "1x", "0x5", "1x2x3", "ax1", "-1x5", "1x5@", "٣x5"])
def test_steps_are_sessions_and_rows(capsys, steps) -> None:
    with pytest.raises(SystemExit) as end:
        main(["engine", f"--steps={steps}"])
    assert end.value.code == 2
    assert "is not SESSIONSxROWS, such as 16x5" in capsys.readouterr().err


@pytest.mark.parametrize("text", ["1x5", "16x1"])
def test_the_shape_of_a_step_is_written_as_it_is_read(text) -> None:
    assert str(StepShape.parse(text)) == text


def test_the_cache_has_room_for_all_steps_that_take_turns_far_into_a_text() -> None:
    assert kv_positions(Case(1, 9, 9, 1000)) > 2 * 1009
    assert kv_positions(Case(2, 1, 1, 1000)) > 4 * 1000


def parts(forward: float, planning: float | None = 0.25) -> StepParts:
    return StepParts(forward, forward - 2.0, 1.0, 0.75, 0.25, 900, 0.5, planning)


def record_of(measured: EngineRecord, dtype: str, *results: CaseResult) -> EngineRecord:
    fields: dict[str, Any] = {name: getattr(measured, name) for name in EngineRecord.__dataclass_fields__}
    names = type(measured.environment).__dataclass_fields__
    environment = {name: getattr(measured.environment, name) for name in names} | {"dtype": dtype}
    return EngineRecord(
        **fields
        | {
            "environment": type(measured.environment)(**environment),
            "results": results,
        }
    )


ONE = CaseResult("1x1", 1, 1, 9, 2, {OURS: EngineTimes(6.5, 1.0), LIBRARY: EngineTimes(13.0, 2.0)}, parts(6.0))
FIVE = CaseResult("1x5", 1, 5, 9, 2, {OURS: EngineTimes(8.0, 1.0)}, parts(7.5))
PROMPT = CaseResult("prefill 20", 1, 20, 0, 2, {OURS: EngineTimes(20.0, 1.0)})


@pytest.fixture(scope="module")
def measured(folder, tmp_path_factory) -> EngineRecord:
    path = tmp_path_factory.mktemp("measured") / "engine.json"
    words = ["--steps", "1x1", "--prefill", "0", "--context", "9", "--repetitions", "1"]
    assert main(["engine", "--target", str(folder), *words, "--json", str(path)]) == 0
    return from_json(EngineRecord, path.read_text(), "json")


def test_the_table_shows_parts_and_engines(measured, tmp_path) -> None:
    console = Console(width=100, record=True, file=(tmp_path / "out").open("w"))
    console.print(table(record_of(measured, "float32", ONE, FIVE, PROMPT)))
    text = console.export_text()
    rows = [line.split() for line in text.splitlines()]
    assert ["1x1", "@", "9", "4.00", "1.00", "0.75", "0.25", "0.50", "0.25", "6.75", "900"] in rows
    assert ["outrider", "ms", "6.50", "8.00"] in rows
    assert ["transformers", "ms", "13.00", "-"] in rows
    assert ["/", "ours", "2.00", "-"] in rows
    assert ["outrider", "ms", "20.00"] in rows
