"""Hundreds of random and damaged frames to a live verifier: it survives, and honest sessions notice nothing."""

from __future__ import annotations

import asyncio
import contextlib
import math
import random

import grpc
import pytest
import torch

from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto import codec
from outrider.proto.errors import FailedPrecondition, Internal, InvalidArgument, NotFound, ResourceExhausted
from outrider.proto.rpc_errors import DETAIL_KEY, from_rpc_error
from outrider.proto.testing import word_tokenizer
from outrider.proto.types import (
    BOUNDS,
    Branch,
    Cancel,
    Commit,
    Draft,
    DraftToken,
    FinishReason,
    Goaway,
    Open,
    Opened,
    Patience,
    Pong,
    Report,
    Sampling,
    token_ids,
)

torch.set_num_threads(1)

VOCAB = 61
ENDED_WHILE_WRITING = "ended while writing"
REFUSALS = (InvalidArgument, FailedPrecondition, NotFound, ResourceExhausted)


@pytest.fixture(scope="module")
def config(tmp_path_factory):
    """Settings of a verifier with a tiny random GPT-2."""
    from transformers import GPT2Config, GPT2LMHeadModel

    folder = tmp_path_factory.mktemp("tiny")
    torch.manual_seed(5)
    shape = {"vocab_size": VOCAB, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 256, "eos_token_id": 2}
    GPT2LMHeadModel(GPT2Config(**shape)).eval().save_pretrained(folder)
    (folder / "tokenizer.json").write_text(word_tokenizer(VOCAB))
    return VerifierConfig(target=str(folder), model="tiny", threads=1, kv_tokens=16384, max_sessions=64, stall_s=5.0)


def honest_open(server, seed=0, **changes):
    defaults = {
        "model": "tiny",
        "tokenizer_sha256": server.tokenizer_sha256,
        "prompt": (5, 6, 7),
        "sampling": Sampling(temperature=1.0, seed=seed, max_tokens=30, ignore_eos=True),
        "session": f"honest-{seed}",
    }
    return Open(**(defaults | changes))


async def honest_text(channel, server, seed):
    """The text of an edge that drafts nothing."""
    call = channel.stream_stream(codec.DECODE_METHOD)()
    await call.write(codec.encode_edge_frame(honest_open(server, seed, drafting=False)))
    tokens = ()
    while True:
        frame = codec.decode_cloud_frame(await asyncio.wait_for(call.read(), 120))
        if isinstance(frame, Commit):
            tokens += token_ids(frame.tokens)
            if frame.finish is not None:
                assert frame.finish is FinishReason.LENGTH
                return tokens


async def send_and_look(channel, frames, max_reads):
    """Return the cloud's answer to `frames`: its frames, or the error."""
    call = channel.stream_stream(codec.DECODE_METHOD)()
    seen = []
    with contextlib.suppress(grpc.RpcError, asyncio.InvalidStateError):  # ended while we wrote; reading tells why
        for frame in frames:
            await call.write(frame)
        await call.done_writing()
    try:
        for _ in range(max_reads):
            data = await asyncio.wait_for(call.read(), 120)
            if data is grpc.aio.EOF:
                break
            seen.append(codec.decode_cloud_frame(data))
    except grpc.aio.AioRpcError as error:
        # Without a detail it is gRPC's own word for a write that met the stream's end, and hides the verifier's.
        detailed = DETAIL_KEY in dict(error.trailing_metadata() or ())
        seen.append(from_rpc_error(error) if detailed else ENDED_WHILE_WRITING)
    finally:
        call.cancel()
    return seen


def damaged(rng, data):
    data = bytearray(data)
    for _ in range(rng.choice([1, 1, 2, 4])):
        kind = rng.random()
        if kind < 0.6 and data:
            data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        elif kind < 0.8:
            data.insert(rng.randrange(len(data) + 1), rng.randrange(256))
        elif data:
            del data[rng.randrange(len(data)) :]
    return bytes(data)


def random_branches(rng, top):
    starts = [rng.choice([3, 4, 5, 30, rng.randrange(1 << 32)]) for _ in range(rng.choice([1, 2, 5, 70]))]
    return tuple(Branch(start, tuple(rng.randrange(top) for _ in range(rng.choice([1, 1, 3, 70])))) for start in starts)


def random_draft(rng):
    n = rng.choice([1, 1, 2, 5, 20, 70])
    top = rng.choice([VOCAB, VOCAB, VOCAB, VOCAB + 3])
    return Draft(
        chain=rng.choice([0, 0, 1, 2, rng.randrange(1 << 31)]),
        start=rng.choice([3, 3, 4, 5, 8, 30, 250, rng.randrange(1 << 32)]),
        tokens=tuple(
            map(
                DraftToken,
                tuple(rng.randrange(top) for _ in range(n)),
                tuple(rng.random() for _ in range(n)) if rng.random() < 0.3 else (math.nan,) * n,
            )
        ),
        branches=random_branches(rng, top) if rng.random() < 0.2 else (),
        complete=rng.random() < 0.3,
    )


def nearly(rng, tokens):
    """Return `tokens`, of which some are others."""
    return tuple(token if rng.random() < 0.8 else rng.randrange(VOCAB) for token in tokens)


def random_frames(rng, server):
    """The bytes of one hostile stream."""
    patience = rng.choice([None, Patience(0.0), Patience(0.01, 3)])
    name = f"hostile-{rng.randrange(1 << 60)}"
    frame = honest_open(server, 99, session=name, patience=patience, trees=rng.random() < 0.5)
    opening = codec.encode_edge_frame(frame)
    kind = rng.random()
    if kind < 0.2:
        return [rng.randbytes(rng.randrange(60))]
    if kind < 0.5:
        return [damaged(rng, opening)]
    later = []
    for _ in range(rng.randrange(1, 8)):
        frame = rng.choice([random_draft(rng), random_draft(rng), Report(rng.random() < 0.5, 0.01), Cancel("x" * 9)])
        data = codec.encode_edge_frame(frame)
        later.append(damaged(rng, data) if rng.random() < 0.4 else data)
    return [opening, *later]


def live(config, scenario):
    async def main():
        server = VerifierServer(config)
        address = await server.start()
        try:
            async with grpc.aio.insecure_channel(address) as channel:
                await scenario(server, channel)
        finally:
            await server.stop(0.2)

    asyncio.run(main())


def test_hostile_streams_are_refused_by_name_and_honest_ones_keep_their_text(config, caplog):
    async def scenario(server, channel):
        rng = random.Random(20)
        wanted = [await honest_text(channel, server, seed) for seed in range(4)]
        outcomes = {"opened": 0, "refused": 0}
        for round_number in range(30):
            hostile = [random_frames(rng, server) for _ in range(5)]
            seed = round_number % 4
            text, *seen = await asyncio.gather(
                honest_text(channel, server, seed), *(send_and_look(channel, frames, 40) for frames in hostile)
            )
            assert text == wanted[seed]
            for frames in seen:
                fine = (
                    isinstance(f, (Opened, Commit, Goaway, Pong, *REFUSALS)) or f is ENDED_WHILE_WRITING for f in frames
                )
                assert all(fine), frames
                outcomes["opened"] += any(isinstance(f, Opened) for f in frames)
                outcomes["refused"] += any(isinstance(f, REFUSALS) for f in frames)
        # How many are seen to open follows from the load: a refusal that comes at once hides the answer before it.
        assert min(outcomes.values()) > 10, f"both ways are tried: {outcomes}"
        for _ in range(500):
            if server.status().sessions == 0:
                break
            await asyncio.sleep(0.01)
        assert server.status().sessions == 0
        assert server.status().kv_pages_free == config.kv_tokens // config.page_size

    live(config, scenario)
    assert not [r for r in caplog.records if r.name.startswith("outrider") and r.levelname == "ERROR"]


def test_random_drafts_of_any_kind_never_change_the_text_of_their_own_session(config):
    async def scenario(server, channel):
        rng = random.Random(21)
        wanted = await honest_text(channel, server, 7)
        for _ in range(40):
            opening = honest_open(server, 7, patience=Patience(0.002, 4), trees=rng.random() < 0.8)
            frames = [codec.encode_edge_frame(opening)]
            for _ in range(rng.randrange(1, 12)):
                start = rng.randrange(3, 20)
                ahead = wanted[start - 3 : start - 3 + rng.randrange(1, 9)]
                tokens = nearly(rng, ahead)
                beside = tuple(
                    Branch(start + i, nearly(rng, ahead[i : i + rng.randrange(1, 4)]))
                    for i in range(len(ahead))
                    if rng.random() < 0.4
                )
                draft = Draft(rng.randrange(3), start, tuple(map(DraftToken, tokens)), branches=beside)
                frames.append(codec.encode_edge_frame(draft))
            seen = await send_and_look(channel, frames, 64)
            tokens = tuple(token for frame in seen if isinstance(frame, Commit) for token in token_ids(frame.tokens))
            assert tokens == wanted, "whatever its chains say, and whether they contradict themselves"

    live(config, scenario)


def test_a_defect_in_reading_a_stream_ends_that_stream_alone(config, monkeypatch, caplog):
    right = codec.decode_edge_frame

    def defective(data, *bounds):
        if b"defective" in data:
            raise KeyError("a defect")
        return right(data, *bounds)

    monkeypatch.setattr(codec, "decode_edge_frame", defective)

    async def scenario(server, channel):
        wanted = await honest_text(channel, server, 3)
        hostile = codec.encode_edge_frame(honest_open(server, 3, session="defective"))
        late = codec.encode_edge_frame(Cancel("defective"))
        begins = codec.encode_edge_frame(honest_open(server, 3, session="begins", patience=Patience(math.inf, 4)))
        for frames in ([hostile], [begins, late]):
            text, seen = await asyncio.gather(honest_text(channel, server, 3), send_and_look(channel, frames, 64))
            assert isinstance(seen[-1], Internal)
            assert text == wanted

    live(config, scenario)
    assert sum("a stream cannot be read" in record.message for record in caplog.records) == 2


def test_extreme_sampling_parameters_give_a_text_or_a_refusal(config):
    big = BOUNDS["logit_bias"].high
    extremes = [
        *(
            Sampling(**{"temperature": 1.0, name: value})
            for name in ("temperature", "top_p", "min_p", "top_k", "repetition_penalty", "frequency_penalty")
            for value in (BOUNDS[name].low, BOUNDS[name].high)
        ),
        Sampling(temperature=1.0, frequency_penalty=100.0, presence_penalty=-100.0),
        Sampling(temperature=1.0, logit_bias=tuple((t, big if t % 2 else -big) for t in range(VOCAB))),
        Sampling(temperature=1.0, allowed_tokens=(4,), logit_bias=((4, -big),)),
    ]

    async def scenario(server, channel):
        wanted = await honest_text(channel, server, 1)
        for i, sampling in enumerate(extremes):
            frame = honest_open(server, i, sampling=sampling, drafting=False)
            seen = await send_and_look(channel, [codec.encode_edge_frame(frame)], 200)
            assert isinstance(seen[0], Opened)
            assert isinstance(seen[-1], Commit), (sampling, seen[-1])
            assert seen[-1].finish is not None, sampling
        assert await honest_text(channel, server, 1) == wanted

    live(config, scenario)
