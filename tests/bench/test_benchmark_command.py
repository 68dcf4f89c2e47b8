"""`outrider bench` from its options to its record and plot, on the reference target at a small size."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from near_verifier import NearVerifier

from outrider.bench.bench_results import Benchmark
from outrider.bench.bench_verifier import VerifierProcess
from outrider.bench.record import from_json
from outrider.cloud.serving.steps import StepTiming
from outrider.cloud.verifier_config import DTYPES, VerifierConfig
from outrider.deploy.cli import main
from outrider.drafters.ngram import NgramDrafter
from outrider.drafters.packages import find_package
from outrider.edge import Client, EdgeConfig, Sampling
from outrider.proto.errors import NotFound
from outrider.proto.plumbing.files import read_text
from outrider.proto.types import Goal, Patience

TOKENS = 16
SMALL = ("--min-step", "5", "--max-tokens", str(TOKENS), "--target-threads", "1")
MEASURED = ["cloud", "sync 2", "sync 4", "colocated 4", "edge", "outrider"]


@pytest.fixture(autouse=True, scope="module")
def _near_verifier() -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("outrider.bench.bench_command.VerifierProcess", NearVerifier)
        yield


@pytest.fixture(scope="module")
def prompt(tmp_path_factory) -> str:
    """Return a file of one prompt."""
    path = tmp_path_factory.mktemp("prompts") / "one.jsonl"
    path.write_text(json.dumps({"id": "one", "prompt": "def main():\n    "}) + "\n")
    return str(path)


@pytest.fixture(scope="module")
def folder(prompt, tmp_path_factory) -> Path:
    """Return the folder of a benchmark's output: `record.json` and `speed.png`."""
    path = tmp_path_factory.mktemp("bench")
    modes = ("--sync-length", "2,4", "--colocated-length", "4", "--rtt", "0,20", "--prompts", prompt)
    modes += ("--drafter", "general,ngram")
    written = ("--json", str(path / "record.json"), "--plot", str(path / "speed.png"))
    assert main(["bench", *SMALL, *modes, *written]) == 0
    return path


@pytest.fixture(scope="module")
def benchmark(folder) -> Benchmark:
    return from_json(Benchmark, read_text(folder / "record.json", "json"), "json")


def test_every_mode_is_measured_with_every_length_on_every_link(benchmark) -> None:
    by_link: dict[float, list[str]] = {}
    for run in benchmark.runs:
        by_link.setdefault(run.link.rtt_ms, []).append(run.name)
    assert by_link == {0.0: MEASURED, 20.0: MEASURED}
    assert (benchmark.min_step_ms, benchmark.sessions, benchmark.temperature) == (5.0, 1, 0.0)


def test_the_record_says_which_type_was_chosen_and_which_drafters_drafted(benchmark) -> None:
    assert benchmark.environment.dtype in DTYPES
    versions = (find_package("general").version, NgramDrafter.version)
    assert benchmark.environment.drafter_version == ", ".join(versions)


def test_the_texts_are_those_of_cloud_streaming(benchmark) -> None:
    assert {run.identical_to_cloud for run in benchmark.runs} == {True}


def test_metrics_are_known_and_positive(benchmark) -> None:
    names = ("tokens_per_second", "seconds", "steps_per_token", "ttft_ms_p50", "token_gap_ms_p99")
    for run in benchmark.runs:
        assert run.tokens == TOKENS
        for name in names:
            assert getattr(run, name) > 0, f"{run.mode} {run.link.rtt_ms}: {name}"
        assert (run.overhead_ms_p50 or 0) > 0
        assert (run.acceptance is None) == (run.mode in ("cloud", "colocated"))
        assert (run.length is not None) == (run.mode in ("sync", "colocated"))


def test_each_mode_drafts_where_it_should(benchmark) -> None:
    for run in benchmark.runs:
        if run.mode in ("cloud", "sync", "edge"):
            assert run.cloud_drafting_ms_per_token == 0
        if run.mode in ("cloud", "colocated"):
            assert run.edge_drafting_ms_per_token == 0
        if run.mode == "colocated":
            assert run.cloud_drafting_ms_per_token > 0
        if run.mode in ("sync", "edge"):
            assert run.edge_drafting_ms_per_token > 0
        assert run.rows_per_token >= run.steps_per_token > 0


def test_bytes_are_counted_where_there_is_a_link(benchmark) -> None:
    for run in benchmark.runs:
        counted = run.link.rtt_ms > 0
        assert [(up or 0) > 0 for up in (run.uplink_bytes_per_token, run.downlink_bytes_per_token)] == [counted] * 2


def test_the_rates_of_a_link_are_recorded_and_without_a_link_there_are_none(benchmark) -> None:
    assert {(run.link.rtt_ms, run.link.up_mbit, run.link.down_mbit) for run in benchmark.runs} == {
        (0.0, None, None),
        (20.0, 20.0, 100.0),
    }


def test_the_plot_is_drawn(folder) -> None:
    assert (folder / "speed.png").read_bytes().startswith(b"\x89PNG")


def test_sessions_at_once_have_the_rate_of_all_together(prompt, tmp_path) -> None:
    record, prompts = tmp_path / "many.json", tmp_path / "three.jsonl"
    prompts.write_text("".join(json.dumps({"id": str(n), "prompt": f"def f{n}():\n    "}) + "\n" for n in range(3)))
    options = ("--sessions", "3", "--rtt", "20", "--modes", "cloud,outrider", "--prompts", str(prompts))
    assert main(["bench", *SMALL, *options, "--json", str(record)]) == 0
    for run in from_json(Benchmark, read_text(record, "json"), "json").runs:
        assert run.tokens == 3 * TOKENS
        assert run.tokens_per_second > 0
        assert run.identical_to_cloud


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        (["--up", "1,2", "--rtt", "5"], 1, "up: has 2 entries where --rtt has 1"),
        (["--sync-length", "4,4"], 1, "sync-length: names 4 twice; once is enough"),
        (["--colocated-length", ""], 1, "colocated-length: is empty; name one or more, or leave colocated out of"),
        (["--draft-here", "off"], 1, "draft-here: is off, but colocated needs it; leave that out of --modes"),
        (["--json", "/proc/r/bench.json"], 1, "json: cannot write /proc/r/bench.json"),
        (["--plot", "speed.txt"], 1, "plot: speed.txt ends in none of .png, .svg, .pdf"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_mistake_is_one_clear_line(arguments, status, says, capfd) -> None:
    check_mistake(arguments, status, says, capfd)


def test_a_verifier_that_gives_no_drafts_is_no_drafter_beside_the_target(prompt, monkeypatch, capfd) -> None:
    monkeypatch.setattr("outrider.bench.bench_command.drafting_here", lambda *_: {"draft_here": "off"})
    arguments = ["--prompts", prompt, "--rtt", "0", "--modes", "colocated", "--max-tokens", "24"]
    check_mistake(arguments, 1, "draft-here: has given no drafts; leave colocated out of --modes", capfd)


def check_mistake(arguments: list[str], status: int, says: str, capfd: pytest.CaptureFixture[str]) -> None:
    try:
        got = main(["bench", *arguments])
    except SystemExit as ended:
        got = int(ended.code or 0)
    out, err = capfd.readouterr()
    assert got == status
    mistakes = [line for line in err.splitlines() if line.startswith("outrider bench: ")]
    assert len(mistakes) == 1
    assert says in mistakes[0]
    assert out == ""


def test_a_verifier_process_gets_the_settings_and_reports_its_refusal(tmp_path) -> None:
    file = tmp_path / "tokenizer.json"
    config = VerifierConfig(
        threads=1, exact="off", patience=Patience(0.001, 4), goal=Goal.EFFICIENCY, min_step_s=0.05, draft_here="off"
    )

    class RefusedFirst(VerifierProcess):
        async def prepare(self) -> None:
            self._config, wanted = replace(self._config, target=str(tmp_path / "none")), self._config
            with pytest.raises(NotFound, match="none"):  # before it loads a target, which takes all cores for seconds
                await super().prepare()
            self._config = wanted
            await super().prepare()

    async def steps() -> list[StepTiming]:
        async with RefusedFirst(config, file) as verifier:
            assert verifier.precision == "float32"  # which --dtype auto takes with --exact off
            edge = EdgeConfig(verifier=verifier.address, model="reference", tokenizer=file, drafter="none")
            async with Client(edge) as client:
                await client.complete("def f(", Sampling(max_tokens=4))
            return await verifier.step_timings()

    assert len(asyncio.run(steps())) == 4
