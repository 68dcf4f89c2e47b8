"""What a benchmark measured, as frozen dataclasses and as JSON. An unknown figure is None, in JSON null."""

from __future__ import annotations

import functools
import itertools
import json
import math
import os
import platform
import subprocess
import types
import typing
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field, fields, is_dataclass
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from outrider.proto.errors import ConfigError, InvalidArgument

MODES = ("cloud", "sync", "outrider", "optimum", "hf-generate", "hf-assisted")
GOALS = ("latency", "efficiency")
LANES = ("draft", "up", "verify", "down", "idle")
QUANTILES = 101  # 0, 1, … 100 %
PACKAGES = ("outrider", "torch", "transformers", "onnxruntime", "grpcio", "ray")


def _require(holds: bool, field_name: str, message: str) -> None:
    if not holds:
        raise InvalidArgument(message, field=field_name)


def _check_figures(record: Any) -> None:
    """Every number of `record` is finite and not negative: all of them are times, counts, rates and shares."""
    for entry in fields(record):
        value = getattr(record, entry.name)
        numbers = value if isinstance(value, tuple) else (value,)
        for number in numbers:
            if isinstance(number, int | float):
                _require(math.isfinite(number) and number >= 0, entry.name, f"{number} is not a figure of 0 or more")


def _rises(values: Sequence[float]) -> bool:
    return all(low <= high for low, high in itertools.pairwise(values))


@dataclass(frozen=True, slots=True)
class LinkRecord:
    """The emulated link between edge and verifier.

    Attributes:
        rtt_ms: round-trip time without queueing.
        up_mbit: bandwidth from the edge, Mbit/s; None: unlimited.
        down_mbit: bandwidth to the edge, Mbit/s; None: unlimited.
        jitter_ms: scale of the random delay that is added, as the emulator defines it.
        trace: name of the recorded link that was played; None: none.
    """

    rtt_ms: float
    up_mbit: float | None = None
    down_mbit: float | None = None
    jitter_ms: float = 0.0
    trace: str | None = None

    def __post_init__(self) -> None:
        _check_figures(self)


@dataclass(frozen=True, slots=True)
class Span:
    """Something that lasted from `start_s` to `end_s` of a session, in the lane of whoever was busy (`LANES`)."""

    lane: str
    start_s: float
    end_s: float

    def __post_init__(self) -> None:
        _require(self.lane in LANES, "lane", f"{self.lane!r} is none of {', '.join(LANES)}")
        _check_figures(self)
        _require(self.end_s >= self.start_s, "end_s", f"{self.end_s} is before start_s {self.start_s}")


@dataclass(frozen=True, slots=True)
class Run:
    """One way of decoding the same prompts, over one link, under one load.

    Attributes:
        mode: one of `MODES`; hf-generate and hf-assisted are transformers' own, in one process without any link.
        link: that lay between.
        pace_ms: every target step took at least so long, as a larger target's would; 0: the target's own time.
        temperature: of the sampling.
        sessions: that decoded at the same time.
        domain: of the prompts; "": all.
        goal: what the policies were set to save, one of `GOALS`; None: the mode has no such choice.
        sync_length: draft tokens a round of synchronous speculation.
        replayed: computed from recorded hits on a virtual clock, not measured.
        tokens: committed by all sessions together.
        seconds: in which they were committed.
        tokens_per_second: of all sessions together.
        steps_per_token: target steps a committed token.
        acceptance: chance that a draft is right, given that those before it in its chain were.
        ttft_ms_p50: median time to a session's first token.
        token_gap_ms_p50: median time between tokens as they reach the user.
        token_gap_ms_p99: the same, 99 %.
        uplink_bytes_per_token: sent by the edge.
        downlink_bytes_per_token: received by the edge.
        identical_to_cloud: whether every text was that of cloud streaming.
        window_mean: unverified tokens in flight, on average.
        code_age_mean: positions between a steering code and the token that the drafts made with it follow, on average
            over steered drafting jobs; None: there were none.
        token_gaps_ms: [101] the 0, 1, … 100 % quantiles of the gaps.
        session_tokens_per_second: [sessions] of each text or session, in order.
        forward_ms_p50: median time of the model's own forward pass in a target step.
        sample_ms_p50: the same of taking tokens from its logits.
        overhead_ms_p50: the same of all else between two steps but waiting: events, planning, commits, other threads.
        timeline: what the parts did in the first second or two of one session.
        arrivals_s: [n] when the tokens of the longest text came, seconds since it was asked for; None: the link did not
            change, or the text did not meet its trace from the beginning.
    """

    mode: str
    link: LinkRecord
    pace_ms: float = 0.0
    temperature: float = 0.0
    sessions: int = 1
    domain: str = ""
    goal: str | None = None
    sync_length: int | None = None
    replayed: bool = False
    tokens: int | None = None
    seconds: float | None = None
    tokens_per_second: float | None = None
    steps_per_token: float | None = None
    acceptance: float | None = None
    ttft_ms_p50: float | None = None
    token_gap_ms_p50: float | None = None
    token_gap_ms_p99: float | None = None
    uplink_bytes_per_token: float | None = None
    downlink_bytes_per_token: float | None = None
    identical_to_cloud: bool | None = None
    window_mean: float | None = None
    code_age_mean: float | None = None
    token_gaps_ms: tuple[float, ...] | None = None
    session_tokens_per_second: tuple[float, ...] | None = None
    forward_ms_p50: float | None = None
    sample_ms_p50: float | None = None
    overhead_ms_p50: float | None = None
    timeline: tuple[Span, ...] | None = None
    arrivals_s: tuple[float, ...] | None = None

    def __post_init__(self) -> None:
        _require(self.mode in MODES, "mode", f"{self.mode!r} is none of {', '.join(MODES)}")
        _require(
            self.goal is None or self.goal in GOALS, "goal", f"{self.goal!r} is none of {', '.join(GOALS)} and null"
        )
        _check_figures(self)
        gaps = self.token_gaps_ms
        if gaps is not None:
            _require(len(gaps) == QUANTILES, "token_gaps_ms", f"holds {len(gaps)} quantiles, not {QUANTILES}")
            _require(_rises(gaps), "token_gaps_ms", "quantiles must not fall")
        _require(_rises(self.arrivals_s or ()), "arrivals_s", "times must not fall")


@dataclass(frozen=True, slots=True)
class Environment:
    """On what, with what and by which command a benchmark was made. `date` is ISO 8601, in UTC."""

    date: str
    command: str
    python: str
    platform: str
    cpu: str | None
    cores: int | None
    packages: Mapping[str, str | None]
    target: str
    dtype: str
    drafter: str
    drafter_version: str | None
    target_threads: int | None
    drafter_threads: int | None
    prompts: int
    max_tokens: int
    seed: int
    revision: str | None = None
    hf_drafter: str | None = None


@dataclass(frozen=True, slots=True)
class Benchmark:
    """An environment, and all that was measured in it."""

    environment: Environment
    runs: tuple[Run, ...] = field(default=())


def environment(
    *,
    command: str,
    target: str,
    dtype: str,
    drafter: str,
    drafter_version: str | None,
    target_threads: int | None,
    drafter_threads: int | None,
    prompts: int,
    max_tokens: int,
    seed: int,
    hf_drafter: str | None = None,
) -> Environment:
    """The environment of a benchmark that runs here and now; what the caller cannot know is found out."""
    return Environment(
        date=datetime.now(UTC).isoformat(timespec="seconds"),
        command=command,
        python=platform.python_version(),
        platform=platform.platform(),
        cpu=_cpu(),
        cores=_cores(),
        packages={name: _version(name) for name in PACKAGES},
        target=target,
        dtype=dtype,
        drafter=drafter,
        drafter_version=drafter_version,
        target_threads=target_threads,
        drafter_threads=drafter_threads,
        prompts=prompts,
        max_tokens=max_tokens,
        seed=seed,
        revision=_revision(),
        hf_drafter=hf_drafter,
    )


def to_json(benchmark: Benchmark) -> str:
    """The JSON text of a benchmark."""
    return json.dumps(asdict(benchmark), indent=1, allow_nan=False) + "\n"


def from_json(text: str) -> Benchmark:
    """The benchmark in a JSON text.

    Raises:
        ConfigError: it is no JSON, or a field is missing, unknown or wrong; the error names it (`runs[3].link.rtt_ms`).
    """
    try:
        parsed = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"is not JSON: {error}", field="benchmark") from error
    benchmark: Benchmark = _decode(Benchmark, parsed, "")
    return benchmark


def save(benchmark: Benchmark, path: Path) -> None:
    """Write the JSON file.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = to_json(benchmark)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error}", field="benchmark") from error


def load(path: Path) -> Benchmark:
    """Read what `save` wrote.

    Raises:
        ConfigError: as `from_json`, or the file cannot be read.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot read {path}: {error}", field="benchmark") from error
    return from_json(text)


_hints = functools.cache(typing.get_type_hints)


def _decode(kind: Any, value: Any, where: str) -> Any:
    """`value` out of JSON as a `kind`: a dataclass, a tuple, a mapping of strings, a union with None, or a scalar."""
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin is types.UnionType:
        inner = next(argument for argument in arguments if argument is not type(None))
        return None if value is None else _decode(inner, value, where)
    if is_dataclass(kind):
        return _decode_record(kind, value, where)
    if origin is tuple:
        _expect(isinstance(value, list), where, value, "a list")
        return tuple(_decode(arguments[0], item, f"{where}[{index}]") for index, item in enumerate(value))
    if origin is Mapping:
        _expect(isinstance(value, dict), where, value, "an object")
        return {name: _decode(arguments[1], item, f"{where}.{name}") for name, item in value.items()}
    if kind is float:
        _expect(isinstance(value, int | float) and not isinstance(value, bool), where, value, "a number")
        return float(value)
    _expect(type(value) is kind, where, value, _NAMES[kind])
    return value


_NAMES = {int: "a whole number", bool: "true or false", str: "a string"}


def _decode_record(kind: Any, value: Any, where: str) -> Any:
    _expect(isinstance(value, dict), where, value, "an object")
    prefix = f"{where}." if where else ""
    known = {entry.name: entry for entry in fields(kind)}
    for name in value:
        if name not in known:
            raise ConfigError("is unknown; remove it, or read the file with a newer outrider", field=prefix + name)
    for name, entry in known.items():
        if name not in value and entry.default is MISSING:
            raise ConfigError("is missing", field=prefix + name)
    decoded = {name: _decode(_hints(kind)[name], item, prefix + name) for name, item in value.items()}
    try:
        return kind(**decoded)
    except InvalidArgument as error:
        raise ConfigError(error.message, field=prefix + error.field) from error


def _expect(holds: bool, where: str, value: Any, wanted: str) -> None:
    if not holds:
        raise ConfigError(f"must be {wanted}, not {json.dumps(value)[:40]}", field=where or "benchmark")


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None


def _cpu() -> str | None:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or None
    names = (line.partition(":")[2].strip() for line in lines if line.startswith("model name"))
    return next(names, platform.processor() or None)


def _cores() -> int | None:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()


def _revision() -> str | None:
    """The commit of the checkout that this file is of, with `-dirty` where it was changed; None if there is none."""
    here = Path(__file__)
    git = ("git", "-C", str(here.parent))
    try:
        # An installed copy may lie in somebody else's checkout, which says nothing about it.
        subprocess.run((*git, "ls-files", "--error-unmatch", here.name), check=True, capture_output=True)  # noqa: S603
        described = subprocess.run(  # noqa: S603
            (*git, "describe", "--always", "--dirty", "--abbrev=12", "--exclude=*"),
            check=True,
            capture_output=True,
            text=True,
        )
    except (OSError, subprocess.CalledProcessError):
        return None
    return described.stdout.strip() or None
