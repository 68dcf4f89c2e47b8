"""Rules and drafters that Outrider does without, as tables for a terminal of 100 columns."""

from __future__ import annotations

from rich.console import Group

from outrider.bench.rules.record import RuleRecord
from outrider.bench.table import Grid, draw, number

LEGEND = (
    "shared noise: the target's token is among the drafter's k best of log q + G; transport: the most that any rule "
    "can accept of k independent draws from q; accepted: mean drafts of a chain; by tokens, by blocks: q on the wire; "
    "ms: processor time of one thread"
)


def tables(record: RuleRecord) -> Group:
    """Return all tables."""
    lists = [
        (f"{entry.temperature:g}", str(entry.drafts), number(entry.shared_noise), number(entry.transport))
        for entry in record.lists
    ]
    blocks = [
        (str(e.drafts), number(e.shared_noise), number(e.by_tokens), number(e.by_blocks), str(e.paths))
        for e in record.blocks
    ]
    layers = [
        (str(e.layers), f"{e.parameters / 1e6:.1f}", number(e.step_ms, 2), number(e.greedy), number(e.shared_noise))
        for e in record.layers
    ]
    passes = [(str(e.tokens), number(e.one_by_one_ms, 2), number(e.one_pass_ms, 2)) for e in record.passes]
    one = [
        ("shared noise, T = 1", number(record.shared_noise)),
        ("with the noise of the text", number(record.coupled_hits)),
        ("maximal coupling, T = 1", number(record.maximal)),
        ("any rule, T = 0", number(record.greedy)),
    ]
    return draw(
        [
            Grid(f"One draft, {record.positions} positions", ("rule", "accepted"), 1, [one]),
            Grid("Several drafts a position", ("T", "k", "shared noise", "transport"), 2, [lists]),
            Grid("Chains at T = 1", ("drafts", "shared noise", "by tokens", "by blocks", "paths"), 1, [blocks]),
            Grid("The target's first layers", ("layers", "10^6 weights", "step ms", "T = 0", "T = 1"), 1, [layers]),
            Grid("The drafter's passes", ("tokens", "one by one, ms", "one pass, ms"), 1, [passes]),
        ],
        LEGEND,
    )
