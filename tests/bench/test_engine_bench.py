"""`outrider engine-bench`: what it times, and the record that it writes."""

from __future__ import annotations

import itertools

import pytest
import torch
from rich.console import Console
from torch import nn

from outrider.bench.engine.record import EngineRecord, StepComparison, StepParts
from outrider.bench.engine.steps import Steps, generate_times
from outrider.bench.engine.table import table
from outrider.bench.record import from_json
from outrider.cloud import attention
from outrider.cloud.target import Target, load_model, load_target
from outrider.deploy.cli import main
from outrider.proto.types import Sampling

torch.set_num_threads(1)

GREEDY = Sampling(temperature=0.0)


class Clock:
    """A clock that goes on by one second whenever it is read."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.fixture
def target(family) -> Target:
    return load_target(str(family.target), kv_tokens=256)


def test_the_parts_of_a_step_are_its_linear_layers_and_its_attention(target) -> None:
    layers = sum(isinstance(module, nn.Linear) for module in target.model.modules())
    with Steps(target, [[3] * 20, [4] * 20], 3, GREEDY, Clock()) as steps:
        first, second = steps.step(), steps.step()
    assert first == second
    assert (first.forward_s, first.sampling_s) == (1.0, 1.0)
    assert first.products_s == layers == 2 * 7 + 1
    assert first.attention_s == 2.0


def test_a_step_leaves_the_target_as_it_was(target) -> None:
    with Steps(target, [[3] * 20], 2, GREEDY, Clock()) as steps:
        steps.step()
        assert target.pool.free_pages < target.pool.page_count
    assert target.pool.free_pages == target.pool.page_count
    assert target.model.config._attn_implementation == attention.NAME
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in target.model.modules())


def test_the_steps_of_generate_exclude_the_prompt_and_the_work_between_them(family) -> None:
    model = load_model(str(family.target), "target", device="cpu", dtype="float32")
    clock, works = Clock(), itertools.count()
    model.generation_config.eos_token_id = list(range(model.config.vocab_size))  # every token would end the text

    def work() -> None:
        next(works)
        clock.now += 100.0

    times = generate_times(model, [[3] * 20, [4] * 20], 5, clock, work)
    assert times == [1.0] * 5
    assert next(works) == 6


def test_the_record_holds_every_step_once(family, tmp_path, capsys) -> None:
    path = tmp_path / "engine.json"
    words = ["--steps", "1x1,2x3", "--context", "20", "--repetitions", "2", "--json", str(path)]
    assert main(["engine-bench", "--target", str(family.target), *words]) == 0
    record = from_json(EngineRecord, path.read_text(), "json")
    assert [(result.sessions, result.rows) for result in record.results] == [(1, 1), (2, 3)]
    assert [result.generate_ms is None for result in record.results] == [False, True]
    for result in record.results:
        for parts in (result.plain, result.packed):
            assert min(parts.forward_ms, parts.products_ms, parts.attention_ms, parts.sampling_ms) > 0
            assert parts.step_ms == parts.forward_ms + parts.sampling_ms
        assert result.forward_ratio > 0
    assert (record.clock, record.context, record.repetitions) == ("thread", 20, 2)
    assert len(record.packed_shapes) + len(record.plain_shapes) == 5
    assert record.environment.target == str(family.target)
    printed = capsys.readouterr().out
    assert "1x1" in printed
    assert "2x3" in printed


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (
            ["--context", "191", "--steps", "1x1,1x2"],
            " context: takes 193 positions with the rows, and the target has 192; take less",
        ),
        (["--json", "/proc/no/engine.json"], " json: cannot write"),
    ],
)
def test_what_cannot_be_measured_is_refused_in_one_line(family, capsys, words, message) -> None:
    assert main(["engine-bench", "--target", str(family.target), *words]) == 1
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("steps", ["5", "1x", "0x5", "1x2x3", "ax1", "-1x5"])
def test_steps_are_sessions_and_rows(capsys, steps) -> None:
    with pytest.raises(SystemExit) as end:
        main(["engine-bench", f"--steps={steps}"])
    assert end.value.code == 2
    assert "is not SESSIONSxROWS, such as 16x5" in capsys.readouterr().err


def test_the_table_shows_plain_and_packed_in_turn(family, tmp_path) -> None:
    path = tmp_path / "engine.json"
    assert main(["engine-bench", "--target", str(family.target), "--steps", "1x1", "--context", "9", "--repetitions",
                 "1", "--json", str(path)]) == 0  # fmt: skip
    measured = from_json(EngineRecord, path.read_text(), "json")
    result = StepComparison(16, 5, StepParts(9.0, 6.0, 2.0, 0.5), StepParts(5.0, 2.5, 2.75, 0.5), 1.75, 12.5)
    fields = {name: getattr(measured, name) for name in EngineRecord.__dataclass_fields__}
    console = Console(width=100, record=True, file=(tmp_path / "out").open("w"))
    console.print(table(EngineRecord(**fields | {"results": (result,)})))
    rows = [line.split() for line in console.export_text().splitlines()]
    assert ["16x5", "plain", "9.00", "6.00", "2.00", "1.00", "0.50", "-", "12.50"] in rows
    assert ["packed", "5.00", "2.50", "2.75", "0.00", "0.50", "1.75"] in rows
