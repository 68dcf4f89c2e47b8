"""A verifier whose target fails for everybody: its texts go on elsewhere, and it gets no others."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from fleets import fleet
from questions import Question, questions

from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.edge import Client
from outrider.edge.link.control_client import CoordinatorClient

TEXTS = 30
AT_ONCE = 12
TOKENS = 20


@pytest.fixture(scope="module")
def asked(folder) -> list[Question]:
    return questions(folder, TEXTS, TOKENS)


def break_target(server: VerifierServer, after_steps: int) -> None:
    """Let every step after the next `after_steps` fail, as after a device-side assertion of CUDA."""
    target = server._engine.backend.target
    right, left = target.forward, iter(range(after_steps))

    def forward(batch: Any) -> Any:
        if next(left, None) is None:
            raise RuntimeError("CUDA error: device-side assert triggered")
        return right(batch)

    target.forward = forward


def streams_met(server: VerifierServer) -> float:
    """How many sessions came to a verifier, taken or refused."""
    names = {f"outrider:verifier_{how}_sessions_total" for how in ("admitted", "refused")}
    families = server._engine.metrics.registry.collect()
    return sum(sample.value for family in families for sample in family.samples if sample.name in names)


async def ask_all(client: Client, asked: list[Question]) -> list[tuple[str, int]]:
    """The text of every answer, and how often its stream was lost."""
    room = asyncio.Semaphore(AT_ONCE)

    async def one(question: Question) -> tuple[str, int]:
        async with room:
            done = await client.complete(
                question.prompt, seed=question.seed, max_tokens=TOKENS, temperature=1.0, ignore_eos=True
            )
        return done.text.strip(), done.statistics.resumes

    return await asyncio.gather(*map(one, asked))


@pytest.mark.parametrize("after_steps", [0, 40], ids=["from the first step on", "in the midst of texts"])
async def test_no_text_is_lost_or_changed_by_a_verifier_that_always_fails(folder, asked, tmp_path, after_steps) -> None:
    async with (
        fleet("a", "b", tiny=folder, verifier={"dtype": "float32"}) as found,
        found.client(tmp_path, drafter="ngram") as client,
    ):
        failing, sound = found.verifiers.values()
        break_target(failing, after_steps)
        answers = await ask_all(client, asked)
        assert [text for text, _ in answers] == [question.text for question in asked]
        resumed = sum(resumes > 0 for _, resumes in answers)
        assert 0 < resumed < TEXTS, "those that met it before the coordinator looked again"
        assert (failing.status().state, sound.status().state) == ("down", "ready")
        control = CoordinatorClient(found.address)
        states = {v.name: v.state for v in (await control.status()).verifiers}
        await control.close()
        assert states["a"] != "ready"
        assert states["b"] == "ready"
        met = streams_met(failing)
        assert met > 0, "or nothing is counted"
        await ask_all(client, asked[:AT_ONCE])
        assert streams_met(failing) == met, "it gets no others"
