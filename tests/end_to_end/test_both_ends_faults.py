"""Texts drafted beside the target through turns, lost verifiers and ends of drafters: they are the target's own."""

from __future__ import annotations

import asyncio
import logging
import math
import re
import threading
from dataclasses import replace
from typing import Any

import pytest
from fleets import SentFrames
from scripted_drafters import FailingDrafter

from outrider.cloud.serving import own_drafter
from outrider.cloud.serving.own_drafter import OwnDrafter, load_own_drafter
from outrider.deploy.link.link_process import LinkProcess
from outrider.deploy.link.shape import LinkShape
from outrider.drafters import ProposalRule, find_package
from outrider.drafters.onnx import OnnxDrafter
from outrider.edge import Sampling
from outrider.proto.policy.measurements import Smoothed
from outrider.proto.session import RetryRules
from outrider.proto.types import Continue, DraftToken, Open, Patience

UNTIL_DRAFTED = Patience(math.inf, 4)
QUICKLY = RetryRules(0.02, 0.1, 30.0)
WAYS = {"greedy": Sampling(max_tokens=20), "sampled": Sampling(max_tokens=20, temperature=1.0, seed=20260)}
LONG = Sampling(max_tokens=60, temperature=1.0, seed=9)
TURNS = (" And then", "\nSo, as I said,", " which")


class Frames(SentFrames):
    """Counts the drafts of the verifier's own."""

    def verified_here(self) -> list[int]:
        """Those that were verified, by stream."""
        return [sum(commit.verified_here for commit in commits) for _, commits in self.streams]


class Watched:
    """A drafter that counts what it reads, and does something before it proposes."""

    version, steering = "1", None

    def __init__(self, inner: Any, before: Any = lambda proposed: None) -> None:
        self.name = f"watched {inner.name}"
        self._inner = inner
        self._before = before
        self.opened = self.read = self.proposed = 0

    def open(self, rule: ProposalRule) -> Any:
        self.opened += 1
        state = self._inner.open(rule)
        propose, extend = state.propose, state.extend

        def counted(n: int) -> tuple[DraftToken, ...]:
            self.proposed += n
            self._before(self.proposed)
            return propose(n)

        def counting(tokens: Any) -> None:
            self.read += len(tokens)
            extend(tokens)

        state.propose, state.extend = counted, counting
        return state


def general(target: Any) -> OwnDrafter:
    return load_own_drafter("general", target)


class KnownTime(Smoothed):
    """A time of an idle machine, which this one does not measure: it may be so busy that no draft is worth its time."""

    def add(self, value: float) -> None:
        pass


# === turns ======================================================================================================


@pytest.mark.parametrize("drafter", ["none", "general"])
async def test_turns_go_on_in_kept_caches_of_target_and_drafter(verifier, edge, prompts, drafting, drafter) -> None:
    """Each is a fresh text's; neither the target nor the drafter beside it reads a token twice."""

    drafters: list[Watched] = []

    def own(target: Any) -> OwnDrafter:
        drafters.append(Watched(load_own_drafter("general", target).drafter))
        return OwnDrafter(drafters[0], target.vocab_size)

    async with (
        drafting(own, page_size=1) as (address, _),
        edge(verifier, drafter="none") as other,
        edge(address, drafter=drafter, drafts_here=4, patience=UNTIL_DRAFTED) as client,
    ):
        frames, turns = Frames(), []
        first = prompts(1)[0].text
        async with client.conversation(observer=frames) as talk:
            for text, way in zip((first, *TURNS), ("greedy", "sampled", "sampled", "greedy"), strict=True):
                before = talk.transcript.tokens
                turn = await talk.complete(text, WAYS[way])
                whole = await other.complete((*before, *client.encode(text)), WAYS[way])
                assert (turn.ids, turn.text, turn.finish_reason) == (whole.ids, whole.text, whole.finish_reason)
                assert turn.statistics.cached_tokens >= len(before) - 1, "the cache was kept"
                turns.append(turn.statistics)
            length = len(talk.transcript.tokens)
        assert [len(frames.of(kind)) for kind in (Open, Continue)] == [1, 3]
        # In how many turns its drafts are there before the edge's, the machine decides.
        assert sum(turn.verified_cloud > 0 for turn in turns) >= 2
        assert sum(turn.accepted_cloud for turn in turns) > 0
        assert drafters[0].opened == 1
        assert drafters[0].read < 2 * length, "a drafter that began each turn anew would read far more"


# === the options, and a far edge ================================================================================


async def test_a_verifier_drafts_with_what_its_options_name(serving, verifier, edge, prompts, caplog) -> None:
    caplog.set_level(logging.INFO)
    options = {"draft_here": "on", "draft_with": "general", "draft_threads": 1, "draft_price": 0.0}
    prompt, frames = prompts(1)[0].text, Frames()
    async with edge(verifier, drafter="none", drafts_here=0) as client:
        expected = await client.complete(prompt, WAYS["sampled"])
    async with (
        serving(**options) as address,
        edge(address, drafter="none", drafts_here=4, patience=UNTIL_DRAFTED) as client,
    ):
        found = await client.complete(prompt, WAYS["sampled"], observer=frames)
    assert found.ids == expected.ids
    assert frames.streams[0][0].drafter_here.startswith("general@")
    assert found.statistics.accepted_cloud > 0
    assert re.search("drafts beside its target with general@[0-9a-z]+ in 1 threads", caplog.text)


async def test_a_far_edge_is_told_how_far_the_verifier_covers_and_hardly_drafts(edge, prompts, drafting) -> None:
    prompt, sampling = prompts(1)[0].text, replace(LONG, max_tokens=40)
    async with (
        drafting(general, min_step_s=0.05) as (address, served),
        LinkProcess(to=address, shape=LinkShape.of(rtt_ms=500)) as link,
    ):
        here = served._engine.sessions.here
        here.drafting_s, here.waiting_s, here.job_s = KnownTime(0.002), KnownTime(), KnownTime(0.01)
        async with edge(address, drafter="none", drafts_here=0) as client:
            expected = await client.complete(prompt, sampling)
        frames = Frames()
        async with edge(link.address, drafter="general") as client:
            await client.complete(prompt, sampling)  # both ends learn what they cost
            found = await client.complete(prompt, sampling, observer=frames)
    assert found.ids == expected.ids
    [(opened, commits)] = frames.streams
    assert opened.drafter_here.startswith("general@")
    statistics = found.statistics
    assert max(commit.covered for commit in commits) >= 8, "a round trip is ten steps, each with drafts"
    assert statistics.accepted_cloud > 0
    assert statistics.steps < len(found.ids)
    assert statistics.verified - statistics.verified_cloud < statistics.verified_cloud


# === failover ===================================================================================================


async def test_a_text_goes_to_a_verifier_without_drafts_of_its_own_and_back(
    serving, edge, prompts, drafting, relay
) -> None:
    prompt, frames, got = prompts(1)[0].text, Frames(), []
    async with (
        drafting(general, name="with", min_step_s=0.02) as (one, _),
        serving(name="without", min_step_s=0.02) as two,
        relay(one) as first,
        relay(two) as second,
        edge(
            first.address, second.address, drafter="none", drafts_here=2, patience=UNTIL_DRAFTED, retry=QUICKLY
        ) as client,
    ):
        async for event in client.generate(prompt, LONG, observer=frames):
            got += getattr(event, "ids", ())
            if len(got) > 6 and not first.cuts:
                first.cut()
            if len(got) > 20 and not second.cuts:
                second.cut()
            finished = event
        async with edge(two, drafter="none") as plain:
            whole = await plain.complete(prompt, LONG)
    assert tuple(got) == whole.ids
    assert finished.statistics.resumes == 2
    assert [opened.verifier for opened, _ in frames.streams] == ["with", "without", "with"]
    assert [bool(opened.drafter_here) for opened, _ in frames.streams] == [True, False, True]
    began, without, ended = frames.verified_here()
    assert without == 0
    assert began > 0
    assert ended > 0


# === ends of the drafter ========================================================================================


class DyingSession:
    """An ONNX session that raises for good after some runs."""

    def __init__(self, session: Any, runs: int) -> None:
        self._session = session
        self._left = runs

    def __getattr__(self, name: str) -> Any:
        return getattr(self._session, name)

    def run_with_iobinding(self, *arguments: Any) -> Any:
        self._left -= 1
        if self._left < 0:
            raise RuntimeError("[ONNXRuntimeError] : 6 : RUNTIME_EXCEPTION")
        return self._session.run_with_iobinding(*arguments)


def dies_in_its_session(target: Any) -> OwnDrafter:
    own = general(target)
    own.drafter.session = DyingSession(own.drafter.session, runs=12)  # type: ignore[attr-defined]
    return own


def exits_its_thread(target: Any) -> OwnDrafter:
    def exit_once(proposed: int) -> None:
        if proposed == 12:
            raise SystemExit(3)

    return OwnDrafter(Watched(general(target).drafter, exit_once), target.vocab_size)


@pytest.mark.parametrize(("own", "goes_on"), [(dies_in_its_session, False), (exits_its_thread, True)])
async def test_a_drafter_killed_in_mid_text_ends_no_text_and_its_thread_serves_others(
    edge, prompts, drafting, own, goes_on
) -> None:
    prompt = prompts(1)[0].text
    async with drafting(own) as (address, served):
        async with edge(address, drafter="none", drafts_here=0) as client:
            expected = [(await client.complete(prompt, way)).ids for way in WAYS.values()]
        async with edge(address, drafter="none", drafts_here=3, patience=Patience(math.inf, 3)) as client:
            frames, found = [Frames(), Frames()], []
            for way, seen in zip(WAYS.values(), frames, strict=True):
                found.append((await client.complete(prompt, way, observer=seen)).ids)
        assert found == expected
        by_commit = [commit.verified_here for commit in frames[0].streams[0][1]]
        assert by_commit[0] > 0, "it drafted"
        assert by_commit[-3:] == [0, 0, 0], "until it was killed"
        assert (frames[1].verified_here()[0] > 0) == goes_on
        assert served._engine.sessions.here is not None, "two texts are not three"


async def test_texts_end_while_every_thread_of_the_drafter_hangs(edge, prompts, drafting, monkeypatch) -> None:
    """Their edges would wait for drafts for ever; one waits for a thread that will never be free."""
    monkeypatch.setattr(own_drafter, "STUCK_S", 0.3)
    monkeypatch.setattr(own_drafter, "STOP_WITHIN_S", 0.1)
    released = threading.Event()

    def hang(proposed: int) -> None:
        if proposed > 8:
            released.wait(60)

    def own(target: Any) -> OwnDrafter:
        return OwnDrafter(Watched(general(target).drafter, hang), target.vocab_size)

    first, second = [prompt.text for prompt in prompts(1)[:2]]
    async with drafting(own) as (address, served):
        async with edge(address, drafter="none", drafts_here=0) as client:
            expected = [(await client.complete(text, WAYS["sampled"])).ids for text in (first, second)]
        async with edge(address, drafter="none", drafts_here=4, patience=UNTIL_DRAFTED) as client:
            frames = Frames()
            texts = (client.complete(first, WAYS["sampled"], observer=frames), client.complete(second, WAYS["sampled"]))
            found = [each.ids for each in await asyncio.wait_for(asyncio.gather(*texts), 60)]
            assert found == expected
            assert served._engine.sessions.here is None
            last = await client.complete(first, WAYS["sampled"], observer=frames)
            assert last.ids == expected[0]
            assert frames.streams[-1][0].drafter_here == ""
        status = served.status()
        assert (status.drafter_here, status.verified_here > 0) == ("", True)
    released.set()


# === unlike drafters at both ends ===============================================================================


class OtherVersion:
    """Another drafter under the name of the edge's."""

    name, version, steering = "general", "0-older", None

    def __init__(self, inner: Any) -> None:
        self.open = inner.open


@pytest.mark.usefixtures("all_drafts_pay")
async def test_another_version_of_the_edges_drafter_takes_part_and_changes_no_text(edge, prompts, drafting) -> None:
    prompt = prompts(1)[1].text

    def own(target: Any) -> OwnDrafter:
        return OwnDrafter(OtherVersion(load_own_drafter("code", target).drafter), target.vocab_size)

    async with drafting(own) as (address, _):
        async with edge(address, drafter="none", drafts_here=0) as client:
            expected = await client.complete(prompt, LONG)
        frames = Frames()
        async with edge(address, drafter="general", drafts_here=6, patience=Patience(math.inf, 6)) as client:
            found = await client.complete(prompt, LONG, observer=frames)
    assert found.ids == expected.ids
    assert frames.streams[0][0].drafter_here == "general@0-older"
    statistics = found.statistics
    assert not statistics.drafter_error
    assert 0 < statistics.verified_cloud < statistics.verified, "both ends have drafted"


@pytest.mark.usefixtures("all_drafts_pay")
async def test_a_drafter_slower_than_the_edge_lets_it_lead_and_goes_on_where_it_ends(edge, prompts, drafting) -> None:
    """The edge's drafter breaks in mid-text; what both propose is the edge's, since that comes first."""
    never = threading.Event()

    def own(target: Any) -> OwnDrafter:
        slow = Watched(general(target).drafter, lambda proposed: never.wait(0.015))
        return OwnDrafter(slow, target.vocab_size)

    prompt, sampling = prompts(1)[0].text, replace(LONG, max_tokens=36)
    async with drafting(own) as (address, _):
        async with edge(address, drafter="none", drafts_here=0) as client:
            expected = await client.complete(prompt, sampling)
        breaks = FailingDrafter(24, OnnxDrafter(find_package("general")))
        async with edge(address, drafter=breaks, drafts_here=4, patience=UNTIL_DRAFTED) as client:
            found = await client.complete(prompt, sampling)
    assert found.ids == expected.ids
    statistics = found.statistics
    assert statistics.drafter_error
    assert 0 < statistics.verified_cloud < statistics.verified, "both ends have drafted"
