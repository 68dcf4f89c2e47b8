"""Commands that a signal interrupts at chosen moments; `python tests/deploy/interrupted.py` measures how soon they end.

A moment is an event of Python's own audit in the command's process (a module is imported, a process is started), by
which a signal comes exactly there, or a line that the command prints. The signal goes to the whole process group, as
Ctrl-C in a terminal does.
"""

from __future__ import annotations

import contextlib
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from default_signals import default_signals_for_children

from outrider.cloud.models.family_index import target_folder, tokenizer_file

MARK = "INTERRUPTED_BY_TEST"  # a variable that whatever the command starts inherits
GONE_WITHIN_S = 20.0
PROGRAM = """
import os, signal, sys, time
event, nth, number, path = sys.argv[1], int(sys.argv[2]), int(sys.argv[3]), sys.argv[4]
sys.argv = ["outrider", *sys.argv[5:]]
left = [nth]
def hook(name, arguments):
    if name == event or (name == "import" and arguments[0] == event):
        left[0] -= 1
        if left[0] == 0:
            with open(path, "w") as file:
                file.write(repr(time.monotonic()))
            os.killpg(0, number)
sys.addaudithook(hook)
from outrider.deploy.__main__ import main
main()
"""


@dataclass(frozen=True, slots=True)
class Ending:
    """End of a command after a signal: exit status, output, seconds from the signal on, and what still runs."""

    status: int
    output: str
    errors: str
    seconds: float
    survivors: tuple[str, ...]

    @property
    def lines(self) -> list[str]:
        """Lines on standard error, without those that say what is waited for."""
        return [line for line in self.errors.strip().splitlines() if not line.endswith(" …")]


def interrupted(
    words: Sequence[str],
    *,
    event: str = "",
    nth: int = 1,
    after: str = "",
    number: int = signal.SIGINT,
    before: str = "",
    environment: Mapping[str, str] | None = None,
    stdin: int = subprocess.DEVNULL,
) -> Ending:
    """Run `outrider` with these words, and end it with a signal.

    Args:
        words: command and options.
        event: event of the audit, or name of a module that is imported; the signal comes at its `nth` time.
        nth: counted from 1.
        after: regular expression of a line of output, instead of an event.
        number: the signal.
        before: Python that the process runs first.
        environment: variables beside this process's own.
        stdin: standard input.
    """
    mark = uuid.uuid4().hex
    with tempfile.TemporaryDirectory() as folder:
        when = Path(folder) / "when"
        command = [
            sys.executable,
            "-c",
            before + PROGRAM,
            event or "none",
            str(nth),
            str(int(number)),
            str(when),
            *words,
        ]
        process = subprocess.Popen(
            command,
            stdin=stdin,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
            env={**os.environ, "OMP_NUM_THREADS": "1", **(environment or {}), MARK: mark},
        )
        shown, sent = "", 0.0
        with process:
            assert process.stdout is not None
            if after:
                while (line := process.stdout.readline()) and not re.search(after, line):
                    shown += line
                shown += line
                sent = time.monotonic()
                os.killpg(process.pid, number)
            output, errors = process.communicate(timeout=300)
        ended = time.monotonic()
        if when.exists():
            sent = float(when.read_text())
    return Ending(process.returncode, shown + output, errors, ended - sent if sent else float("nan"), survivors(mark))


def survivors(mark: str) -> tuple[str, ...]:
    """Return the processes that have inherited this mark and do not end within some seconds."""
    until = time.monotonic() + GONE_WITHIN_S
    while (left := _marked(mark)) and time.monotonic() < until:
        time.sleep(0.02)
    return left


def _marked(mark: str) -> tuple[str, ...]:
    found = []
    for path in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if f"{MARK}={mark}".encode() in (path / "environ").read_bytes():
                found.append((path / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")[:100])
    return tuple(found)


# In the folder that `main` fills.
SECRET = ["--listen", "127.0.0.1:0", "--lease-secret-file", "secret"]
LONG = ["--teacher", ".", "--output", "trained", "--steps", "9"]
STAGES = (
    ("run", ["run", "x"], ("argparse", "rich", "numpy", "torch", "transformers", "onnxruntime"), ("⟦",)),
    ("bench", ["bench", "--per-domain", "1"], ("rich", "subprocess.Popen"), ()),
    ("up", ["up", "--listen", "127.0.0.1:0"], ("ray", "subprocess.Popen"), ("coordinator on",)),
    ("demo", ["demo", "--per-domain", "1"], ("ray", "subprocess.Popen"), ("starting", "drafter ")),
    ("verifier", ["verifier", "--listen", "127.0.0.1:0"], ("torch", "transformers"), ("verifier ",)),
    ("coordinator", ["coordinator", *SECRET, "--ray-address", "127.0.0.1:1"], ("grpc", "ray"), ()),
    (
        "coordinator",
        ["coordinator", *SECRET, "--verifier", "v=127.0.0.1:1", "--model", "m", "--tokenizer", "tokenizer.json"],
        (),
        ("coordinator on",),
    ),
    ("train", ["train", "drafter", *LONG], ("torch", "transformers", "safetensors"), ()),
    ("train", ["train", "teacher", "--texts", "corpus.jsonl", "--output", "teacher"], (), ("teacher",)),
    ("submit", ["submit", "--address", "http://127.0.0.1:1", "--", "run", "x"], ("ray", "aiohttp"), ()),
)


def main() -> None:
    """Measure the commands at the stages above, and at random imports."""
    seed = random.Random(int(sys.argv[1]) if len(sys.argv) > 1 else 1)
    only = sys.argv[2:]
    os.chdir(tempfile.mkdtemp())
    shutil.copy(tokenizer_file(target_folder("reference")), "tokenizer.json")
    Path("secret").write_text("0123456789abcdef" * 4)
    Path("corpus.jsonl").write_text('{"id": "a", "text": "Two apples and a pear. "}\n' * 2000)
    print("| command | signal at | status | s | lines | left |\n|---|---|---|---|---|---|")
    for name, words, events, lines in STAGES:
        if only and name not in only:
            continue
        moments = [{"event": event} for event in events] + [{"after": line} for line in lines]
        if name not in ("coordinator", "submit"):  # which import less, and then there would be no signal
            moments += [{"event": "import", "nth": seed.randrange(200, 2500)} for _ in range(2)]
        moments += [{"event": "subprocess.Popen", "nth": n} for n in (2, 3)] * (name in ("up", "demo"))
        for moment in moments:
            number = seed.choice((signal.SIGINT, signal.SIGTERM))
            ending = interrupted(words, number=number, **moment)
            at = " ".join(map(str, moment.values()))
            left = ", ".join(ending.survivors) or "nothing"
            print(
                f"| {name} | {number.name} {at} | {ending.status} | {ending.seconds:.2f} | {ending.lines} | {left} |",
                flush=True,
            )


if __name__ == "__main__":
    with default_signals_for_children():
        main()
