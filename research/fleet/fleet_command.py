"""`python -m research fleet`: what a verifier and a fleet hold by scheme, and whether the simulation is right."""

from __future__ import annotations

import itertools
import json
import math
import multiprocessing
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.bench.bench_results import Benchmark, check_drawing
from outrider.bench.environment import machine
from outrider.bench.record import check_file, from_json
from outrider.bench.table import UNKNOWN, Grid, draw, number
from outrider.deploy.arguments import Given
from outrider.deploy.link.link_traces import find_trace
from outrider.deploy.link.shape import LinkShape
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.files import read_text
from research.fleet.benchmark_again import SIMULATED, simulated_again
from research.fleet.capacity import Bounds, Held, best_length, capacity
from research.fleet.fleet_plots import plot
from research.fleet.many_sessions import Load, load
from research.fleet.prices import DEVICES, VERIFIERS, Device, VerifierPrices
from research.fleet.schemes import (
    LENGTHS,
    Scheme,
    both_ends,
    by_deadline,
    centralised,
    cloud_streaming,
    edges_alone,
    in_rounds,
)
from research.fleet.whole_fleet import Arrival, Fleet, FleetPlan, read_arrivals
from research.research_settings import CapacitySettings, CheckSettings, FleetSettings
from research.traces.recordings import HitTrace, load_recording

LINKS = ("fibre", "wifi", "5g-handover", "lte-motion")
CARD_HOUR = 2.5  # dollars
WITH_LENGTH = ("centralised", "rounds", "deadline")  # schemes


@dataclass(frozen=True, slots=True)
class Cell:
    """One search: prices of the verifier, device of the edges, round trip in ms, and the scheme by its name.

    Where `sessions` are given, the length is sought with which they are fastest, not how many are held.
    """

    prices: str
    device: Device
    rtt_ms: float
    scheme: str
    sessions: int = 0


def capacity_command(given: Given) -> int:
    """Run `python -m research fleet capacity`."""
    options = given(CapacitySettings)
    if options.json is not None:
        check_file(options.json, "json")
    if options.plot is not None:
        check_drawing("plot")
    traces = _traces(options.traces)
    bounds = Bounds(
        gap_s=options.gap / 1e3,
        pace_s=options.pace / 1e3 or math.inf,
        max_sessions=options.max_sessions,
        session_seconds=options.seconds,
    )
    cells = list(_cells(options))
    rows = []
    for cell, held in zip(cells, _mapped(partial(search, traces, bounds, options.seeds), cells), strict=True):
        rows.append(_capacity_row(cell, held, bounds))
        print(json.dumps(rows[-1]), flush=True)
    Console(width=100, highlight=False).print(draw([_capacity_table(rows, bounds)]))
    _save(options.json, {"bounds": asdict(bounds), "rows": rows})
    if options.plot is not None:
        plot(rows, options.plot, by_sessions=bool(options.sessions))
    return 0


def search(traces: Sequence[HitTrace], bounds: Bounds, seeds: int, cell: Cell) -> list[Held]:
    """Return what a cell's scheme holds, with its best length, once a seed: the median comes first."""
    prices = VERIFIERS[cell.prices]
    links = (partial(_shape, LinkShape(cell.rtt_ms / 1e3)),)

    of: dict[str, Any] = {"devices": (cell.device,), "links": links}
    scheme_of = _schemes(prices, bounds.gap_s)[cell.scheme]
    lengths = LENGTHS if cell.scheme in WITH_LENGTH else LENGTHS[:1]
    if cell.sessions:
        seconds = bounds.trial_s(cell.sessions)
        loads = [
            (load(traces, scheme, prices, sessions=cell.sessions, seconds=seconds, **of), scheme)
            for scheme in map(scheme_of, lengths)
        ]
        fastest, scheme = max(loads, key=lambda found: found[0].tokens_per_second)
        return [Held(cell.sessions, scheme, fastest)] * 3

    def found(scheme: Scheme, guess: int, seed: int = 0) -> Held:
        return capacity(traces, scheme, prices, bounds, guess=guess, seed=seed, **of)

    first = best_length(found, scheme_of, lengths)
    held = [first, *(found(first.scheme, max(1, first.sessions), seed) for seed in range(1, seeds))]
    held.sort(key=lambda each: each.sessions)
    return [held[(len(held) - 1) // 2], held[0], held[-1]]


def _schemes(prices: VerifierPrices, gap_s: float) -> Mapping[str, Callable[[int], Scheme]]:
    return {
        "cloud": lambda _: cloud_streaming(),
        "centralised": partial(centralised, prices),
        "rounds": in_rounds,
        "deadline": partial(by_deadline, gap_s=gap_s),
        "edges": lambda _: edges_alone(),
        "both": lambda _: both_ends(prices),
    }


def _cells(options: CapacitySettings) -> Iterator[Cell]:
    """Yield the searches; what waits for no edge is sought once, and rounds for the first device alone."""
    devices = [device for name in options.devices for device in DEVICES if device.name == name]
    for prices, sessions in itertools.product(options.prices, options.sessions or (0,)):
        for scheme in ("cloud", "centralised"):
            yield Cell(prices, devices[0], 0.0, scheme, sessions)
        for device, rtt_ms in itertools.product(devices, options.rtt):
            for scheme in ("edges", "both", *(("rounds", "deadline") if device == devices[0] else ())):
                yield Cell(prices, device, rtt_ms, scheme, sessions)


def _shape(shape: LinkShape, _: float) -> LinkShape:
    return shape


def _mapped(function: Callable[[Any], Any], over: Sequence[Any]) -> Iterator[Any]:
    """Call in as many processes as there are cores, which a virtual clock does not notice."""
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        yield from pool.map(function, over)


def _traces(path: Path) -> Sequence[HitTrace]:
    recording = load_recording(path)
    return next(iter(recording.traces.values()))


def _capacity_row(cell: Cell, held: Sequence[Held], bounds: Bounds) -> dict[str, Any]:
    prices, middle = VERIFIERS[cell.prices], held[0]
    row: dict[str, Any] = {
        "prices": cell.prices,
        "scheme": middle.scheme.name,
        "length": middle.scheme.length,
        "device": cell.device.name,
        "drafting_ms": 1e3 * cell.device.drafting_s,
        "rtt_ms": cell.rtt_ms,
        "sessions": middle.sessions,
        "least": held[1].sessions,
        "most": held[2].sessions,
    }
    return row | _said(middle.load, prices.cards, bounds)


def _said(load: Load | None, cards: int, bounds: Bounds) -> dict[str, Any]:
    """Return what a load shows; cost is that of the cards for a million tokens of goodput."""
    if load is None:
        return {}
    goodput = load.goodput(bounds.gap_s, bounds.pace_s)
    return {
        "tokens_per_second": _short(load.tokens_per_second),
        "goodput": _short(goodput),
        "tokens_per_card_second": _short(load.tokens_per_second / cards),
        "dollars_per_million": _short(CARD_HOUR * cards / 3600 / goodput * 1e6) if goodput else None,
        "gap_p99_ms": _short(1e3 * load.gap_p99_s),
        "steps_per_token": _short(load.steps_per_token),
        "rows_per_token": _short(load.rows_per_token),
        "edge_joules_per_token": _short(load.edge_joules),
        "bytes_per_token": _short(load.bytes_per_token),
        "slowest_over_median": _short(_fairness(load)),
    }


def _fairness(load: Load) -> float:
    """Return the slowest session's rate over the median's, of those with 32 tokens or more."""
    rates = sorted(rate for rate, tokens in zip(load.rates, load.tokens, strict=True) if tokens >= 32)
    return rates[0] / rates[len(rates) // 2] if rates else 1.0


def fleet_command(given: Given) -> int:
    """Run `python -m research fleet edges`."""
    options = given(FleetSettings)
    if options.json is not None:
        check_file(options.json, "json")
    if not options.pace:
        raise ConfigError("must be above 0, since it sets the rate of arrivals", field="pace")
    traces, arrivals = _traces(options.traces), read_arrivals(options.arrivals)
    bounds = Bounds(gap_s=options.gap / 1e3, pace_s=options.pace / 1e3)
    prices = VERIFIERS[options.price]
    plan = FleetPlan(edges=options.edges, seconds=options.seconds, pace_s=bounds.pace_s, seed=options.seed)
    schemes = [
        cloud_streaming(),
        centralised(prices, options.length),
        in_rounds(options.length),
        by_deadline(options.length, bounds.gap_s),
        edges_alone(),
        both_ends(prices),
    ]
    plans = [replace(plan, verifiers=count, texts=count * options.texts) for count in options.verifiers]
    work = [(scheme, of_plan) for of_plan in plans for scheme in schemes]
    rows = []
    runs = _mapped(partial(_run, traces, arrivals, prices), work)
    for (scheme, of_plan), (found, refused) in zip(work, runs, strict=True):
        row = {"scheme": scheme.name, "verifiers": of_plan.verifiers, "texts": of_plan.texts, "refused": refused}
        rows.append(row | _said(found, prices.cards * of_plan.verifiers, bounds))
        print(json.dumps(rows[-1]), flush=True)
    Console(width=100, highlight=False).print(draw([_fleet_table(rows)]))
    run = {"edges": plan.edges, "seconds": plan.seconds, "seed": plan.seed}
    _save(options.json, {"prices": asdict(prices), "run": run, "bounds": asdict(bounds), "rows": rows})
    return 0


def _run(
    traces: Sequence[HitTrace], arrivals: Sequence[Arrival], prices: VerifierPrices, work: tuple[Scheme, FleetPlan]
) -> tuple[Load, int]:
    scheme, plan = work
    fleet = Fleet(traces, arrivals, scheme, prices, plan, DEVICES, [find_trace(name) for name in LINKS])
    return fleet.run(), fleet.refused


def check_command(given: Given) -> int:
    """Run `python -m research fleet check`: the runs of a benchmark with many sessions, simulated."""
    options = given(CheckSettings)
    if options.json is not None:
        check_file(options.json, "json")
    if not options.measured:
        raise ConfigError("names no record; give some that `outrider bench --json` wrote", field="measured")
    recording = load_recording(options.traces)
    drafter, traces = next(iter(recording.traces.items()))
    rows = []
    for path in options.measured:
        benchmark = from_json(Benchmark, read_text(path, "measured"), "measured")
        costs = recording.costs.of(drafter, min_step_s=benchmark.min_step_ms / 1e3)
        rows += [simulated_again(run, benchmark, traces, costs) for run in benchmark.runs if run.mode in SIMULATED]
    Console(width=100, highlight=False).print(draw([_check_table(rows)]))
    _save(options.json, {"rows": rows})
    return 0


def _capacity_table(rows: Sequence[Mapping[str, Any]], bounds: Bounds) -> Grid:
    cells = [
        (
            str(row["prices"]),
            f"{row['scheme']}{'' if row['length'] is None else ' ' + str(row['length'])}",
            f"{row['drafting_ms']:g}",
            f"{row['rtt_ms']:g}",
            f"{row['sessions']} ({row['least']} to {row['most']})",
            number(row.get("tokens_per_card_second"), 0),
            number(row.get("dollars_per_million"), 3),
            number(row.get("edge_joules_per_token"), 3),
        )
        for row in rows
    ]
    headings = ("verifier", "scheme", "ms a draft", "ms away", "sessions", "tok/card s", "$/M", "J/tok")
    title = f"Sessions of one verifier at a p99 gap of {1e3 * bounds.gap_s:g} ms and {1e3 * bounds.pace_s:g} ms a token"
    return Grid(title, headings, 2, [cells])


def _fleet_table(rows: Sequence[Mapping[str, Any]]) -> Grid:
    cells = [
        (
            str(row["verifiers"]),
            row["scheme"],
            number(row["goodput"], 0),
            number(row["tokens_per_second"], 0),
            number(row["gap_p99_ms"], 0),
            number(row["tokens_per_card_second"], 0),
            number(row["dollars_per_million"], 3),
            number(row["edge_joules_per_token"], 3),
        )
        for row in rows
    ]
    headings = ("verifiers", "scheme", "goodput", "tok/s", "gap p99", "tok/card s", "$/M", "J/tok")
    return Grid("A fleet", headings, 2, [cells])


def _check_table(rows: Sequence[Mapping[str, Any]]) -> Grid:
    cells = [
        (
            f"{of_run['sessions']}",
            of_run["mode"],
            row["figure"],
            number(row["measured"], 2),
            number(row["simulated"], 2),
            f"{row['simulated'] / row['measured']:.2f}" if row["measured"] else UNKNOWN,
        )
        for of_run in rows
        for row in of_run["figures"]
    ]
    headings = ("sessions", "mode", "figure", "measured", "simulated", "ratio")
    return Grid("Measured and simulated", headings, 3, [cells])


def _short(value: float) -> float:
    return float(f"{value:.4g}")


def _save(path: Path | None, made: Mapping[str, Any]) -> None:
    if path is not None:
        path.write_text(json.dumps({"environment": machine(), "card_hour": CARD_HOUR, **made}, indent=1) + "\n")
