"""Files that a drafted token passes through, traced in a real run: `python -m research way`."""

from __future__ import annotations

import asyncio
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

from outrider.cloud.models.family_index import target_folder, tokenizer_file
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.arguments import Given
from outrider.edge import Client, EdgeConfig, Tokens

ROOT = Path(__file__).parents[1]
TARGET, DRAFTER = "reference", "general"
PROMPT = "def main(argv):\n"
BEFORE, FOLLOWED = 24, 48  # tokens of the text before those that are followed, and these
OF_EVERY = 8  # a file that is entered less often than once in so many tokens is not on the way of each


@contextmanager
def entered_files() -> Iterator[Counter[str]]:
    """Count the calls into each of the project's files, by its path from the root, in threads that begin inside."""
    calls: Counter[str] = Counter()
    ours = str(ROOT)

    def enter(frame: FrameType, event: str, _: Any) -> None:
        if event == "call" and frame.f_code.co_filename.startswith(ours):
            calls[frame.f_code.co_filename] += 1

    threading.setprofile(enter)
    sys.setprofile(enter)
    try:
        yield calls
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


async def _follow(calls: Counter[str]) -> dict[str, int]:
    server = VerifierServer(VerifierConfig(target=TARGET, threads=1))
    address = await server.start()
    try:
        edge = EdgeConfig(
            verifier=address, model=TARGET, tokenizer=tokenizer_file(target_folder(TARGET)), drafter=DRAFTER
        )
        async with Client(edge) as client:
            seen, before = 0, Counter[str]()
            async for event in client.generate(PROMPT, max_tokens=BEFORE + FOLLOWED + 8, ignore_eos=True):
                seen += len(event.ids) if isinstance(event, Tokens) else 0
                if seen >= BEFORE and not before:
                    before = calls.copy()
                if seen >= BEFORE + FOLLOWED:
                    break
            return dict(calls - before)
    finally:
        await server.stop(0)


def way() -> dict[str, int]:
    """Return the files that tokens in the midst of a text pass through, with the calls into each.

    Client and verifier run in this process, beside each other, with the embedded target and drafter. Files of generated
    code are left out, and so is what happens once in a while.
    """
    with entered_files() as calls:
        found = asyncio.run(_follow(calls))
    names = {str(Path(name).relative_to(ROOT)): count for name, count in found.items()}
    own = {name: count for name, count in names.items() if "/outrider/" in name and "/v1/" not in name}
    return {name: own[name] for name in sorted(own) if own[name] * OF_EVERY >= FOLLOWED}


def show(_: Given) -> int:
    """Run `python -m research way`."""
    found = way()
    lines = {name: len((ROOT / name).read_text(encoding="utf-8").splitlines()) for name in found}
    for name, count in found.items():
        print(f"{count:8,} calls {lines[name]:6,} lines  {name}")
    print(f"{len(found)} files, {sum(lines.values()):,} lines")
    return 0
