"""Traces and costs of one file, checked against each other."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from outrider.bench.replay.traces import HitTrace, load_traces
from outrider.bench.traces.costs import CostSheet, costs_path, load_costs
from outrider.proto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class Recording:
    """Some texts, the hits of drafters in them, and what the machines took.

    Attributes:
        traces: of each drafter, by name, in the order of the file; all have the same texts in the same order.
        costs: of the target and of these drafters, perhaps of more.
    """

    traces: Mapping[str, Sequence[HitTrace]]
    costs: CostSheet

    def __post_init__(self) -> None:
        if not self.traces:
            raise ConfigError("holds no trace; record some with `outrider traces record`", field="traces")
        (first, texts), *others = ((name, [_text(t) for t in own]) for name, own in self.traces.items())
        for name, own in others:
            if own != texts:
                raise ConfigError(f"{name!r} has other texts than {first!r}; record them together", field="traces")
        for name in self.traces:
            if name not in self.costs.drafters:
                raise ConfigError(f"says nothing of {name!r}; record the traces again", field="costs.drafters")

    @property
    def texts(self) -> Sequence[HitTrace]:
        """A trace of every text, whoever drafts."""
        return next(iter(self.traces.values()))

    @property
    def domains(self) -> tuple[str, ...]:
        """Of the prompts, in their order."""
        return tuple(dict.fromkeys(trace.domain for trace in self.texts))

    def only(self, names: Sequence[str]) -> Recording:
        """The same of these drafters alone, in that order; of all where none is named.

        Raises:
            ConfigError: one was not recorded, or is named twice.
        """
        if not names:
            return self
        for name in names:
            if name not in self.traces:
                known = ", ".join(self.traces)
                raise ConfigError(f"{name!r} was not recorded; name some of {known}", field="drafter")
            if names.count(name) > 1:
                raise ConfigError(f"names {name!r} twice; once is enough", field="drafter")
        return Recording({name: self.traces[name] for name in names}, self.costs)


def load_recording(path: Path) -> Recording:
    """What `outrider traces record` wrote.

    Raises:
        ConfigError: as `load_traces`, `load_costs` and `Recording`.
    """
    path = path.expanduser()
    traces: dict[str, list[HitTrace]] = {}
    for trace in load_traces(path):
        traces.setdefault(trace.drafter, []).append(trace)
    return Recording(traces, load_costs(costs_path(path, "traces")))


def _text(trace: HitTrace) -> tuple[object, ...]:
    return trace.domain, trace.id, trace.seed, trace.temperature, trace.prompt_tokens, trace.tokens
