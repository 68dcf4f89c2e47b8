"""Tables of README and docs: what `tables.toml` declares, their rows from a record, and how a new record compares."""

from __future__ import annotations

import json
import re
import statistics
import tomllib
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple

from research.probes.probe_costs import even

DECLARED = "research/tables.toml"
FIGURES = "docs/figures"
GENERATED = "docs/cli.md"
MEASURED = 1 / 7  # share of cells that begin with a figure from which on a table is one of figures
# A table under its mark, if any, or a fenced block.
BLOCK = re.compile(
    r"(?:^<!-- table: (\S+) -->\n)?(?:^```[^\n]*\n(.*?)^```$|((?:^\|[^\n]*(?:\n|\Z))+))", re.MULTILINE | re.DOTALL
)
BEGINS = re.compile(r"[*(~<>±+-]*\.?\d")
NUMBER = re.compile(r"(± ?)?([+-]?(?:\d+(?:,\d{3})*(?:\.\d+)?|\.\d+))")
MISSING = (AttributeError, LookupError, NameError, StopIteration, TypeError, statistics.StatisticsError)

Cells = Sequence[str]


@dataclass(frozen=True, slots=True)
class Table:
    """A declared table; `tables.toml` says what each field means."""

    page: str
    records: Sequence[str] = ()
    rows: str = ""
    columns: Sequence[Sequence[Any]] = ()
    noise: float | str = 0.1
    small: float = 0.25
    kept: str = ""
    tag: str = ""
    by: str = ""


@dataclass(frozen=True, slots=True)
class Run:
    """Commands that take a record again; `tables.toml` says what each field means."""

    full: Sequence[str]
    small: Sequence[str]
    minutes: Sequence[float]
    needs: Mapping[str, str] = field(default_factory=dict)


class Found(NamedTuple):
    """A table in a page, with the name that its mark gives, if any: rows [r][c], the headings first."""

    name: str
    rows: Sequence[Cells]


class Record(dict[str, Any]):
    """An object of JSON, with its keys as attributes."""

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(name) from None


def declared(root: Path) -> tuple[dict[str, Table], dict[str, Run]]:
    """Return tables and runs by name."""
    found = tomllib.loads((root / DECLARED).read_text(encoding="utf-8"))
    tables = {name: Table(**table) for name, table in found["tables"].items()}
    return tables, {name: Run(**run) for name, run in found["runs"].items()}


def committed(root: Path) -> dict[str, Any]:
    """Return the records of docs/figures by name."""
    return {path.stem: load(path) for path in sorted((root / FIGURES).glob("*.json"))}


def load(path: Path) -> Any:
    """Return a record."""
    return json.loads(path.read_text(encoding="utf-8"), object_hook=Record)


def pages(root: Path) -> Iterator[tuple[str, str]]:
    """Yield names and texts of README and of the pages of docs."""
    for path in (root / "README.md", *sorted((root / "docs").rglob("*.md"))):
        if (name := path.relative_to(root).as_posix()) != GENERATED:
            yield name, path.read_text(encoding="utf-8")


def tables_in(text: str) -> Iterator[Found]:
    """Yield the tables of a page, and the blocks of printed rows that have a mark."""
    for name, printed_rows, rows in BLOCK.findall(text):
        if rows:
            first, _, *others = map(cells_of, rows.splitlines())
            yield Found(name, [first, *others])
        elif name:
            yield Found(name, [line.split() for line in printed_rows.splitlines()])


def cells_of(line: str) -> Cells:
    """Return the cells of a row."""
    return [cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip()[1:-1])]


def has_figures(table: Found) -> bool:
    """Whether so many cells begin with a figure that the table needs a declaration."""
    cells = [cell for row in table.rows[1:] for cell in row]
    return sum(bool(BEGINS.match(cell)) for cell in cells) > MEASURED * len(cells)


def rendered(table: Table, records: Mapping[str, Any], *, whole: bool = True) -> Iterator[Cells]:
    """Yield the rows of a table; without `whole` a cell is empty where the record lacks what it needs."""
    names = {**HELPERS, **records}
    for row in eval(table.rows, names):  # noqa: S307 - the project's own file
        yield row if isinstance(row, list) else [_cell(column[1], names | row, whole) for column in table.columns]


def _cell(template: str, names: dict[str, Any], whole: bool) -> str:
    try:
        return str(eval(f"f'''{template}'''", names))  # noqa: S307
    except MISSING:
        if whole:
            raise
        return ""


def rewritten(text: str, tables: Mapping[str, Table], records: Mapping[str, Any]) -> str:
    """Return a page whose tables are made again, where docs/figures has all of their records."""

    def made(match: re.Match[str]) -> str:
        table = tables.get(match[1])
        if table is None or not match[3] or not table.rows or any(name not in records for name in table.records):
            return match[0]
        rows = [*rendered(table, records)]
        if table.kept:
            rows = _among([cells_of(line) for line in match[3].splitlines()[2:]], rows)
        lines = [_line([column[0] for column in table.columns]), "|" + "---|" * len(table.columns), *map(_line, rows)]
        return match[0].removesuffix(match[3]) + "\n".join(lines) + "\n"

    return BLOCK.sub(made, text)


def _among(kept: list[Cells], rows: Iterable[Cells]) -> list[Cells]:
    """Return the kept rows with each of `rows` in the place of the next one of its name."""
    place = 0
    for row in rows:
        place = next(i for i in range(place, len(kept)) if kept[i][0] == row[0])
        kept[place] = row
    return kept


def _line(cells: Cells) -> str:
    return f"| {' | '.join(cells)} |".replace("|  ", "| ")


def compared(
    table: Table, page: Sequence[Cells], new: Iterable[Cells], noise: float, *, small: bool
) -> tuple[int, list[str]]:
    """Return how many figures of new rows the page has, and which of them moved."""
    names = next((i for i, column in enumerate(table.columns) if column[2:]), 1)
    old = defaultdict[tuple[str, ...], list[Cells]](list)
    for row in page:
        old[tuple(row[:names])].append(row)
    count, moved = 0, list[str]()
    for row in new:
        there = old[tuple(row[:names])]
        for column, before, after in zip(table.columns, there.pop(0) if there else (), row, strict=False):
            if column[2:] and after and (column[2] == "ratio" or not small):
                count += 1
                if differ(before, after, noise if small else [noise, *column[3:]][-1]):
                    moved.append(f"{' '.join(row[:names])}, {column[0]}: {before} is now {after}")
    return count, moved


def differ(old: str, new: str, noise: float) -> bool:
    """Whether words of a cell differ, or numbers by more than a share (0: at all) or what ± says, and a last digit."""
    before, after = numbers(old), numbers(new)
    if not before or len(before) != len(after):
        return old != new
    return any(
        abs(a - b) > max(noise * max(abs(a), abs(b)), a_error + b_error) + 1.001 * max(a_unit, b_unit) * bool(noise)
        for (a, a_unit, a_error), (b, b_unit, b_error) in zip(before, after, strict=True)
    )


def numbers(cell: str) -> list[tuple[float, float, float]]:
    """Return value, unit of the last digit, and what stands after ±, of each number in a cell."""
    found = list[tuple[float, float, float]]()
    for plus_minus, digits in NUMBER.findall(cell):
        value, unit = float(digits.replace(",", "")), 10.0 ** -len(digits.partition(".")[2])
        found = [*found[:-1], (*found[-1][:2], value)] if plus_minus and found else [*found, (value, unit, 0.0)]
    return found


def noise_of(table: Table, records: Mapping[str, Any]) -> float:
    """Return the share by which figures of a table may differ between runs."""
    return float(eval(table.noise, {**HELPERS, **records}) if isinstance(table.noise, str) else table.noise)  # noqa: S307


# --- names for the expressions of tables.toml ---


def by(runs: Iterable[Any], *paths: str) -> list[dict[str, Any]]:
    """Group the runs of a benchmark by the values at `paths`, in order.

    A group has `key`, and its quickest run of each mode by the mode's name: `outrider_efficiency` under that goal.
    """
    groups: dict[tuple[Any, ...], dict[str, Any]] = {}
    for run in runs:
        key = tuple(attrgetter(path)(run) for path in paths)
        group = groups.setdefault(key, {"key": key})
        name = run.mode.replace("-", "_") + ("_efficiency" if run.get("goal") == "efficiency" else "")
        if name not in group or group[name].tokens_per_second < run.tokens_per_second:
            group[name] = run
    return [groups[key] for key in sorted(groups)]


def pick(found: Iterable[Any], /, **values: Any) -> Any:
    """Return the first that has these values; `a__b` is b of a."""
    return next(row for row in found if all(attrgetter(k.replace("__", "."))(row) == v for k, v in values.items()))


def spread(runs: Iterable[Any]) -> float:
    """Return the range of cloud streaming over the links of a run, to which they hardly matter, over its mean."""
    rates = [run.tokens_per_second for run in runs if run.mode == "cloud"]
    return float((max(rates) - min(rates)) / statistics.mean(rates))


def bold(text: str, when: object) -> str:
    """Return the text, in bold type where `when` holds."""
    return f"**{text}**" if when else text


def printed(record: Any) -> list[Cells]:
    """Return the rows that a command printed: those of a table with bars, or else words."""
    return [cells_of(line) if line.startswith("|") else line.split() for line in record.printed if line.strip()]


def learned(record: Any, loss: str) -> Cells:
    """Return seeds, hits, gains, exponent and tokens of half the gain, means of the seeds of a loss."""
    runs = [run for run in record.runs if (run.arm, run.start) == (loss, "warm")]
    hits = list[str]()
    for sampling in ("greedy", "sampled"):
        gains = [run.after[sampling] - run.before[sampling] for run in runs]
        hits += [f"{statistics.mean(run.after[sampling] for run in runs):.3f}"]
        hits += [f"{statistics.mean(gains):+z.3f} ± {statistics.stdev(gains):.3f}"]
    half = statistics.mean(run.half_gain_tokens for run in runs)
    return [f"{len(runs)}", *hits, f"{statistics.mean(run.exponent for run in runs):.2f}", f"{half:,.0f}"]


HELPERS: dict[str, Any] = {helper.__name__: helper for helper in (by, pick, spread, bold, printed, learned, even)}
HELPERS["mean"] = statistics.mean
