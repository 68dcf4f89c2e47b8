"""An edge's say in how much its verifier's own drafter drafts: the option, and the Open that carries it."""

from __future__ import annotations

import pytest
from scripted_cloud import scripted_client

from outrider.cloud.models.family_index import target_folder, tokenizer_file
from outrider.deploy.cli import parse
from outrider.edge import EdgeConfig
from outrider.proto.errors import ConfigError
from outrider.proto.types import CommittedToken, Open, Sampling

FILE = tokenizer_file(target_folder("reference"))
WHERE = {"verifier": "127.0.0.1:1", "model": "m"}


@pytest.mark.parametrize("drafts", [None, 0, 8])
async def test_the_open_asks_for_what_the_option_says(drafts: int | None) -> None:
    opened: list[Open] = []

    def script(frame: Open) -> list[CommittedToken]:
        opened.append(frame)
        return [CommittedToken(5), CommittedToken(6)]

    client, channels = scripted_client(FILE, drafts_here=drafts)
    channels.script = script
    async with client:
        await client.complete([3, 4], Sampling(max_tokens=2))
    assert [frame.drafts_here for frame in opened] == [drafts]


def test_the_verifier_decides_unless_the_option_is_set() -> None:
    arguments = ["edge", "--verifier", "127.0.0.1:1", "--model", "m"]
    assert parse(arguments)(EdgeConfig).drafts_here is None
    assert parse([*arguments, "--drafts-here", "0"])(EdgeConfig).drafts_here == 0
    with pytest.raises(ConfigError, match="drafts_here: -1 is below 0"):
        EdgeConfig(**WHERE, drafts_here=-1)
