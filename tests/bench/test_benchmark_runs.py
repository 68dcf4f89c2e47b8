"""A run's metrics from observed texts."""

from __future__ import annotations

from outrider.bench.benchmark.measure import Measured, run_of
from outrider.bench.links import LinkRecord
from outrider.deploy.built_in_prompts import Prompt

TRACED = LinkRecord(105.0, trace="step")


def text(began: float, tokens: int, per_token_s: float) -> Measured:
    arrivals = tuple((n + 1) * per_token_s for n in range(tokens))
    return Measured(Prompt("1", "x"), began, tuple(range(tokens)), arrivals)


def test_on_a_link_that_changes_the_arrivals_of_the_longest_text_are_kept() -> None:
    run = run_of("cloud", TRACED, [text(10, 2, 0.5), text(20, 3, 0.25), text(30, 3, 9.0)], None)
    assert run.arrivals_s == (0.25, 0.5, 0.75)


def test_on_other_links_and_in_parallel_no_arrivals_are_kept() -> None:
    assert run_of("cloud", LinkRecord(30.0), [text(10, 2, 0.5)], None).arrivals_s is None
    together = [text(10, 2, 0.5), text(10, 3, 0.5)]  # the later ones do not meet the trace from its beginning
    assert run_of("cloud", TRACED, together, None, sessions=2).arrivals_s is None


def test_sequential_texts_take_the_sum_of_their_times_and_parallel_ones_the_longest() -> None:
    texts = [text(10, 2, 0.5), text(100, 4, 0.5)]
    assert run_of("cloud", LinkRecord(30.0), texts, None).seconds == 3.0
    at_once = [text(10, 2, 0.5), text(10.5, 4, 0.5)]
    assert run_of("cloud", LinkRecord(30.0), at_once, None, sessions=2).seconds == 2.5
