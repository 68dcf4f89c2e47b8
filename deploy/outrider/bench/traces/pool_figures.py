"""What selectors of a pool of drafters came to, as frozen dataclasses and as JSON."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from outrider.bench.benchmark.record import LinkRecord
from outrider.bench.comparison.record import Interval

DRAFTER, SELECTOR, ORACLE = "drafter", "selector", "oracle"


@dataclass(frozen=True, slots=True)
class Cell:
    """One way of choosing on the texts of one row.

    Attributes:
        kind: of the column: one `drafter` alone, a `selector`, or the `oracle` in hindsight.
        name: of the drafter or the selector.
        tokens: of the texts, all seeds together.
        seconds: that they took.
        speed_up: seconds of cloud streaming over these.
        interval: of the speed-up, over the prompts; None: a domain has but one.
        of_oracle: seconds of the oracle over these.
        settled: the same from `SETTLED_TOKENS` tokens after a change of domain on; None: there is no such token.
        switches: tokens whose drafter was not the one of the token before, a thousand tokens.
        shares: [K] of the tokens, by drafter.
        regret_s: seconds behind the oracle at each of the row's `positions`, averaged over seeds.
    """

    kind: str
    name: str
    tokens: int
    seconds: float
    speed_up: float
    interval: Interval | None
    of_oracle: float
    settled: float | None
    switches: float
    shares: tuple[float, ...]
    regret_s: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Change:
    """Who drafts around changes to one domain.

    Attributes:
        kind: as of a cell.
        name: as of a cell.
        domain: that begins.
        shares: [positions][K] of the texts, from `BEFORE` tokens before the change on, by drafter.
    """

    kind: str
    name: str
    domain: str
    shares: tuple[tuple[float, ...], ...]


@dataclass(frozen=True, slots=True)
class Row:
    """The texts of one domain, of all, or such whose domain changes midway, over one link.

    Attributes:
        link: that lay between.
        name: of the domain, `mix` or `midway`.
        prompts: how many.
        positions: tokens since the beginning of a run, at which regret is noted.
        cells: the drafters, the selectors, the oracle.
        changes: of all but the drafters, where domains change.
    """

    link: LinkRecord
    name: str
    prompts: int
    positions: tuple[int, ...]
    cells: tuple[Cell, ...]
    changes: tuple[Change, ...]

    def of(self, kind: str, name: str) -> Cell:
        """The cell of a column."""
        return next(cell for cell in self.cells if (cell.kind, cell.name) == (kind, name))

    @property
    def columns(self) -> tuple[tuple[str, str], ...]:
        """Kind and name of each."""
        return tuple((cell.kind, cell.name) for cell in self.cells)


@dataclass(frozen=True, slots=True)
class PoolReplayed:
    """Everything.

    Attributes:
        command: that replayed.
        play: how: synchronous rounds, or the session's streams.
        drafts: of a round.
        seeds: runs of each row.
        pace_ms: a step took at least so long.
        drafters: of the pool, in order.
        costs: of the machines, as they were recorded.
        rows: link by link.
    """

    command: str
    play: str
    drafts: int
    seeds: int
    pace_ms: float
    drafters: tuple[str, ...]
    costs: Mapping[str, Any]
    rows: tuple[Row, ...]

    @property
    def links(self) -> tuple[LinkRecord, ...]:
        """In the order of the command."""
        return tuple(dict.fromkeys(row.link for row in self.rows))

    def over(self, link: LinkRecord) -> tuple[Row, ...]:
        """The rows of one link."""
        return tuple(row for row in self.rows if row.link == link)
