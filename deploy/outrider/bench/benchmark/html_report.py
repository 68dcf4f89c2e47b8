"""A report folder of a benchmark: an HTML page, its plots, and the record as JSON."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path
from string import Template

from outrider.bench.benchmark.bench_record import Benchmark
from outrider.bench.benchmark.bench_table import LEGEND, RATIO_LEGEND, by_condition, grids
from outrider.bench.benchmark.plots import Picture, draw
from outrider.bench.environment import Environment
from outrider.bench.plot import check_drawing
from outrider.bench.record import save
from outrider.bench.table import Grid
from outrider.proto.errors import ConfigError

PAGE = "index.html"
RECORD = "benchmark.json"
UNKNOWN = "unknown"
_TEMPLATE = Path(__file__).parent / "page.html"


def write_report(benchmark: Benchmark, folder: Path) -> Path:
    """Write `index.html`, its PNG files and `benchmark.json` into `folder`, and return the page's path.

    Raises:
        ConfigError: there is nothing to report, the folder cannot be written, or matplotlib is not installed.
    """
    if not benchmark.runs:
        raise ConfigError("holds no run; there is nothing to report", field="runs")
    check_drawing("report")
    sections = []
    try:
        folder.mkdir(parents=True, exist_ok=True)
        for number, (condition, runs) in enumerate(by_condition(benchmark).items(), 1):
            pictures = draw(condition, runs, folder, f"condition-{number}")
            sections.append(_section(str(condition), grids(condition, runs), pictures))
        save(benchmark, folder / RECORD, "report")
        (folder / PAGE).write_text(_page(benchmark.environment, sections), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {folder}: {error}", field="report") from error
    return folder / PAGE


def _page(environment: Environment, sections: list[str]) -> str:
    e = environment
    drafter = f"{e.drafter} {e.drafter_version}" if e.drafter_version else e.drafter
    summary = (
        f"Target {e.target} ({e.dtype}), drafter {drafter}: the same {e.prompts} prompts, {e.max_tokens} tokens each "
        "at most, decoded in every way and over every link below."
    )
    return Template(_TEMPLATE.read_text(encoding="utf-8")).substitute(
        title=f"Outrider benchmark, {escape(e.date[:10])}",
        summary=escape(summary),
        legend=escape(f"{LEGEND}. {RATIO_LEGEND}."),
        sections="\n".join(sections),
        environment="\n".join(f"<dt>{escape(name)}</dt><dd>{escape(value)}</dd>" for name, value in _facts(e)),
        command=escape(e.command),
        record=RECORD,
    )


def _facts(e: Environment) -> Iterator[tuple[str, str]]:
    versions = ", ".join(f"{name} {version or UNKNOWN}" for name, version in e.packages.items())
    cores = UNKNOWN if e.cores is None else str(e.cores)
    yield "date", e.date
    yield "revision", e.revision or UNKNOWN
    yield "machine", f"{e.cpu or UNKNOWN}, {cores} cores, {e.platform}"
    yield "packages", f"python {e.python}, {versions}"
    yield "target", f"{e.target}, {e.dtype}, {_threads(e.target_threads)}"
    yield "drafter", f"{e.drafter} {e.drafter_version or ''}".strip() + f", {_threads(e.drafter_threads)}"
    yield "prompts", f"{e.prompts}, at most {e.max_tokens} tokens each, seed {e.seed}"


def _threads(count: int | None) -> str:
    if count is None:
        return "threads unknown"
    return "1 thread" if count == 1 else f"{count or 'all'} threads"


def _section(title: str, grids: list[Grid], pictures: list[Picture]) -> str:
    heading = f"<h2>{escape(title)}</h2>"
    return "\n".join((heading, *(_table(grid) for grid in grids), *(_figure(picture) for picture in pictures)))


def _table(grid: Grid) -> str:
    headings = "".join(f'<th scope="col">{escape(heading)}</th>' for heading in grid.headings)
    rows = "\n".join(_row(cells, starts=index == 0) for block in grid.blocks for index, cells in enumerate(block))
    note = f'<p class="note">{escape(grid.caption)}.</p>' if grid.caption else ""
    return (
        f'<h3>{escape(grid.title)}</h3>\n<div class="wide"><table>\n<thead><tr>{headings}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table></div>\n{note}"
    )


def _row(cells: Sequence[str], *, starts: bool) -> str:
    """Return a row in HTML; `starts`: it is the first of its block."""
    kind = " ".join(filter(None, ("start" if starts else "", "ours" if cells[1].startswith("outrider") else "")))
    return f'<tr class="{kind}">' + "".join(f"<td>{escape(cell)}</td>" for cell in cells) + "</tr>"


def _figure(picture: Picture) -> str:
    return (
        f'<figure><img src="{escape(picture.path.name)}" alt="{escape(picture.title)}" loading="lazy">'
        f"<figcaption>{escape(picture.title)}. {escape(picture.caption)}</figcaption></figure>"
    )
