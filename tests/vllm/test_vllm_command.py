"""`outrider verifier --engine vllm` as an operator runs it, with workers in processes of their own."""

from __future__ import annotations

import asyncio
from pathlib import Path

import psutil
from command_processes import Command

from outrider.cloud.models.family_index import target_folder, tokenizer_file
from outrider.edge import Client, EdgeConfig

TOKENIZER = tokenizer_file(target_folder("reference"))
SIZES = ("--context-length", "256", "--target-threads", "1", "--dtype", "float32")


async def text_at(address: str) -> tuple[int, ...]:
    config = EdgeConfig(verifier=address, model="reference", tokenizer=TOKENIZER, drafter="general", threads=1)
    async with Client(config) as client:
        return (await client.complete("The river", max_tokens=32, temperature=1.0, seed=6)).ids


def test_the_command_serves_and_leaves_no_worker_behind(tmp_path: Path) -> None:
    texts = []
    for engine in (("--engine", "transformers"), ("--engine", "vllm", "--tensor-parallel", "2")):
        process = Command("verifier", *engine, *SIZES, log=tmp_path / "log")
        process.start()
        try:
            texts.append(asyncio.run(text_at(process.line().rpartition(" ")[2])))
            workers = psutil.Process(process.process.pid).children(recursive=True)
            assert (len(workers) >= 2) == ("vllm" in engine)
            assert process.terminate() == 0
            assert psutil.wait_procs(workers, timeout=10)[1] == []
        finally:
            process.end()
    assert texts[0] == texts[1]
