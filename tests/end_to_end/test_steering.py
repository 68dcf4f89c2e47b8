"""Steering from the target's hidden state to the draft and back: whatever vectors come, the text is the target's."""

from __future__ import annotations

import asyncio
import math
import random
from contextlib import asynccontextmanager
from dataclasses import replace

import numpy as np
import pytest
import torch
from fleets import SentFrames
from tiny_drafter import RANK, STEERING_MANIFEST, steering_graph, tiny_graph, write_package

from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.target.projection import Projection
from outrider.cloud.testing import save_tiny_target
from outrider.cloud.verifier_config import VerifierConfig
from outrider.drafters.onnx import OnnxState
from outrider.edge import Client, EdgeConfig
from outrider.edge.event_stream import Finished, Tokens
from outrider.proto import codec
from outrider.proto.errors import Internal
from outrider.proto.steering_vector import decode, encode
from outrider.proto.types import Commit, Open, Patience, Report, Sampling, Steering, SteeringPrecision, SteeringRequest

PROMPTS = ((3, 7, 11), (40, 8, 5, 5))
LENGTH = Sampling(max_tokens=40, ignore_eos=True)
SAMPLINGS = (LENGTH, replace(LENGTH, temperature=1.0, seed=9))
UNTIL_DRAFTED = Patience(math.inf, 4)  # else drafts of a busy machine may all come too late
INT8 = SteeringPrecision.INT8


@pytest.fixture(scope="module")
def target(tmp_path_factory):
    return save_tiny_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def projection(tmp_path_factory):
    """(file, id) of one that suits the target; its vectors are large, so that they do steer."""
    torch.manual_seed(1)
    made = Projection((0,), 16, RANK, "tiny")
    with torch.no_grad():
        made.down.weight.normal_(std=2.0)
    path = tmp_path_factory.mktemp("projection") / "projection.safetensors"
    return path, made.save(path)


@pytest.fixture(scope="module")
def package(tmp_path_factory, target, projection):
    """A steered drafter of the target's tokens that knows nothing of its text."""
    folder = tmp_path_factory.mktemp("drafter")
    steering = STEERING_MANIFEST | {"projection": projection[1]}
    tokenizer = (target / "tokenizer.json").read_text()
    write_package(folder, tiny_graph(steered=True), steering_graph(), tokenizer, steering=steering)
    return folder


class Frames(SentFrames):
    """Finds the requests for vectors among what was sent."""

    def steering_requests(self):
        return [frame.steering for frame in self.of(Open | Report) if frame.steering is not None]


@asynccontextmanager
async def serving(target, *projections):
    config = VerifierConfig(
        target=str(target),
        model="tiny",
        threads=1,
        kv_tokens=4096,
        min_step_s=0.005,  # else a busy machine's drafter hardly makes a draft before the tiny target is done
        steering=tuple(map(str, projections)),
    )
    server = VerifierServer(config)
    try:
        yield await server.start()
    finally:
        await server.stop(0)


def edge(address, target, drafter, **config):
    return Client(
        EdgeConfig(verifier=address, model="tiny", tokenizer=target / "tokenizer.json", drafter=str(drafter), **config)
    )


async def texts_of(client, observer=None):
    """(tokens, statistics) of every prompt and sampling."""
    found = await asyncio.gather(
        *(client.complete(prompt, sampling, observer=observer) for prompt in PROMPTS for sampling in SAMPLINGS)
    )
    return [(completion.ids, completion.statistics) for completion in found]


@pytest.fixture(scope="module")
def expected(target):
    """The same texts by plain cloud streaming."""

    async def main():
        async with serving(target) as address, edge(address, target, "none") as client:
            return [tokens for tokens, _ in await texts_of(client)]

    return asyncio.run(main())


async def test_the_text_is_the_same_with_steering_on_chosen_and_off(target, projection, package, expected):
    async with serving(target, projection[0]) as address:
        for how in ("on", "auto", "off"):
            frames = Frames()
            waits = {"patience": UNTIL_DRAFTED} if how == "on" else {}
            async with edge(address, target, package, steering=how, **waits) as client:
                found = await texts_of(client, frames)
            assert [tokens for tokens, _ in found] == expected
            statistics = [each for _, each in found]
            assert all(each.steered == (how != "off") and not each.drafter_error for each in statistics)
            vectors = sum(each.vectors for each in statistics)
            if how == "off":
                assert (vectors, frames.steering_requests()) == (0, [])
                continue
            assert vectors > (10 if how == "on" else 0)  # chosen, they end: no draft of this drafter is ever right
            assert sum(each.vector_bytes for each in statistics) == RANK * vectors
            assert sum(each.steered_jobs for each in statistics) > (10 if how == "on" else 0)
            assert all(each.vector_age >= each.steered_jobs for each in statistics)
            assert all(request.projection == projection[1] for request in frames.steering_requests())
            if how == "on":
                assert set(frames.steering_requests()) == {SteeringRequest(projection[1], INT8, 1)}
                assert vectors == sum(each.steps - 1 for each in statistics), "all but the last, which ends the text"


async def test_a_vector_of_the_last_processed_position_reaches_the_drafter_unchanged(
    target, projection, package, monkeypatch
):
    """The tap, the projection and the wire, against torch's own forward pass; and what the drafter is given."""
    from transformers import LlamaForCausalLM

    given = []
    frames = Frames()
    original = OnnxState.steer

    def steer(self, vector, since):
        given.append((vector, since))
        original(self, vector, since)

    async with serving(target, projection[0]) as address, edge(address, target, package, steering="on") as client:
        monkeypatch.setattr(OnnxState, "steer", steer)
        completion = await client.complete(PROMPTS[0], SAMPLINGS[0], observer=frames)
    tokens = torch.tensor([*PROMPTS[0], *completion.ids])
    model = LlamaForCausalLM.from_pretrained(target).eval()
    with torch.no_grad():
        by_torch = Projection.load(projection[0])(model.model.embed_tokens(tokens)).numpy()  # what layer 0 reads
    sent = []
    for commit in frames.streams[0][1]:
        if commit.steering is not None:
            position = commit.start + len(commit.tokens) - 2
            sent.append(decode(commit.steering, RANK))
            largest = np.abs(by_torch[position]).max()
            np.testing.assert_allclose(sent[-1], by_torch[position], atol=0.51 * largest / 127)
            assert largest > 0.5, "or it would prove little"
    assert len(sent) > 10
    assert len(given) > 5
    for vector, since in given:
        assert since == len(PROMPTS[0])
        assert any(np.array_equal(vector, each) for each in sent)


def spoilt(kind, rng):
    """Damage to a vector on its way; `noise` comes with any scale."""

    def spoil(commit):
        match kind:
            case "noise":
                noise = np.array([rng.gauss(0, 1) for _ in range(RANK)], dtype=np.float32) * 10 ** rng.uniform(-3, 6)
                return replace(commit, steering=encode(noise, SteeringPrecision.FLOAT16))
            case "lost":
                return commit if rng.random() < 0.3 else replace(commit, steering=None)
            case "malformed":
                return replace(commit, steering=Steering(1.0, bytes(RANK + rng.choice((-1, 1, 200))), INT8))

    return spoil


@pytest.mark.parametrize("kind", ["noise", "lost", "malformed"])
async def test_the_text_is_the_same_with_vectors_that_are_wrong_lost_or_malformed(
    target, projection, package, expected, monkeypatch, kind
):
    spoil, decoded = spoilt(kind, random.Random(3)), codec.decode_cloud_frame

    def received(data):
        frame = decoded(data)
        return spoil(frame) if isinstance(frame, Commit) and frame.steering is not None else frame

    async with serving(target, projection[0]) as address:
        monkeypatch.setattr(codec, "decode_cloud_frame", received)
        async with edge(address, target, package, steering="on") as client:
            found = await texts_of(client)
    assert [tokens for tokens, _ in found] == expected
    statistics = [each for _, each in found]
    assert not any(each.drafter_error for each in statistics)
    vectors, steps = sum(each.vectors for each in statistics), sum(each.steps for each in statistics)
    assert (vectors < 0.6 * steps) == (kind == "lost")
    assert sum(each.bad_vectors for each in statistics) == (vectors if kind == "malformed" else 0)
    assert (sum(each.steered_jobs for each in statistics) == 0) == (kind == "malformed")


async def test_without_the_projection_or_with_another_drafter_all_is_as_before(target, projection, package, expected):
    async with serving(target) as address, edge(address, target, package, patience=UNTIL_DRAFTED) as client:
        found = await texts_of(client)
    assert [tokens for tokens, _ in found] == expected
    for _, statistics in found:
        assert (statistics.steered, statistics.vectors, statistics.steered_jobs) == (False, 0, 0)
    assert sum(statistics.drafted for _, statistics in found) > 20, "it goes on drafting"
    async with serving(target, projection[0]) as address:
        frames = Frames()
        async with edge(address, target, "ngram") as client:
            found = await texts_of(client, frames)
    assert [tokens for tokens, _ in found] == expected
    assert frames.steering_requests() == []
    assert not any(statistics.steered or statistics.vectors for _, statistics in found)


async def test_turns_of_a_conversation_begin_unsteered_and_have_the_texts_of_fresh_ones(target, projection, package):
    frames = Frames()
    async with serving(target, projection[0]) as address, edge(address, target, package, steering="on") as client:
        said = []
        async with client.conversation(SAMPLINGS[1], observer=frames) as talk:
            said += [await talk.complete(prompt) for prompt in PROMPTS]
        assert len(frames.of(Open)) == 1, "the session was kept"
    async with serving(target) as address, edge(address, target, "none") as client:
        transcript = ()
        for prompt, turn in zip(PROMPTS, said, strict=True):
            fresh = await client.complete((*transcript, *prompt), SAMPLINGS[1])
            assert turn.ids == fresh.ids
            assert turn.statistics.steered
            assert turn.statistics.vectors > 0
            transcript = (*transcript, *prompt, *turn.ids)


async def test_a_stream_that_breaks_leaves_the_text_and_the_steering(target, projection, package, expected, relay):
    async with (
        serving(target, projection[0]) as address,
        relay(address) as middle,
        edge(middle.address, target, package, steering="on") as client,
    ):
        tokens = ()
        async for event in client.generate(PROMPTS[0], SAMPLINGS[0]):
            if isinstance(event, Tokens):
                tokens += event.ids
                if len(tokens) > 12 and not middle.cuts:
                    middle.cut()
            elif isinstance(event, Finished):
                statistics = event.statistics
    assert tokens == expected[0]
    assert (statistics.resumes, statistics.steered) == (1, True)
    assert statistics.vectors > 10


async def test_a_drafter_that_cannot_take_its_vectors_costs_drafts_and_no_text(
    target, projection, package, expected, monkeypatch
):
    def steer(self, vector, since):
        raise Internal("no more of that")

    frames, waits = Frames(), {"steering": "on", "patience": UNTIL_DRAFTED}
    async with serving(target, projection[0]) as address, edge(address, target, package, **waits) as client:
        monkeypatch.setattr(OnnxState, "steer", steer)
        found = await texts_of(client, frames)
    assert [tokens for tokens, _ in found] == expected
    assert all("no more of that" in statistics.drafter_error for _, statistics in found)
    assert SteeringRequest(projection[1], INT8, 0) in frames.steering_requests(), (
        "and its edge asks for vectors no more"
    )
