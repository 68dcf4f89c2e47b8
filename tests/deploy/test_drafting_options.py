"""Several drafters on the command line, and the memory that they take."""

from __future__ import annotations

from outrider.deploy.cli import main, parse
from outrider.edge.edge_config import DRAFTING, EdgeConfig


def test_one_drafter_alone_is_what_it_always_was():
    given = parse(["run", "hello"])
    names = [a.field.name for a in given.arguments if a.kind is EdgeConfig and a.field.option.group == DRAFTING]
    assert names
    said, unsaid = given.fields(EdgeConfig), EdgeConfig(verifier="127.0.0.1:1", model="m")
    assert [said[name] for name in names] == [getattr(unsaid, name) for name in names]


def test_a_list_of_drafters_and_its_memory_reach_the_edge():
    line = "edge --coordinator 127.0.0.1:1 --drafter general,ngram --drafter-memory 64"
    config = parse(line.split())(EdgeConfig)
    assert config.drafters == ("general", "ngram")
    assert config.drafter_memory_mb == 64


def test_an_option_that_cannot_be_meant_is_one_line_too(capfd):
    assert main(["run", "--coordinator", "127.0.0.1:1", "--drafter", "general,,ngram", "hello"]) != 0
    said = capfd.readouterr().err
    assert "drafter: has an empty name between commas" in said
    assert len(said.splitlines()) == 1
