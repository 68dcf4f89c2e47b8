"""Doors that extreme values are given to: the codec, the session machine, a verifier and a coordinator."""

from __future__ import annotations

import asyncio
import math
import random
from collections.abc import Callable, Coroutine, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Self
from unittest import mock

import grpc
from decoded_by_hand import decode_by_hand
from extreme_values import MAX_SINGLE
from golden_messages import EXAMPLES
from loop_thread import LoopThread
from machines_under_fire import HonestSession, VerifierUnderFire
from recorded_streams import HASH, PROMPT, oracle
from refusals import check_refusal

from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.testing import save_tiny_target
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto import codec
from outrider.proto.errors import OutriderError
from outrider.proto.rpc_errors import DETAIL_KEY, from_rpc_error
from outrider.proto.streams import ENDED, send_bytes
from outrider.proto.types import (
    Branch,
    Branches,
    Cancel,
    Commit,
    Continue,
    Draft,
    DraftToken,
    EdgeFrame,
    Open,
    Patience,
    Ping,
    PromptLogprobs,
    Report,
    Sampling,
    token_ids,
)
from outrider.proto.v1 import decoding_pb2 as pb

VOCABULARY = 131_072  # of a real target
MAX_SMALL_BYTES = 1 << 16  # of a frame that is neither an Open nor a Continue, or that is decoded on the event loop
ANSWER_WITHIN_S = 60.0
CONTEXT = 96
TEXT = 12  # tokens
# Each setting in use, so that one extreme value meets all others.
SETTINGS = Sampling(
    temperature=0.9, seed=5, top_k=20, top_p=0.9, min_p=0.01, repetition_penalty=1.1, presence_penalty=0.5,
    frequency_penalty=0.5, logit_bias=((5, 0.5), (6, -0.5)), max_tokens=TEXT, min_tokens=2, stop_tokens=(60,),
    ignore_eos=True,
)  # fmt: skip


_CONTROL = {
    "LeaseRequest": "lease request",
    "SessionReport": "session report",
    "ListDraftersRequest": "drafter query",
    "WatchDraftersRequest": "drafter query",
    "FetchFileRequest": "fetch",
    "DrainRequest": "drain",
}


def decoded(data: bytes) -> EdgeFrame | None:
    """Return the frame that a verifier of a large vocabulary makes of a message; None: it refuses it."""
    try:
        frame = codec.decode_edge_frame(data, VOCABULARY)
    except OutriderError as error:
        check_refusal(error)
        return None
    assert len(data) <= MAX_SMALL_BYTES or isinstance(frame, Open | Continue), (
        f"{len(data)} bytes are taken as one {type(frame).__name__}"
    )
    if isinstance(frame, Open | Continue) and frame.sampling is not None:
        check_single(frame.sampling)
    again = codec.decode_edge_frame(codec.encode_edge_frame(frame), VOCABULARY)
    assert repr(again) == repr(frame), (frame, again)  # in place of ==, since NaN differs from itself
    return frame


def check_single(sampling: Sampling) -> None:
    """Fail for a number of a text's settings that is none in float32, in which scores are processed."""
    numbers = [getattr(sampling, field.name) for field in fields(sampling)] + [bias for _, bias in sampling.logit_bias]
    for value in numbers:
        assert not isinstance(value, float) or abs(value) <= MAX_SINGLE, f"{value} is taken: {sampling}"


def written(wanted: Sequence[int], opening: Open) -> list[EdgeFrame]:
    """Return the frames of an edge that knows the text `wanted`: right and wrong drafts, branches, and another turn."""
    start = len(opening.prompt)
    miss = tuple(map(DraftToken, (*wanted[:2], wanted[2] ^ 1, *wanted[3:5]), (0.5,) * 5))
    saved = (Branch(start + 2, tuple(wanted[2:5]), 0.5),)
    later = tuple(map(DraftToken, wanted[4:8]))
    return [
        opening,
        Ping(1),
        Draft(0, start, miss, "swift", "7", branches=saved),
        Branches(0, (*saved, Branch(start + 2, tuple(wanted[2:4]), 0.25))),
        Report(True, 0.001, 0.02, 0.5),
        Draft(1, start + 4, later, complete=True),
        Cancel("enough"),
        Continue(start + 1, (7,), opening.sampling, 9),
    ]


def opening(**changes: Any) -> Open:
    """Return an Open that asks for all that there is, of the verifier of recorded streams."""
    defaults: dict[str, Any] = {
        "tokenizer_sha256": HASH, "prompt": PROMPT, "sampling": SETTINGS, "session": "s", "window": 16,
        "patience": Patience(0.02, 3),
        "max_drafts": 8, "logprobs": True, "top_logprobs": 3, "keep_s": 5.0, "drafts_here": 0, "trees": True,
    }  # fmt: skip
    return Open("m", **(defaults | changes))


def oracle_text() -> tuple[int, ...]:
    """Return what follows the prompt of recorded streams."""
    said = PROMPT
    for _ in range(TEXT):
        said += (oracle(said),)
    return said[len(PROMPT) :]


def messages(frames: Sequence[EdgeFrame]) -> list[Any]:
    """Return frames as protobuf messages, with an empty one of each kind that is not among them."""
    found = [pb.EdgeFrame.FromString(codec.encode_edge_frame(frame)) for frame in frames]
    for field in pb.EdgeFrame.DESCRIPTOR.oneofs_by_name["body"].fields:
        if all(message.WhichOneof("body") != field.name for message in found):
            found.append(pb.EdgeFrame())
            getattr(found[-1], field.name).SetInParent()
    return found


def drive_machine(frames: Sequence[bytes], seed: int) -> None:
    """Give frames to a verifier's session machine, with an honest session beside it."""
    verifier, honest = VerifierUnderFire(random.Random(seed)), HonestSession()
    for data in frames:
        verifier.receive(data)
        honest.go_on()
        if verifier.refusal is not None:
            break
    verifier.check()


class VerifierAtDoor:
    """A verifier of a tiny target on a loop of its own, and streams to it beside honest ones."""

    def __init__(self, folder: Path) -> None:
        save_tiny_target(folder, max_position_embeddings=CONTEXT)
        ((self.text,), _) = decode_by_hand(folder, [PROMPT], [5], TEXT)
        self._folder = folder
        self._failed: list[str] = []
        self._number = 0
        self._bytes_on_loop = 0  # of the largest frame that was decoded there since the last check
        self._loop = LoopThread()

    def __enter__(self) -> Self:
        self._decode = mock.patch.object(codec, "decode_edge_frame", self._watched(codec.decode_edge_frame))
        self._decode.start()
        self.run(self._start())
        return self

    def __exit__(self, *_: object) -> None:
        self.run(self._stop())
        self._decode.stop()
        self._loop.close()

    def run(self, work: Coroutine[Any, Any, Any]) -> Any:
        """Return what comes of work on the verifier's loop."""
        return self._loop.run(work, 2 * ANSWER_WITHIN_S)

    async def _start(self) -> None:
        config = VerifierConfig(target=str(self._folder), model="m", dtype="float32", kv_tokens=4096, threads=1)
        self._server = VerifierServer(config, b"", lambda: self._failed.append("the verifier has failed"))
        self.address = await self._server.start()
        self._channel = grpc.aio.insecure_channel(self.address)

    async def _stop(self) -> None:
        await self._channel.close()
        await self._server.stop(0.1)

    def _watched(self, decode: Callable[..., EdgeFrame]) -> Callable[..., EdgeFrame]:
        def watched(data: bytes, *limits: int) -> EdgeFrame:
            if asyncio._get_running_loop() is not None:
                self._bytes_on_loop = max(self._bytes_on_loop, len(data))
            return decode(data, *limits)

        return watched

    def frames(self, **changes: Any) -> list[EdgeFrame]:
        """Return an edge's frames for the honest text."""
        return written(self.text, opening(**changes, tokenizer_sha256=self._server.tokenizer_sha256))

    async def check(self, hostile: Coroutine[Any, Any, Any]) -> None:
        """Fail unless an honest text is itself beside `hostile`, and all frames on the loop are small."""
        self._bytes_on_loop = 0
        await asyncio.gather(self._honest(), hostile)
        assert not self._failed, self._failed
        most = self._bytes_on_loop
        assert most <= MAX_SMALL_BYTES, f"the loop decodes a frame of {most} bytes, and all others wait for it"

    async def _honest(self) -> None:
        self._number += 1
        plain = Sampling(temperature=1.0, seed=5, max_tokens=TEXT, ignore_eos=True)
        opened = self.frames(sampling=plain, session=f"honest-{self._number}", keep_s=0.0, drafting=False)[0]
        said = await self.stream([codec.encode_edge_frame(opened)])
        assert said == tuple(self.text), "a stranger's text is disturbed"

    async def stream(self, frames: Sequence[bytes]) -> tuple[int, ...]:
        """Send the frames of one stream, and return the text that comes back; fail for what must not come."""
        call: Any = self._channel.stream_stream(codec.DECODE_METHOD)()
        said: tuple[int, ...] = ()
        writing = asyncio.create_task(_write(call, frames))
        try:
            async with asyncio.timeout(ANSWER_WITHIN_S):
                while (data := await call.read()) is not grpc.aio.EOF:
                    frame = codec.decode_cloud_frame(data)
                    assert not any(map(math.isnan, _probabilities(frame))), f"NaN is answered: {frame}"
                    said += token_ids(frame.tokens) if isinstance(frame, Commit) else ()
                _check_end(await call.code(), await call.trailing_metadata(), await call.details())
        except grpc.aio.AioRpcError as error:
            _check_end(error.code(), error.trailing_metadata(), error.details())
        except asyncio.InvalidStateError:
            pass  # it ended while it was written
        finally:
            writing.cancel()
            call.cancel()
        return said


def _probabilities(frame: Any) -> Iterator[float]:
    tokens = frame.tokens if isinstance(frame, Commit | PromptLogprobs) else ()
    for token in tokens:
        yield from (value for value in (getattr(token, "logp", None), token.logprob) if value is not None)
        yield from (value for _, value in getattr(token, "top", ()))


async def _write(call: Any, frames: Sequence[bytes]) -> None:
    try:
        for frame in frames:
            await send_bytes(call, frame)
        await call.done_writing()
    except ENDED:
        pass  # refused meanwhile


def _check_end(code: grpc.StatusCode, metadata: Any, details: str | None) -> None:
    if code is grpc.StatusCode.OK or "Received message larger than max" in (details or ""):
        return  # gRPC refuses a message of too many bytes by itself
    assert DETAIL_KEY in dict(metadata or ()), (
        f"a stream ends with {code.name} {details!r}, which no error of the tree says"
    )
    check_refusal(from_rpc_error(grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details)))


def control_base(kind: type[Any]) -> Any:
    """Return a right request of a kind; an empty one where none is recorded."""
    name = _CONTROL.get(kind.DESCRIPTOR.name)
    if name is None:
        return kind()
    example = EXAMPLES[name]
    return kind.FromString(example.encode(example.message))


def control_methods() -> dict[str, tuple[type[Any], bool]]:
    """Return the methods of the coordinator by name: the class of their requests, and whether they answer a stream."""
    service = pb.DESCRIPTOR.services_by_name["Control"]
    return {m.name: (getattr(pb, m.input_type.name), m.server_streaming) for m in service.methods}


async def ask(channel: grpc.aio.Channel, method: str, streaming: bool, data: bytes) -> None:
    """Send one request to a coordinator; fail for an end that is no refusal."""
    path = f"/{codec.CONTROL_SERVICE}/{method}"
    call: Any = (channel.unary_stream if streaming else channel.unary_unary)(path)(data, timeout=ANSWER_WITHIN_S)
    try:
        await (call.read() if streaming else call)
    except grpc.aio.AioRpcError as error:
        _check_end(error.code(), error.trailing_metadata(), error.details())
    finally:
        call.cancel()
