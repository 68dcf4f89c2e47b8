"""`outrider learn-bench`: how drafters improve on streams of texts, by loss."""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import mean, stdev

import torch
from rich.console import Console
from rich.table import Table

from outrider.bench.commands import LearnBenchSettings
from outrider.bench.environment import command_line
from outrider.bench.learning.arms import HERE, Before, LearningTrial, StreamTexts, measure_start, run_arm
from outrider.bench.learning.plots import draw_curves
from outrider.bench.learning.record import LearningRun, LearningRuns
from outrider.bench.learning.stream import TEXT_TOKENS, StreamPlan, StreamWriter
from outrider.bench.metrics import grouped
from outrider.bench.outputs import check_file, hand_out
from outrider.bench.record import from_json, to_json
from outrider.cloud.training.corpus import domain_name
from outrider.deploy.arguments import Given

STREAM_CLASS = 1
REHEARSED_TEXTS = 256  # of each kept domain
TABLE_WIDTH = 170


def learn_bench(given: Given) -> int:
    """Run `outrider learn-bench`."""
    options = given(LearnBenchSettings)
    torch.set_num_threads(1)
    console = Console(stderr=True, highlight=False)

    def found() -> LearningRuns:
        (options.output / "runs").mkdir(parents=True, exist_ok=True)
        texts = {domain_name(path): _texts(path, options, console) for path in options.streams}
        return LearningRuns(
            command=command_line(),
            target=options.target,
            drafter=options.drafter,
            runs=tuple(_runs(options, texts, console)),
        )

    hand_out(options.json, options.plot, found, table, draw_curves, check_plot=_check_plot, width=TABLE_WIDTH)
    return 0


def _check_plot(path: Path) -> None:
    check_file(path, "plot")


def _runs(options: LearnBenchSettings, texts: Mapping[str, StreamTexts], console: Console) -> Iterator[LearningRun]:
    """Yield the runs, from the folder or made now while there is time."""
    began = time.monotonic()
    starts = {"warm": options.drafter, "cold": options.cold}
    before: dict[tuple[str, str], Before] = {}
    for trial in _trials(options):
        path, package, own = options.output / "runs" / trial.name, starts[trial.start], texts[trial.stream]
        if not path.exists():
            if options.minutes and time.monotonic() - began > 60 * options.minutes:
                continue
            if (trial.stream, trial.start) not in before:
                before[trial.stream, trial.start] = measure_start(package, own)
            run = run_arm(trial, package, own, before[trial.stream, trial.start])
            path.write_text(to_json(run), encoding="utf-8")
            console.print(f"{trial.name}: {_change(run)}")
        yield from_json(LearningRun, path.read_text(encoding="utf-8"), str(path))


def _trials(options: LearnBenchSettings) -> Iterator[LearningTrial]:
    """Yield the runs to make, those of the first seed first."""
    own = itertools.product(range(options.seeds if options.here else 0), options.streams)
    for seed, stream in own:
        yield LearningTrial(domain_name(stream), "warm", HERE, 0.0, seed)
    for seed, rehearsed, stream in itertools.product(range(options.seeds), options.rehearsed, options.streams):
        starts = ["warm"] + (["cold"] if options.cold and seed < options.cold_seeds else [])
        for start, arm in itertools.product(starts, options.losses):
            yield LearningTrial(domain_name(stream), start, arm, rehearsed, seed)


def _texts(path: Path, options: LearnBenchSettings, console: Console) -> StreamTexts:
    writer = StreamWriter(options.target, options.output)
    say = console.print
    stream = writer.stream(path, StreamPlan(max(1, options.tokens // TEXT_TOKENS), False, 0), STREAM_CLASS, say)
    fresh = writer.stream(path, StreamPlan(options.fresh, True, 1), STREAM_CLASS, say)
    kept, rehearsal = {}, []
    for number, corpus in enumerate(options.kept, start=STREAM_CLASS + 1):
        kept[domain_name(corpus)] = writer.stream(corpus, StreamPlan(options.fresh, True, 1), number, say)
        rehearsal += writer.stream(corpus, StreamPlan(REHEARSED_TEXTS, False, 0), number, say)
    return StreamTexts(stream, fresh, kept, rehearsal)


def _change(run: LearningRun) -> str:
    return (
        f"T=0 {run.before.greedy:.3f} to {run.after.greedy:.3f}, T=1 {run.before.sampled:.3f} to "
        f"{run.after.sampled:.3f}, {run.cpu_s:.0f} s of training"
    )


def table(record: LearningRuns) -> Table:
    """Return means over the seeds by stream, start and arm; after ± the standard deviation over seeds.

    The worst change among the kept domains has its standard error over texts instead.
    """
    shown = Table(title=f"{record.drafter} and what it learned, share of hits")
    hits = ("T=0", "gain", "T=1", "gain", "worst kept T=0", "worst kept T=1")
    for column in ("stream", "start", "loss", "rehearsed", "seeds", *hits, "regret", "half of it"):
        shown.add_column(column, justify="right" if column not in ("stream", "start", "loss") else "left")
    by_row = grouped(record.runs, lambda run: (run.stream, run.start, run.arm, run.rehearsed))
    for (stream, start, arm, rehearsed), runs in by_row.items():
        cells = [stream, start, arm, f"{rehearsed:g}", str(len(runs))]
        for kind in ("greedy", "sampled"):
            cells.append(f"{mean(getattr(run.after, kind) for run in runs):.3f}")
            cells.append(_spread([getattr(run.after, kind) - getattr(run.before, kind) for run in runs]))
        cells += [_worst_kept(runs, kind) for kind in ("greedy", "sampled")]
        exponents = [run.exponent for run in runs if run.exponent is not None]
        cells.append(f"t^{mean(exponents):.2f}" if exponents else "-")
        halves = [run.half_gain_tokens for run in runs if run.half_gain_tokens is not None]
        cells.append(f"{mean(halves):,.0f}" if halves else "-")
        shown.add_row(*cells)
    return shown


def _spread(gains: list[float]) -> str:
    return f"{mean(gains):+.3f}" + (f" ±{stdev(gains):.3f}" if len(gains) > 1 else "")


def _worst_kept(runs: list[LearningRun], kind: str) -> str:
    """Return the least mean change among the kept domains, its domain, and the error that the same texts leave."""
    changes = {
        name: mean(getattr(run.kept_after[name], kind) - getattr(run.kept_before[name], kind) for run in runs)
        for name in runs[0].kept_before
    }
    if not changes:
        return "-"
    worst = min(changes, key=lambda name: changes[name])
    error = mean(getattr(run.kept_errors[worst], kind) for run in runs)
    return f"{worst} {changes[worst]:+.3f} ±{error:.3f}"
