"""New versions of a drafter reach a client that lives: texts that run keep theirs, and no text changes."""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from pathlib import Path

import numpy as np
import pytest
from fleets import SentFrames, fleet, until
from poisoned import BAD_VERSION, HEAD, without_numbers

from outrider.drafters import find_package
from outrider.drafters.adapters import weights_of, write_adapter_package
from outrider.edge import Client, Completion, preparation
from outrider.edge.event_stream import Tokens
from outrider.edge.link.control_client import CoordinatorClient
from outrider.proto.drafter_format import LearnedFrom
from outrider.proto.types import DrafterHits, LeaseRequest, RemoteFile, SessionReport

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


async def disprove(control: CoordinatorClient, current: str, former: str, name: str = "general") -> None:
    """Report texts of other edges in which the current version hits less, until it is retired."""
    await control.open_lease(LeaseRequest("reference", "s"))
    for edge in range(100):
        hits = (DrafterHits(name, current, 30, 100), DrafterHits(name, former, 50, 100))
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
            assert await states(control) == {published[0]: "former", BAD_VERSION: "current"}

            async def publish_third() -> None:
                published.append(publish(catalogue, 3))
                await until(lambda: is_current(published[1]))

            await text(client, publish_third)
            assert versions() == (published[1], published[0]), "the version before it drafts beside it"
            await until(lambda: len(client.ready.shelf.drafters()[0]) == 2)
            tried, named_tried = await text(client)
            assert tried == alone
            assert named_tried <= set(published)
            assert await states(control) == {published[0]: "former", BAD_VERSION: "retired", published[1]: "current"}, (
                "a bad version does not stand in a later one's way"
            )
            (third,) = [v for v in (await control.status()).versions if v.version == published[1]]
            assert third.texts == 1, "the edge has reported the hits of both on the text"
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
            (said,) = [each for each in (await control.status()).versions if each.version == second]
            assert (said.state, said.texts) == ("current", 1), "hits of both were reported"
            await disprove(control, second, first, "swift")
            await until(lambda: versions() == (first,))
            taken = await text(client)
            assert taken.statistics.steered_jobs > 0
            assert alone.ids == steered.ids == tried.ids == taken.ids
        await control.close()
