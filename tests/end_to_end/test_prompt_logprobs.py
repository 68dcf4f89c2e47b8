"""Log probabilities of prompts from a verifier to a client of HTTP, as lm-eval asks for them, and after a failover."""

from __future__ import annotations

import asyncio
import json
import urllib.request
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider.cloud.models.family_index import resolve_target
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.target.target_loading import load_model
from outrider.cloud.verifier_config import VerifierConfig
from outrider.edge import Client, EdgeConfig
from outrider.edge.daemon import DaemonConfig
from outrider.edge.daemon.http_server import Daemon
from outrider.edge.link.routes import DirectRoute
from outrider.proto.tokenizer import tokenizer_hash

MODEL = "reference"
TEXT = "def main(argv):\n    for each in argv:\n        print(each)\n" * 6
CLOSE = 2e-4


@cache
def plain(prompt: tuple[int, ...]) -> list[float]:
    """Log probabilities of the tokens after the first, by transformers alone."""
    model = load_model(str(resolve_target(MODEL)), MODEL, device="cpu", dtype="float32")
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([prompt]), use_cache=False).logits[0, :-1]
    logp = torch.log_softmax(logits.float(), dim=-1)
    return [float(row[token]) for row, token in zip(logp, prompt[1:], strict=True)]


def asked(url: str, **fields: Any) -> Any:
    body = json.dumps({"model": MODEL, **fields}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", body, {"Content-Type": "application/json"})
    with urllib.request.urlopen(request, timeout=120) as answer:
        return json.loads(answer.read())


async def test_the_request_of_lm_eval_gets_the_targets_own_numbers(tokenizer_file: Path) -> None:
    verifier = VerifierServer(VerifierConfig(threads=1, dtype="float32"))
    edge = EdgeConfig(verifier=await verifier.start(), model=MODEL, tokenizer=tokenizer_file)
    daemon = Daemon(DaemonConfig(listen="127.0.0.1:0"), Client(edge))
    url = await daemon.start()
    await daemon.cloud.found.wait()
    prompts = [list(daemon.cloud.served.ready.encode(text, special=False)) for text in (TEXT, TEXT[:60])]
    request = {"temperature": 0, "max_tokens": 1, "logprobs": 1, "seed": 1234, "echo": True, "prompt": prompts}
    for _ in range(2):  # the cache is cold, and warm
        answer = await asyncio.to_thread(asked, url, **request)
        for choice, prompt in zip(answer["choices"], prompts, strict=True):
            said = choice["logprobs"]
            assert len(said["token_logprobs"]) == len(prompt) + 1
            assert said["token_logprobs"][0] is None
            assert said["token_logprobs"][1:-1] == pytest.approx(plain(tuple(prompt)), abs=CLOSE)
            rows = zip(said["token_logprobs"][1:-1], said["top_logprobs"][1:-1], strict=True)
            greedy = [logprob == max(top.values()) for logprob, top in rows]
            assert 0 < sum(greedy) < len(greedy), "some are the likeliest, some are not"
    await daemon.stop()
    await verifier.stop(0)


async def test_a_verifier_that_dies_amid_the_prompt_leaves_them_as_they_are(tokenizer_file: Path) -> None:
    sha256 = tokenizer_hash(tokenizer_file.read_text())

    # The first is so slow that it is amid the prompt when it goes.
    first = VerifierServer(VerifierConfig(name="first", threads=1, dtype="float32", min_step_s=0.5))
    second = VerifierServer(VerifierConfig(name="second", threads=1, dtype="float32"))
    addresses = (await first.start(), await second.start())
    edge = EdgeConfig(verifier=addresses[0], model=MODEL, tokenizer=tokenizer_file, drafter="none")
    route = DirectRoute(addresses, MODEL, sha256)
    async with Client(edge, route=route) as client:
        prompt = client.encode(TEXT * 3)
        going = asyncio.create_task(client.complete(prompt, max_tokens=4, temperature=0, prompt_logprobs=2))
        while not first.status().sessions:  # noqa: ASYNC110 - counted in another thread
            await asyncio.sleep(0.01)
        await first.stop(0)
        whole = await going
    assert whole.statistics.resumes >= 1
    assert [said.logprob for said in whole.prompt] == pytest.approx(plain(prompt), abs=CLOSE)
    assert all(len(said.top) == 2 for said in whole.prompt)
    await second.stop(0)
