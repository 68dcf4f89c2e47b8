"""A cloud without a network, whose verifier makes commits of any sizes from scripted tokens."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from dataclasses import replace
from itertools import chain, repeat
from pathlib import Path
from typing import Any

from outrider.edge import Client, EdgeConfig
from outrider.edge.link.link import Connection
from outrider.proto.errors import Unavailable
from outrider.proto.session import EdgeStatistics
from outrider.proto.session.acceptance import accept_drafts
from outrider.proto.types import (
    LATER_SETTINGS,
    Cancel,
    CloudFrame,
    Commit,
    CommittedToken,
    Continue,
    DraftToken,
    EdgeFrame,
    Lease,
    Open,
    Opened,
    token_ids,
)

EOS = 1
VOCABULARY = CONTEXT = 8192
YIELDS = 20  # turns of the event loop that let an edge answer a commit

Script = Callable[[Open], Sequence[CommittedToken]]


def commits(frame: Open, tokens: Sequence[CommittedToken], sizes: Sequence[int]) -> Iterator[Commit]:
    """Cut a text's tokens into commits of these sizes, and then of one token, up to where the text ends."""
    done, finish = 0, None
    for size in chain(sizes, repeat(1)):
        rows = tuple(tokens[done : done + size])
        drafts = tuple(DraftToken(token.id) for token in rows[:-1])
        committed, accepted, finish = accept_drafts(
            drafts, rows, generated=done, sampling=frame.sampling, eos_tokens=frozenset({EOS})
        )
        start = len(frame.prompt) + done
        yield Commit(start, committed, accepted, 8, finish=finish, verified=len(drafts))
        if finish is not None:
            return
        done += len(committed)


class ScriptedStream:
    """Answers a text with all of its commits, or waits for the edge's answer to each where it is `paced`."""

    def __init__(self, channels: ScriptedChannels, statistics: EdgeStatistics) -> None:
        self.statistics = statistics
        self.connection = channels.connection
        self.refused = False
        self._channels = channels
        self._frames: asyncio.Queue[CloudFrame] = asyncio.Queue()
        self._cancelled = False
        self._last: Open | None = None
        self._transcript: list[int] = []
        self._turn = 0

    def send(self, frame: EdgeFrame) -> None:
        self._cancelled |= isinstance(frame, Cancel)
        if isinstance(frame, Open):
            self._frames.put_nowait(
                Opened(
                    0,
                    8,
                    frame.sampling.max_tokens,
                    "scripted",
                    CONTEXT,
                    vocab_size=VOCABULARY,
                    keep_s=frame.keep_s,
                    epoch=frame.epoch,
                    settings=LATER_SETTINGS,
                    eos_tokens=self._channels.eos_tokens,
                )
            )
            self._answer(frame)
        elif isinstance(frame, Continue) and self._last is not None:
            prompt = (*self._transcript[: frame.start], *frame.prompt)
            self._turn += 1
            self._answer(replace(self._last, prompt=prompt, sampling=frame.sampling or self._last.sampling))

    def _answer(self, frame: Open) -> None:
        self._last, self._transcript = frame, list(frame.prompt)
        for commit in commits(frame, self._channels.script(frame), self._channels.sizes):
            self._transcript += token_ids(commit.tokens)
            self._frames.put_nowait(replace(commit, epoch=frame.epoch, turn=self._turn))

    async def frames(self) -> AsyncIterator[CloudFrame]:
        while not self._cancelled:
            yield await self._frames.get()
            for _ in range(YIELDS if self._channels.paced else 0):
                await asyncio.sleep(0)
        await asyncio.Event().wait()


class ScriptedChannels:
    """Streams to such a verifier, in place of `outrider.edge.link.link.Channels`.

    Attributes:
        script: tokens of a text, which go on beyond its end.
        sizes: numbers of tokens in the first commits of each text; the others have one.
        paced: whether the edge can answer each commit before the next, as with steps that take time.
        eos_tokens: ids that end a text of the target.
    """

    stream = ScriptedStream

    def __init__(self) -> None:
        self.script: Script = lambda _: ()
        self.sizes: Sequence[int] = ()
        self.paced = True
        self.eos_tokens: tuple[int, ...] = ()
        self.connection = Connection(None, lambda: self.connection)  # type: ignore[arg-type]

    def connect(self, lease: Lease) -> None:
        pass

    def open_stream(self, lease: Lease, statistics: EdgeStatistics, *_: object) -> ScriptedStream:
        return self.stream(self, statistics)

    async def described(self, lease: Lease, within_s: float) -> Lease:
        return replace(lease, context_length=CONTEXT)

    async def close_stream(self, stream: ScriptedStream) -> None:
        pass

    def retire(self, address: str, connection: Connection) -> None:
        pass

    async def renew(self, lease: Lease) -> None:
        raise Unavailable("there is no other verifier")

    async def close(self) -> None:
        pass


def scripted_client(tokenizer: Path, channels: Any = None, **config: Any) -> tuple[Client, Any]:
    """Make a client of that cloud, and the channels that it decodes through."""
    options = {"verifier": "127.0.0.1:1", "model": "tiny", "drafter": "none", **config}
    client = Client(EdgeConfig(tokenizer=tokenizer, **options))
    client._channels = channels = channels or ScriptedChannels()
    return client, channels
