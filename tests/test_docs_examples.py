"""Every Python example of README and docs runs as it stands there, against a real cluster, but for the addresses."""

from __future__ import annotations

import io
import re
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from contextlib import AsyncExitStack
from pathlib import Path
from typing import Any

import pytest
from loop_thread import LoopThread

SECRET = b"a secret of the two of them"
COORDINATOR = "127.0.0.1:50050"
DAEMON = "http://127.0.0.1:8080"


class Cluster:
    """Verifier, coordinator and edge daemon on an event loop of their own."""

    def __init__(self, tokenizer_file: Path, cache: Path) -> None:
        self.coordinator = self.daemon = ""
        self.verifier: Any = None
        self._stack = AsyncExitStack()
        self._loop = LoopThread()
        self._call(self._start(tokenizer_file.read_text(encoding="utf-8"), cache))
        for _ in range(2000):
            if self._is_healthy():
                return
            time.sleep(0.02)
        raise AssertionError("the daemon does not find the cloud")

    async def _start(self, tokenizer_json: str, cache: Path) -> None:
        from outrider.cloud.models.family_index import chat_template_json
        from outrider.cloud.serving.verifier_server import VerifierServer
        from outrider.cloud.verifier_config import VerifierConfig
        from outrider.coordinator.coordinator_config import CoordinatorConfig, StaticVerifier
        from outrider.coordinator.coordinator_server import CoordinatorServer
        from outrider.drafters.packages import FAMILY
        from outrider.edge import Client, EdgeConfig
        from outrider.edge.daemon import DaemonConfig
        from outrider.edge.daemon.http_server import Daemon

        self.verifier = VerifierServer(VerifierConfig(threads=1), SECRET)
        address = await self.verifier.start()
        self._stack.push_async_callback(self.verifier.stop, 0)
        template = chat_template_json("reference")
        fixed = StaticVerifier("verifier", address, "reference", tokenizer_json, chat_template_json=template)
        coordinator = CoordinatorServer(
            CoordinatorConfig(lease_secret=SECRET, listen="127.0.0.1:0", verifiers=(fixed,), drafters=(FAMILY,))
        )
        self.coordinator = await coordinator.start()
        self._stack.push_async_callback(coordinator.stop)
        daemon = Daemon(
            DaemonConfig(listen="127.0.0.1:0"), Client(EdgeConfig(coordinator=self.coordinator, cache=cache))
        )
        self.daemon = await daemon.start()
        self._stack.push_async_callback(daemon.stop)

    def _is_healthy(self) -> bool:
        try:
            with urllib.request.urlopen(f"{self.daemon}/health", timeout=10) as answer:
                return answer.status == 200
        except urllib.error.HTTPError:
            return False

    def _call(self, work: Any) -> None:
        self._loop.run(work, within_s=120)

    def close(self) -> None:
        self._call(self._stack.aclose())
        self._loop.close()

    def is_at_rest(self) -> bool:
        """Whether no session runs and none is kept."""
        for _ in range(2000):
            status = self.verifier.status()
            if status.sessions == 0 and status.kv_pages_free == status.kv_pages:
                return True
            time.sleep(0.01)
        return False


@pytest.fixture(scope="module")
def cluster(tokenizer_file, tmp_path_factory) -> Iterator[Cluster]:
    cluster = Cluster(tokenizer_file, tmp_path_factory.mktemp("daemon"))
    yield cluster
    cluster.close()


def examples(root: Path) -> dict[str, str]:
    """The Python blocks by the heading that they stand under."""
    found: dict[str, str] = {}
    heading = ""
    pages = (root / "README.md", *sorted((root / "docs").glob("*.md")))
    text = "\n".join(page.read_text(encoding="utf-8") for page in pages)
    for title, block in re.findall(r"^#+ ([^\n]+)$|^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
        heading = title or heading
        if block:
            assert heading not in found, f"two examples under {heading!r}: the second has no check"
            found[heading] = block
    return found


# --- what each prints ---


def draws_and_counts(printed: str) -> None:
    (accepted, committed) = map(int, re.findall(r"(\d+) of (\d+) were drafts", printed)[0])
    assert 0 < accepted < committed <= 64
    assert len(printed.splitlines()[0]) > 0


def holds_a_story(printed: str) -> None:
    assert len(printed.split()) > 5


def ends_by_length(printed: str) -> None:
    text, _, completion = printed.rpartition("\n")
    assert len(text.split()) > 5
    assert re.match(r"(LENGTH|EOS): '", completion)


def is_cancelled_everywhere(printed: str) -> None:
    text, _, cancelled = printed.rpartition("\n")
    assert 5 < len(text.split()) < 40
    assert cancelled.startswith("cancelled: [CancelledError(")


def runs_out_of_time(printed: str) -> None:
    assert printed.splitlines()[-1].startswith("deadline_s: ")  # a busy machine has no token before it


def goes_on(printed: str) -> None:
    turns = [(int(before), int(up)) for before, up in re.findall(r"\[(\d+) tokens before, (\d+) bytes up\]", printed)]
    assert len(turns) == 2
    total = int(re.findall(r"(\d+) tokens in all: ['\"]def area\(radius\)", printed)[0])
    assert 24 < turns[0][0] < turns[1][0] < total <= turns[1][0] + 24


def says_nothing(printed: str) -> None:
    assert not printed, "the example compares the two texts itself"


def says_what_became_of_its_service(printed: str) -> None:
    kept, gaps = map(int, re.findall(r"(\d+) of (\d+) gaps kept, first token after \d", printed)[0])
    assert 0 <= kept <= gaps <= 16
    assert gaps > 0


USES: dict[str, Callable[[str], None]] = {
    "From Python": draws_and_counts,
    "Through the edge daemon": holds_a_story,
    "Without async": ends_by_length,
    "Text that repeats what is here": says_nothing,
    "Cancellation": is_cancelled_everywhere,
    "Deadlines": runs_out_of_time,
    "Several turns": goes_on,
    "When tokens should come": says_what_became_of_its_service,
}


def test_there_is_an_example_of_every_use_and_every_example_is_checked(root) -> None:
    assert set(examples(root)) == set(USES)


@pytest.mark.parametrize("use", USES)
def test_an_example_does_what_it_says(root, cluster, use, monkeypatch, tmp_path) -> None:
    from outrider.edge import EdgeConfig

    code = examples(root)[use]
    assert COORDINATOR in code or DAEMON in code
    monkeypatch.setitem(EdgeConfig.__init__.__kwdefaults__, "cache", tmp_path)  # not the user's
    printed = io.StringIO()

    def to_paper(*values: Any, **options: Any) -> None:
        print(*values, **{**options, "file": printed})

    here = code.replace(COORDINATOR, cluster.coordinator).replace(DAEMON, cluster.daemon)
    exec(compile(here, f"example: {use}", "exec"), {"__name__": "__main__", "print": to_paper})
    USES[use](printed.getvalue().strip())
    assert cluster.is_at_rest(), "the example leaves a session behind"
