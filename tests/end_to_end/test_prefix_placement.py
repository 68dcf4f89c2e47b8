"""Two verifiers: texts go where the beginning of their prompt is cached, unless others have used it or load forbids."""

from __future__ import annotations

import asyncio
import random
from pathlib import Path
from typing import Any

import pytest
from fleets import Fleet, fleet

import outrider.edge.link.routes
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.testing import save_tiny_target
from outrider.cloud.verifier_config import VerifierConfig
from outrider.edge import Client, EdgeConfig
from outrider.edge.client import Completion
from outrider.proto.plumbing.access import Key, secret_sha256
from outrider.proto.session import RetryRules
from outrider.proto.testing import write_keys

# As long as the test: a granted lease counts as a session, so that load alone sends the next text elsewhere.
POLL_S = 60.0


def two_verifiers(folder: Path, **coordinator: Any) -> Any:
    return fleet("a", "b", tiny=folder, poll_s=POLL_S, **coordinator)


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, 60), k=length))


def places(found: Fleet) -> list[str]:
    """Verifiers of the leases, in their order."""
    return [grant.verifier for grant in found.coordinator.service._view.granted]  # type: ignore[union-attr]


async def complete(client: Client, text: tuple[int, ...], seed: int = 0) -> Completion:
    return await client.complete(text, max_tokens=12, temperature=1.0, seed=seed, ignore_eos=True)


@pytest.mark.parametrize("second", ["the chat's next stream", "another text of its system prompt"])
@pytest.mark.parametrize("recognised", [True, False])
async def test_a_text_that_begins_alike_finds_what_is_cached(recognised, second, folder, tmp_path, monkeypatch) -> None:
    if not recognised:
        monkeypatch.setattr(outrider.edge.link.routes, "text_prefixes", lambda *_: ())

    system, question = prompt(1, 100), prompt(2, 20)
    async with two_verifiers(folder) as found, found.client(tmp_path) as client:
        first = await complete(client, (*system, *question))
        before = (*question, *first.ids) if "chat" in second else ()
        done = await complete(client, (*system, *before, *prompt(3, 20)))
        assert places(found) == ["a", "a" if recognised else "b"]
    assert first.statistics.cached_tokens == 0
    if recognised:
        assert done.statistics.cached_tokens >= 100 + max(0, len(before) - 1), "all that was computed"
    else:
        assert done.statistics.cached_tokens == 0, "load alone sends it to the other verifier"


async def test_load_wins_where_the_verifier_that_has_the_beginning_is_busy(folder, tmp_path) -> None:
    async with two_verifiers(folder) as found, found.client(tmp_path) as client:
        text = prompt(1, 70)  # five beginnings, worth a session
        cached = [(await complete(client, text, seed)).statistics.cached_tokens for seed in range(4)]
        where = places(found)
    assert where == ["a", "a", "b", "b"], "one more than the other, and no more; then both have it"
    assert cached == [0, 69, 0, 69]


async def test_keys_do_not_attract_each_other(folder, tmp_path) -> None:
    keys = write_keys(tmp_path / "keys.toml", *(Key(name, secret_sha256(f"{name}s")) for name in ("alice", "bob")))
    text = prompt(5, 200)
    async with (
        two_verifiers(folder, api_keys=keys) as found,
        found.client(tmp_path, api_key="alices") as alice,
        found.client(tmp_path, api_key="bobs") as bob,
    ):
        cached = [(await complete(client, text)).statistics.cached_tokens for client in (alice, bob, alice, bob)]
        where = places(found)
    assert where == ["a", "b", "a", "b"], "to each its own, though the prompts are equal"
    assert cached == [0, 0, 199, 199]


# --- turns of a chat ---

PROMPT = tuple(3 + i % 50 for i in range(45))


def test_each_turn_of_a_chat_reads_what_is_new_and_no_answer_changes(tmp_path) -> None:
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
                    done = await client.complete(said, max_tokens=9, temperature=turn % 2, seed=3, ignore_eos=True)
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


# --- more texts at once than the KV cache holds ---

PROMPTS = ("def main(argv):", "Once upon a time", "The sum of 3 and 4 is", "# Title", "import os")


async def test_texts_that_do_not_fit_together_wait_or_move_and_are_the_same(serving, edge) -> None:
    async def ask(**limits) -> tuple[list[tuple[int, ...]], int]:
        async with (
            serving(**limits) as address,
            edge(address, drafter="ngram", retry=RetryRules(abandon_after_s=30.0)) as client,
        ):
            texts = await asyncio.gather(
                *(
                    client.complete(prompt, max_tokens=64, ignore_eos=True, temperature=1.0, seed=seed)
                    for seed, prompt in enumerate(PROMPTS)
                )
            )
        return [text.ids for text in texts], sum(text.statistics.resumes for text in texts)

    expected, resumes = await ask(kv_tokens=4096)
    assert resumes == 0
    found, resumes = await ask(kv_tokens=144)
    assert resumes > 0, "no text was sent away"
    assert found == expected
