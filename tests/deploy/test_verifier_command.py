"""The end of `outrider verifier`: a signal drains it, and steps that all fail end it by themselves."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path
from typing import Any, ClassVar

import pytest

from outrider.cloud import server
from outrider.cloud.slots import Outbox
from outrider.cloud.testing import save_tiny_target
from outrider.deploy.cli import main
from outrider.proto.types import Open, Sampling


class Ignoring(Outbox):
    def put(self, item: Any) -> None:
        pass

    def unread(self) -> int:
        return 0


class FailingServer(server.VerifierServer):
    async def start(self) -> str:
        address = await super().start()
        self._backend.target.forward = lambda batch: 1 // 0  # type: ignore[assignment, method-assign]
        frame = Open(self.rules.model, self.tokenizer_sha256, (5, 6, 7), Sampling(), session="s", drafting=False)
        self._engine.post_open(0, frame, Ignoring())
        return address


class SignalledServer(server.VerifierServer):
    """A healthy server whose process gets SIGTERM as soon as the command waits for one."""

    ends: ClassVar[list[str]] = []

    async def start(self) -> str:
        address = await super().start()
        asyncio.get_running_loop().call_soon(os.kill, os.getpid(), signal.SIGTERM)
        return address

    async def drain(self, grace_s: float = 10.0) -> int:
        self.ends.append("drain")
        return await super().drain(grace_s)

    async def stop(self, grace_s: float = 1.0) -> None:
        self.ends.append("stop")
        await super().stop(grace_s)


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """Return the command of a verifier of a tiny target."""
    return ["verifier", "--target", str(save_tiny_target(tmp_path)), "--target-threads", "1"]


def test_sigterm_drains_a_healthy_verifier_and_ends_it_with_0(command, monkeypatch, capsys) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(server, "VerifierServer", SignalledServer)
    monkeypatch.setattr(SignalledServer, "ends", [])
    assert main(command) == 0
    assert SignalledServer.ends == ["drain", "stop"]
    assert capsys.readouterr().err == ""
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_verifier_whose_steps_all_fail_ends_by_itself_with_1_and_says_why(command, monkeypatch, capsys) -> None:
    monkeypatch.setattr(server, "VerifierServer", FailingServer)
    assert main(command) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("verifier verifier of ")
    assert "outrider verifier: the verifier has failed: no step succeeds" in shown.err
