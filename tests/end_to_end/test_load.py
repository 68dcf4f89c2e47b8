"""200 streams at once at one daemon and one verifier: none is lost or mixed, memory stays, refusals say when to ask."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from command_processes import Command, free_port
from http_streams import Answer, ask, ask_patiently, metric_value, until_healthy
from questions import Question, questions

from outrider.cloud.testing import save_tiny_target

pytestmark = pytest.mark.soak

STREAMS = 200
TOKENS = 20
SLOTS_IN_DAEMON = 128
SLOTS_IN_VERIFIER = 96
MAX_GROWTH_MIB = 8.0  # in 400 texts: 20 KiB of each that were never freed would be seen


@dataclass
class System:
    """One verifier and one daemon, in processes of their own."""

    verifier: Command
    daemon: Command
    port: int
    metrics_port: int
    model: str
    questions: list[Question]


@pytest.fixture(scope="module")
def at(tmp_path_factory: pytest.TempPathFactory) -> Iterator[System]:
    folder = save_tiny_target(tmp_path_factory.mktemp("tiny"))
    logs = tmp_path_factory.mktemp("logs")
    port, metrics_port, verifier_port = free_port(), free_port(), free_port()
    target = ["--target", str(folder), "--target-threads", "1", "--max-sessions", str(SLOTS_IN_VERIFIER)]
    target += ["--exact", "off"]  # with exactness memory grows for a thousand texts before it stays level
    served = ["--listen", f"127.0.0.1:{verifier_port}", "--metrics-listen", f"127.0.0.1:{metrics_port}"]
    verifier = Command("verifier", "--name", "v", *target, *served, log=logs / "verifier")
    cloud = ["--verifier", f"127.0.0.1:{verifier_port}", "--model", str(folder)]
    cloud += ["--tokenizer", str(folder / "tokenizer.json"), "--drafter", "ngram"]
    here = ["--listen", f"127.0.0.1:{port}", "--max-requests", str(SLOTS_IN_DAEMON)]
    daemon = Command("edge", *cloud, *here, log=logs / "daemon")
    with pytest.MonkeyPatch.context() as patch:
        for name in ("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "LRU_CACHE_CAPACITY"):
            patch.setenv(name, "16")  # 1,024 kernels, one for each number of rows, come to 200 MiB, which hides a leak
        verifier.start()
    daemon.start()
    asked = questions(folder, STREAMS, TOKENS)
    try:
        verifier.line()
        daemon.line()
        asyncio.run(until_healthy(port))
        yield System(verifier, daemon, port, metrics_port, str(folder), asked)
    finally:
        daemon.end()
        verifier.end()


async def all_at_once(at: System) -> list[Answer]:
    return await asyncio.gather(*(ask_patiently(at.port, question.asks(at.model)) for question in at.questions))


async def until_idle(at: System) -> None:
    """Until neither side holds anything for a text any more."""
    began = time.monotonic()
    while True:
        running = await metric_value(at.port, "outrider:num_requests_running")
        sessions = await metric_value(at.port, "outrider:edge_sessions")
        pages = await metric_value(at.metrics_port, "outrider:kv_cache_usage_perc")
        if not (running or sessions or pages):
            return
        assert time.monotonic() - began < 30, f"{running} requests, {sessions} sessions, {pages} of the pages are left"
        await asyncio.sleep(0.05)


def check_refusal(answer: Answer) -> None:
    """It has OpenAI's shape, and says when to ask again."""
    assert answer.status in (429, 503)
    assert answer.error is not None
    assert answer.error["type"] == ("rate_limit_error" if answer.status == 429 else "server_error")
    assert answer.error["message"]
    assert 1 <= int(answer.headers["retry-after"]) <= 60


async def test_200_streams_at_once_are_all_whole_three_times_over_and_memory_stays(at: System) -> None:
    resident: list[tuple[float, float]] = []
    refusals: Counter[int] = Counter()
    seconds: list[float] = []
    for _ in range(3):
        began = time.monotonic()
        answers = await all_at_once(at)
        seconds.append(time.monotonic() - began)
        for question, answer in zip(at.questions, answers, strict=True):
            assert answer.done, answer
            assert answer.text == question.text
            for refusal in answer.refusals:
                check_refusal(refusal)
                refusals[refusal.status] += 1
        await until_idle(at)
        resident.append((at.daemon.resident_mib, at.verifier.resident_mib))
    print(f"\nseconds a round {seconds}, refusals {dict(refusals)}, daemon and verifier MiB {resident}")
    assert refusals[429] > 0, "there are fewer slots than streams, so some had to be refused"
    for side in (0, 1):
        growth = resident[-1][side] - resident[0][side]
        assert growth < MAX_GROWTH_MIB, f"{resident} MiB"
    assert at.daemon.runs
    assert at.verifier.runs


async def test_clients_that_leave_in_the_middle_leave_nothing_behind(at: System) -> None:
    async def leave(question: Question) -> None:
        begun = asyncio.Event()
        body = question.asks(at.model) | {"max_tokens": 900}
        asking = asyncio.create_task(ask(at.port, body, lambda _: begun.set()))
        beginning = asyncio.create_task(begun.wait())
        await asyncio.wait([asking, beginning], return_when=asyncio.FIRST_COMPLETED)
        assert not asking.done()
        for task in (asking, beginning):
            task.cancel()

    await asyncio.gather(*(leave(question) for question in at.questions[:100]))
    await until_idle(at)
    last = at.questions[-1]
    assert (await ask_patiently(at.port, last.asks(at.model))).text == last.text
