"""50 streams while verifier, link, coordinator and daemon die in turn and come back: the right text, or a clear error.

A daemon decodes on two verifiers, each behind an emulated link, with leases from a coordinator: all are processes.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from command_processes import Command, free_port
from http_streams import Answer, ask_patiently, until_healthy
from questions import Question, questions

from outrider.cloud.testing import save_tiny_target
from outrider.deploy.link.link_process import LinkProcess
from outrider.edge.link.control_client import CoordinatorClient
from outrider.proto.errors import OutriderError

pytestmark = pytest.mark.soak

STREAMS = 50
EARLY = 35  # asked for before the fault; the others while it lasts
TOKENS = 120
STALL_S = 1.0


@dataclass
class FaultRun:
    """50 streams: how much of each has come, and what became of it."""

    answers: list[Answer] = field(default_factory=list)
    words: list[int] = field(default_factory=lambda: [0] * STREAMS)

    @property
    def begun(self) -> int:
        """Streams of which there is some text and not all."""
        return sum(0 < words < TOKENS for words in self.words)


@dataclass
class System:
    """Everything that can die, and what is asked of it."""

    folder: Path
    questions: list[Question]
    port: int
    coordinator_address: str
    coordinator: Command
    daemon: Command
    verifiers: dict[str, Command]
    links: dict[str, LinkProcess]
    link_places: dict[str, tuple[str, str]]  # from where to where

    async def until_ready(self) -> None:
        """Until the coordinator places on every verifier, and the daemon finds them."""
        control = CoordinatorClient(self.coordinator_address)
        try:
            while not await self._all_ready(control):  # noqa: ASYNC110 - another process is waited for
                await asyncio.sleep(0.1)
        finally:
            await control.close()
        await until_healthy(self.port)

    async def _all_ready(self, control: CoordinatorClient) -> bool:
        try:
            return all(verifier.state == "ready" for verifier in (await control.status()).verifiers)
        except OutriderError:
            return False

    async def start_link(self, name: str) -> None:
        listen, to = self.link_places[name]
        self.links[name] = await LinkProcess(to, listen=listen).__aenter__()

    async def end_link(self, name: str) -> None:
        await self.links.pop(name).__aexit__(None, None, None)


@asynccontextmanager
async def system(folder: Path) -> AsyncIterator[System]:
    async with AsyncExitStack() as stack:
        secret = folder / "secret"
        secret.write_text("a secret of the fleet")
        port, coordinator_port = free_port(), free_port()
        verifiers, link_places = {}, {}
        for name in ("a", "b"):
            address, link_address = f"127.0.0.1:{free_port()}", f"127.0.0.1:{free_port()}"
            target = ["--target", str(folder), "--dtype", "float32", "--target-threads", "1", "--max-sessions", "64"]
            place = ["--listen", address, "--lease-secret-file", str(secret)]
            verifiers[name] = Command("verifier", "--name", name, *target, *place, log=folder / f"verifier-{name}.log")
            link_places[name] = link_address, address
        fixed = [f"--verifier={name}={place[0]}" for name, place in link_places.items()]
        served = ["--model", str(folder), "--tokenizer", str(folder / "tokenizer.json")]
        place = ["--listen", f"127.0.0.1:{coordinator_port}", "--lease-secret-file", str(secret)]
        coordinator = Command("coordinator", *fixed, *served, *place, log=folder / "coordinator.log")
        cloud = ["--coordinator", f"127.0.0.1:{coordinator_port}", "--drafter", "ngram"]
        here = ["--listen", f"127.0.0.1:{port}", "--cache", str(folder / "cache")]
        daemon = Command("edge", *cloud, *here, log=folder / "daemon.log")
        for command in (*verifiers.values(), coordinator, daemon):
            stack.callback(command.end)
            command.start()
        asked = questions(folder, STREAMS, TOKENS)
        address = f"127.0.0.1:{coordinator_port}"
        made = System(folder, asked, port, address, coordinator, daemon, verifiers, {}, link_places)
        for name in verifiers:
            await made.start_link(name)
        for command in (*verifiers.values(), coordinator, daemon):
            await asyncio.to_thread(command.line)
        try:
            yield made
        finally:
            for name in list(made.links):
                await made.end_link(name)


async def stream_through(at: System, fault: Callable[[], Awaitable[None]]) -> FaultRun:
    """35 streams; the fault, when all have some text and most have more to come; 15 more while it lasts."""
    run = FaultRun()

    async def one(index: int) -> Answer:
        def count(text: str) -> None:
            run.words[index] += len(text.split())

        return await ask_patiently(at.port, at.questions[index].asks(str(at.folder)), count)

    await at.until_ready()
    asking = [asyncio.create_task(one(index)) for index in range(EARLY)]
    while not all(run.words[:EARLY]):
        assert not any(task.done() and task.exception() for task in asking)
        await asyncio.sleep(0.005)
    assert run.begun > EARLY // 2, "the fault must come in the middle of the streams"
    faulting = asyncio.create_task(fault())
    await asyncio.sleep(0.05)
    asking += [asyncio.create_task(one(index)) for index in range(EARLY, STREAMS)]
    run.answers = await asyncio.gather(*asking)
    await faulting
    return run


def counted(at: System, run: FaultRun) -> Counter[str]:
    """Return the number of streams by their end; there are two kinds."""
    kinds: Counter[str] = Counter()
    for question, answer in zip(at.questions, run.answers, strict=True):
        if answer.done:
            assert answer.text == question.text, "a stream that says that it is whole is whole and right"
            kinds["full text"] += 1
            kinds["asked more than once"] += bool(answer.refusals)
        else:
            assert answer.failed, answer
            assert question.text.startswith(answer.text), "what came before the error is right"
            kinds["clear error"] += 1
    return kinds


async def verifier_dies(at: System) -> None:
    """Kill a verifier as the kernel's OOM killer would; it comes back while streams go on at the other."""
    at.verifiers["a"].kill()
    at.verifiers["a"].start()
    await asyncio.to_thread(at.verifiers["a"].line)


async def coordinator_dies(at: System) -> None:
    at.coordinator.kill()
    await asyncio.sleep(0.5)
    at.coordinator.start()
    await asyncio.to_thread(at.coordinator.line)


async def links_stall_break_and_die(at: System) -> None:
    for link in at.links.values():
        await link.stall(STALL_S)
    await asyncio.sleep(STALL_S / 2)
    for link in at.links.values():
        await link.cut()
    await asyncio.sleep(STALL_S)
    for name in at.verifiers:
        await at.end_link(name)
    await asyncio.sleep(0.3)
    for name in at.verifiers:
        await at.start_link(name)


async def daemon_dies(at: System) -> None:
    at.daemon.kill()
    await asyncio.sleep(0.5)
    at.daemon.start()
    await asyncio.to_thread(at.daemon.line)


FAULTS: dict[str, Callable[[System], Awaitable[None]]] = {
    "a verifier is killed": verifier_dies,
    "the coordinator is killed": coordinator_dies,
    "the links stall, break and die": links_stall_break_and_die,
    "the daemon is killed": daemon_dies,
}


@pytest.mark.timeout(600)
def test_every_stream_ends_with_the_right_text_or_a_clear_error_whatever_dies(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_tiny_target(tmp_path)
    counts: dict[str, Counter[str]] = {}

    async def main() -> None:
        async with system(folder) as at:
            for name, fault in FAULTS.items():
                run = await stream_through(at, lambda fault=fault: fault(at))  # type: ignore[misc]
                counts[name] = counted(at, run)
            for question in at.questions[:5]:  # all is as it was
                assert (await ask_patiently(at.port, question.asks(str(folder)))).text == question.text
            for command in (at.daemon, at.coordinator, *at.verifiers.values()):
                assert command.terminate() == 0
                assert "Traceback" not in command.errors

    asyncio.run(main())
    with capsys.disabled():
        print()
        for name, kinds in counts.items():
            print(f"{name:32}", ", ".join(f"{kind}: {count}" for kind, count in kinds.items()))
    for name, kinds in counts.items():
        assert kinds["full text"] + kinds["clear error"] == STREAMS
        if name != "the daemon is killed":
            assert kinds["clear error"] == 0, f"{name}: the daemon has to hide it"
    assert counts["the daemon is killed"]["clear error"] >= EARLY // 2, "nobody took half a text for the whole"
