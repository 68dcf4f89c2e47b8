"""The benchmark's links, runs and record: JSON both ways, and one clear line for every field that is wrong."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from datetime import datetime

import pytest
from pydantic import ValidationError

from outrider.bench import environment as environments
from outrider.bench.bench_command import Case, Known, Measured, run_of
from outrider.bench.bench_results import Benchmark, BenchmarkRun
from outrider.bench.bench_settings import LinkListSettings
from outrider.bench.environment import environment
from outrider.bench.links import LinkRecord, links_of
from outrider.bench.record import from_json, save, to_json
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.built_in_prompts import Prompt
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.files import read_text


@pytest.fixture(scope="module")
def benchmark() -> Benchmark:
    found = environment(
        VerifierConfig(threads=1),
        "bfloat16",
        max_tokens=48,
        seed=7,
        drafter="general",
        drafter_version="1",
        drafter_threads=None,
        prompts=4,
    )
    run = BenchmarkRun(
        mode="outrider",
        link=LinkRecord(30.0, 5.0, None, 2.5, "lte"),
        length=None,
        tokens=192,
        seconds=3.5,
        tokens_per_second=54.9,
        steps_per_token=0.4,
        rows_per_token=1.5,
        cloud_drafting_ms_per_token=0.0,
        edge_drafting_ms_per_token=2.0,
        acceptance=None,
        ttft_ms_p50=60.0,
        token_gap_ms_p50=10.0,
        token_gap_ms_p99=50.0,
        uplink_bytes_per_token=None,
        downlink_bytes_per_token=None,
        overhead_ms_p50=0.3,
        identical_to_cloud=True,
    )
    return Benchmark(found, 30.0, 0.0, 1, (run,))


def test_a_saved_record_loads(benchmark, tmp_path) -> None:
    save(benchmark, tmp_path / "new" / "benchmark.json")
    assert from_json(Benchmark, read_text(tmp_path / "new" / "benchmark.json", "benchmark"), "benchmark") == benchmark


def test_the_json_has_the_agreed_shape_and_null_for_unknown_metrics(benchmark) -> None:
    parsed = json.loads(to_json(benchmark))
    assert set(parsed) == {"environment", "min_step_ms", "temperature", "sessions", "runs"}
    (run,) = parsed["runs"]
    shape = {"rtt_ms": 30.0, "up_mbit": 5.0, "down_mbit": None, "jitter_ms": 2.5, "trace": "lte"}
    assert run["link"] == shape
    assert (run["acceptance"], run["uplink_bytes_per_token"]) == (None, None)


def test_the_environment_names_machine_and_versions(benchmark) -> None:
    found = benchmark.environment
    assert datetime.fromisoformat(found.date).utcoffset() is not None
    assert found.python == ".".join(str(part) for part in sys.version_info[:3])
    assert found.cores is not None
    assert found.cores >= 1
    assert set(found.packages) == {"outrider", "torch", "transformers", "onnxruntime", "grpcio", "ray"}
    assert all(found.packages.values())
    assert found.drafter_threads is None


def test_a_missing_package_or_git_is_unknown(monkeypatch) -> None:
    assert environments._version("outrider-no-such-package") is None
    monkeypatch.setenv("PATH", "/nonexistent")
    assert environments._revision() is None


def test_the_checkout_of_another_project_is_not_our_revision(tmp_path, monkeypatch) -> None:
    subprocess.run(("git", "init", "-q", tmp_path), check=True)
    (tmp_path / "environment.py").write_text("")
    monkeypatch.setattr(environments, "__file__", str(tmp_path / "environment.py"))
    assert environments._revision() is None


def changed(benchmark: Benchmark, path: str, value: object) -> str:
    """Return the JSON text with one value changed; `...` removes it."""
    parsed = json.loads(to_json(benchmark))
    *parents, last = path.split("/")
    place = parsed
    for step in parents:
        place = place[int(step) if step.isdigit() else step]
    if value is ...:
        del place[last]
    else:
        place[int(last) if last.isdigit() else last] = value
    return json.dumps(parsed)


@pytest.mark.parametrize(
    ("path", "value", "message"),
    [
        ("runs/0/mode", ..., "runs[0].mode: is missing"),
        ("runs/0/link/rtt_ms", "30", 'runs[0].link.rtt_ms: must be a number, not "30"'),
        ("runs/0/tokens", None, "runs[0].tokens: must be a whole number, not null"),
        ("runs/0/speed", 1, "runs[0].speed: is unknown"),
        ("runs/0/tokens_per_second", float("nan"), "runs[0].tokens_per_second: must be a finite number, not NaN"),
    ],
)
def test_a_wrong_field_is_named(benchmark, path, value, message) -> None:
    with pytest.raises(ConfigError) as raised:
        from_json(Benchmark, changed(benchmark, path, value), "benchmark")
    assert str(raised.value).startswith(message)


def test_a_wrong_metric_is_refused_before_it_is_written(benchmark) -> None:
    with pytest.raises(ValidationError, match=r"seconds\n.*should be a finite number"):
        replace(benchmark.runs[0], seconds=float("inf"))


# --- runs ---


def seconds_of(*texts: Measured, sessions: int = 1) -> float:
    (link,) = links_of(options())
    case = Case("cloud", None, link, None, None, list(texts))
    return run_of(case, sessions, Known({"1": texts[0].tokens}, "none", None)).seconds


def text(began: float, tokens: int, per_token_s: float) -> Measured:
    arrivals = tuple((n + 1) * per_token_s for n in range(tokens))
    return Measured(Prompt("1", "x"), began, tuple(range(tokens)), arrivals)


def test_sequential_texts_take_the_sum_of_their_times_and_parallel_ones_the_longest() -> None:
    assert seconds_of(text(10, 2, 0.5), text(100, 4, 0.5)) == 3.0
    assert seconds_of(text(10, 2, 0.5), text(10.5, 4, 0.5), sessions=2) == 2.5


# --- links ---


def options(**given: tuple[float | str, ...]) -> LinkListSettings:
    """Return the default options with one round trip, but for those given."""
    return LinkListSettings(**{"rtt": (2.0,), **given})


def test_a_benchmark_may_have_traces_alone() -> None:
    (link,) = links_of(options(rtt=(), trace=("step",), jitter=(1.5,)))
    assert link.trace is not None
    assert link.record.trace == "step"
    assert link.shape_at(0.0).jitter_s == pytest.approx(0.0015)


def test_fixed_links_come_before_traces() -> None:
    links = links_of(options(rtt=(0.0, 60.0), trace=("wifi",)))
    assert [link.label for link in links] == ["0 ms", "60 ms", "trace wifi"]


def test_a_list_of_another_length_is_refused_by_its_name() -> None:
    with pytest.raises(ConfigError, match="has 2 entries where --rtt has 3") as refused:
        links_of(options(rtt=(1.0, 2.0, 3.0), up=(1.0, 2.0)))
    assert refused.value.field == "up"
