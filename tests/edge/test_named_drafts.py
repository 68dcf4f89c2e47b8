"""The drafts of a client bear the name and the version of their drafter."""

from __future__ import annotations

import asyncio
from pathlib import Path

from scripted_cloud import scripted_client

from outrider.drafters import NgramDrafter
from outrider.edge.decoding import Observer
from outrider.proto.types import CommittedToken, Draft, EdgeFrame


class Listening(Observer):
    """Keeps the drafts that are sent."""

    def __init__(self) -> None:
        self.drafts: list[Draft] = []

    def sent(self, frame: EdgeFrame, now: float) -> None:
        if isinstance(frame, Draft):
            self.drafts.append(frame)


def test_drafts_bear_the_name_and_version_of_their_drafter(tokenizer_file: Path) -> None:
    listening = Listening()

    async def decode() -> None:
        client, channels = scripted_client(tokenizer_file, drafter="ngram")
        channels.script = lambda _: tuple(map(CommittedToken, (5, 6, 7, 8) * 16))
        async with client:
            async for _ in client.generate((5, 6, 7, 8) * 8, max_tokens=64, observer=listening):
                pass

    asyncio.run(decode())
    first, *others = [(draft.drafter, draft.drafter_version) for draft in listening.drafts]
    assert first == ("ngram", NgramDrafter.version)
    assert set(others) <= {("", "")}
