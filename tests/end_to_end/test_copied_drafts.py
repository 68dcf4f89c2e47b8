"""Drafts copied from a prediction, from files and from earlier answers: they change the speed of a text, never it."""

from __future__ import annotations

import math
import random

import pytest

from outrider.edge.decoding import Observer
from outrider.proto.types import Patience

PROMPT = "def main(argv):\n"
PATIENT = Patience(math.inf, 8)
TOKENS = 64
AT_RANDOM = {"temperature": 1.0, "seed": 5, "ignore_eos": True}  # a text that does not repeat itself


class Drafted(Observer):
    """Keeps the machine of the newest text."""

    def began(self, subject, machine, at) -> None:
        self.machine = machine


async def written(client, **options):
    """Return the ids of a text, its statistics, and how often its copying drafter was right."""
    observer = Drafted()
    events = [event async for event in client.generate(PROMPT, max_tokens=TOKENS, observer=observer, **options)]
    ids = tuple(token for event in events[:-1] for token in event.ids)
    return ids, events[-1].statistics, observer.machine.statistics.of("retrieval")


def edited(ids, share: float = 0.1):
    """Return ids with that share of tokens replaced by others of them."""
    draw = random.Random(3)
    return [draw.choice(ids) if draw.random() < share else token for token in ids]


@pytest.mark.usefixtures("all_drafts_pay")
@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_a_prediction_changes_the_speed_of_a_text_and_not_the_text(verifier, edge, temperature) -> None:
    sampling = {"temperature": temperature, "seed": 11, "ignore_eos": True}
    async with edge(verifier, drafter="none") as client:
        plain, streamed, _ = await written(client, **sampling)
        assert (await written(client, prediction=plain, **sampling))[0] == plain
    async with edge(verifier, drafter="general", patience=PATIENT) as client:
        assert (await written(client, prediction=edited(plain), **sampling))[0] == plain
        copied, statistics, right = await written(client, prediction=plain, **sampling)
        assert copied == plain
        assert right.hits > 0.5 * TOKENS
        assert statistics.steps < 0.8 * streamed.steps, "how far depends on when the drafts come"
        assert (await written(client, **sampling))[2].compared == 0  # nothing to copy from any more


@pytest.mark.usefixtures("all_drafts_pay")
async def test_a_useless_or_hostile_prediction_leaves_the_text_as_it_is(verifier, edge) -> None:
    async with edge(verifier, drafter="general", patience=PATIENT) as client:
        plain, _, _ = await written(client, **AT_RANDOM)
        special = client.encode("<|endoftext|><|user|>") * 300
        for prediction in ("", special, (plain[:20] + special[:4]) * 30, "ß" * 5000):
            assert (await written(client, prediction=prediction, **AT_RANDOM))[0] == plain


@pytest.mark.usefixtures("all_drafts_pay")
async def test_files_are_copied_from_and_read_again_when_they_change(verifier, edge, tmp_path) -> None:
    document = tmp_path / "notes.txt"
    document.write_text("Nothing of it.", encoding="utf-8")
    async with edge(verifier, drafter="none") as client:
        plain, _, _ = await written(client, **AT_RANDOM)
        text = client.decode(plain)
        config = {"drafter": "general", "draft_from": (tmp_path,), "patience": PATIENT}
        async with edge(verifier, **config) as copying:
            assert copying.drafter_name == "general,retrieval"
            ids, _, without = await written(copying, **AT_RANDOM)
            assert ids == plain
            document.write_text(PROMPT + text, encoding="utf-8")
            local = copying.ready.local_texts
            local.refresh()
            local._thread.submit(int).result()  # after what it has begun
            ids, _, right = await written(copying, **AT_RANDOM)
            assert ids == plain
            assert right.hits > max(0.5 * TOKENS, 2 * without.hits)


@pytest.mark.usefixtures("all_drafts_pay")
async def test_earlier_answers_are_copied_from_where_they_are_kept(verifier, edge, tmp_path) -> None:
    kept = tmp_path / "answers"
    async with edge(verifier, drafter="general", patience=PATIENT) as client:
        plain, _, _ = await written(client, **AT_RANDOM)
    assert not kept.exists()
    config = {"drafter": "general", "draft_answers": kept, "patience": PATIENT}
    async with edge(verifier, **config) as client:
        first, _, without = await written(client, **AT_RANDOM)
    async with edge(verifier, **config) as client:
        second, _, right = await written(client, **AT_RANDOM)
    assert first == second == plain
    assert right.hits > max(0.5 * TOKENS, 2 * without.hits)


@pytest.mark.usefixtures("all_drafts_pay")
async def test_each_turn_of_a_conversation_has_its_own_prediction(verifier, edge) -> None:
    async with edge(verifier, drafter="none") as client, client.conversation(max_tokens=48) as talk:
        plain = [(await talk.complete(prompt)).ids for prompt in (PROMPT, "\n\nclass", "\n    def")]
    general = edge(verifier, drafter="general", patience=PATIENT)
    async with general as client, client.conversation(max_tokens=48) as talk:
        first = await talk.complete(PROMPT)
        second = await talk.complete("\n\nclass", prediction=plain[1])
        third = await talk.complete("\n    def", prediction=plain[2])
    assert [first.ids, second.ids, third.ids] == plain
    assert "retrieval" not in first.statistics.of_drafters
    for turn in (second, third):
        assert turn.statistics.of("retrieval").hits > 24
