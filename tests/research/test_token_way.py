"""The files of README's "Follow one token", beside those that a token really passes through."""

from __future__ import annotations

import asyncio
import re
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from outrider.cloud.models.family_index import target_folder, tokenizer_file
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.edge import Client, EdgeConfig, Tokens

BEGINS = "edge/outrider/edge/client.py"  # entered once a text
BEFORE, FOLLOWED = 24, 48  # tokens of the text before those that are followed, and these
OF_EVERY = 8  # a file that is entered less often than once in so many tokens is not on the way of each


@contextmanager
def entered_files() -> Iterator[Counter[str]]:
    """Count the calls into each file, in this thread and in threads that begin inside."""
    calls: Counter[str] = Counter()

    def enter(frame, event, _) -> None:
        if event == "call":
            calls[frame.f_code.co_filename] += 1

    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def follow(calls: Counter[str]) -> Counter[str]:
    """Decode a text with the embedded target and drafter; return the calls of tokens in its midst."""
    server = VerifierServer(VerifierConfig(target="reference", threads=1))
    verifier = await server.start()
    try:
        tokenizer = tokenizer_file(target_folder("reference"))
        edge = EdgeConfig(verifier=verifier, model="reference", tokenizer=tokenizer, drafter="general")
        async with Client(edge) as client:
            seen, before = 0, Counter[str]()
            async for event in client.generate("def main(argv):\n", max_tokens=80, ignore_eos=True):
                seen += len(event.ids) if isinstance(event, Tokens) else 0
                if seen >= BEFORE and not before:
                    before = calls.copy()
                if seen >= BEFORE + FOLLOWED:
                    break
            return calls - before
    finally:
        await server.stop(0)


def test_a_token_passes_through_every_file_that_readme_names(root) -> None:
    section = (root / "README.md").read_text(encoding="utf-8").split("## Follow one token")[1].split("\n## ")[0]
    named = set(re.findall(r"`([\w/]+\.py)`", section))
    assert BEGINS in named
    with entered_files() as calls:
        often = {Path(name) for name, count in asyncio.run(follow(calls)).items() if count * OF_EVERY >= FOLLOWED}
    assert {root / name for name in named - {BEGINS}} <= often
    probes = root / "cloud/outrider/cloud/serving/engine_health.py"
    assert probes.is_file()
    assert probes not in often, "a file that answers probes is on no token's way"
