"""Learning goes wrong while texts are decoded, and each text is the one that it would have been."""

from __future__ import annotations

import asyncio
from pathlib import Path

import numpy as np
import pytest
from kept_lessons import KeptLessons
from tokenizers import Tokenizer

from outrider.cloud.learning.judge import ShadowJudge, hits_of
from outrider.cloud.learning.lesson_record import record_of_text
from outrider.cloud.learning.losses import LOSSES, check_record
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.drafters import find_package
from outrider.drafters.adapters import weights_of, write_adapter_package
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.packages import load_package
from outrider.edge.event_stream import Tokens
from outrider.proto.drafter_format import LearnedFrom
from outrider.proto.types import Sampling

HEAD = "model.lm_head.weight"
PROMPT = "def count(words):\n    "


def poisoned(folder: Path) -> Path:
    """A version of the embedded drafter that every check lets load, and whose head is led astray."""
    parent = find_package("general")
    weight = weights_of(parent)[HEAD]
    rng = np.random.default_rng(1)
    a, b = rng.standard_normal((8, weight.shape[1])), rng.standard_normal((len(weight), 8))
    b *= 0.45 * np.linalg.norm(weight) / np.linalg.norm(b @ a)  # half of the norm is refused
    return write_adapter_package(
        parent.folder, folder, {HEAD: (a, b)}, sequence=9, learned_from=LearnedFrom(1000, 8, {"code": 1000})
    )


@pytest.mark.usefixtures("all_drafts_pay")
async def test_a_poisoned_version_that_loads_costs_hits_and_changes_no_token(serving, edge, tmp_path) -> None:
    bad = poisoned(tmp_path / "bad")
    sampling, texts = Sampling(max_tokens=48, temperature=1.0, seed=7), []
    async with serving() as address:
        for drafter in ("none", "general", str(bad)):
            async with edge(address, drafter=drafter) as client:
                done = await client.complete(PROMPT, sampling)
                texts.append(done.ids)
                assert (done.statistics.drafted > 0) == (drafter != "none")
    ids = texts[0]
    assert texts == [ids] * 3
    prompt = Tokenizer.from_file(str(bad / "tokenizer.json")).encode(PROMPT).ids
    salts = {"session_salt": bytes(16), "key_salt": bytes(16)}
    text = record_of_text([*prompt, *ids], len(prompt), sampling, model="reference", **salts)
    good, worse = (
        hits_of(OnnxDrafter(load_package(folder), threads=1), text).mean()
        for folder in (find_package("general").folder, bad)
    )
    assert worse < good, "it is poisoned indeed"


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
