"""A kept conversation takes another version of its drafter at its next turn, on its session, and no text changes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import SentFrames
from scripted_drafters import FailingDrafter, ScriptedDrafter

from outrider.drafters import NgramDrafter, ProposalRule, find_package
from outrider.drafters.adapters import weights_of, write_adapter_package
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.packages import load_package
from outrider.drafters.shelf import loaded_member
from outrider.edge import Client
from outrider.edge.event_stream import Tokens
from outrider.proto.drafter_format import LearnedFrom, SteeringShape
from outrider.proto.types import Continue, Open, Patience

HEAD = "model.lm_head.weight"
TURNS = ("def main(argv):\n", "\n# more of it\n", "class A:\n    pass\n", "x = 1\n")
WAYS: tuple[dict[str, Any], ...] = ({}, {"temperature": 1.0, "seed": 20260})
PATIENT = {"patience": Patience(math.inf, 3), "drafter": "none"}


class Frames(SentFrames):
    def take(self) -> tuple[set[str], int, int]:
        """Versions that drafts name, and how many sessions and turns began, since the last call."""
        taken = self.versions(), len(self.of(Open)), len(self.of(Continue))
        self.frames = []
        return taken


def script(version: str, name: str = "scripted", *, seen: list[tuple[int, ...]] | None = None) -> ScriptedDrafter:
    """A version that drafts token 7 for ever, and notes what it has read."""

    def propose(prefix: Sequence[int]) -> int:
        if seen is not None:
            seen.append(tuple(prefix))
        return 7

    drafter = ScriptedDrafter(propose, name=name)
    drafter.version = version
    return drafter


def swap(client: Client, *drafters: Any) -> None:
    client.ready.shelf.offer([loaded_member(drafter) for drafter in drafters])


async def said_as_fresh(client: Client, talk: Any, text: str, **options: Any) -> Any:
    """Say it; the turn must be that of a fresh text."""
    before = talk.transcript.tokens
    turn = await talk.complete(text, **options)
    whole = await client.complete((*before, *client.encode(text)), **options)
    assert (turn.ids, turn.finish_reason) == (whole.ids, whole.finish_reason)
    assert not turn.statistics.drafter_error
    return turn


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory) -> tuple[OnnxDrafter, OnnxDrafter]:
    """The embedded drafter, and an update of it that changes its head a little."""
    parent, rng = find_package("general"), np.random.default_rng(1)
    rows, columns = weights_of(parent)[HEAD].shape
    a, b = rng.standard_normal((8, columns)) / columns, rng.standard_normal((rows, 8)) * 0.05
    folder: Path = tmp_path_factory.mktemp("versions") / "1"
    write_adapter_package(parent.folder, folder, {HEAD: (a, b)}, sequence=1, learned_from=LearnedFrom(1, 1, {}))
    return OnnxDrafter(parent), OnnxDrafter(load_package(folder))


@pytest.mark.usefixtures("all_drafts_pay")
@pytest.mark.parametrize("way", WAYS)
async def test_a_kept_conversation_drafts_with_the_new_version_from_its_next_turn_on(
    verifier, edge, versions, way
) -> None:
    first, second = versions

    frames = Frames()
    async with edge(verifier, **PATIENT) as client:
        swap(client, first)
        async with client.conversation(max_tokens=10, observer=frames, **way) as talk:
            for number, text in enumerate(TURNS):
                if number == 2:
                    swap(client, second)
                turn = await said_as_fresh(client, talk, text, max_tokens=10, **way)
                drafter = first if number < 2 else second
                named, opened, continued = frames.take()
                assert named == ({drafter.version} if number in (0, 2) else set()), "it is named once"
                assert (opened, continued) == ((1, 0) if number == 0 else (0, 1)), "on one session"
                assert turn.statistics.accepted > 0, "its cache is that of the transcript"
                assert list(turn.statistics.of_drafters) == ["general"]


@pytest.mark.usefixtures("all_drafts_pay")
async def test_the_new_version_reads_the_transcript_and_nothing_else(verifier, edge) -> None:
    seen: list[tuple[int, ...]] = []
    async with edge(verifier, **PATIENT) as client:
        swap(client, script("1"))
        async with client.conversation(max_tokens=6) as talk:
            await talk.complete(TURNS[0])
            swap(client, script("2", seen=seen))
            before = (*talk.transcript.tokens, *client.encode(TURNS[1]))
            turn = await talk.complete(TURNS[1])
            assert seen
            whole = (*before, *turn.ids)
            assert all(prefix[: len(before)] == before for prefix in seen)
            for prefix in seen:  # after the text, its own drafts alone
                agreed = next((i for i, pair in enumerate(zip(prefix, whole, strict=False)) if len(set(pair)) > 1), 99)
                assert set(prefix[agreed:]) <= {7}


@pytest.mark.usefixtures("all_drafts_pay")
async def test_a_turn_that_runs_keeps_its_version(verifier, edge) -> None:
    frames = Frames()
    async with edge(verifier, **PATIENT) as client:
        swap(client, script("1"))
        async with client.conversation(max_tokens=12, observer=frames) as talk:
            given = 0
            async for event in talk.say(TURNS[0]):
                given += len(event.ids) if isinstance(event, Tokens) else 0
                if given == 3:
                    swap(client, script("2"))
            assert given == 12
            assert frames.take() == ({"1"}, 1, 0)
            await said_as_fresh(client, talk, TURNS[1], max_tokens=12)
            assert frames.take() == ({"2"}, 0, 1)
            await said_as_fresh(client, talk, TURNS[2], max_tokens=12)
            named, opened, continued = frames.take()
            assert (named <= {"2"}, opened, continued) == (True, 0, 1), "and stays"


@pytest.mark.usefixtures("all_drafts_pay")
async def test_drafters_that_did_not_change_keep_what_they_have_read(verifier, edge) -> None:
    class Counted(NgramDrafter):
        opened = 0

        def open(self, rule: ProposalRule):
            Counted.opened += 1
            return super().open(rule)

    async with edge(verifier, **PATIENT) as client:
        kept = Counted(name="kept")
        swap(client, script("1"), kept)
        async with client.conversation(max_tokens=10) as talk:
            await talk.complete(TURNS[0] * 3)
            for version in ("2", "3"):
                swap(client, script(version), Counted(name="kept"))
                turn = await talk.complete(TURNS[1])
                assert set(turn.statistics.of_drafters) <= {"scripted", "kept"}
        assert Counted.opened == 1


@pytest.mark.usefixtures("all_drafts_pay")
async def test_a_version_that_works_takes_the_place_of_one_that_broke(verifier, edge) -> None:
    frames = Frames()
    async with edge(verifier, **PATIENT) as client:
        swap(client, FailingDrafter(2, script("1")))
        async with client.conversation(max_tokens=10, observer=frames) as talk:
            broken = await talk.complete(TURNS[0])
            assert broken.statistics.drafter_error
            frames.take()
            assert (await talk.complete(TURNS[1])).statistics.drafter_error
            assert frames.take() == (set(), 0, 1)
            swap(client, script("2"))
            await said_as_fresh(client, talk, TURNS[2], max_tokens=10)
            assert frames.take() == ({"2"}, 0, 1)


async def test_a_version_that_wants_other_vectors_begins_another_session(verifier, edge) -> None:
    frames = Frames()
    async with edge(verifier, **PATIENT) as client:
        swap(client, script("1"))
        async with client.conversation(max_tokens=6, observer=frames) as talk:
            await said_as_fresh(client, talk, TURNS[0], max_tokens=6)
            steered = script("2")
            steered.steering = SteeringShape(4, 8, "0" * 12)  # type: ignore[assignment]
            swap(client, steered)
            frames.take()
            await said_as_fresh(client, talk, TURNS[1], max_tokens=6)
            _, opened, continued = frames.take()
            assert (opened, continued) == (1, 0)
