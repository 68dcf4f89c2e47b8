"""`outrider learn-bench`: how drafters improve on one stream of texts, by loss."""

from __future__ import annotations

import itertools
import time
from collections import defaultdict
from collections.abc import Iterator
from statistics import mean, stdev

import torch
from rich.console import Console
from rich.table import Table

from outrider.bench.commands import LearnBenchSettings
from outrider.bench.environment import command_line
from outrider.bench.learning.arms import Before, LearningTrial, StreamTexts, measure_start, run_arm
from outrider.bench.learning.record import LearningRun, LearningRuns
from outrider.bench.learning.stream import TEXT_TOKENS, StreamPlan, StreamWriter
from outrider.bench.outputs import check_file
from outrider.bench.record import from_json, save, to_json
from outrider.cloud.training.corpus import domain_name
from outrider.deploy.arguments import Given

STREAM_CLASS = 1
REHEARSED_TEXTS = 64  # of each kept domain


def learn_bench(given: Given) -> int:
    """Run `outrider learn-bench`."""
    options = given(LearnBenchSettings)
    if options.json:
        check_file(options.json, "json")
    torch.set_num_threads(1)
    console = Console(stderr=True, highlight=False)
    results = options.output / "runs"
    results.mkdir(parents=True, exist_ok=True)
    texts = _texts(options, console)
    began = time.monotonic()
    runs: list[LearningRun] = []
    starts = {"warm": options.drafter} | ({"cold": options.cold} if options.cold else {})
    before: dict[str, Before] = {}
    for trial in _trials(options):
        path, package = results / trial.name, starts[trial.start]
        if not path.exists():
            if options.minutes and time.monotonic() - began > 60 * options.minutes:
                continue
            if trial.start not in before:
                before[trial.start] = measure_start(package, texts)
            run = run_arm(trial, package, texts, before[trial.start])
            path.write_text(to_json(run), encoding="utf-8")
            console.print(f"{trial.name}: {_change(run)}")
        runs.append(from_json(LearningRun, path.read_text(encoding="utf-8"), str(path)))
    record = LearningRuns(
        command=command_line(),
        target=options.target,
        drafter=options.drafter,
        stream=domain_name(options.stream),
        runs=tuple(runs),
    )
    Console(width=140, highlight=False).print(table(record))
    if options.json:
        save(record, options.json)
    return 0


def _trials(options: LearnBenchSettings) -> Iterator[LearningTrial]:
    """Yield the runs to make, those of the first seed first."""
    for seed, rehearsed in itertools.product(range(options.seeds), options.rehearsed):
        starts = ["warm"] + (["cold"] if options.cold and seed < options.cold_seeds else [])
        for start, arm in itertools.product(starts, options.losses):
            yield LearningTrial(start, arm, rehearsed, seed)


def _texts(options: LearnBenchSettings, console: Console) -> StreamTexts:
    writer = StreamWriter(options.target, options.output)
    say = console.print
    stream = writer.stream(
        options.stream, StreamPlan(max(1, options.tokens // TEXT_TOKENS), False, 0), STREAM_CLASS, say
    )
    fresh = writer.stream(options.stream, StreamPlan(options.fresh, True, 1), STREAM_CLASS, say)
    kept, rehearsal = {}, []
    for number, corpus in enumerate(options.kept, start=STREAM_CLASS + 1):
        kept[domain_name(corpus)] = writer.stream(corpus, StreamPlan(options.fresh // 2, True, 1), number, say)
        rehearsal += writer.stream(corpus, StreamPlan(REHEARSED_TEXTS, False, 0), number, say)
    return StreamTexts(stream, fresh, kept, rehearsal)


def _change(run: LearningRun) -> str:
    return (
        f"T=0 {run.before.greedy:.3f} to {run.after.greedy:.3f}, T=1 {run.before.sampled:.3f} to "
        f"{run.after.sampled:.3f}, {run.cpu_s:.0f} s of training"
    )


def table(record: LearningRuns) -> Table:
    """Return means over the seeds, with their standard deviations, by start and arm."""
    shown = Table(title=f"{record.drafter} on {record.stream}, share of hits")
    hits = ("T=0", "gain", "T=1", "gain", "worst kept T=0 / T=1")
    for column in ("start", "loss", "rehearsed", "seeds", *hits, "regret", "half of it"):
        shown.add_column(column, justify="right" if column != "loss" else "left")
    grouped: dict[tuple[str, str, float], list[LearningRun]] = defaultdict(list)
    for run in record.runs:
        grouped[run.start, run.arm, run.rehearsed].append(run)
    for (start, arm, rehearsed), runs in grouped.items():
        cells = [start, arm, f"{rehearsed:g}", str(len(runs))]
        for kind in ("greedy", "sampled"):
            cells.append(f"{mean(getattr(run.after, kind) for run in runs):.3f}")
            cells.append(_spread([getattr(run.after, kind) - getattr(run.before, kind) for run in runs]))
        cells.append(" / ".join(_worst_kept(runs, kind) for kind in ("greedy", "sampled")))
        exponents = [run.exponent for run in runs if run.exponent is not None]
        cells.append(f"t^{mean(exponents):.2f}" if exponents else "-")
        halves = [run.half_gain_tokens for run in runs if run.half_gain_tokens is not None]
        cells.append(f"{mean(halves):,.0f}" if halves else "-")
        shown.add_row(*cells)
    return shown


def _spread(gains: list[float]) -> str:
    return f"{mean(gains):+.3f}" + (f" ±{stdev(gains):.3f}" if len(gains) > 1 else "")


def _worst_kept(runs: list[LearningRun], kind: str) -> str:
    """Return the least mean change among the kept domains."""
    changes = [
        mean(getattr(run.kept_after[name], kind) - getattr(run.kept_before[name], kind) for run in runs)
        for name in runs[0].kept_before
    ]
    return f"{min(changes):+.3f}" if changes else "-"
