"""The first token of a text: it waits for no drafter, drafts do not wait for it."""

from __future__ import annotations

import threading
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from scripted_cloud import ScriptedChannels, ScriptedStream, scripted_client

from outrider.drafters import NgramDrafter
from outrider.edge import Client
from outrider.proto.session import EdgeStatistics
from outrider.proto.types import CommittedToken, Draft, EdgeFrame, Open

TEXT = tuple(map(CommittedToken, (5, 6, 7, 8) * 6))
PROMPT = (5, 6, 7, 8) * 8


class HeldDrafter(NgramDrafter):
    """An n-gram drafter that does nothing, such as reading the prompt, until the test lets it.

    Attributes:
        rules: the rules by which its states were to propose.
    """

    def __init__(self) -> None:
        super().__init__()
        self.go_on = threading.Event()
        self.rules: list[Any] = []

    def open(self, rule: Any) -> Any:
        self.rules.append(rule)
        assert self.go_on.wait(30)
        return super().open(rule)


class WatchfulStream(ScriptedStream):
    """Notes the frames of its edge, and answers an Open only after a draft where it is told to."""

    def __init__(self, channels: WatchfulChannels, statistics: EdgeStatistics) -> None:
        super().__init__(channels, statistics)
        self.sent: list[EdgeFrame] = []
        self._waits = channels.answers_after_a_draft
        self._held: list[EdgeFrame] = []
        channels.streams.append(self)

    def send(self, frame: EdgeFrame) -> None:
        self.sent.append(frame)
        if isinstance(frame, Open) and self._waits:
            self._held.append(frame)
            return
        if isinstance(frame, Draft) and self._held:
            super().send(self._held.pop())
        super().send(frame)


class WatchfulChannels(ScriptedChannels):
    stream = WatchfulStream

    def __init__(self) -> None:
        super().__init__()
        self.answers_after_a_draft = False
        self.streams: list[WatchfulStream] = []
        self.script = lambda _: TEXT


@asynccontextmanager
async def client_of(tokenizer: Path, drafter: HeldDrafter) -> AsyncIterator[tuple[Client, WatchfulChannels]]:
    client, channels = scripted_client(tokenizer, WatchfulChannels())
    client._preparation._drafters = (drafter,)
    async with client:
        yield client, channels


async def test_a_drafter_that_never_gets_ready_delays_no_token(tokenizer_file: Path) -> None:
    drafter = HeldDrafter()
    async with client_of(tokenizer_file, drafter) as (client, channels):
        for _ in range(2):  # without and with terms of an earlier text
            completion = await client.complete(PROMPT, max_tokens=len(TEXT))
            assert completion.tokens == TEXT
        for stream in channels.streams:
            assert isinstance(stream.sent[0], Open)
            assert not any(isinstance(frame, Draft) and frame.tokens for frame in stream.sent)
        assert len(drafter.rules) == 1, "the thread is still at the first text's first job"
        drafter.go_on.set()


async def test_drafts_follow_the_open_of_a_verifier_that_has_answered_before(tokenizer_file: Path) -> None:
    drafter = HeldDrafter()
    drafter.go_on.set()
    async with client_of(tokenizer_file, drafter) as (client, channels):
        await client.complete(PROMPT, max_tokens=4)
        channels.answers_after_a_draft = True
        completion = await client.complete(PROMPT, max_tokens=len(TEXT))
        assert completion.tokens == TEXT
        opening, draft = channels.streams[1].sent[:2]
        assert isinstance(opening, Open)
        assert isinstance(draft, Draft)
        assert (draft.start, draft.tokens[0].id) == (len(PROMPT), 5)


async def test_drafts_hold_to_min_tokens_with_the_ends_that_the_verifier_names(tokenizer_file: Path) -> None:
    drafter = HeldDrafter()
    drafter.go_on.set()
    async with client_of(tokenizer_file, drafter) as (client, channels):
        channels.eos_tokens = (1, 9)
        await client.complete(PROMPT, max_tokens=4)
        assert not drafter.rules[-1].eos_tokens, "nobody asked, and no rule is replaced"
        channels.answers_after_a_draft = True
        await client.complete(PROMPT, max_tokens=4, min_tokens=3)
        assert drafter.rules[-1].eos_tokens == {1, 9}
