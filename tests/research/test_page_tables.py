"""Tables of README and docs: each with figures is declared, those with a record are made from it, and commands run."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
from dataclasses import replace

import pytest

from outrider.deploy.cli import OUTRIDER
from outrider.deploy.cli import parse as parse_line
from research import commands, page_tables, tables_command
from research.page_tables import Run, Table

TYPED = "| a | b |\n|---|---|\n| x | 1.5 |\n"


@pytest.fixture(scope="module")
def declared(root):
    return page_tables.declared(root)


@pytest.fixture(scope="module")
def records(root):
    return page_tables.committed(root)


def undeclared(pages, tables) -> list[str]:
    """Tables with figures and no mark, and marks and declarations that do not belong together one to one."""
    found = [(page, table) for page, text in pages for table in page_tables.tables_in(text)]
    wrong = [f"{page}: {table.rows[0]}" for page, table in found if page_tables.has_figures(table) and not table.name]
    marked = sorted((table.name, page) for page, table in found if table.name)
    expected = sorted((name, table.page) for name, table in tables.items())
    return wrong + [str(name) for name in {*marked} ^ {*expected}] + ["twice"] * (len({*marked}) < len(marked))


def test_every_table_with_figures_has_a_mark_and_is_declared(root, declared) -> None:
    assert len(declared[0]) > 70
    assert undeclared(page_tables.pages(root), declared[0]) == []


@pytest.mark.parametrize("planted", [TYPED, f"<!-- table: new -->\n{TYPED}", f"<!-- table: pair -->\n{TYPED}"])
def test_a_table_that_nobody_declared_is_noticed(root, declared, planted) -> None:
    pages = [(page, text + f"\n{planted}" * (page == "docs/load.md")) for page, text in page_tables.pages(root)]
    assert undeclared(pages, declared[0]) != []


def test_a_table_in_a_block_of_code_and_one_of_words_need_no_mark() -> None:
    words = "| a | b |\n|---|---|\n| x | by 2 |\n"
    assert undeclared([("README.md", f"```\n{TYPED}```\n\n{words}")], {}) == []


def test_scripts_of_commands_start_from_any_folder(root, declared, tmp_path) -> None:
    """Nothing but the checkout's own environment helps them to find its modules."""
    commands = [line for run in declared[1].values() for line in (*run.full, *run.small)]
    scripts = {shlex.split(line)[1] for line in commands if line.startswith("python ") and "--output" in line} - {"-m"}
    assert len(scripts) > 3
    for script in scripts:
        bare = {name: os.environ[name] for name in ("PATH", "HOME") if name in os.environ}
        started = subprocess.run(
            (sys.executable, root / script, "--help"),
            cwd=tmp_path,
            env=bare,
            capture_output=True,
            text=True,
            timeout=60,
        )
        assert started.returncode == 0, started.stderr


def test_a_table_is_taken_again_or_says_why_not(declared) -> None:
    tables, runs = declared
    for name, table in tables.items():
        is_taken = bool(table.records) and runs.keys() >= {*table.records}
        assert bool(table.tag) + bool(table.by) == 1 or (is_taken and not table.tag + table.by), name


def test_tables_on_the_pages_are_those_of_their_records(root, declared, records) -> None:
    made = {name for name, table in declared[0].items() if table.rows and records.keys() >= {*table.records}}
    assert len(made) > 35
    for page, text in page_tables.pages(root):
        assert page_tables.rewritten(text, declared[0], records) == text, f"{page}: python -m research tables --write"


def test_a_wrong_figure_in_a_record_or_on_a_page_shows(root, declared, records) -> None:
    text = (root / "README.md").read_text(encoding="utf-8")
    assert page_tables.rewritten(text.replace("| 1.73 |", "| 1.74 |"), declared[0], records) == text
    other = json.loads(json.dumps(records["pair"]), object_hook=page_tables.Record)
    other.runs[0]["tokens_per_second"] *= 1.1
    assert page_tables.rewritten(text, declared[0], records | {"pair": other}) != text


def test_rows_that_are_of_no_record_stay() -> None:
    table = Table("p", ("r",), "[['b', str(r.x)]]", (["head"], ["y"]), kept="others")
    text = "<!-- table: t -->\n| head | y |\n|---|---|\n| a | 1 |\n| b | 2 |\n\nMore.\n"
    assert page_tables.rewritten(text, {"t": table}, {"r": page_tables.Record(x=3)}) == text.replace("b | 2", "b | 3")


def test_commands_of_the_runs_parse(root, declared, capsys) -> None:
    for run in declared[1].values():
        assert run.full
        for line in (*run.full, *run.small):
            program, *words = shlex.split(line.format(record="r.json", inputs="dist", work="dist"))
            if program == "outrider" or words[:2] == ["-m", "research"]:
                parsed = (words, OUTRIDER) if program == "outrider" else (words[2:], commands.RESEARCH)
                assert parse_line(*parsed), capsys.readouterr().err
            elif words[0] != "-m":
                assert (root / words[0]).is_file()


@pytest.mark.parametrize(
    ("old", "new", "noise", "moved"),
    [
        ("**54.3**", "**50.0**", 0.1, False),
        ("**54.3**", "**48.0**", 0.1, True),
        ("0.44", "0.45", 0.01, False),
        ("1,540", "1,600", 0.01, True),
        ("24.4, 34.0", "24.4, 44.0", 0.1, True),
        ("1.024 ±.026", "0.990 ±.010", 0.01, False),
        ("1.024 ±.026", "0.970 ±.010", 0.01, True),
        ("chains", "branches", 1, True),
        ("24/24", "23/24", 0, True),
        ("-0.134 / -0.076", "0.134 / -0.076", 0.1, True),
    ],
)
def test_a_figure_moves_where_it_differs_by_more_than_its_noise(old, new, noise, moved) -> None:
    assert page_tables.differ(old, new, noise) is moved


def test_small_runs_compare_ratios_alone() -> None:
    table = Table("p", columns=(["link"], ["rate", "", "rate", 0.5], ["ratio", "", "ratio"], ["words"]))
    page = [["2", "10", "2.0", "a"], ["10", "10", "2.0", "a"]]
    new = [["10", "19", "3.0", "b"], ["60", "1", "1", "b"]]
    assert page_tables.compared(table, page, new, 0.25, small=True) == (1, ["10, ratio: 2.0 is now 3.0"])
    assert page_tables.compared(replace(table, small=0.5), page, new, 0.4, small=False)[0] == 2


def test_the_noise_of_a_table_may_come_from_its_record(declared, records) -> None:
    assert 0.03 < page_tables.noise_of(declared[0]["pair"], records) < 0.1


def test_a_command_that_fails_or_hangs_is_named_and_the_rest_goes_on(tmp_path, monkeypatch, capsys) -> None:
    def run(*lines: str, **more) -> Run:
        return Run(lines, lines, (0, 0), **more)

    runs = {
        "broken": run("python -c 1/0"),
        "stuck": run("python -c 'import time; time.sleep(60)'"),
        "silent": run("python -c 'import sys' {record}"),
        "poor": run("python -c 1", needs={"no-such-file": "It is made by hand."}),
        "shown": run("python -c 'print(1, 2.5)'"),
    }
    tables = {
        "shown": Table(
            "README.md", ("shown",), "[['2', '1', *row] for row in printed(shown)]", (["k"], ["v", "", "ratio"])
        ),
        "old": Table("docs/x.md", tag="v0"),
    }
    monkeypatch.setattr(page_tables, "declared", lambda _: (tables, runs))
    monkeypatch.setattr(page_tables, "pages", lambda _: [("README.md", f"<!-- table: shown -->\n{TYPED}| 2 | 3 |\n")])
    monkeypatch.setattr(tables_command, "START_S", 3.0)
    given = commands.parse(["tables", "--output", str(tmp_path), "--inputs", str(tmp_path)])
    assert tables_command.tables(given) == 1
    said = capsys.readouterr().out
    assert "Failed: broken, silent, stuck" in said
    assert "no-such-file is missing. It is made by hand." in said
    assert "README.md, shown: 1 of 1 figures moved" in said
    assert "2, v: 3 is now 1" in said
    assert "docs/x.md, old: of the tag v0" in said
    record = json.loads((tmp_path / "shown.json").read_text())
    assert record["printed"] == ["1 2.5"]
    assert record["environment"]["revision"]
    assert record["environment"]["cores"]
