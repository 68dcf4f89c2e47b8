"""Selectors of a pool of drafters on every row of texts and every link, against single drafters and the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from pydantic.dataclasses import dataclass as record_dataclass

from outrider.bench.bench_metrics import grouped
from outrider.bench.links import LinkRecord
from outrider.bench.record import RECORD, Count, Metric
from outrider.edge.selectors import selector_named
from outrider.proto.errors import ConfigError
from research.recording import Recording
from research.replay.pool_texts import PoolText
from research.traces.stages import Stage, Trajectory

DRAFTER, SELECTOR, ORACLE = "drafter", "selector", "oracle"
MIX = "mix"
STATIC = "static"  # stands for every drafter alone

RESAMPLES = 2000

Variants = Mapping[tuple[str, str], Sequence[PoolText]]  # the texts of each prompt by seed; by domain and id


@record_dataclass(frozen=True, slots=True, config=RECORD)
class Interval:
    """The 95 % confidence interval of a metric."""

    low: float
    high: float


class Bootstrap:
    """Resamples of prompts, drawn within each domain and shared by all drafters, so that comparisons are paired.

    Intervals are by percentiles (Efron and Tibshirani 1993, chapters 8 and 13).
    """

    def __init__(self, domains: Sequence[str], *, seed: int, resamples: int = RESAMPLES) -> None:
        """Draw the resamples; `domains`: [n] domain of each prompt."""
        rng = np.random.default_rng(seed)
        self._domains = np.array(domains)
        self._drawn = np.zeros((resamples, len(domains)))  # times that each prompt is in each resample
        self._too_few = set[str]()
        for domain in dict.fromkeys(domains):
            columns = np.flatnonzero(self._domains == domain)
            share = np.full(len(columns), 1 / len(columns))
            self._drawn[:, columns] = rng.multinomial(len(columns), share, size=resamples)
            if len(columns) < 2:
                self._too_few.add(domain)

    def within(self, domain: str | None) -> np.ndarray:
        """Return [n] whether each prompt belongs to `domain`; None: all do."""
        return np.ones(len(self._domains), dtype=bool) if domain is None else self._domains == domain

    def sums(self, values: np.ndarray, domain: str | None = None) -> np.ndarray:
        """Return [resamples] sums of `values` [n] over the drawn prompts of `domain`; None: over all."""
        columns = self.within(domain)
        sums: np.ndarray = self._drawn[:, columns] @ values[columns]
        return sums

    def interval(self, resampled: np.ndarray, domain: str | None = None) -> Interval | None:
        """Return the interval of `resampled` [resamples]; None where a domain has one prompt: no two differ."""
        if self._too_few if domain is None else domain in self._too_few:
            return None
        low, high = np.percentile(resampled, (2.5, 97.5)).tolist()
        return Interval(low, high)


def variants_of(texts: Sequence[PoolText]) -> Variants:
    """Group texts by prompt, in their order."""
    return grouped(texts, lambda text: text.prompt)


def row_names(domains: Sequence[str]) -> Sequence[str]:
    """Return the domains, and their mix where there are several."""
    return (*domains, MIX) if len(domains) > 1 else domains


def run_texts(row: str, variants: Variants, seed: int) -> list[PoolText]:
    """Return the texts of one run in random order: one of each prompt of the row, with alternating seeds."""
    chosen = [texts[seed % len(texts)] for (domain, _), texts in variants.items() if row in (MIX, domain)]
    return [chosen[i] for i in np.random.default_rng(seed).permutation(len(chosen))]


@record_dataclass(frozen=True, slots=True, config=RECORD)
class Against:
    """Speed over that of one drafter alone, on the same texts.

    Attributes:
        interval: interval of the ratio, over the prompts, which are resampled in pairs; None: a domain has but one.
    """

    drafter: str
    ratio: Metric
    interval: Interval | None


@record_dataclass(frozen=True, slots=True, config=RECORD)
class Cell:
    """One way of choosing on the texts of one row.

    Attributes:
        kind: one `drafter` alone, a `selector`, or the `oracle` in hindsight.
        seconds: time of all texts and seeds together.
        speed_up: seconds of cloud streaming over these.
        interval: interval of the speed-up, over the prompts; None: a domain has but one.
        of_oracle: seconds of the oracle over these.
        switches: changes of drafter from token to token, a thousand tokens.
        shares: [K] share of the tokens of each drafter.
        of_first: speed over that of the first drafter alone; None: drafters were not played alone.
        of_best: the same for the fastest drafter of the row.
    """

    kind: str
    name: str
    tokens: Count
    seconds: Metric
    speed_up: Metric
    interval: Interval | None
    of_oracle: Metric
    switches: Metric
    shares: tuple[Metric, ...]
    of_first: Against | None = None
    of_best: Against | None = None


@record_dataclass(frozen=True, slots=True, config=RECORD)
class PoolRow:
    """The texts of one domain, or of all, over one link.

    Attributes:
        name: the domain, or `mix`.
        prompts: number of prompts.
    """

    link: LinkRecord
    name: str
    prompts: Count
    cells: tuple[Cell, ...]

    def of(self, kind: str, name: str) -> Cell:
        """Return the cell of a column."""
        return next(cell for cell in self.of_kind(kind) if cell.name == name)

    def of_kind(self, kind: str) -> list[Cell]:
        """Return the cells of all columns of one kind."""
        return [cell for cell in self.cells if cell.kind == kind]


@record_dataclass(frozen=True, slots=True, config=RECORD)
class PoolReplayed:
    """All results of a pool.

    Attributes:
        window: name of the window policy.
        seeds: runs of each row.
        min_step_ms: the shortest step.
        costs: recorded costs of the machines.
        rows: rows, link by link.
    """

    command: str
    window: str
    seeds: Count
    min_step_ms: Metric
    drafters: tuple[str, ...]
    costs: Mapping[str, Any]
    rows: tuple[PoolRow, ...]

    @property
    def by_link(self) -> Mapping[LinkRecord, Sequence[PoolRow]]:
        """Rows of each link, in the order of the command."""
        return grouped(self.rows, lambda row: row.link)


class CellAccumulator:
    """Adds up the runs of one way of choosing among K drafters on the texts of one row."""

    def __init__(self, kind: str, name: str, drafters: int, prompts: Mapping[tuple[str, str], int]) -> None:
        """Begin a column; `prompts`: indices of the row's prompts."""
        self.kind = kind
        self.name = name
        self._prompts = prompts
        self._tokens = self._switches = 0
        self._best_s = 0.0
        self._seconds = np.zeros(len(prompts))
        self._chosen = np.zeros(drafters)  # tokens

    def add(self, texts: Sequence[PoolText], trajectories: Sequence[Trajectory], best: Sequence[Trajectory]) -> None:
        """Add one run; `best`: the oracle's trajectories of the same texts."""
        for text, trajectory, oracle in zip(texts, trajectories, best, strict=True):
            self._seconds[self._prompts[text.prompt]] += trajectory.seconds
            self._best_s += oracle.seconds
            self._tokens += len(trajectory.choices)
            self._switches += int(np.count_nonzero(np.diff(trajectory.choices)))
            self._chosen += np.bincount(trajectory.choices, minlength=len(self._chosen))

    @property
    def total_s(self) -> float:
        """Seconds of all texts."""
        return float(self._seconds.sum())

    def against(self, other: CellAccumulator, resampled: Bootstrap) -> Against:
        """Return the speed over that of another column."""
        ratios = resampled.sums(other._seconds) / resampled.sums(self._seconds)
        return Against(other.name, other.total_s / self.total_s, resampled.interval(ratios))

    def cell(self, cloud_s: np.ndarray, resampled: Bootstrap, alone: Sequence[CellAccumulator]) -> Cell:
        """Return the result, against seconds [prompts] of cloud streaming, and the drafters alone."""
        seconds = self.total_s
        return Cell(
            self.kind,
            self.name,
            tokens=self._tokens,
            seconds=seconds,
            speed_up=float(cloud_s.sum()) / seconds,
            interval=resampled.interval(resampled.sums(cloud_s) / resampled.sums(self._seconds)),
            of_oracle=self._best_s / seconds,
            switches=1e3 * self._switches / self._tokens,
            shares=tuple((self._chosen / self._tokens).tolist()),
            of_first=self.against(alone[0], resampled) if alone else None,
            of_best=self.against(min(alone, key=lambda one: one.total_s), resampled) if alone else None,
        )


@dataclass(frozen=True, slots=True)
class Pool:
    """Scope of a trial.

    Attributes:
        selectors: names of selectors.
        seeds: runs of each row; they differ in order, in texts where several were recorded, and in what selectors draw.
        only: names of the rows to play; empty: all.

    Raises:
        ConfigError: a domain has the name of another row, or there is no row of a name.
    """

    recording: Recording
    stages: Mapping[LinkRecord, Stage]
    selectors: Sequence[str]
    seeds: int = 20
    only: Sequence[str] = ()

    def __post_init__(self) -> None:
        known = row_names(self.recording.domains)
        for name in self.only:
            if name not in known:
                raise ConfigError(f"{name!r} is none of {', '.join(known)}", field="row")
        for domain in self.recording.domains:
            if domain == MIX:
                raise ConfigError(f"has a domain {domain!r}, which is the name of a row; rename it", field="traces")

    def __len__(self) -> int:
        """Return the number of runs."""
        return len(self.stages) * len(self._names) * self.seeds

    @property
    def _names(self) -> Sequence[str]:
        return [name for name in row_names(self.recording.domains) if not self.only or name in self.only]

    def rows(self, done: Callable[[], object]) -> Iterator[PoolRow]:
        """Yield rows link by link; `done` is called after each run."""
        variants = variants_of(self.recording.texts)
        for link, stage in self.stages.items():
            for name in self._names:
                runs = [run_texts(name, variants, seed) for seed in range(self.seeds)]
                yield self._row(link, stage, name, runs, done)

    def _columns(self) -> list[tuple[str, str]]:
        """Return kind and name of each column."""
        drafters = self.recording.traces if STATIC in self.selectors else ()
        selectors = [name for name in self.selectors if name != STATIC]
        return [*((DRAFTER, name) for name in drafters), *((SELECTOR, name) for name in selectors), (ORACLE, ORACLE)]

    def _row(
        self, link: LinkRecord, stage: Stage, name: str, runs: Sequence[Sequence[PoolText]], done: Callable[[], object]
    ) -> PoolRow:
        prompts = {prompt: index for index, prompt in enumerate(sorted(text.prompt for text in runs[0]))}
        columns = [CellAccumulator(*column, len(self.recording.traces), prompts) for column in self._columns()]
        cloud_s = np.zeros(len(prompts))
        for seed, texts in enumerate(runs):
            for text in texts:
                cloud_s[prompts[text.prompt]] += stage.cloud_s(text)
            best = stage.best(texts)
            for column in columns:
                found = best if column.kind == ORACLE else self._trajectories(stage, column, texts, seed)
                column.add(texts, found, best)
            done()
        alone = [column for column in columns if column.kind == DRAFTER]
        resampled = Bootstrap([domain for domain, _ in prompts], seed=0)
        return PoolRow(
            link,
            name,
            len(prompts),
            tuple(column.cell(cloud_s, resampled, alone) for column in columns),
        )

    def _trajectories(
        self, stage: Stage, column: CellAccumulator, texts: Sequence[PoolText], seed: int
    ) -> list[Trajectory]:
        drafters = list(self.recording.traces)
        if column.kind == DRAFTER:
            return stage.alone(texts, drafters.index(column.name))
        return stage.trajectories(texts, selector_named(column.name)(len(drafters), np.random.default_rng(seed)))
