"""Texts with a drafter of another tokenizer equal those without any drafter."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from other_tokenizer import byte_tokenizer, with_tokenizer

from outrider.drafters import NgramDrafter, find_package
from outrider.drafters.by_text import TextDrafter, Vocabulary
from outrider.edge.event_stream import Finished
from outrider.proto.session import EdgeStatistics

PROMPT = "The cat sat on the mat. The dog sat on the mat. The cat sat on the"


def drafters(tmp_path: Any) -> dict[str, Any]:
    reference = Vocabulary(find_package("general").tokenizer_path.read_text(encoding="utf-8"))
    return {
        "none": "none",
        "package": str(with_tokenizer(tmp_path / "foreign", byte_tokenizer())),
        "bytes": TextDrafter(NgramDrafter(longest=8), Vocabulary(byte_tokenizer()), reference),
    }


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_with_another_tokenizer_leaves_the_text_as_it_is(serving, edge, tmp_path, temperature) -> None:
    async def scenario() -> dict[str, tuple[str, EdgeStatistics]]:
        found = {}
        async with serving() as address:
            for name, drafter in drafters(tmp_path).items():
                async with edge(address, drafter=drafter, drafts_here=0) as client:
                    text = client.generate(PROMPT, max_tokens=40, temperature=temperature, seed=5)
                    events = [event async for event in text]
                    done = events[-1]
                    assert isinstance(done, Finished)
                    found[name] = "".join(event.text for event in events), done.statistics
        return found

    found = asyncio.run(scenario())
    text = found["none"][0]
    assert text
    for name in ("package", "bytes"):
        assert found[name][0] == text, name
        assert not found[name][1].drafter_error
    assert found["bytes"][1].drafted > 0
    assert found["package"][1].drafted > 0
    if temperature == 0:
        assert found["bytes"][1].accepted > 0
