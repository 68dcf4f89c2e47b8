"""Figures taken again: `python -m research tables`, which `make tables` runs.

Each command of `tables.toml` runs in a process of its own and leaves a record, with machine and revision, and a log.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TextIO

from outrider.bench.environment import machine
from outrider.deploy.arguments import Given
from outrider.proto.errors import ConfigError, did_you_mean
from research import page_tables
from research.page_tables import MISSING, Run, Table
from research.research_settings import TablesSettings

ROOT = Path(__file__).parents[1]
PROGRAMS = {"outrider": (sys.executable, "-m", "outrider.deploy"), "python": (sys.executable,)}
START_S = 180.0
LATE = 3.0  # times the declared minutes, and a start, are the limit of a command


def tables(given: Given) -> int:
    """Run `python -m research tables`; the status is 1 where a command failed."""
    options = given(TablesSettings)
    known, runs = page_tables.declared(ROOT)
    if options.write:
        return write(known)
    for name in options.names:
        if name not in runs:
            raise ConfigError(f"no command is declared as {name!r}{did_you_mean(name, runs)}", field="names")
    chosen = {name: run for name, run in runs.items() if name in options.names or not options.names}
    if options.small:
        options = replace(options, output=options.output / "small")  # a record of a small run makes no table
        chosen = {name: run for name, run in chosen.items() if run.small}
    minutes = sum(run.minutes[options.small] for run in chosen.values())
    print(f"{len(chosen)} commands, some {minutes:.0f} minutes on two cores; records and logs: {options.output}")
    taken, failed = set[str](), set[str]()
    for name, run in chosen.items():
        print(f"{name}, some {run.minutes[options.small]:g} min: ", end="", flush=True)
        began = time.monotonic()
        wrong = take(name, run, options)
        if not wrong:
            taken.add(name)
        elif not wrong.startswith("skipped"):
            failed.add(name)
        print(f"FAILED: {wrong}" if name in failed else wrong or f"took {(time.monotonic() - began) / 60:.1f}")
    print("\n".join([*report(known, taken, options), *(() if options.names else left(known))]))
    print(f"Failed: {', '.join(sorted(failed)) or 'none'}")
    return 1 if failed else 0


def take(name: str, run: Run, options: TablesSettings) -> str:
    """Take the record of a run; return what went wrong, from `skipped` on where something is not at hand."""
    for need, source in run.needs.items():
        if not (options.inputs / need).exists():
            return f"skipped: {options.inputs / need} is missing. {source}"
    record, work = options.output / f"{name}.json", options.output / name
    work.mkdir(parents=True, exist_ok=True)
    record.unlink(missing_ok=True)
    lines = run.small if options.small else run.full
    places = {"record": _place(record), "inputs": _place(options.inputs), "work": _place(work)}
    ends = time.monotonic() + LATE * 60 * run.minutes[options.small] + START_S
    log = options.output / f"{name}.log"
    with log.open("w", encoding="utf-8") as out:
        for line in lines:
            if wrong := _ran([word.format(**places) for word in shlex.split(line)], out, ends):
                return f"{wrong}: {line}"
    said = log.read_text(encoding="utf-8").splitlines()
    if not record.exists() and any("{record}" in line for line in lines):
        return [f"no record came of {name}", *said][-1]
    found = json.loads(record.read_text(encoding="utf-8")) if record.exists() else {"printed": said}
    if "environment" not in found:
        found = {"environment": machine() | {"command": "; ".join(lines)}} | found
        record.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    return ""


def _place(path: Path) -> Path:
    """Return the path as a command in the tree has it, so that records name no folder of a machine in vain."""
    path = path.absolute()
    return path.relative_to(ROOT) if path.is_relative_to(ROOT) else path


def _ran(words: list[str], out: TextIO, ends: float) -> str:
    command = [*PROGRAMS[words[0]], *words[1:]]
    process = subprocess.Popen(command, cwd=ROOT, stdout=out, stderr=subprocess.STDOUT, start_new_session=True)  # noqa: S603
    try:
        status = process.wait(max(0.0, ends - time.monotonic()))
    except subprocess.TimeoutExpired:
        return "it was not done in its time"
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # with all that it started
        process.wait()
    return f"status {status}" if status else ""


def report(known: Mapping[str, Table], taken: set[str], options: TablesSettings) -> Iterator[str]:
    """Yield what the records that were taken say of each table."""
    there = {found.name: found.rows[1:] for _, text in page_tables.pages(ROOT) for found in page_tables.tables_in(text)}
    kept, silent = page_tables.committed(ROOT), set(taken)
    if options.small:
        yield "Small runs compare ratios within one run, loosely: their texts are fewer and shorter than the page's."
    for name, table in known.items():
        if table.tag or table.by or not table.rows or not taken.issuperset(table.records):
            continue
        new = {record: page_tables.load(options.output / f"{record}.json") for record in table.records}
        noise = table.small if options.small else page_tables.noise_of(table, kept)
        try:
            rows = [*page_tables.rendered(table, new, whole=False)]
        except MISSING as error:
            yield f"{table.page}, {name}: its rows cannot be made of the new record ({error!r})"
            continue
        count, moved = page_tables.compared(table, there[name], rows, noise, small=options.small)
        if count:
            silent -= {*table.records}
            yield f"{table.page}, {name}: {len(moved)} of {count} figures moved by more than their noise of {noise:.0%}"
            yield from (f"  {figure}" for figure in moved)
    for name in sorted(silent):
        yield f"{name}: nothing is compared; its record is {options.output / name}.json"


def left(known: Mapping[str, Table]) -> Iterator[str]:
    """Yield what no command takes again."""
    for name, table in known.items():
        if table.tag or table.by:
            yield f"Not taken again: {table.page}, {name}: {table.by or f'of the tag {table.tag}'}"


def write(known: Mapping[str, Table]) -> int:
    """Make the tables of all pages from the records of docs/figures."""
    records = page_tables.committed(ROOT)
    for page, text in page_tables.pages(ROOT):
        if (made := page_tables.rewritten(text, known, records)) != text:
            (ROOT / page).write_text(made, encoding="utf-8")
            print(f"{page} is written")
    return 0
