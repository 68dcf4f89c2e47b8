"""Servers, verifiers and edges of a measurement: processes of their own on loopback, with links between."""

from __future__ import annotations

import asyncio
import json
import shlex
import socket
import sys
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp

from outrider.bench.links import BenchLink
from outrider.deploy.link.link_process import LinkProcess
from outrider.proto.errors import Unavailable
from research.research_settings import ProbeSettings
from research.systems.run_systems import VLLM_ENVIRONMENT, running

MODEL = "smollm2"  # in all requests, and the target of our own verifier
HOST = "127.0.0.1"
READY_S, POLL_S = 400.0, 0.1
VLLM = (
    f"-m vllm.entrypoints.openai.api_server --host {HOST} --served-model-name {MODEL} "
    "--enable-scale-out --enable-prompt-tokens-details --max-logprobs -1"
)
LOOKS_UP = {"method": "ngram", "prompt_lookup_min": 3, "prompt_lookup_max": 4}
DRAFTS = {"method": "draft_model", "num_speculative_tokens": 4}
# In its mode for developers vLLM can be told to forget its cache, so that no text is read from the one before it.
VARIABLES = {"VLLM_SERVER_DEV_MODE": "1", "OMP_NUM_THREADS": "1", **VLLM_ENVIRONMENT}


@dataclass(frozen=True, slots=True)
class Doors:
    """Makers of servers of one model, and of the doors at which a client asks for texts over a link."""

    options: ProbeSettings
    logs: Path

    @asynccontextmanager
    async def server(self, kind: str) -> AsyncIterator[str]:
        """Start vLLM (`plain`, or speculating by `ngram` or `draft`) or our `own` verifier, and yield its address."""
        if kind == "own":
            async with self._ours("verifier", *f"--target {MODEL} --dtype float32 --no-prefix-cache".split()) as own:
                yield own
            return
        looks_up = LOOKS_UP | {"num_speculative_tokens": self.options.ngram_drafts}
        speculation = {"ngram": looks_up, "draft": DRAFTS | {"model": str(self.options.draft_model)}}.get(kind)
        words = ["--speculative-config", json.dumps(speculation)] if speculation else []
        words += [*shlex.split(self.options.vllm_flags), "--model", str(self.options.target_folder)]
        command, port = [str(self.options.vllm_python), *VLLM.split(), *words], _free_port()
        async with self._running("vllm", [*command, "--port", str(port)], port):
            yield f"{HOST}:{port}"

    @asynccontextmanager
    async def door(self, way: str, server: str, link: BenchLink, drafter: str) -> AsyncIterator[str]:
        """Yield the URL at which a client on the near end of a link asks for texts of `server` in this `way`.

        Our ways have an edge there, which drafts with `drafter`; its verifier is in it (`here`), beside the server
        (`beside`), or is the server (`own`).
        """
        folder = str(self.options.target_folder)
        async with AsyncExitStack() as stack:
            if way == "beside":
                probes = "--engine", "probes", "--target-url", f"http://{server}", "--tokenizer", folder
                server = await stack.enter_async_context(self._ours("verifier", *probes))
            far = (await stack.enter_async_context(LinkProcess(server, link.shape, link.trace))).address
            if way in ("stream", "ngram", "draft"):
                yield f"http://{far}"
                return
            words = ["--server", f"http://{far}", "--server-model", MODEL, "--tokenizer", folder]
            if way != "here":
                words = ["--verifier", far, "--model", MODEL, "--tokenizer", f"{folder}/tokenizer.json"]
                words += ["--chat-template", f"{folder}/chat_template.jinja"]
            yield f"http://{await stack.enter_async_context(self._ours('edge', *words, '--drafter', drafter))}"

    @asynccontextmanager
    async def _ours(self, name: str, *words: str) -> AsyncIterator[str]:
        port = _free_port()
        command = [sys.executable, "-m", "outrider.deploy", name, *words, "--listen", f"{HOST}:{port}"]
        async with self._running(name, command, port):
            yield f"{HOST}:{port}"

    @asynccontextmanager
    async def _running(self, name: str, command: Sequence[str], port: int) -> AsyncIterator[None]:
        """Run a command from when it serves."""
        log, until = self.logs / f"{name}.log", time.monotonic() + READY_S
        log.unlink(missing_ok=True)
        async with running(command, VARIABLES, log) as process:
            while not await _serves(name, port):
                if not process.is_running() or time.monotonic() > until:
                    said = log.read_text(encoding="utf-8", errors="replace").strip().splitlines()
                    raise Unavailable(f"{name} did not start: {' / '.join(said[-3:])[-400:]}")
                await asyncio.sleep(POLL_S)
            yield


def _free_port() -> int:
    with socket.create_server((HOST, 0)) as listener:
        return int(listener.getsockname()[1])


async def _serves(name: str, port: int) -> bool:
    """Return whether a verifier accepts connections, or one of the others says that it is well."""
    try:
        if name == "verifier":
            (await asyncio.open_connection(HOST, port))[1].close()
            return True
        async with aiohttp.ClientSession() as http, http.get(f"http://{HOST}:{port}/health") as answer:
            return answer.status == 200
    except (OSError, aiohttp.ClientError):
        return False
