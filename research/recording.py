"""Recordings of `traces record`: traces in `FILE.jsonl`, and the machines' costs in `FILE.costs.json`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Annotated, Any

from pydantic.dataclasses import dataclass as record_dataclass

from outrider.bench.bench_metrics import grouped
from outrider.bench.bench_settings import check_once
from outrider.bench.record import RECORD, Metric, from_json, one_of
from outrider.deploy.arguments import read_text
from outrider.proto.errors import ConfigError
from research.replay.hit_traces import HitTrace, load_traces
from research.replay.pool_texts import PoolText, texts_of
from research.simulator.clock import Costs

FORMAT = "outrider-trace-costs/1"
SUFFIX = ".jsonl"


@record_dataclass(frozen=True, slots=True, config=RECORD)
class TargetCosts:
    """Seconds of a step without its rows, of each row, and of each row of a prompt."""

    step_s: Metric
    row_s: Metric
    prefill_row_s: Metric


@record_dataclass(frozen=True, slots=True, config=RECORD)
class DrafterCosts:
    """Seconds of a token that the drafter drafts, and of one that it reads."""

    drafting_s: Metric
    catch_up_s: Metric


@record_dataclass(frozen=True, slots=True, config=RECORD)
class CostSheet:
    """Costs of the machines of a recording.

    Attributes:
        target: costs of the target that wrote the texts.
        drafters: costs of the drafters, by the names of their traces.
        environment: machine and command of the recording, for people.
        format: format of the file.
    """

    target: TargetCosts
    drafters: Mapping[str, DrafterCosts]
    environment: Mapping[str, Any] = field(default_factory=dict)
    format: Annotated[str, one_of(FORMAT)] = FORMAT

    def of(self, drafter: str, *, min_step_s: float = 0.0) -> Costs:
        """Return the costs of a replay with one drafter; those that only a network shows are the defaults."""
        return Costs(min_step_s=min_step_s, **asdict(self.target), **asdict(self.drafters[drafter]))


def costs_path(traces: Path, field_name: str) -> Path:
    """Return the file of the costs of these traces.

    Raises:
        ConfigError: the name, of the option `field_name`, does not end in .jsonl.
    """
    if traces.suffix != SUFFIX:
        raise ConfigError(f"{traces} does not end in {SUFFIX}; call it {traces.stem}{SUFFIX}", field=field_name)
    return traces.with_suffix(".costs.json")


def load_costs(path: Path) -> CostSheet:
    """Read the costs of a recording.

    Raises:
        ConfigError: the file cannot be read, or a field is missing, unknown or wrong; the field is named.
    """
    text = read_text(path, "costs", origin=", which `python -m research traces record` writes beside the traces")
    return from_json(CostSheet, text, "costs", prefix="costs.", remedy="record the traces again")


@dataclass(frozen=True, slots=True)
class Recording:
    """Some texts, the hits of drafters in them, and the costs of the machines.

    Attributes:
        traces: traces of each drafter, by name, in the order of the file; all are of the same texts in the same order.
        costs: costs of the target and of these drafters, perhaps of more.
        texts: texts with the traces of all drafters.

    Raises:
        ConfigError: there is no trace, texts differ, or costs are missing.
    """

    traces: Mapping[str, Sequence[HitTrace]]
    costs: CostSheet
    texts: Sequence[PoolText] = field(init=False)

    def __post_init__(self) -> None:
        if not self.traces:
            raise ConfigError("holds no trace; record some with `python -m research traces record`", field="traces")
        object.__setattr__(self, "texts", texts_of(self.traces))
        for name in self.traces:
            if name not in self.costs.drafters:
                raise ConfigError(f"says nothing of {name!r}; record the traces again", field="costs.drafters")

    @property
    def domains(self) -> tuple[str, ...]:
        """Domains of the prompts, in their order."""
        return tuple(dict.fromkeys(text.prompt[0] for text in self.texts))

    def only(self, names: Sequence[str]) -> Recording:
        """Return the recording of these drafters alone, in that order; of all if none is named.

        Raises:
            ConfigError: one was not recorded, or is named twice.
        """
        if not names:
            return self
        for name in names:
            if name not in self.traces:
                known = ", ".join(self.traces)
                raise ConfigError(f"{name!r} was not recorded; name some of {known}", field="drafter")
        check_once(names, "drafter")
        return Recording({name: self.traces[name] for name in names}, self.costs)

    def one(self, name: str) -> tuple[str, Sequence[HitTrace]]:
        """Return a drafter with its traces; an empty name stands for the only one.

        Raises:
            ConfigError: it was not recorded, or none is named of several.
        """
        found = self.only((name,) if name else ()).traces
        if len(found) > 1:
            raise ConfigError(f"must name one of {', '.join(found)}", field="drafter")
        return next(iter(found.items()))


def load_recording(path: Path) -> Recording:
    """Read a recording.

    Raises:
        ConfigError: as `load_traces`, `load_costs` and `Recording`.
    """
    path = path.expanduser()
    traces = grouped(load_traces(path), lambda trace: trace.drafter)
    return Recording(traces, load_costs(costs_path(path, "traces")))
