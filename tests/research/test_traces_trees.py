"""`python -m research traces trees`: steps of chains, trees and merged trees on recordings whose hits are known."""

from __future__ import annotations

import json

import pytest
from test_traces_command import SHEET, run_command, written

from research.recording import Recording
from research.replay.hit_traces import HitTrace
from research.traces.tree_counts import ALL, other_results, shape_results

TOKENS = 240


def trace_of(drafter: str, ranks: str, domain: str = "code") -> HitTrace:
    """A trace whose drafter has each token as its choice of this rank, 0 to 2; 9: it has not, -: it is silent."""
    tokens = tuple(range(1000, 1000 + TOKENS))
    pattern = (ranks * TOKENS)[:TOKENS]

    def choices(token: int, rank: str) -> tuple[int, ...]:
        own = [token + 5000, token + 6000, token + 7000] if drafter == "good" else [token + 8000]
        if rank in "012":
            own[int(rank)] = token
        return () if rank == "-" else tuple(own)

    return HitTrace(
        "p",
        domain,
        drafter,
        "1",
        0.0,
        30,
        tokens,
        tuple(rank == "0" for rank in pattern),
        (0.5,) * TOKENS,
        silent=tuple(rank == "-" for rank in pattern) if "-" in pattern else (),
        choices=tuple(choices(token, rank) for token, rank in zip(tokens, pattern, strict=True)),
    )


def steps_of(leader: str, other: str) -> dict[str, int]:
    recording = Recording({"good": [trace_of("good", leader)], "bad": [trace_of("bad", other)]}, SHEET)
    results = shape_results(recording.texts, ("good", "bad"), 16)
    return {result.shape: result.steps for result in results if result.domain == ALL}


def test_a_chain_commits_its_hits_and_a_token_and_runners_up_save_their_misses() -> None:
    steps = steps_of("0009", "9")
    assert steps["chain"] == TOKENS / 4
    steps = steps_of("0011", "9")
    assert steps["chain"] == TOKENS / 2
    assert steps["tree"] == pytest.approx(TOKENS / 4, abs=2)
    assert steps["tree + bad"] == pytest.approx(steps["tree"], abs=1)


def test_another_drafter_saves_the_misses_that_it_knows_and_what_follows_them() -> None:
    steps = steps_of("0099", "9900")
    assert steps["tree"] == steps["chain"]
    assert steps["tree + bad"] == pytest.approx(TOKENS / 4, abs=6)
    longer = steps_of("00099999", "---00000")
    assert longer["tree"] == longer["chain"]
    assert longer["tree + bad"] < 0.5 * longer["chain"]


def test_the_run_of_another_takes_the_place_of_the_same_runner_up() -> None:
    steps = steps_of("00019999", "---00000")
    assert steps["tree + bad"] < 0.6 * steps["tree"] < 0.6 * steps["chain"]


def test_hits_of_others_count_where_none_of_the_leaders_choices_is_the_token() -> None:
    recording = Recording({"good": [trace_of("good", "0129")], "bad": [trace_of("bad", "9990")]}, SHEET)
    found = next(iter(other_results(recording.texts, ("good", "bad"))))
    assert (found.domain, found.drafter, found.missed, found.hits, found.follow) == (ALL, "bad", 0.25, 1.0, 0.0)


def test_the_command_prints_every_shape_and_writes_a_record(tmp_path, capfd) -> None:
    recording = Recording({"good": [trace_of("good", "0019")], "bad": [trace_of("bad", "9990")]}, SHEET)
    output = tmp_path / "trees.json"
    status, out, _ = run_command(["trees", str(written(recording, tmp_path)), "--json", str(output)], capfd)
    assert status == 0
    assert "tree + bad" in out
    record = json.loads(output.read_text())
    assert {shape["shape"] for shape in record["shapes"]} == {"chain", "tree", "tree + bad"}
    assert record["leader"] == "good"


def test_traces_without_the_proposed_tokens_are_refused_with_the_remedy(tmp_path, capfd) -> None:
    tokens = tuple(range(200, 210))
    old = HitTrace("p", "code", "good", "1", 0.0, 30, tokens, (True,) * 10)
    status, _, err = run_command(["trees", str(written(Recording({"good": [old]}, SHEET), tmp_path))], capfd)
    assert status != 0
    assert "record them again" in err
