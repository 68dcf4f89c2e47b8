"""Several drafters on the command line, and the memory that they take."""

from __future__ import annotations

import pytest

from outrider.deploy.cli import main, parse
from outrider.drafters import embedded_packages
from outrider.edge.edge_config import EdgeConfig


def test_one_drafter_alone_is_what_it_always_was():
    said = parse(["run", "hello"]).fields(EdgeConfig)
    assert said
    unsaid = EdgeConfig(verifier="127.0.0.1:1", model="m")
    assert said == {name: getattr(unsaid, name) for name in said}


def test_a_list_of_drafters_its_rule_and_its_memory_reach_the_edge():
    line = "edge --coordinator 127.0.0.1:1 --drafter general,ngram --selector hedge --drafter-memory 64"
    config = parse(line.split())(EdgeConfig)
    assert config.drafters == ("general", "ngram")
    assert (config.selector, config.drafter_memory_mb) == ("hedge", 64)


def test_an_option_that_cannot_be_meant_is_one_line_too(capfd):
    assert main(["generate", "--coordinator", "127.0.0.1:1", "--drafter", "general,,ngram", "hello"]) != 0
    said = capfd.readouterr().err
    assert "drafter: has an empty name between commas" in said
    assert len(said.splitlines()) == 1


def test_models_shows_the_memory_of_every_drafter(capfd):
    assert main(["models", "--memory"]) == 0
    lines = [line.split("│")[1:-1] for line in capfd.readouterr().out.splitlines() if "│" in line]
    rows = {cells[0].strip(): cells[1:] for cells in lines}
    taken = [float(rows[name][0]) for name in embedded_packages()]
    assert all(0 < megabytes < 500 for megabytes in taken)
    assert float(rows["all"][0]) == pytest.approx(sum(taken), abs=0.1 * len(taken))
    assert rows["general"][1].strip() == "0.8", "512 positions of 3 layers, 2 heads, 32 numbers, keys and values"
