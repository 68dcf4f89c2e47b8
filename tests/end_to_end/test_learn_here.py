"""An edge learns from its own texts: it drafts better, texts stay the same, and a dead trainer harms nothing."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fleets import SentFrames, until
from kept_lessons import KeptLessons
from poisoned import HEAD, without_numbers

from outrider.cloud.learning.judge import ShadowJudge
from outrider.cloud.learning.losses import LOSSES, check_record
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.local import learn_here
from outrider.deploy.local.learn_here import LearningHere
from outrider.drafters import find_package
from outrider.drafters.adapters import write_adapter_package, write_tensors
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.packages import load_package
from outrider.edge import Client
from outrider.edge.decoding import Observer
from outrider.edge.event_stream import Tokens
from outrider.edge.link.routes import DirectRoute
from outrider.proto.drafter_format import LearnedFrom
from outrider.proto.errors import OutriderError
from outrider.proto.types import SessionReport

WORDS = tuple("the of and to in is that for it as was with be by on not he his but at are this have from".split())  # noqa: SIM905


@pytest.fixture(autouse=True)
def _quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(learn_here, "LOOK_EVERY_S", 0.1)
    monkeypatch.setattr(learn_here, "AGAIN_S", 0.1)


@asynccontextmanager
async def learning(client: Client, folder: Path | None, **changes: Any) -> AsyncIterator[LearningHere]:
    made = LearningHere(client, cpu_share=1.0, folder=folder, logs={}, **changes)
    task = asyncio.create_task(made.run())
    try:
        yield made
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def texts(client: Client, first: int, count: int, observer: Observer | None = None) -> list[tuple[int, ...]]:
    """Texts of their own prompts, half at T = 0 and half at T = 1, some at a time."""

    async def one(number: int) -> tuple[int, ...]:
        rng = np.random.default_rng(number)
        prompt = " ".join(rng.choice(WORDS, 6))
        ids: list[int] = []
        sampling = {"temperature": float(number % 2), "seed": number, "max_tokens": 24, "ignore_eos": True}
        async for event in client.generate(prompt, observer=observer, **sampling):
            ids += getattr(event, "ids", ())
        return tuple(ids)

    made: list[tuple[int, ...]] = []
    for number in range(first, first + count, 8):
        made += await asyncio.gather(*(one(each) for each in range(number, min(number + 8, first + count))))
    return made


@pytest.fixture
def reports(monkeypatch: pytest.MonkeyPatch) -> list[SessionReport]:
    """Reports of texts that have ended."""
    told: list[SessionReport] = []

    async def report(_: object, each: SessionReport) -> None:
        told.append(each)

    monkeypatch.setattr(DirectRoute, "report", report)
    return told


async def test_texts_are_the_same_while_a_trainer_learns_dies_and_comes_back(serving, edge, tiny) -> None:
    async with serving(target=str(tiny), model="tiny") as address:
        async with edge(address, model="tiny", drafter="none") as client:
            plain = await texts(client, 0, 8)
        async with edge(address, model="tiny", drafter="general") as client, learning(client, None) as made:
            assert await texts(client, 0, 8) == plain
            await until(lambda: made.info.get("counts", {}).get("records") == 8)
            killed, folder = made.info["pid"], Path(made.info["folder"])
            os.kill(killed, signal.SIGKILL)
            assert await texts(client, 0, 8) == plain
            await until(lambda: made.info["pid"] != killed)
            assert client.drafter is not None
            assert client.drafter.version == made.info["version"] == load_package(folder).version


@pytest.mark.soak
@pytest.mark.timeout(900)
async def test_an_edge_drafts_better_with_what_it_has_learned_here(serving, edge, tiny, tmp_path: Path) -> None:
    parent, folder = find_package("general").version, tmp_path / "learned"

    async with serving(target=str(tiny), model="tiny") as address:
        where = {"model": "tiny", "drafter": "general"}
        async with edge(address, model="tiny", drafter="none") as client:
            plain = await texts(client, 0, 8)
        async with edge(address, **where) as client:
            before = SentFrames()
            assert await texts(client, 0, 8, before) == plain
            assert before.versions() <= {parent}
            async with learning(client, folder) as made:
                number = 8
                killed = 0
                while client.drafter is None or client.drafter.version == parent:
                    assert number < 2000, made.info
                    await texts(client, number, 24)
                    number += 24
                    await until(lambda: not made._waiting)
                    if not killed and made.info.get("steps", 0) >= 8:
                        killed = made.info["pid"]
                        os.kill(killed, signal.SIGKILL)
                        await texts(client, number, 8)
                        await until(lambda pid=killed: made.info["pid"] != pid)
                        assert made.info["steps"] >= 8, "it goes on from its checkpoint"
                version = client.drafter.version
                assert load_package(Path(made.info["folder"])).parent == parent
                assert killed
                after = SentFrames()
                assert await texts(client, 0, 8, after) == plain
                assert after.versions() == {version}
        assert (folder.stat().st_mode & 0o777) == 0o700
        async with edge(address, **where) as client, learning(client, folder):
            await until(lambda: client.drafter is not None and client.drafter.version == version)
            assert await texts(client, 0, 8) == plain


@pytest.mark.usefixtures("all_drafts_pay")
async def test_an_own_version_drafts_and_is_told_to_nobody_and_its_parent_can_come_back(
    verifier, edge, tmp_path: Path, caplog, reports
) -> None:
    parent, rng = find_package("general"), np.random.default_rng(1)
    good = tmp_path / "good"
    matrices = {HEAD: (rng.standard_normal((8, 192)) / 192, rng.standard_normal((8192, 8)) * 0.05)}
    write_adapter_package(parent.folder, good, matrices, sequence=1, learned_from=LearnedFrom(1, 1, {}))

    async with edge(verifier, drafter="general") as client:
        named = SentFrames()
        assert client.learnable is not None
        plain = await texts(client, 0, 4, named)
        assert named.versions() == {parent.version}
        await until(lambda: len(reports) == 4)
        assert {each.drafter_version for each in reports} == {parent.version}
        reports.clear()
        assert client.learnable.version == parent.version
        await client.draft_with(good)
        version = load_package(good).version
        assert client.drafter is not None
        assert client.drafter.version == version != parent.version
        assert client.learnable.version == parent.version, "what learns next has the same parent"
        named = SentFrames()
        assert await texts(client, 0, 4, named) == plain
        assert named.versions() == {version}
        await until(lambda: len(reports) == 4)
        told = {(each.drafter, each.drafter_version, each.drafter_hits) for each in reports}
        assert told == {("general", "", ())}
        path = good / "adapter.safetensors"
        content = path.read_bytes()
        write_tensors(path, {f"{HEAD}.A": np.full((8, 192), np.nan, np.float16)})
        with pytest.raises(OutriderError, match="adapter"):
            await client.draft_with(good)
        path.write_bytes(content)
        bad = without_numbers(good, tmp_path / "bad")
        await client.draft_with(bad)
        assert "not finite" in caplog.text
        assert client.drafter.version == version, "the one before stays"
        reports.clear()
        await client.draft_with(parent.folder)  # the version was retired
        assert client.drafter.version == parent.version
        named = SentFrames()
        assert await texts(client, 0, 4, named) == plain
        assert named.versions() == {parent.version}
        await until(lambda: len(reports) == 4)
        assert {each.drafter_version for each in reports} == {parent.version}, "which others know"


# --- at verifiers ---

PROMPT = "def count(words):\n    "


async def test_a_verifier_that_dies_in_mid_text_changes_nothing_and_teaches_once(edge) -> None:
    kept = KeptLessons()

    async def text(client, meanwhile=None) -> list[int]:
        ids: list[int] = []
        async for event in client.generate(PROMPT, max_tokens=64, temperature=1.0, seed=5):
            if isinstance(event, Tokens):
                ids += [token.id for token in event.tokens]
            if meanwhile is not None and len(ids) > 20:
                meanwhile = await meanwhile()
        return ids

    first, second = (VerifierServer(VerifierConfig(threads=1, learn=True), sink=kept) for _ in range(2))
    here, there = await first.start(), await second.start()
    async with edge(there, drafter="general", share_texts=False) as client:
        expected = await text(client)
    assert not kept.records, "nobody agreed"
    async with edge(here, there, drafter="general", share_texts=True) as client:
        assert await text(client, lambda: first.stop(0)) == expected
        await asyncio.to_thread(kept.wait_for, 1)  # what the second one judged
    await second.stop(0)
    records = kept.records
    package = find_package("general")
    drafter = OnnxDrafter(package, threads=1)
    judge = ShadowJudge(drafter)
    judge.begin(drafter)
    for record in records:
        check_record(record, package, LOSSES["kl-tail"])
        assert record.tokenizer_sha256 == package.tokenizer_sha256
        generated = record.tokens[record.first_generated - record.start :].tolist()
        at = max(0, record.start - record.first_generated)
        assert generated == expected[at : at + len(generated)]
        judge.take(record)
    assert judge.test is not None
    assert judge.test.texts <= 1
