"""`outrider verifier`: the drafter that its options ask for, and its end by a signal or because all steps fail."""

from __future__ import annotations

import asyncio
import math
import os
import signal
import threading
from pathlib import Path
from typing import Any, ClassVar

import pytest

from outrider.cloud.serving import verifier_server
from outrider.cloud.serving.local_source import LocalSource, NoSource
from outrider.cloud.serving.own_drafter import DraftThreads
from outrider.cloud.serving.slots import Outbox
from outrider.cloud.testing import save_tiny_target
from outrider.deploy.cli import main
from outrider.proto.types import Open, Sampling


class Ignoring(Outbox):
    def put(self, item: Any) -> None:
        pass

    def unread(self) -> int:
        return 0


class FailingServer(verifier_server.VerifierServer):
    async def start(self) -> str:
        address = await super().start()
        self._engine.backend.target.forward = lambda batch: 1 // 0  # type: ignore[assignment, method-assign]
        frame = Open(self.rules.model, self.tokenizer_sha256, (5, 6, 7), Sampling(), session="s", drafting=False)
        self._engine.post_open(0, frame, Ignoring())
        return address


class SignalledServer(verifier_server.VerifierServer):
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


class ShownServer(SignalledServer):
    """A server that ends soon, and whose drafts beside the target are looked at before."""

    source: ClassVar[NoSource]

    async def start(self) -> str:
        ShownServer.source = self._engine.source
        return await super().start()


@pytest.fixture
def command(tmp_path: Path) -> list[str]:
    """Return the command of a verifier of a tiny target."""
    return ["verifier", "--target", str(save_tiny_target(tmp_path)), "--target-threads", "1"]


def test_sigterm_drains_a_healthy_verifier_and_ends_it_with_0(command, monkeypatch, capsys) -> None:
    before = signal.getsignal(signal.SIGTERM)
    monkeypatch.setattr(verifier_server, "VerifierServer", SignalledServer)
    monkeypatch.setattr(SignalledServer, "ends", [])
    assert main(command) == 0
    assert SignalledServer.ends == ["drain", "stop"]
    assert capsys.readouterr().err == ""
    assert signal.getsignal(signal.SIGTERM) == before


def test_a_verifier_whose_steps_all_fail_ends_by_itself_with_1_and_says_why(command, monkeypatch, capsys) -> None:
    monkeypatch.setattr(verifier_server, "VerifierServer", FailingServer)
    assert main(command) == 1
    shown = capsys.readouterr()
    assert shown.out.startswith("verifier verifier of ")
    assert "outrider verifier: the verifier has failed: no step succeeds" in shown.err
    assert not [
        thread
        for thread in threading.enumerate()
        if isinstance(thread, threading.Timer) and not thread.finished.is_set()
    ], "nothing is left that would end this process later"


@pytest.mark.parametrize(
    ("options", "cores", "drafts"),
    [
        ("--draft-here off --draft-with ngram --draft-threads 2", 3, None),
        ("--draft-here auto", 3, None),  # nothing embedded was made for this target's tokenizer
        ("--draft-here auto --draft-with ngram", 0, None),
        ("--draft-with ngram", 3, (3, None)),
        ("--draft-here auto --draft-with ngram --draft-threads 2 --draft-price 0.5", 0, (2, 0.5)),
        ("--draft-here on --draft-with ngram", 0, (1, None)),
        ("--draft-here on --draft-with ngram --draft-price inf", 3, (3, math.inf)),
    ],
)
def test_its_options_say_whether_with_what_and_at_what_price_it_drafts(
    command, monkeypatch, capsys, options, cores, drafts
) -> None:
    monkeypatch.setattr(verifier_server, "VerifierServer", ShownServer)
    monkeypatch.setattr("outrider.cloud.serving.local_source.spare_cores", lambda config, target: cores)
    assert main([*command, *options.split()]) == 0
    assert capsys.readouterr().err == ""
    source = ShownServer.source
    if drafts is None:
        assert type(source) is NoSource
        return
    assert isinstance(source, LocalSource)
    assert isinstance(source._threads, DraftThreads)
    assert source._own.name.startswith("ngram@")
    assert (source._threads.num_threads, source._here.price) == drafts


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ("--draft-here on", "draft-here: finds no drafter for this target: 'general' was made for another tokenizer"),
        ("--draft-here on --draft-with nobody", "draft-here: finds no drafter for this target"),
        ("--draft-here perhaps", "perhaps"),
        ("--draft-threads -1", "-1"),
        ("--draft-price -0.5", "-0.5 is below 0"),
        ("--draft-price nan", "nan"),
    ],
)
def test_a_mistake_in_them_is_one_line_with_its_remedy(command, capsys, options, says) -> None:
    try:
        assert main([*command, *options.split()]) != 0
    except SystemExit as refusal:
        assert refusal.code  # noqa: PT017 - the parser ends so
    said = capsys.readouterr().err
    assert says in said
    assert len(said.splitlines()) == 1
    if "--draft-here on" in options:
        assert "--draft-with" in said
