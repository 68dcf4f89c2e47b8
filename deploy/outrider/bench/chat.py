"""`outrider chat-bench`: turns of a chat through two daemons in turn, whose verifiers share KV pages or share none."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

from rich.console import Console

from outrider.bench.commands import ChatSettings
from outrider.bench.outputs import check_file
from outrider.bench.table import Grid, draw
from outrider.cloud.config import VerifierConfig
from outrider.cloud.family_index import chat_template_json
from outrider.cloud.server import VerifierServer
from outrider.deploy.arguments import Given
from outrider.deploy.termination import temporary_folder
from outrider.edge import Client, EdgeConfig
from outrider.edge.daemon import DaemonConfig
from outrider.edge.daemon.server import Daemon
from outrider.proto.errors import ConfigError, Unavailable

READY_WITHIN_S = 60.0
ANSWER_WITHIN_S = 600.0
QUESTION = "Part {turn}. Say more about the point before, and then answer this: what follows from it, and why? " * 3


@dataclass(frozen=True, slots=True)
class TurnResult:
    """One turn of one side.

    Attributes:
        prompt_tokens: tokens of the whole chat so far.
        cached_tokens: those that the verifier had computed already.
        answer_tokens: tokens of the answer.
        first_token_s: time from the request to the first text, in seconds.
        text: the answer.
    """

    prompt_tokens: int
    cached_tokens: int
    answer_tokens: int
    first_token_s: float
    text: str


def chat_bench(given: Given) -> int:
    """Run `outrider chat-bench`."""
    options = given(ChatSettings)
    if options.json:
        check_file(options.json, "json")
    turns = asyncio.run(measure(options, given(VerifierConfig)))
    Console(width=100, highlight=False).print(table(turns))
    if options.json:
        options.json.write_text(json.dumps([[asdict(side) for side in turn] for turn in turns]), encoding="utf-8")
    return 0


async def measure(options: ChatSettings, verifier: VerifierConfig) -> list[tuple[TurnResult, TurnResult]]:
    """Return [turns] the results without and with shared pages.

    Raises:
        ConfigError: the target has no chat template.
        Unavailable: the answers differ, or a daemon does not come up.
    """
    async with AsyncExitStack() as stack:
        sides = [
            await stack.enter_async_context(
                _daemon(replace(verifier, listen="127.0.0.1:0", no_prefix_cache=not shares))
            )
            for shares in (False, True)
        ]
        messages: list[dict[str, str]] = []
        turns: list[tuple[TurnResult, TurnResult]] = []
        for turn in range(options.turns):
            messages.append({"role": "user", "content": QUESTION.format(turn=turn + 1)})
            asked = {"model": verifier.model_id, "messages": messages, "max_tokens": options.max_tokens}
            asked |= {"seed": turn, "temperature": options.temperature}
            order = (0, 1) if turn % 2 else (1, 0)
            found = {side: await asyncio.to_thread(_answer, sides[side], asked) for side in order}
            if found[0].text != found[1].text:
                raise Unavailable("the answers differ, with shared pages and without")
            turns.append((found[0], found[1]))
            messages.append({"role": "assistant", "content": found[0].text})
        return turns


@asynccontextmanager
async def _daemon(config: VerifierConfig) -> AsyncIterator[str]:
    """Serve a verifier and a daemon before it, which drafts nothing, and yield its URL."""
    template = chat_template_json(config.target)
    if not template:
        raise ConfigError("has no chat template", field="target")
    server = VerifierServer(config)
    with temporary_folder("outrider-bench-") as folder:
        files = folder / "tokenizer.json", folder / "chat_template.json"
        for file, text in zip(files, (server.tokenizer_json, template), strict=True):
            file.write_text(text, encoding="utf-8")
        edge = EdgeConfig(
            verifier=await server.start(),
            model=config.model_id,
            tokenizer=files[0],
            chat_template=files[1],
            drafter="none",
            drafts_here=0,
        )
        daemon = Daemon(DaemonConfig(listen="127.0.0.1:0", grace_s=0.1), Client(edge))
        try:
            url = await daemon.start()
            await _until(lambda: daemon.cloud.health.status != "unavailable")
            yield url
        finally:
            await daemon.stop()
            await server.stop(0)


async def _until(holds: Callable[[], bool]) -> None:
    async with asyncio.timeout(READY_WITHIN_S):
        while not holds():  # noqa: ASYNC110 - the daemon has no event for it
            await asyncio.sleep(0.02)


def _answer(url: str, asked: dict[str, Any]) -> TurnResult:
    began = time.perf_counter()
    first_token_s, text = 0.0, ""
    usage: dict[str, Any] = {}
    body = json.dumps(asked | {"stream": True, "stream_options": {"include_usage": True}}).encode()
    request = Request(f"{url}/v1/chat/completions", body, {"Content-Type": "application/json"})  # noqa: S310 - our own
    with build_opener(ProxyHandler({})).open(request, timeout=ANSWER_WITHIN_S) as reply:  # on this machine
        for line in reply:
            if not line.startswith(b"data: {"):
                continue
            chunk = json.loads(line[6:])
            if "error" in chunk:
                raise Unavailable(str(chunk["error"]))
            usage = chunk["usage"] or usage
            piece = chunk["choices"][0]["delta"].get("content", "") if chunk["choices"] else ""
            if piece and not first_token_s:
                first_token_s = time.perf_counter() - began
            text += piece
    return TurnResult(
        usage["prompt_tokens"],
        usage["prompt_tokens_details"]["cached_tokens"],
        usage["completion_tokens"],
        first_token_s,
        text,
    )


def table(turns: list[tuple[TurnResult, TurnResult]]) -> Any:
    """Return the table of a chat."""
    rows = [
        (
            str(number),
            str(shared.prompt_tokens),
            str(shared.cached_tokens),
            str(shared.prompt_tokens - shared.cached_tokens),
            f"{1e3 * alone.first_token_s:.0f}",
            f"{1e3 * shared.first_token_s:.0f}",
        )
        for number, (alone, shared) in enumerate(turns, 1)
    ]
    headings = ("turn", "tokens", "cached", "read", "without, ms", "shared, ms")
    legend = "tokens: of the chat so far; read: computed in this turn; ms: to the first text, without and with sharing."
    return draw([Grid("A chat through the daemon", headings, 0, [rows])], legend)
