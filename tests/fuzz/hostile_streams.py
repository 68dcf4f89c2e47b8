"""Damaged streams to a verifier over gRPC, and honest texts beside them that must come out exactly."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from frame_mutations import mutated, reordered
from recorded_streams import CONTINUES, recorded_stream

from outrider.proto import codec
from outrider.proto.errors import Internal, OutriderError, ResourceExhausted
from outrider.proto.rpc_errors import DETAIL_KEY, from_rpc_error
from outrider.proto.streams import ENDED, send_bytes
from outrider.proto.types import Commit, Draft, DraftToken, Open, Sampling, token_ids

AT_ONCE = 8
READ_WITHIN_S = 120.0  # a stream whose edge has closed its half must end
TURN_WITHIN_S = 2.0
TELLTALE = 16  # tokens in a row that only one text has
# One connection each, so that a frame which breaks one breaks nobody else's.
_ALONE = [("grpc.use_local_subchannel_pool", 1)]


@dataclass(frozen=True)
class Canary:
    """A text that is known: prompt, seed and tokens."""

    prompt: tuple[int, ...]
    seed: int
    tokens: tuple[int, ...]


@dataclass
class HostileStreams:
    """Streams to one verifier, until so many frames have been sent.

    Attributes:
        model: id of its target.
        tokenizer_sha256: hash of the target's tokenizer.
        canaries: texts that honest clients ask for meanwhile.
        own: text of the recorded streams, which a hostile one keeps where its first frame is whole.
        frames: frames sent.
        answers: frames that came.
        ends: streams by their end.
        whole: canaries that came out right.
        wrong: what must not be, one line each.
    """

    address: str
    model: str
    tokenizer_sha256: str
    canaries: Sequence[Canary]
    own: tuple[int, ...]
    seed: int
    frames: int = 0
    answers: int = 0
    ends: Counter[str] = field(default_factory=Counter)
    whole: int = 0
    wrong: list[str] = field(default_factory=list)

    async def run(self, frames: int) -> None:
        """Send so many frames, and let honest clients decode until then."""
        rng = random.Random(self.seed)
        recorded = [recorded_stream(seed)[0] for seed in range(AT_ONCE)]
        starts = range(len(self.canaries[0].tokens) - TELLTALE + 1)
        marks = {canary.tokens[at : at + TELLTALE] for canary in self.canaries for at in starts}
        over = asyncio.Event()

        async def fire() -> None:
            async with grpc.aio.insecure_channel(self.address, options=_ALONE) as channel:
                while self.frames < frames:
                    await self._one_stream(channel, *self._hostile(rng, rng.choice(recorded)), marks)

        async def sing(number: int) -> None:
            async with grpc.aio.insecure_channel(self.address, options=_ALONE) as channel:
                while not over.is_set():
                    await self._sing(channel, rng.choice(self.canaries), f"canary-{number}-{self.whole}")

        singing = [asyncio.create_task(sing(number)) for number in range(2)]
        try:
            await asyncio.gather(*(fire() for _ in range(AT_ONCE)))
        finally:
            over.set()
            await asyncio.gather(*singing)

    def _hostile(self, rng: random.Random, recorded: Sequence[bytes]) -> tuple[list[bytes], bool]:
        """Return the frames of a stream, and whether its first is whole."""
        opening = codec.decode_edge_frame(recorded[0])
        assert isinstance(opening, Open)
        session = f"hostile-{rng.getrandbits(40):x}"
        sha256 = self.tokenizer_sha256
        first = codec.encode_edge_frame(replace(opening, model=self.model, tokenizer_sha256=sha256, session=session))
        rest = list(recorded[1:])
        if rng.random() < 0.5:
            rest = reordered(rng, rest)
        hurt = rng.choice((0.02, 0.1, 0.4))
        whole = rng.random() < 0.8
        opened = first if whole else mutated(rng, first)
        return [opened, *(mutated(rng, frame) if rng.random() < hurt else frame for frame in rest)], whole

    async def _one_stream(
        self, channel: grpc.aio.Channel, frames: Sequence[bytes], whole: bool, marks: set[tuple[int, ...]]
    ) -> None:
        call: Any = channel.stream_stream(codec.DECODE_METHOD)()
        finished = asyncio.Event()
        writing = asyncio.create_task(self._write(call, frames, finished))
        said: tuple[int, ...] = ()
        first_turn = 0
        try:
            async with asyncio.timeout(READ_WITHIN_S):
                while (data := await call.read()) is not grpc.aio.EOF:
                    self.answers += 1
                    frame = codec.decode_cloud_frame(data)
                    if isinstance(frame, Commit):
                        said += token_ids(frame.tokens)
                        first_turn += len(frame.tokens) * (frame.turn == 0)
                        if frame.finish is not None:
                            finished.set()
            self._end(await call.code(), await call.trailing_metadata(), await call.details())
        except grpc.aio.AioRpcError as error:
            self._end(error.code(), error.trailing_metadata(), error.details(), error)
        except asyncio.InvalidStateError:
            self.ends["ended while it was written"] += 1
        except TimeoutError:
            self.wrong.append(f"a stream whose edge closed its half is open after {READ_WITHIN_S:g} s")
        except OutriderError as error:
            self.wrong.append(f"the verifier sent what cannot be read: {error}")
        finally:
            writing.cancel()
            call.cancel()
        if whole and said[:first_turn] != self.own[:first_turn]:
            self.wrong.append(f"a hostile stream got another text than its own: {said}")
        if any(said[at : at + TELLTALE] in marks for at in range(len(said))):
            self.wrong.append(f"a hostile stream got another session's text: {said}")

    async def _write(self, call: Any, frames: Sequence[bytes], finished: asyncio.Event) -> None:
        """Write a stream; another turn follows the end of the one before, where that comes soon."""
        with suppress(*ENDED):
            for frame in frames:
                if frame[:1] == CONTINUES:
                    with suppress(TimeoutError):
                        await asyncio.wait_for(finished.wait(), TURN_WITHIN_S)
                    finished.clear()
                await send_bytes(call, frame)
                self.frames += 1
            await call.done_writing()

    def _end(self, code: grpc.StatusCode, metadata: Any, details: str | None, error: Any = None) -> None:
        if code is grpc.StatusCode.OK:
            self.ends["went on to its end"] += 1
            return
        if DETAIL_KEY not in dict(metadata or ()):
            if code in (grpc.StatusCode.UNKNOWN, grpc.StatusCode.UNAVAILABLE):
                self.wrong.append(f"a stream ended with {code.name} {details!r}, which no error of the tree says")
            self.ends[f"{code.name} of gRPC's own"] += 1
            return
        known = from_rpc_error(error or grpc.aio.AioRpcError(code, grpc.aio.Metadata(), metadata, details))
        self.ends[type(known).__name__] += 1
        if isinstance(known, Internal):
            self.wrong.append(f"a stream ended with a defect: {known}")

    async def _sing(self, channel: grpc.aio.Channel, canary: Canary, session: str) -> None:
        """Decode one honest text, with drafts of which every other one is right."""
        sampling = Sampling(temperature=1.0, seed=canary.seed, max_tokens=len(canary.tokens), ignore_eos=True)
        opening = Open(self.model, self.tokenizer_sha256, canary.prompt, sampling, session)
        call: Any = channel.stream_stream(codec.DECODE_METHOD)()
        drafts = Draft(0, len(canary.prompt), tuple(map(DraftToken, (*canary.tokens[:4], canary.tokens[4] ^ 1))))
        with suppress(*ENDED):  # refused while it was written
            await send_bytes(call, codec.encode_edge_frame(opening))
            await send_bytes(call, codec.encode_edge_frame(drafts))
        said: tuple[int, ...] = ()
        try:
            async with asyncio.timeout(READ_WITHIN_S):
                while (data := await call.read()) is not grpc.aio.EOF:
                    frame = codec.decode_cloud_frame(data)
                    if isinstance(frame, Commit):
                        said += token_ids(frame.tokens)
        except grpc.aio.AioRpcError as error:
            known = from_rpc_error(error)
            if not isinstance(known, ResourceExhausted):
                self.wrong.append(f"an honest text failed: {known}")
            await asyncio.sleep(0.2)
            return
        except TimeoutError:
            self.wrong.append(f"an honest text did not end within {READ_WITHIN_S:g} s")
            return
        finally:
            call.cancel()
        if said == canary.tokens:
            self.whole += 1
        else:
            self.wrong.append(f"an honest text is not its oracle's: {said}")
