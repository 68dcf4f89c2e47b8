"""Trees over real gRPC: texts are the same whether steps verify chains, trees or nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from test_invariant import ALL_SAMPLING, texts

from outrider.proto.policy import trees as trees_module
from outrider.proto.session import Drafted, EdgeSession
from outrider.proto.types import Grammar, GrammarKind, Patience

WAITS = Patience(5.0, 6)  # so that each step has drafts, and branches beside them, on a busy machine too
LETTERS = Grammar(GrammarKind.REGEX, r"[a-zA-Z ,.\n]{40,400}")


@pytest.fixture
def rows_cost_nothing(monkeypatch) -> None:
    """Verify whatever is likely enough, at any price of a row on this machine."""
    really = trees_module.best_tree

    def best_tree(*given: Any, row_share: float = 0.0, **named: Any) -> trees_module.Tree:
        return really(*given, **named)

    monkeypatch.setattr("outrider.proto.session.verifier.best_tree", best_tree)


@pytest.mark.usefixtures("all_drafts_pay", "rows_cost_nothing")
@pytest.mark.parametrize("name", [*ALL_SAMPLING, "grammar"])
async def test_the_text_is_the_same_with_trees_and_with_chains(verifier, edge, prompts, name) -> None:
    sampling = ALL_SAMPLING.get(name) or replace(ALL_SAMPLING["sampled"], grammar=LETTERS)

    chosen = prompts(1)[:2]
    async with edge(verifier, drafter="none") as client:
        expected = await texts(client, chosen, sampling)
    async with edge(verifier, drafter="general", patience=WAITS) as client:
        done = [await client.complete(prompt.text, sampling) for prompt in chosen]
    assert [each.ids for each in done] == expected
    assert sum(each.statistics.verified_beside for each in done) >= 4
    async with edge(verifier, drafter="general", chains=True, patience=WAITS) as client:
        chain = await client.complete(chosen[0].text, sampling)
    assert chain.ids == expected[0]
    assert chain.statistics.verified_beside == 0


@pytest.mark.usefixtures("all_drafts_pay", "rows_cost_nothing")
async def test_the_text_survives_cuts_while_steps_verify_trees(verifier, edge, relay, prompts) -> None:
    sampling = ALL_SAMPLING["sampled"]

    (prompt, *_) = prompts(1)
    async with edge(verifier, drafter="none") as client:
        expected = await texts(client, [prompt], sampling)
    async with relay(verifier) as link, edge(link.address, drafter="general", patience=WAITS) as client:
        got: list[int] = []
        async for event in client.generate(prompt.text, sampling):
            if hasattr(event, "reason"):
                statistics = event.statistics
                continue
            got += event.ids
            link.cut()
    assert tuple(got) == expected[0]
    assert statistics.resumes >= 2
    assert statistics.verified_beside > 0


@pytest.mark.usefixtures("all_drafts_pay", "rows_cost_nothing")
async def test_the_text_is_the_same_with_branches_of_a_second_drafter(verifier, edge, prompts, monkeypatch) -> None:
    read: list[int] = []
    really = EdgeSession._take_idle

    def take_idle(machine: EdgeSession, done: Drafted) -> None:
        read.append(len(done.teacher_forced.drafts))
        really(machine, done)

    monkeypatch.setattr(EdgeSession, "_take_idle", take_idle)
    chosen, sampling = prompts(1)[:2], ALL_SAMPLING["sampled"]
    async with edge(verifier, drafter="none") as client:
        expected = await texts(client, chosen, sampling)
    async with edge(verifier, drafter="general,ngram", patience=WAITS) as client:
        done = [await client.complete(prompt.text, sampling) for prompt in chosen]
    assert [each.ids for each in done] == expected
    assert sum(each.statistics.verified_beside for each in done) >= 4
    assert sum(read) > 0, "an idle drafter has read chains"
