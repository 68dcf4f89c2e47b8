"""Selectors of a pool of drafters on every row of texts and every link, against single drafters and the oracle."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from operator import attrgetter
from typing import Any, cast

import numpy as np
from pydantic.dataclasses import dataclass as record_dataclass
from rich.console import Group

from outrider.bench.bench_metrics import grouped
from outrider.bench.bench_settings import WARM_UP_TOKENS
from outrider.bench.links import LinkRecord, link_name
from outrider.bench.record import RECORD, Count, Metric
from outrider.bench.table import UNKNOWN, Block, Grid, draw
from outrider.edge.selectors import selector_named
from outrider.proto.errors import ConfigError
from outrider.proto.policy.selector import RoundOutcome, Selector
from research.simulator.clock import Costs
from research.simulator.wire import ShapeAt
from research.traces.recordings import PoolText, Recording
from research.traces.sweep import BEST, paced
from research.traces.traced import DrafterArm, Policy, ReplayOutcome, replay

DRAFTER, SELECTOR, ORACLE = "drafter", "selector", "oracle"
MIX = "mix"
STATIC = "static"  # stands for every drafter alone
RESAMPLES = 2000
POOL_LEGEND = (
    "speed-up over cloud streaming ± half of its 95 % confidence interval over the prompts; * the most, but for the "
    "oracle, which knows in hindsight the best drafter of every text; of {last} alone: oracle: share of its speed; "
    "switches: changes of drafter a thousand tokens"
)
Variants = Mapping[tuple[str, str], Sequence[PoolText]]  # the texts of each prompt by seed; by domain and id


@dataclass(frozen=True, slots=True)
class Stage:
    """A link with machines at both ends, in the simulator.

    Another drafter becomes the active one where a chain of drafts begins; idle drafters catch up while that one waits.
    With a policy of synchronous rounds this is MetaSD's own setting (arXiv 2604.05417).

    Attributes:
        costs: [K] costs of the verifier and the events, with each drafter's own.
        seed: seed of the jitter.
    """

    costs: Sequence[Costs]
    shape_at: ShapeAt
    policy: Policy
    seed: int = 0
    _alone: dict[tuple[object, ...], list[ReplayOutcome]] = field(init=False, default_factory=dict)
    _cloud_s: dict[tuple[int, ...], float] = field(init=False, default_factory=dict)  # by a text's tokens

    def cloud_s(self, text: PoolText) -> float:
        """Return the seconds of cloud streaming, from the request to the last token."""
        tokens = text.traces[0].tokens
        if tokens not in self._cloud_s:
            [outcome] = self._replayed([text], 0, replace(self.policy, drafting=False))
            self._cloud_s[tokens] = outcome.seconds
        return self._cloud_s[tokens]

    def alone(self, texts: Sequence[PoolText], arm: int) -> list[ReplayOutcome]:
        """Play the texts with one drafter; edge and verifier keep their measurements."""
        key = (arm, *(text.traces[arm].tokens for text in texts))
        if key not in self._alone:
            outcomes = self._replayed(texts, arm, self.policy)
            self._alone[key] = [replace(outcome, active=(arm,) * len(outcome.arrivals)) for outcome in outcomes]
        return self._alone[key]

    def chosen(self, texts: Sequence[PoolText], selector: Selector) -> list[ReplayOutcome]:
        """Play the texts one after the other; edge and verifier keep their measurements."""
        if len(self.costs) == 1:
            return self.alone(texts, 0)
        others = [list(map(DrafterArm, text.traces[1:], self.costs[1:])) for text in texts]
        return self._replayed(
            texts, 0, self.policy, others=others, selector=Aligned(selector, len(self.costs)).begin_text
        )

    def best(self, texts: Sequence[PoolText]) -> list[ReplayOutcome]:
        """Play in hindsight, each text with its fastest drafter.

        An oracle that knew every single bit and took another drafter each round would be out of reach.
        """
        self._alone.clear()  # a new run begins
        alone = zip(*(self.alone(texts, arm) for arm in range(len(self.costs))), strict=True)
        return [min(runs, key=lambda run: run.seconds) for runs in alone]

    def _replayed(
        self,
        texts: Sequence[PoolText],
        arm: int,
        policy: Policy,
        others: Sequence[Sequence[DrafterArm]] = (),
        selector: Callable[[], Selector] | None = None,
    ) -> list[ReplayOutcome]:
        return replay(
            [text.traces[arm] for text in texts],
            self.shape_at,
            self.costs[arm],
            policy,
            warm_up_tokens=WARM_UP_TOKENS,
            seed=self.seed,
            others=others,
            selector=selector,
        )


class Aligned:
    """One selector for many sessions: at a text's end it has heard of as many tokens of every drafter.

    Otherwise it would wait for those that idle drafters have not read, and take the next text's for them.
    """

    def __init__(self, inner: Selector, arms: int) -> None:
        self._inner = inner
        self._heard = [0] * arms  # tokens of this text
        self._last: RoundOutcome | None = None

    def __getattr__(self, name: str) -> Any:
        """Return what the selector itself has: but for what it learns, nothing changes."""
        return getattr(self._inner, name)

    def begin_text(self) -> Selector:
        """End the text before, and begin the next."""
        if self._last is not None and self._inner.catches_up:
            unread = [max(self._heard) - heard for heard in self._heard]
            nothing = self._last._replace(committed=0, verified=0, accepted=0, agreement=math.nan, seconds=0.0)
            hits = tuple((None,) * tokens for tokens in unread)
            self._inner.learn(nothing._replace(hits=hits))
        self._heard = [0] * len(self._heard)
        return cast("Selector", self)

    def learn(self, outcome: RoundOutcome) -> None:
        self._last = outcome
        self._heard = [heard + len(hits) for heard, hits in zip(self._heard, outcome.hits, strict=True)]
        self._inner.learn(outcome)


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
    """Speed over that of one drafter alone, on the same texts; no interval where a domain has but one prompt."""

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
        interval: interval of the speed-up, over the prompts.
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
    """The texts of one domain, or of all (`mix`), over one link."""

    link: LinkRecord
    name: str
    prompts: Count
    cells: tuple[Cell, ...]

    def of(self, kind: str, name: str) -> Cell:
        return next(cell for cell in self.of_kind(kind) if cell.name == name)

    def of_kind(self, kind: str) -> list[Cell]:
        return [cell for cell in self.cells if cell.kind == kind]


@record_dataclass(frozen=True, slots=True, config=RECORD)
class PoolReplayed:
    """All results of a pool, link by link; each row was played `seeds` times."""

    command: str
    window: str
    seeds: Count
    min_step_ms: Metric
    drafters: tuple[str, ...]
    costs: Mapping[str, Any]
    rows: tuple[PoolRow, ...]


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

    def add(self, texts: Sequence[PoolText], run: Sequence[ReplayOutcome], best: Sequence[ReplayOutcome]) -> None:
        """Add one run; `best`: the oracle's of the same texts."""
        for text, outcome, oracle in zip(texts, run, best, strict=True):
            self._seconds[self._prompts[text.prompt]] += outcome.seconds
            self._best_s += oracle.seconds
            self._tokens += len(outcome.active)
            self._switches += int(np.count_nonzero(np.diff(outcome.active)))
            self._chosen += np.bincount(outcome.active, minlength=len(self._chosen))

    @property
    def total_s(self) -> float:
        return float(self._seconds.sum())

    def against(self, other: CellAccumulator, resampled: Bootstrap) -> Against:
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

    @property
    def _names(self) -> Sequence[str]:
        return [name for name in row_names(self.recording.domains) if not self.only or name in self.only]

    def rows(self) -> Iterator[PoolRow]:
        variants = variants_of(self.recording.texts)
        for link, stage in self.stages.items():
            for name in self._names:
                runs = [run_texts(name, variants, seed) for seed in range(self.seeds)]
                yield self._row(link, stage, name, runs)

    def _columns(self) -> list[tuple[str, str]]:
        """Return kind and name of each column."""
        drafters = self.recording.traces if STATIC in self.selectors else ()
        selectors = [name for name in self.selectors if name != STATIC]
        return [*((DRAFTER, name) for name in drafters), *((SELECTOR, name) for name in selectors), (ORACLE, ORACLE)]

    def _row(self, link: LinkRecord, stage: Stage, name: str, runs: Sequence[Sequence[PoolText]]) -> PoolRow:
        prompts = {prompt: index for index, prompt in enumerate(sorted(text.prompt for text in runs[0]))}
        columns = [CellAccumulator(*column, len(self.recording.traces), prompts) for column in self._columns()]
        cloud_s = np.zeros(len(prompts))
        for seed, texts in enumerate(runs):
            for text in texts:
                cloud_s[prompts[text.prompt]] += stage.cloud_s(text)
            best = stage.best(texts)
            for column in columns:
                run = best if column.kind == ORACLE else self._run(stage, column, texts, seed)
                column.add(texts, run, best)
        alone = [column for column in columns if column.kind == DRAFTER]
        resampled = Bootstrap([domain for domain, _ in prompts], seed=0)
        return PoolRow(link, name, len(prompts), tuple(column.cell(cloud_s, resampled, alone) for column in columns))

    def _run(
        self, stage: Stage, column: CellAccumulator, texts: Sequence[PoolText], seed: int
    ) -> Sequence[ReplayOutcome]:
        drafters = list(self.recording.traces)
        if column.kind == DRAFTER:
            return stage.alone(texts, drafters.index(column.name))
        return stage.chosen(texts, selector_named(column.name)(len(drafters), np.random.default_rng(seed)))


def pool_tables(replayed: PoolReplayed) -> Group:
    """Return a table a link: a line for each drafter, selector and the oracle, a column for each row of texts."""
    grids = []
    for link, rows in grouped(replayed.rows, lambda row: row.link).items():
        headings = ("", *(row.name or UNKNOWN for row in rows), "oracle", "switches")
        blocks = [block for kind in (DRAFTER, SELECTOR, ORACLE) if (block := _columns(rows, kind))]
        title = f"{link_name(link)}{paced(replayed.min_step_ms)}: {replayed.seeds} runs, window {replayed.window}"
        grids.append(Grid(title, headings, 1, blocks))
        if rows[0].of_kind(DRAFTER):
            grids += _against(rows)
    last = replayed.rows[-1].name or "all"
    return draw(grids, POOL_LEGEND.format(last=last))


def _columns(rows: Sequence[PoolRow], kind: str) -> Block:
    chosen = [[cell for cell in row.cells if cell.kind != ORACLE] for row in rows]
    best = [max(cells, key=attrgetter("speed_up"), default=None) for cells in chosen]
    lines = []
    for cells in zip(*(row.of_kind(kind) for row in rows), strict=True):
        last = cells[-1]
        shown = [_cell(cell, cell is most) for cell, most in zip(cells, best, strict=True)]
        lines.append((last.name, *shown, f"{last.of_oracle:.3f}", f"{last.switches:.0f}"))
    return lines


def _against(rows: Sequence[PoolRow]) -> list[Grid]:
    """Return the speeds over those of the row's best drafter alone, and over those of the first drafter alone."""
    others = [cells for cells in zip(*(row.cells for row in rows), strict=True) if cells[0].kind != DRAFTER]
    headings = ("", *(row.name or UNKNOWN for row in rows))
    best = [(cells[0].name, *(_ratio(cell.of_best) for cell in cells)) for cells in others]
    first = [(cells[0].name, *(_ratio(cell.of_first) for cell in cells)) for cells in others]
    name = rows[0].of_kind(DRAFTER)[0].name
    return [
        Grid("Speed over that of the row's best drafter alone", headings, 1, [best]),
        Grid(f"Speed over that of {name} alone", headings, 1, [first]),
    ]


def _ratio(against: Against | None) -> str:
    return UNKNOWN if against is None else f"{against.ratio:.3f}{_spread(against.interval, 3)}"


def _cell(cell: Cell, is_best: bool) -> str:
    return f"{BEST if is_best else ''}{cell.speed_up:.2f}{_spread(cell.interval, 2)}"


def _spread(interval: Interval | None, digits: int) -> str:
    return f"±{(interval.high - interval.low) / 2:.{digits}f}".replace("0.", ".") if interval else ""
