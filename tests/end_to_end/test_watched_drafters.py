"""New versions of a drafter reach a client that lives: texts that run keep theirs, and no text changes."""

from __future__ import annotations

import asyncio
import json
import math
from collections.abc import Awaitable, Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import SentFrames, fleet, until
from poisoned import BAD_VERSION, HEAD, without_numbers
from scripted_drafters import FailingDrafter, ScriptedDrafter

from outrider.drafters import NgramDrafter, ProposalRule, find_package
from outrider.drafters.adapters import weights_of, write_adapter_package
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.packages import load_package
from outrider.drafters.shelf import loaded_member
from outrider.edge import Client, Completion, preparation
from outrider.edge.event_stream import Tokens
from outrider.edge.link.control_client import CoordinatorClient
from outrider.proto.drafter_format import LearnedFrom, SteeringShape
from outrider.proto.types import Continue, DrafterHits, LeaseRequest, Open, Patience, RemoteFile, SessionReport

PROMPT = "def count(words):\n    "
Meanwhile = Callable[[], Awaitable[None]]


def publish(catalogue: Path, sequence: int, name: str = "general") -> str:
    """An update of an embedded drafter that changes its head a little, at random; return its version."""
    parent = find_package(name)
    rng = np.random.default_rng(sequence)
    rows, columns = weights_of(parent)[HEAD].shape
    a, b = rng.standard_normal((8, columns)) / columns, rng.standard_normal((rows, 8)) * 0.3
    folder = write_adapter_package(
        parent.folder,
        catalogue / f"{name}-{sequence}",
        {HEAD: (a, b)},
        sequence=sequence,
        learned_from=LearnedFrom(1000, 8, {"code": 1000}),
    )
    return str(json.loads((folder / "manifest.json").read_text())["version"])


def poison(catalogue: Path, sequence: int) -> None:
    """A later version whose hashes are right and whose numbers are not."""
    made = catalogue.parent / "unpublished" / f"general-{sequence}"
    publish(made.parent, sequence)
    without_numbers(made, catalogue / made.name)


async def states(control: CoordinatorClient) -> dict[str, str]:
    return {version.version: version.state for version in (await control.status()).versions}


async def compared_on(control: CoordinatorClient, version: str, texts: int) -> None:
    """Wait for the edge's reports, sent after its texts: those of hits of the version and of the one before it."""
    async with asyncio.timeout(60):
        while texts not in [v.texts for v in (await control.status()).versions if v.version == version]:  # noqa: ASYNC110
            await asyncio.sleep(0.01)


async def disprove(control: CoordinatorClient, current: str, previous: str, name: str = "general") -> None:
    """Report texts of other edges in which the current version hits less, until it is retired."""
    await control.open_lease(LeaseRequest("reference", "s"))
    for edge in range(100):
        hits = (DrafterHits(name, current, 30, 100), DrafterHits(name, previous, 50, 100))
        await control.report(SessionReport("s", "reference", "verifier", edge=f"other-{edge}", drafter_hits=hits))
        if (await states(control))[current] == "retired":
            return
    raise AssertionError("100 texts show nothing")


@pytest.mark.usefixtures("all_drafts_pay")
async def test_a_version_that_is_published_in_mid_text_drafts_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    catalogue = tmp_path / "drafters"
    catalogue.mkdir()
    embedded = find_package("general").version
    fetched: list[str] = []

    def counting(*arguments, **options):
        fetch = right(*arguments, **options)

        def counted(file: RemoteFile, offset: int):
            fetched.append(file.name)
            return fetch(file, offset)

        return counted

    right = preparation.file_fetcher
    monkeypatch.setattr(preparation, "file_fetcher", counting)

    async def text(client: Client, in_the_middle: Meanwhile | None = None) -> tuple[list[int], set[str]]:
        sent, ids = SentFrames(), []
        async for event in client.generate(PROMPT, max_tokens=48, temperature=1.0, seed=5, observer=sent):
            if isinstance(event, Tokens):
                ids += [token.id for token in event.tokens]
                if in_the_middle is not None and len(ids) > 4:
                    meanwhile, in_the_middle = in_the_middle, None
                    await meanwhile()
        assert in_the_middle is None
        return ids, sent.versions()

    cache = tmp_path / "cache"
    async with fleet("verifier", drafters=(catalogue,), poll_s=0.05) as found:
        async with found.client(cache) as client:
            alone, _ = await text(client)
        async with found.client(cache, drafter="general") as client:

            def is_current(version: str) -> bool:
                return client.drafter is not None and client.drafter.version == version

            def versions() -> tuple[str, ...]:
                assert client.ready is not None
                return tuple(version for _, version in client.ready.shelf.offered)

            async def publish_first() -> None:
                published.append(publish(catalogue, 1))
                await until(lambda: is_current(published[0]))

            published: list[str] = []
            fetched.clear()
            during, named_during = await text(client, publish_first)
            after, named_after = await text(client)
            assert fetched == ["manifest.json", "adapter.safetensors"], "graph and tokenizer ship with the wheel"
            assert during == after == alone
            assert named_during == {embedded}, "a text that runs keeps its drafter"
            assert named_after == {published[0]}

            async def publish_poison() -> None:
                poison(catalogue, 2)
                await until(lambda: "not finite" in caplog.text)
                assert is_current(published[0])

            poisoned, named_poisoned = await text(client, publish_poison)
            again, named_again = await text(client)
            assert poisoned == again == alone
            assert named_poisoned == {published[0]}
            assert named_again == {published[0]}, "what cannot be loaded replaces nothing"
            control = CoordinatorClient(found.address)
            assert await states(control) == {published[0]: "previous", BAD_VERSION: "current"}

            async def publish_third() -> None:
                published.append(publish(catalogue, 3))
                await until(lambda: is_current(published[1]))

            await text(client, publish_third)
            assert versions() == (published[1], published[0]), "the version before it drafts beside it"
            await until(lambda: len(client.ready.shelf.drafters()[0]) == 2)
            tried, named_tried = await text(client)
            assert tried == alone
            assert named_tried <= set(published)
            assert await states(control) == {
                published[0]: "previous",
                BAD_VERSION: "retired",
                published[1]: "current",
            }, "a bad version does not stand in a later one's way"
            await compared_on(control, published[1], 1)
            assert {each.version: each.state for each in await client.versions()} == await states(control)
            await disprove(control, published[1], published[0])
            await until(lambda: versions() == (published[0],))
            _, named = await text(client)
            assert named == {published[0]}
            assert await states(control) == {published[0]: "current", BAD_VERSION: "retired", published[1]: "retired"}
        reports = [report for report in (await control.status()).recent if report.drafter]
        said = [report.drafter_version for report in reports]
        assert sorted(said) == sorted([embedded, *[published[0]] * 5, published[1]]), "what a text began with"
        await control.close()


@pytest.mark.usefixtures("all_drafts_pay")
async def test_a_steered_drafter_goes_without_vectors_while_it_is_compared(tmp_path: Path) -> None:
    catalogue = tmp_path / "drafters"
    catalogue.mkdir()

    async def text(client: Client) -> Completion:
        return await client.complete(PROMPT, max_tokens=48, temperature=1.0, seed=5)

    cache = tmp_path / "cache"
    async with fleet("verifier", drafters=(catalogue,), poll_s=0.05) as found:
        control = CoordinatorClient(found.address)
        async with found.client(cache) as client:
            alone = await text(client)
        first = publish(catalogue, 1, "swift")
        async with found.client(cache, drafter="swift", steering="on") as client:

            def versions() -> tuple[str, ...]:
                assert client.ready is not None
                return tuple(version for _, version in client.ready.shelf.offered)

            await until(lambda: versions() == (first,))
            steered = await text(client)
            assert steered.statistics.steered_jobs > 0
            second = publish(catalogue, 2, "swift")
            await until(lambda: versions() == (second, first))
            await until(lambda: len(client.ready.shelf.drafters()[0]) == 2)
            tried = await text(client)
            assert not tried.statistics.steered
            await compared_on(control, second, 1)
            assert (await states(control))[second] == "current"
            await disprove(control, second, first, "swift")
            await until(lambda: versions() == (first,))
            taken = await text(client)
            assert taken.statistics.steered_jobs > 0
            assert alone.ids == steered.ids == tried.ids == taken.ids
        await control.close()


# --- a kept conversation takes another version at its next turn, on its session, and no text changes ---

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
