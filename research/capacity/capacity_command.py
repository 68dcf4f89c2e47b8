"""`capacity`: sessions that one verifier holds, by who drafts, the round trip and the drafter's time."""

from __future__ import annotations

import itertools
import math

from rich.console import Console

from outrider.bench.bench_settings import check_once
from outrider.bench.environment import command_line
from outrider.deploy.arguments import Given
from outrider.proto.errors import ConfigError
from research.capacity.capacity_record import Capacities, HeldSessions, StepModel
from research.capacity.capacity_search import Bounds, Search
from research.capacity.capacity_tables import capacity_tables
from research.outputs import hand_out, progress
from research.recording import load_recording
from research.research_settings import CapacitySettings
from research.simulator.clock import Costs

MEASURED, FLAT = "measured", "flat"


def capacity(given: Given) -> int:
    """Run `python -m research capacity`."""
    options = given(CapacitySettings)
    recording = load_recording(options.traces)
    drafter, traces = recording.one(options.drafter)
    for name in ("rtt", "drafting", "draft_threads", "step_costs", "modes"):
        values = getattr(options, name)
        if not values:
            raise ConfigError("is empty; give one value or more", field=name)
        check_once(values, name)
    costs = recording.costs.of(drafter)
    models = [_model(name, costs, options) for name in options.step_costs]
    pace_s = options.pace / 1e3 if options.pace else math.inf
    bounds = Bounds(options.gap / 1e3, pace_s, options.max_sessions, options.seconds, options.seeds)
    search = Search(traces, costs, bounds)

    def found() -> Capacities:
        results: list[HeldSessions] = []
        cells = list(itertools.product(models, options.drafting))
        with progress(Console(stderr=True, highlight=False), "replaying", len(cells)) as advance:
            for model, drafting_ms in cells:
                results += search.capacities(model, drafting_ms, options.draft_threads, options.rtt, options.modes)
                advance()
        return Capacities(
            command=command_line(),
            environment=dict(recording.costs.environment),
            drafter=drafter,
            gap_ms=options.gap,
            pace_ms=options.pace,
            max_sessions=options.max_sessions,
            seconds=options.seconds,
            seeds=options.seeds,
            models=tuple(models),
            results=tuple(results),
        )

    hand_out(options.json, found, capacity_tables)
    return 0


def _model(name: str, costs: Costs, options: CapacitySettings) -> StepModel:
    if name == MEASURED:
        return StepModel(name, 1e3 * costs.step_s, 1e3 * costs.row_s, options.min_step)
    return StepModel(name, options.min_step, options.flat_row, options.min_step)
