"""Recordings: a target's texts, where drafters would have proposed the same, and the costs of the machines."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from pydantic import AfterValidator, BeforeValidator, Field
from pydantic.dataclasses import dataclass as record_dataclass

from outrider.bench.bench_metrics import grouped
from outrider.bench.bench_settings import check_once
from outrider.bench.record import RECORD, Metric, from_json, one_of, write
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.files import read_text
from outrider.proto.types import MAX_TOKEN_ID
from research.simulator.clock import Costs

# One entry for each token.
LISTS = ("tokens", "hits", "confidence", "silent", "perturbed_probability", "agreement", "runner_up")
OPTIONAL_LISTS = LISTS[2:]  # these may be empty
MEASURES = ("confidence", "perturbed_probability", "agreement")  # these may hold NaN
FORMAT = "outrider-trace-costs/1"
SUFFIX = ".jsonl"


def _nan_for_null(values: Any) -> Any:
    return tuple(math.nan if value is None else value for value in values) if isinstance(values, list) else values


def _probability(value: float) -> float:
    """Return a number from 0 to 1, or NaN."""
    if value < 0 or value > 1:
        raise ValueError(f"must be a probability or null, not {value:g}")
    return value


Chances = Annotated[tuple[Annotated[float, AfterValidator(_probability)], ...], BeforeValidator(_nan_for_null)]


@dataclass(frozen=True, slots=True)
class HitTrace:
    """One text of a target, and what one drafter would have proposed in place of each of its tokens.

    Attributes:
        id: name of the prompt.
        domain: domain of the prompt, may be empty.
        prompt_tokens: length of the prompt.
        tokens: [n] the text, which is the target's own.
        hits: [n] whether the drafter proposes tokens[i] after prompt + tokens[:i].
        confidence: [n] the drafter's probability of its proposal; NaN: not known; empty: nowhere known.
        ended: whether the text ended by itself (EOS, its last token), not for its length.
        silent: [n] whether the drafter proposes nothing there; empty: nowhere.
        perturbed_probability: [n] softmax of (log q + G) at its proposal, G the shared noise; NaN: not known; empty:
            not recorded.
        agreement: [n] min(1, p / q) of its proposal, p the target's processed probability of it; NaN and empty as
            above. At temperature 0 both are those at temperature 1, as in the verifier's rewards.
        runner_up: [n] at a miss, the rank of tokens[i] among the drafter's runners-up, from 1 on; 0: it is none of
            them, or a hit; empty: not recorded, and a replay has no branches.
        prompt_log_q: log q of the prompt's end, in nats a token; NaN: not recorded.

    Raises:
        ConfigError: lists of unequal length, or a text that no run can have given; the field is named.
    """

    __pydantic_config__ = RECORD

    id: str
    domain: str
    drafter: str
    drafter_version: str
    temperature: Metric
    prompt_tokens: int
    tokens: tuple[Annotated[int, Field(ge=0, lt=MAX_TOKEN_ID)], ...]
    hits: tuple[bool, ...]
    confidence: Chances = ()
    ended: bool = False
    silent: tuple[bool, ...] = ()
    perturbed_probability: Chances = ()
    agreement: Chances = ()
    runner_up: tuple[Annotated[int, Field(ge=0)], ...] = ()
    seed: int = 0
    prompt_log_q: Annotated[float, Field(le=0)] = math.nan

    def __post_init__(self) -> None:
        if not self.tokens:
            raise ConfigError("is empty", field="trace.tokens")
        if not self.confidence:
            object.__setattr__(self, "confidence", (math.nan,) * len(self.tokens))
        for name in LISTS:
            if len(getattr(self, name)) not in (len(self.tokens), *((0,) if name in OPTIONAL_LISTS else ())):
                raise ConfigError("must hold one entry for each token", field=f"trace.{name}")
        if any(hit and silent for hit, silent in zip(self.hits, self.silent, strict=False)):
            raise ConfigError("is set where the drafter hits", field="trace.silent")
        if self.prompt_tokens < 1:
            raise ConfigError("must be 1 or more", field="trace.prompt_tokens")
        if self.ended and self.tokens[-1] in self.tokens[:-1]:
            raise ConfigError("holds the token that ended it before its end", field="trace.tokens")

    def first(self, tokens: int) -> HitTrace:
        n = min(tokens, len(self.tokens))
        return replace(self, ended=False, **{name: getattr(self, name)[:n] for name in LISTS})


def save_traces(traces: Iterable[HitTrace], path: Path) -> None:
    """Write one JSON object a line, with null for NaN and without lists that were not recorded."""
    text = "".join(_to_line(trace) + "\n" for trace in traces)
    write(path, lambda: path.write_text(text, encoding="utf-8"), "output")


def load_traces(path: Path) -> list[HitTrace]:
    """Return what `save_traces` wrote; a line that is no trace is named in a `ConfigError`, with its field."""
    traces = []
    for number, line in enumerate(read_text(path, "traces").splitlines(), 1):
        if not line.strip():
            continue
        try:
            traces.append(from_json(HitTrace, line, "traces", prefix="trace."))
        except ConfigError as error:
            where = f"line {number} of {path} is no hit trace"
            raise ConfigError(f"{where}: {error.message}", field=error.field) from error
    return traces


def _to_line(trace: HitTrace) -> str:
    values = asdict(trace)
    for name in OPTIONAL_LISTS:
        if not values[name]:
            del values[name]
    if math.isnan(trace.prompt_log_q):
        del values["prompt_log_q"]
    for name in values.keys() & set(MEASURES):
        values[name] = [None if value != value else value for value in values[name]]  # NaN alone is not itself
    return json.dumps(values, separators=(",", ":"), allow_nan=False)


@dataclass(frozen=True, slots=True)
class PoolText:
    """One text of the target with the traces [K] of one drafter or more, all on this text."""

    traces: tuple[HitTrace, ...]

    @property
    def prompt(self) -> tuple[str, str]:
        return self.traces[0].domain, self.traces[0].id


def texts_of(traces: Mapping[str, Sequence[HitTrace]]) -> list[PoolText]:
    """Return the texts that drafters were recorded on, in their order, with drafters in the order of the mapping.

    Raises `ConfigError` where a drafter has other texts than the first one.
    """
    (first, texts), *others = ((name, [_text_of(trace) for trace in own]) for name, own in traces.items())
    for name, own in others:
        if own != texts:
            raise ConfigError(f"{name!r} has other texts than {first!r}; record them together", field="traces")
    return list(map(PoolText, zip(*traces.values(), strict=True)))


def _text_of(trace: HitTrace) -> tuple[object, ...]:
    return trace.domain, trace.id, trace.seed, trace.temperature, trace.prompt_tokens, trace.tokens


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
    """Costs of the machines of a recording: of its target and, by name, of its drafters.

    `environment` has the machine and the command of the recording, for people.
    """

    target: TargetCosts
    drafters: Mapping[str, DrafterCosts]
    environment: Mapping[str, Any] = field(default_factory=dict)
    format: Annotated[str, one_of(FORMAT)] = FORMAT

    def of(self, drafter: str, *, min_step_s: float = 0.0) -> Costs:
        """Return the costs of a replay with one drafter; those that only a network shows are the defaults."""
        return Costs(min_step_s=min_step_s, **asdict(self.target), **asdict(self.drafters[drafter]))


def costs_path(traces: Path, field_name: str) -> Path:
    """Return the file of the costs of these traces, which the option `field_name` names."""
    if traces.suffix != SUFFIX:
        raise ConfigError(f"{traces} does not end in {SUFFIX}; call it {traces.stem}{SUFFIX}", field=field_name)
    return traces.with_suffix(".costs.json")


def load_costs(path: Path) -> CostSheet:
    """Read the costs of a recording; a field that is missing, unknown or wrong is named in a `ConfigError`."""
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
        return tuple(dict.fromkeys(text.prompt[0] for text in self.texts))

    def only(self, names: Sequence[str]) -> Recording:
        """Return the recording of these drafters alone, in that order; of all if none is named."""
        if not names:
            return self
        for name in names:
            if name not in self.traces:
                known = ", ".join(self.traces)
                raise ConfigError(f"{name!r} was not recorded; name some of {known}", field="drafter")
        check_once(names, "drafter")
        return Recording({name: self.traces[name] for name in names}, self.costs)


def load_recording(path: Path) -> Recording:
    """Read a recording; raises as `load_traces`, `load_costs` and `Recording` do."""
    path = path.expanduser()
    traces = grouped(load_traces(path), lambda trace: trace.drafter)
    return Recording(traces, load_costs(costs_path(path, "traces")))
