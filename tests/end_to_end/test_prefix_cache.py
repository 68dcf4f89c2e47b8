"""Shared KV pages from outside: chats read what is new, keys are kept apart, and texts stay what they are."""

from __future__ import annotations

import asyncio

import pytest
from fleets import SECRET, LeasedRoute

from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.testing import save_tiny_target
from outrider.cloud.verifier_config import VerifierConfig
from outrider.edge import Client, EdgeConfig

PROMPT = tuple(3 + i % 50 for i in range(45))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_each_turn_of_a_chat_reads_what_is_new_and_no_answer_changes(temperature, tmp_path) -> None:
    async def chat(shares: bool) -> tuple[list[tuple[int, ...]], list[tuple[int, int]]]:
        """Return the answers of four turns, and the cached tokens of each beside those that were known."""
        folder = save_tiny_target(tmp_path / str(shares))
        target, tokenizer = str(folder), folder / "tokenizer.json"
        server = VerifierServer(VerifierConfig(target=target, threads=1, kv_tokens=4096, no_prefix_cache=not shares))
        edge = EdgeConfig(verifier=await server.start(), model=target, tokenizer=tokenizer, drafter="none")
        answers, found, said = [], [], PROMPT
        known = 0
        try:
            async with Client(edge) as client:
                for turn in range(4):
                    done = await client.complete(said, max_tokens=9, temperature=temperature, seed=3, ignore_eos=True)
                    answers.append(done.ids)
                    found.append((done.statistics.cached_tokens, known))
                    known = len(said) + len(done.ids) - 1  # the answer's last token was never computed
                    said = (*said, *done.ids, *PROMPT[turn : turn + 7])
        finally:
            await server.stop(0)
        return answers, found

    (alone, read_alone), (shared, read) = asyncio.run(chat(False)), asyncio.run(chat(True))
    assert shared == alone
    assert [cached for cached, _ in read_alone] == [0] * 4
    assert [cached for cached, _ in read] == [known for _, known in read]


@pytest.mark.parametrize("shares", [True, False])
async def test_no_key_finds_what_another_has_computed(shares, tmp_path) -> None:
    target = str(save_tiny_target(tmp_path))
    config = VerifierConfig(
        name="v", target=target, model="tiny", threads=1, kv_tokens=4096, no_prefix_cache=not shares
    )
    server = VerifierServer(config, SECRET)
    tokenizer = tmp_path / "tokenizer.json"
    edge = EdgeConfig(verifier=await server.start(), model="tiny", tokenizer=tokenizer, drafter="none")
    found: dict[str, list[int]] = {"one": [], "two": []}
    texts = set()
    try:
        for key in ("one", "two", "one", "two"):
            route = LeasedRoute((edge.verifier,), "tiny", server.tokenizer_sha256)
            route.api_key = key
            async with Client(edge, route=route) as client:
                done = await client.complete(PROMPT, max_tokens=8, temperature=1.0, seed=3)
            found[key].append(done.statistics.cached_tokens)
            texts.add(done.ids)
    finally:
        await server.stop(0)
    assert len(texts) == 1
    assert found == {key: [0, len(PROMPT) - 1 if shares else 0] for key in found}, "to each its own"
