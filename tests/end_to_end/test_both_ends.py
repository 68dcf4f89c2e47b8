"""Drafts made beside the target change no text, whatever makes them and however it fails, and make texts faster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from typing import Any

from scripted_drafters import FailingDrafter, GarbageDrafter

from outrider.cloud.serving.own_drafter import OwnDrafter, load_own_drafter
from outrider.drafters import NgramDrafter, ProposalRule
from outrider.drafters.protocol import TokenPrefix
from outrider.edge import Sampling
from outrider.proto.types import DraftToken, Patience

VOCAB = 8192
WAYS = {"greedy": Sampling(max_tokens=16), "sampled": Sampling(max_tokens=16, temperature=1.0, seed=20260)}
NEVER_VERIFIED = ("n-grams", "unknown ids")  # no words come twice; nothing is proposed before the first unknown one
UNTIL_DRAFTED = Patience(math.inf, 4)


class SlowDrafter:
    """Another drafter, each of whose tokens takes 30 ms more."""

    version, steering, name = "1", None, "slow"

    def __init__(self, inner: Any) -> None:
        self._inner = inner

    def open(self, rule: ProposalRule) -> Any:
        state = self._inner.open(rule)
        propose = state.propose

        def slowly(n: int) -> tuple[DraftToken, ...]:
            time.sleep(0.03 * n)
            return propose(n)

        state.propose = slowly
        return state


class UnknownTokens:
    """Proposes ids that no target has, after a few that it has."""

    version, steering, name = "1", None, "unknown"

    def open(self, rule: ProposalRule) -> Any:
        return _UnknownState()


class _UnknownState(TokenPrefix):
    def propose(self, n: int) -> tuple[DraftToken, ...]:
        start = len(self.tokens)
        drafts = tuple(
            DraftToken(VOCAB + 7 if position % 5 == 4 else position, 0.9) for position in range(start, start + n)
        )
        self.extend([draft.id for draft in drafts])
        return drafts


OWN: dict[str, Callable[[Any], OwnDrafter]] = {
    "the edge's own": lambda target: load_own_drafter("general", target),
    "windowed": lambda target: load_own_drafter("swift", target),
    "n-grams": lambda target: load_own_drafter("ngram", target),
    "rubbish": lambda _: OwnDrafter(GarbageDrafter(VOCAB, seed=4), VOCAB),
    "unknown ids": lambda _: OwnDrafter(UnknownTokens(), VOCAB),
    "killed midway": lambda _: OwnDrafter(FailingDrafter(12, NgramDrafter()), VOCAB),
    "slow": lambda _: OwnDrafter(SlowDrafter(NgramDrafter()), VOCAB),
}


async def test_no_drafter_beside_the_target_changes_a_text(verifier, edge, prompts, drafting) -> None:
    """Not that of a session for which it always drafts, and not that of an edge that drafts itself."""
    prompt, (one, other) = prompts(1)[0].text, WAYS

    async with edge(verifier, drafter="none", drafts_here=0) as client:
        expected = {way: (await client.complete(prompt, sampling)).ids for way, sampling in WAYS.items()}
    for name, own in OWN.items():
        async with drafting(own) as (address, served):
            async with edge(address, drafter="none", drafts_here=4, patience=UNTIL_DRAFTED) as client:
                assert (await client.complete(prompt, WAYS[one])).ids == expected[one], name
            assert served.status().verified_here > 0 or name in NEVER_VERIFIED
            async with edge(address, drafter="general") as client:
                assert (await client.complete(prompt, WAYS[other])).ids == expected[other], name
        one, other = other, one


async def test_an_edge_without_a_drafter_needs_far_fewer_steps(verifier, edge, prompts, drafting) -> None:
    chosen, sampling = prompts(1)[:2], Sampling(max_tokens=32)
    async with edge(verifier, drafter="none") as client:
        plain = [await client.complete(prompt.text, sampling) for prompt in chosen]
    async with drafting(OWN["the edge's own"]) as (address, served):
        async with edge(address, drafter="none", drafts_here=4, patience=UNTIL_DRAFTED) as client:
            drafted = [await client.complete(prompt.text, sampling) for prompt in chosen]
        status = served.status()
        assert status.drafter_here.startswith("general@")
        assert status.committed_tokens == sum(len(each.ids) for each in drafted)
        assert status.accepted_here == sum(each.statistics.accepted_cloud for each in drafted) > 0
        assert status.verified_here == sum(each.statistics.verified_cloud for each in drafted)
        assert status.drafted_here >= status.verified_here >= status.accepted_here
        assert status.drafting_here_s > 0
    assert [each.ids for each in drafted] == [each.ids for each in plain]
    assert all(each.statistics.steps == len(each.ids) for each in plain)
    assert sum(each.statistics.steps for each in drafted) < 0.6 * sum(len(each.ids) for each in drafted)


async def test_branches_of_likely_misses_are_taken_and_change_no_text(edge, prompts, drafting) -> None:
    """The target takes its time, and there is no link; once without a drafter beside it, once with one."""

    prompt, sampling = prompts(1)[0].text, Sampling(max_tokens=64)
    async with drafting(OWN["the edge's own"], min_step_s=0.03) as (address, _):
        async with edge(address, drafter="none", drafts_here=0) as client:
            expected = await client.complete(prompt, sampling)
        for here in (0, None):
            async with edge(address, drafter="general", drafts_here=here) as client:
                drafted = await client.complete(prompt, sampling)
            assert drafted.ids == expected.ids
            assert drafted.statistics.branched > 0
            assert here is None or drafted.statistics.branches_taken > 0
