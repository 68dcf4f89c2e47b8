"""Failures that are no crashes: a verifier that is stopped, hangs, or whose connection passes nothing any more.

Two verifiers, each behind an emulated link, and their coordinator are processes; the edge is here. Each aim is held
with slack for slow machines, and the gaps measured are printed: those of docs/faults.md come from here.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from command_processes import Command, free_port
from questions import Question, questions

from outrider.cloud.testing import save_tiny_target
from outrider.deploy.link.link_process import LinkProcess
from outrider.deploy.link.shape import LinkShape
from outrider.edge import Client, EdgeConfig, Tokens
from outrider.edge.link.control_client import CoordinatorClient
from outrider.proto.errors import OutriderError
from outrider.proto.session import EdgeStatistics

pytestmark = [pytest.mark.soak, pytest.mark.timeout(600)]

TOKENS = 150
FAULT_AT = 30  # tokens
SLACK = 3.0  # for machines where everything takes longer
STOPPED_S = 45.0

# Steps take a while, and hang where a file says so; a hung engine is given up after 15 s and not after a minute.
SLOW_VERIFIER = """
import functools, os, sys, threading, time
from outrider.cloud.serving import heartbeat
heartbeat.HealthRules = functools.partial(heartbeat.HealthRules, lost_s=15.0)
from outrider.cloud.serving.runner import ModelRunner
hang_file, run = sys.argv.pop(1), ModelRunner.run
def slowly(self, shares):
    time.sleep(0.03)
    if os.path.exists(hang_file):
        threading.Event().wait()
    return run(self, shares)
ModelRunner.run = slowly
from outrider.deploy.cli import main
sys.exit(main())
"""


@dataclass
class Fleet:
    """Verifiers by name, the links to them, and the address of their coordinator."""

    folder: Path
    address: str
    verifiers: dict[str, Command]
    links: dict[str, LinkProcess]
    asked: Question

    async def states(self) -> Mapping[str, str]:
        control = CoordinatorClient(self.address)
        try:
            return {verifier.name: verifier.state for verifier in (await control.status()).verifiers}
        except OutriderError:
            return {}
        finally:
            await control.close()

    async def until(self, **states: str) -> None:
        """Until the coordinator says these states."""
        while not states.items() <= (await self.states()).items():  # noqa: ASYNC110 - a process is waited for
            await asyncio.sleep(0.1)


@asynccontextmanager
async def fleet(folder: Path, names: tuple[str, ...] = ("a", "b")) -> AsyncIterator[Fleet]:
    async with AsyncExitStack() as stack:
        secret = folder / "secret"
        secret.write_text("a secret of the fleet")
        program = folder / "slow_verifier.py"
        program.write_text(SLOW_VERIFIER)
        verifiers, links, commands = {}, {}, []
        for name in names:
            address = f"127.0.0.1:{free_port()}"
            target = ["--target", str(folder), "--dtype", "float32", "--target-threads", "1"]
            place = ["--listen", address, "--lease-secret-file", str(secret)]
            made_to_hang = [str(program), str(folder / f"hang-{name}")]
            verifiers[name] = Command(
                "verifier", "--name", name, *target, *place, log=folder / f"{name}.log", program=made_to_hang
            )
            links[name] = await stack.enter_async_context(LinkProcess(address))
        fixed = [f"--verifier={name}={link.address}" for name, link in links.items()]
        served = ["--model", str(folder), "--tokenizer", str(folder / "tokenizer.json")]
        port = free_port()
        place = ["--listen", f"127.0.0.1:{port}", "--lease-secret-file", str(secret)]
        commands = [
            *verifiers.values(),
            Command("coordinator", *fixed, *served, *place, log=folder / "coordinator.log"),
        ]
        for command in commands:
            stack.callback(command.end)
            command.start()
        for command in commands:
            await asyncio.to_thread(command.line)
        (asked,) = questions(folder, 1, TOKENS)
        made = Fleet(folder, f"127.0.0.1:{port}", verifiers, links, asked)
        await made.until(**dict.fromkeys(names, "ready"))
        yield made


@dataclass
class Run:
    """One text through a fault: its statistics, and the longest time without a token, in seconds."""

    text: str = ""
    longest_gap_s: float = 0.0
    statistics: EdgeStatistics = field(default_factory=EdgeStatistics)


async def decode(at: Fleet, fault: Callable[[], Awaitable[None]]) -> Run:
    """Decode the question, with the fault after a few tokens, and check the text."""
    run, words, faulting = Run(), list[str](), None
    last = time.monotonic()
    config = EdgeConfig(coordinator=at.address, cache=at.folder / "cache", drafter="none")
    async with Client(config) as client:
        events = client.generate(
            at.asked.prompt, seed=at.asked.seed, max_tokens=TOKENS, temperature=1.0, ignore_eos=True
        )
        async for event in events:
            if not isinstance(event, Tokens):
                run.statistics = event.statistics
                continue
            words.append(event.text)
            now = time.monotonic()
            run.longest_gap_s, last = max(run.longest_gap_s, now - last), now
            if len(words) >= FAULT_AT and faulting is None:
                faulting = asyncio.create_task(fault())
    assert faulting is not None
    await faulting
    run.text = "".join(words).strip()
    assert run.text == at.asked.text, "not a token is lost, repeated or another"
    return run


def measured(capsys: pytest.CaptureFixture[str], what: str, run: Run) -> None:
    with capsys.disabled():
        print(f"\n{what}: longest gap {run.longest_gap_s:.2f} s")


async def test_a_verifier_that_is_stopped_costs_its_texts_a_moment(tmp_path: Path, capsys) -> None:
    async with fleet(save_tiny_target(tmp_path)) as at:
        stopped = at.verifiers["a"].process.pid

        async def stop() -> None:
            os.kill(stopped, signal.SIGSTOP)

        began = time.monotonic()
        try:
            run = await decode(at, stop)
            measured(capsys, "verifier stopped", run)
            assert run.longest_gap_s < SLACK * 3.0
            assert (run.statistics.suspected, run.statistics.reopened) == (1, 1)
            await at.until(a="down")
            assert time.monotonic() - began < STOPPED_S, "it went on long before the verifier could wake"
        finally:
            os.kill(stopped, signal.SIGCONT)
        await at.until(a="ready")

        async def nothing() -> None: ...

        for _ in range(2):  # both verifiers
            assert (await decode(at, nothing)).statistics.resumes == 0, "what woke disturbs nobody"


async def test_a_lone_verifier_that_is_stopped_keeps_its_texts(tmp_path: Path, capsys) -> None:
    async with fleet(save_tiny_target(tmp_path), ("a",)) as at:
        stopped = at.verifiers["a"].process.pid

        async def stop() -> None:
            os.kill(stopped, signal.SIGSTOP)
            try:
                await asyncio.sleep(8.0)
            finally:
                os.kill(stopped, signal.SIGCONT)

        run = await decode(at, stop)
        measured(capsys, "the only verifier stopped for 8 s", run)
        assert run.statistics.reopened == 0, "there was nowhere to go, and its session was kept"
        assert run.statistics.suspected >= 1


async def test_a_connection_that_passes_nothing_is_left_while_it_stands(tmp_path: Path, capsys) -> None:
    async with fleet(save_tiny_target(tmp_path)) as at:

        async def drop() -> None:
            await at.links["a"].set_shape(LinkShape(up_bytes_per_s=0.0, down_bytes_per_s=0.0))

        run = await decode(at, drop)
        measured(capsys, "connection half open", run)
        assert run.longest_gap_s < SLACK * 5.0
        assert run.statistics.reopened == 1


async def test_an_engine_that_hangs_loses_its_texts_to_another_and_then_its_process(tmp_path: Path, capsys) -> None:
    async with fleet(save_tiny_target(tmp_path)) as at:
        file = at.folder / "hang-a"

        async def hang() -> None:
            file.touch()

        run = await decode(at, hang)
        measured(capsys, "engine hung", run)
        assert run.longest_gap_s < SLACK * 10.0
        assert run.statistics.resumes == 1
        assert run.statistics.reopened == 0, "its verifier said so itself"
        assert (await at.states())["a"] == "sick"
        began = time.monotonic()
        process = at.verifiers["a"].process
        assert await asyncio.to_thread(process.wait, 300) == 1
        with capsys.disabled():
            print(f"its process ended {time.monotonic() - began:.0f} s later")
        file.unlink()
        at.verifiers["a"].start()  # as Ray or a supervisor does
        await asyncio.to_thread(at.verifiers["a"].line)
        await at.until(a="ready")
