"""The drafts of a client bear the name and the version of their drafter."""

from __future__ import annotations

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


async def test_drafts_bear_the_name_and_version_of_their_drafter(tokenizer_file: Path) -> None:
    listening = Listening()
    client, channels = scripted_client(tokenizer_file, drafter="ngram")
    channels.script = lambda _: tuple(map(CommittedToken, (5, 6, 7, 8) * 16))
    async with client:
        await client.collect((5,), client.generate((5, 6, 7, 8) * 8, max_tokens=64, observer=listening))
    first, *others = [(draft.drafter, draft.drafter_version) for draft in listening.drafts]
    assert first == ("ngram", NgramDrafter.version)
    assert set(others) <= {("", "")}
