"""Several drafters at one edge against a real verifier: the text is the target's, whoever drafts, fails or is away."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from other_tokenizer import byte_tokenizer, with_tokenizer
from scripted_drafters import FailingDrafter

from outrider.drafters import NgramDrafter, find_package
from outrider.drafters.by_text import TextDrafter, Vocabulary
from outrider.drafters.onnx import OnnxDrafter
from outrider.edge import Client, EdgeConfig

FAMILY = "general,swift,ngram"
SELECTORS = ("leader", "metasd-bd")  # with and without catching up; the session's own tests have them all


@pytest.mark.usefixtures("all_drafts_pay")
async def test_selectors_leave_the_text_as_it_is_and_give_turns(verifier, edge, prompts) -> None:
    prompt, sampling = prompts(1)[0].text, {"max_tokens": 32, "temperature": 1.0, "seed": 3}
    async with edge(verifier, drafter="none") as client:
        alone = (await client.complete(prompt, **sampling)).ids
    for name in SELECTORS:
        async with edge(verifier, drafter=FAMILY, selector=name) as client:
            await all_loaded(client)
            text = await client.complete(prompt, **sampling)
        assert text.ids == alone, name
        turns = text.statistics.of_drafters
        assert sum(counts.committed for counts in turns.values()) == text.statistics.committed
        assert set(turns) <= set(FAMILY.split(","))
        if name == "leader":
            assert len(turns) == 3, "all of them catch up"
            assert text.statistics.read > 0


@pytest.mark.usefixtures("all_drafts_pay")
async def test_by_default_a_text_beside_others_has_one_drafter_and_is_what_it_is(verifier, edge, prompts) -> None:
    prompt, sampling = prompts(1)[0].text, {"max_tokens": 32, "temperature": 0.0}
    async with edge(verifier, drafter="none") as client:
        alone = (await client.complete(prompt, **sampling)).ids
    async with edge(verifier, drafter="auto") as client:
        await all_loaded(client)
        texts = await asyncio.gather(*(client.complete(prompt, **sampling) for _ in range(2)))
        texts.append(await client.complete(prompt, **sampling))
    assert [text.ids for text in texts] == [alone] * 3
    first, beside, after = (set(text.statistics.of_drafters) for text in texts)
    assert beside == {"general"}
    assert min(len(first), len(after)) > 1


async def test_a_broken_drafter_leaves_its_turn_to_the_others_and_the_text_as_it_is(
    verifier, edge, tokenizer_file
) -> None:
    prompt, sampling = "def main(argv):\n", {"max_tokens": 48}
    async with edge(verifier, drafter="none") as client:
        alone = (await client.complete(prompt, **sampling)).ids
    broken = FailingDrafter(3, OnnxDrafter(find_package("general"), threads=1))
    config = EdgeConfig(verifier=verifier, model="reference", tokenizer=tokenizer_file)
    async with Client(config, drafters=(broken, NgramDrafter())) as client:
        text = await client.complete(prompt, **sampling)
        assert text.ids == alone
        assert text.statistics.drafter_error, "and it is said"
        assert text.statistics.of_drafters["ngram"].committed > 0
        assert (await client.complete(prompt, **sampling)).ids == alone


async def test_turns_of_a_conversation_keep_the_pool_and_the_text(verifier, edge) -> None:
    said = []
    for drafter in ("none", FAMILY):
        async with edge(verifier, drafter=drafter) as client:
            await all_loaded(client)
            async with client.conversation(max_tokens=20) as conversation:
                said.append([(await conversation.complete(turn)).ids for turn in ("def main(", "argv):\n", "# end")])
    assert said[0] == said[1]


async def all_loaded(client: Client) -> None:
    """Wait until all drafters are loaded."""
    assert client.ready is not None
    assert await asyncio.to_thread(client.ready.shelf.load_all) == {}


# --- drafters of another tokenizer ---

PROMPT = "The cat sat on the mat. The dog sat on the mat. The cat sat on the"


def drafters(tmp_path: Any) -> dict[str, Any]:
    reference = Vocabulary(find_package("general").tokenizer_path.read_text(encoding="utf-8"))
    return {
        "none": "none",
        "package": str(with_tokenizer(tmp_path / "foreign", byte_tokenizer())),
        "bytes": TextDrafter(NgramDrafter(longest=8), Vocabulary(byte_tokenizer()), reference),
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_drafter_with_another_tokenizer_leaves_the_text_as_it_is(verifier, edge, tmp_path, temperature) -> None:
    found = {}
    for name, drafter in drafters(tmp_path).items():
        async with edge(verifier, drafter=drafter, drafts_here=0) as client:
            found[name] = await client.complete(PROMPT, max_tokens=40, temperature=temperature, seed=5)
    assert found["none"].text
    for name in ("package", "bytes"):
        assert found[name].text == found["none"].text, name
        assert not found[name].statistics.drafter_error
        assert found[name].statistics.drafted > 0
    if temperature == 0:
        assert found["bytes"].statistics.accepted > 0
