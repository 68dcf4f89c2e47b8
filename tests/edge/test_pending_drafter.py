"""A drafter that is slow to load: texts begin without it, and it takes part in them once it is there."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from scripted_cloud import ScriptedChannels, ScriptedStream, scripted_client

from outrider.drafters import NgramDrafter
from outrider.drafters.protocol import Drafter
from outrider.drafters.search import DrafterSearch
from outrider.drafters.shelf import Member
from outrider.edge import Client
from outrider.proto.errors import DataLoss, NotFound, TokenizerMismatch
from outrider.proto.session import EdgeStatistics
from outrider.proto.types import CloudFrame, CommittedToken, Draft, EdgeFrame, Open

PROMPT = (5, 6, 7, 8) * 8
TEXT = tuple(map(CommittedToken, (5, 6, 7, 8) * 16))
COMMITS_BEFORE = 8  # the drafter is there


class SlowLoad:
    """Load that ends when the test says so, with a drafter or an error; all names find such a drafter."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.begun, self.go_on = threading.Event(), threading.Event()
        self.error: Exception | None = None
        monkeypatch.setattr(DrafterSearch, "named", lambda *_: [Member("slow", "1", 1000, self.load)])

    def load(self) -> Drafter:
        self.begun.set()
        assert self.go_on.wait(30)
        if self.error is not None:
            raise self.error
        return NgramDrafter(name="slow")


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> SlowLoad:
    return SlowLoad(monkeypatch)


@asynccontextmanager
async def client_of(tokenizer: Path) -> AsyncIterator[Client]:
    client, channels = scripted_client(tokenizer, drafter="slow")
    channels.script = lambda _: TEXT
    try:
        yield client
    finally:
        await client.close()


async def test_a_slow_load_delays_no_token(tokenizer_file: Path, slow: SlowLoad) -> None:
    async with client_of(tokenizer_file) as client:
        for _ in range(2):
            completion = await client.complete(PROMPT, max_tokens=len(TEXT))
            assert completion.tokens == TEXT
            assert (completion.statistics.drafted, completion.statistics.drafter_error) == (0, "")
        assert slow.begun.is_set()
        assert not slow.go_on.is_set()
        assert client.drafter_name == "slow"
        assert client.drafter is None
        slow.go_on.set()
        await client.prepare()
        assert client.drafter is not None


class GatedStream(ScriptedStream):
    """Lets the load end after a few commits, and the drafting thread answer each commit from then on."""

    def __init__(self, channels: GatedChannels, statistics: EdgeStatistics) -> None:
        super().__init__(channels, statistics)
        self._gates = channels

    async def frames(self) -> AsyncIterator[CloudFrame]:
        received = 0
        async for frame in super().frames():
            if received == COMMITS_BEFORE:
                self._gates.slow.go_on.set()
                await self._gates.client.prepare()
            elif received > COMMITS_BEFORE:
                await asyncio.get_running_loop().run_in_executor(self._gates.client._thread, lambda: None)
            received += 1
            yield frame


class GatedChannels(ScriptedChannels):
    stream = GatedStream

    def __init__(self, client: Client, slow: SlowLoad) -> None:
        super().__init__()
        self.client, self.slow = client, slow
        self.opens: list[Open] = []
        self.script = self._note

    def _note(self, frame: Open) -> Sequence[CommittedToken]:
        self.opens.append(frame)
        return TEXT


async def test_a_drafter_takes_part_in_a_text_that_began_while_it_loaded(tokenizer_file: Path, slow: SlowLoad) -> None:
    async with client_of(tokenizer_file) as client:
        channels = client._channels = GatedChannels(client, slow)  # type: ignore[assignment]
        completion = await client.complete(PROMPT, max_tokens=len(TEXT))
        assert completion.tokens == TEXT
        assert completion.statistics.drafted > 0
        assert completion.statistics.drafter_error == ""
        assert [frame.drafting for frame in channels.opens] == [True]


@pytest.mark.parametrize("cold", [True, False])
async def test_a_drafter_that_cannot_be_loaded_is_reported(tokenizer_file: Path, slow: SlowLoad, cold: bool) -> None:
    slow.error = DataLoss("model.onnx has the wrong hash")
    async with client_of(tokenizer_file) as client:
        if cold:
            await client.find()
        slow.go_on.set()
        if not cold:
            await client.prepare()
            assert client.drafter_name == "none"
        for _ in range(2):
            completion = await client.complete(PROMPT, max_tokens=8)
            assert completion.tokens == TEXT[:8]
        await client.prepare()
        completion = await client.complete(PROMPT, max_tokens=8)
        assert "wrong hash" in completion.statistics.drafter_error


@pytest.mark.parametrize("error", [NotFound("is unknown", field="drafter"), TokenizerMismatch("another")])
async def test_a_mistake_in_the_name_is_an_error_at_once(
    tokenizer_file: Path, slow: SlowLoad, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    def named(*_: object) -> list[Member]:
        raise error

    monkeypatch.setattr(DrafterSearch, "named", named)
    async with client_of(tokenizer_file) as client:
        with pytest.raises(type(error)):
            await client.complete(PROMPT, max_tokens=8)


async def test_a_client_can_be_closed_while_its_drafter_loads(tokenizer_file: Path, slow: SlowLoad) -> None:
    async with client_of(tokenizer_file) as client:
        await client.complete(PROMPT, max_tokens=8)
        assert client.ready is not None
        assert slow.begun.wait(30)
        await client.close()
        assert not slow.go_on.is_set()
        slow.go_on.set()
        await asyncio.to_thread(client.ready.shelf._thread.shutdown)
        assert client.drafter is None


async def test_the_first_text_has_what_needs_no_loading_beside_the_drafter_that_loaded(
    tokenizer_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    members = [Member("slow", "1", 1000, lambda: NgramDrafter(name="slow")), Member("ngram", "1", 0, NgramDrafter)]
    monkeypatch.setattr(DrafterSearch, "named", lambda *_: list(members))
    async with client_of(tokenizer_file) as client:
        await client.prepare()
        assert [drafter.name for drafter in client.ready.shelf.drafters()[0]] == ["slow", "ngram"]


# --- the first token waits for no drafter, and drafts do not wait for it ---


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
async def client_with(tokenizer: Path, drafter: HeldDrafter) -> AsyncIterator[tuple[Client, WatchfulChannels]]:
    client, channels = scripted_client(tokenizer, WatchfulChannels())
    client._preparation._drafters = (drafter,)
    async with client:
        yield client, channels


async def test_a_drafter_that_never_gets_ready_delays_no_token(tokenizer_file: Path) -> None:
    drafter = HeldDrafter()
    async with client_with(tokenizer_file, drafter) as (client, channels):
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
    async with client_with(tokenizer_file, drafter) as (client, channels):
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
    async with client_with(tokenizer_file, drafter) as (client, channels):
        channels.eos_tokens = (1, 9)
        await client.complete(PROMPT, max_tokens=4)
        assert not drafter.rules[-1].eos_tokens, "nobody asked, and no rule is replaced"
        channels.answers_after_a_draft = True
        await client.complete(PROMPT, max_tokens=4, min_tokens=3)
        assert drafter.rules[-1].eos_tokens == {1, 9}
