"""Commands of outrider as forks of one process that has imported everything, so that a killed one is back in a second.

`python command_forks.py` forks at each line of standard input, a JSON object with `argv`, `output` and `errors`, and
answers with `{"pid": …}`; where a fork ends it says `{"ended": pid, "status": …}`, negative for a signal. Its forks end
with it. Nothing that has threads is begun before a fork, and a fork runs `outrider`'s own main.
"""

from __future__ import annotations

import asyncio
import ctypes
import gc
import importlib
import json
import os
import select
import signal
import sys
from pathlib import Path
from typing import Any

MODULES = (
    "outrider.cloud.serving.verifier_server", "outrider.cloud.target.transformers_backend",
    "transformers.models.llama.modeling_llama", "outrider.coordinator.coordinator_server", "outrider.deploy.cli",
    "outrider.deploy.local.servers", "outrider.deploy.commands.edge_options", "outrider.deploy.commands.operating",
    "outrider.deploy.commands.serving_options", "outrider.deploy.daemon", "outrider.deploy.link_command",
    "outrider.edge.client", "outrider.edge.daemon.http_server", "outrider.drafters.ngram",
)  # fmt: skip
_PR_SET_PDEATHSIG = 1


def _serve() -> None:
    """Fork and reap until standard input ends; a fork leaves by `SystemExit`, as a process of its own would."""
    for module in MODULES:
        importlib.import_module(module)
    gc.freeze()
    wakes, woken = os.pipe()
    os.set_blocking(woken, False)
    signal.set_wakeup_fd(woken, warn_on_full_buffer=False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    parent, pending = os.getpid(), b""
    _say({"ready": parent})
    while True:
        readable, _, _ = select.select([0, wakes], [], [])
        if wakes in readable:
            os.read(wakes, 4096)
            _reap()
        if 0 in readable:
            data = os.read(0, 65536)
            if not data:
                return
            *lines, pending = (pending + data).split(b"\n")
            for line in lines:
                request = json.loads(line)
                pid = os.fork()
                if pid == 0:
                    signal.set_wakeup_fd(-1)
                    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
                    for descriptor in (wakes, woken):
                        os.close(descriptor)
                    _become(request, parent)
                _say({"pid": pid})


def _reap() -> None:
    while True:
        try:
            pid, status = os.waitpid(-1, os.WNOHANG)
        except ChildProcessError:
            return
        if pid == 0:
            return
        _say({"ended": pid, "status": os.waitstatus_to_exitcode(status)})


def _become(request: dict[str, Any], parent: int) -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != parent:  # it died before that was set
        os._exit(1)
    nowhere = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nowhere, 0)
    for descriptor, path in ((1, request["output"]), (2, request["errors"])):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    os.close(nowhere)
    from outrider.deploy.__main__ import main

    sys.argv = ["outrider", *request["argv"]]
    main()


def _say(answer: dict[str, int]) -> None:
    os.write(1, json.dumps(answer).encode() + b"\n")


class CommandForks:
    """The process that forks, as an async context manager.

    Args:
        folder: folder of the outputs and logs of the commands.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._process: asyncio.subprocess.Process | None = None
        self._listening: asyncio.Task[None] | None = None
        self._started: asyncio.Queue[tuple[int, asyncio.Future[int]]] = asyncio.Queue()
        self._asking = asyncio.Lock()
        self._ends: dict[int, asyncio.Future[int]] = {}

    async def __aenter__(self) -> CommandForks:
        environment = os.environ | {"OMP_NUM_THREADS": "1"}
        pipe = asyncio.subprocess.PIPE
        command = (sys.executable, __file__)
        self._process = await asyncio.create_subprocess_exec(*command, stdin=pipe, stdout=pipe, env=environment)
        assert self._process.stdout is not None
        assert "ready" in json.loads(await self._process.stdout.readline())
        self._listening = asyncio.create_task(self._listen(self._process.stdout))
        return self

    async def __aexit__(self, *_: object) -> None:
        assert self._process is not None
        assert self._process.stdin is not None
        assert self._listening is not None
        self._process.stdin.close()
        await self._process.wait()
        await self._listening

    @property
    def pid(self) -> int:
        """Process whose children the commands are."""
        assert self._process is not None
        return self._process.pid

    async def start(self, name: str, argv: list[str]) -> tuple[int, asyncio.Future[int]]:
        """Start `outrider ARGV…`; return its process, and its exit status to come, negative for a signal."""
        assert self._process is not None
        assert self._process.stdin is not None
        output, errors = self.output(name), self.errors(name)
        output.unlink(missing_ok=True)  # its lines say when it serves
        request = {"argv": argv, "output": str(output), "errors": str(errors)}
        async with self._asking:
            self._process.stdin.write(json.dumps(request).encode() + b"\n")
            return await self._started.get()

    def output(self, name: str) -> Path:
        """Return the file of what its newest start has printed."""
        return self._folder / f"{name}.out"

    def errors(self, name: str) -> Path:
        """Return the file of what all its starts have logged."""
        return self._folder / f"{name}.log"

    async def _listen(self, lines: asyncio.StreamReader) -> None:
        while line := await lines.readline():
            match json.loads(line):
                case {"pid": pid}:
                    self._ends[pid] = asyncio.get_running_loop().create_future()
                    self._started.put_nowait((pid, self._ends[pid]))
                case {"ended": pid, "status": status}:
                    self._ends.pop(pid).set_result(status)


if __name__ == "__main__":
    _serve()
