"""The script that times kept turns beside new texts."""

from __future__ import annotations

import argparse
import asyncio
import runpy

from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig


def test_turns_are_asked_both_ways_and_a_kept_one_sends_less(root, capsys) -> None:
    measure = runpy.run_path(str(root / "research/kept_turns.py"), run_name="kept_turns")["measure"]

    async def main() -> None:
        servers = [
            VerifierServer(VerifierConfig(target="reference", listen="127.0.0.1:0", kv_tokens=4096)) for _ in range(2)
        ]
        options = argparse.Namespace(
            verifiers=[await server.start() for server in servers],
            target="reference",
            drafter="ngram",
            turns=3,
            chats=1,
            max_tokens=4,
        )
        try:
            await measure(options)
        finally:
            for server in servers:
                await server.stop(0)

    asyncio.run(main())
    *_, first, second, third, last = capsys.readouterr().out.splitlines()
    assert last == "medians of 1 chats; all texts equal"
    for number, line in enumerate((first, second, third), 1):
        turn, _, *_, kept, anew = line.strip("| ").split(" | ")
        assert int(turn) == number
        assert int(kept) < int(anew) or number == 1
