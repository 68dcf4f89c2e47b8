"""A new machine, by the README's own commands: a cluster, a daemon, a streamed chat; then all of it goes again."""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest
from command_processes import END_WITHIN_S, Command, free_port

from outrider.cloud.models.family_index import find_target
from outrider.proto.errors import OutriderError

pytestmark = [pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(500)]

WITHIN_S = 180.0
COORDINATOR, DAEMON = "127.0.0.1:50050", "127.0.0.1:8080"  # as the README has them


def shell_command(readme: str, beginning: str) -> list[str]:
    """The words of the first command of the README that begins so."""
    found = re.search(rf"^{beginning}.*?(?<!\\)$", readme, re.MULTILINE | re.DOTALL)
    assert found, f"the README has no {beginning}"
    return shlex.split(found[0].replace("\\\n", " ").removesuffix("&"))


def openai_example(page: str) -> str:
    return next(block for block in re.findall(r"```python\n(.*?)```", page, re.DOTALL) if "import OpenAI" in block)


def said(events: str) -> str:
    """The text of a streamed chat."""
    lines = [line.removeprefix("data: ") for line in events.split("\n\n") if line]
    assert lines.pop() == "[DONE]"
    return "".join(json.loads(line)["choices"][0]["delta"].get("content") or "" for line in lines)


@pytest.fixture
def target(monkeypatch: pytest.MonkeyPatch) -> str:
    """The README's target, or where that cannot be had the one that commands take in its place."""
    try:
        folder = Path(find_target("smollm2"))
    except OutriderError:
        return "reference"
    monkeypatch.delitem(os.environ, "OUTRIDER_UP_TARGET")
    monkeypatch.setitem(os.environ, "OUTRIDER_MODELS", str(folder.parent))
    return "smollm2"


def test_from_nothing_to_a_streamed_chat_in_three_minutes_and_nothing_remains(
    target: str, root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    coordinator, daemon = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
    readme, python = (
        (root / page).read_text(encoding="utf-8").replace(COORDINATOR, coordinator).replace(DAEMON, daemon)
        for page in ("README.md", "docs/python.md")
    )
    readme = readme.replace('"model": "smollm2"', f'"model": "{target}"')
    monkeypatch.setitem(os.environ, "XDG_CACHE_HOME", str(tmp_path))  # as empty as a new machine's
    monkeypatch.setitem(os.environ, "OUTRIDER_EDGE_LISTEN", daemon)
    up = Command(*shell_command(readme, "outrider up")[1:], log=tmp_path / "up.log")
    edge = Command(*shell_command(readme, "outrider edge")[1:], log=tmp_path / "edge.log")
    began = time.monotonic()
    try:
        up.start()
        edge.start()  # at once, as in the README: it waits for its coordinator
        assert up.line().startswith(f"coordinator on {coordinator}")
        assert edge.line() == f"edge daemon on http://{daemon}"
        curl = shell_command(readme, "curl")
        if shutil.which(curl[0]):
            talked = subprocess.run(curl, capture_output=True, text=True, check=True, timeout=WITHIN_S)
            assert said(talked.stdout)
            assert target != "smollm2" or "Paris" in said(talked.stdout)
        program = [sys.executable, "-c", openai_example(python)]
        talked = subprocess.run(program, capture_output=True, text=True, check=False, timeout=WITHIN_S)
        seconds = time.monotonic() - began
        assert talked.returncode == 0, talked.stderr
        assert len(talked.stdout.split()) > 3
        print(f"\na chat with {target} {seconds:.0f} s after the first command")
        assert seconds < WITHIN_S
        started = [process for command in (up, edge) for process in psutil.Process(command.process.pid).children(True)]
        assert started, "Ray has processes of its own"
        assert (edge.terminate(), up.terminate()) == (0, 0)
        assert psutil.wait_procs(started, END_WITHIN_S)[1] == []
        assert "Traceback" not in up.errors + edge.errors
    finally:
        edge.end()
        up.end()
