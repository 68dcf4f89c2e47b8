"""A verifier behind the daemon's API, in this process."""

from __future__ import annotations

import asyncio
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

from openai import AsyncOpenAI

from outrider.cloud.models.family_index import chat_template_json
from outrider.cloud.serving.verifier_server import VerifierServer
from outrider.cloud.verifier_config import VerifierConfig
from outrider.edge import Client, EdgeConfig
from outrider.edge.daemon import DaemonConfig
from outrider.edge.daemon.http_server import Daemon


@asynccontextmanager
async def client_of(verifier: VerifierServer, edge: EdgeConfig) -> AsyncIterator[AsyncOpenAI]:
    """Yield a client of a daemon with the settings `edge`; end the daemon and `verifier`, which has started."""
    daemon = Daemon(DaemonConfig(listen="127.0.0.1:0", grace_s=0.1), Client(edge))
    daemon.cloud.every_s = 0.1
    try:
        url = await daemon.start()
        while daemon.cloud.health.status == "unavailable":  # noqa: ASYNC110 - the watch has no event for it
            await asyncio.sleep(0.02)
        async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0) as openai:
            yield openai
    finally:
        await daemon.stop()
        await verifier.stop(0)


@asynccontextmanager
async def serving(target: str, *, drafter: str = "ngram", **config: Any) -> AsyncIterator[AsyncOpenAI]:
    """Yield a client of the OpenAI API of a verifier of `target`."""
    with tempfile.TemporaryDirectory() as folder:
        tokenizer, template = Path(folder, "tokenizer.json"), Path(folder, "chat_template.json")
        verifier = VerifierServer(VerifierConfig(target=target, **config))
        for file, text in ((tokenizer, verifier.tokenizer_json), (template, chat_template_json(target))):
            file.write_text(text, encoding="utf-8")
        edge = EdgeConfig(
            verifier=await verifier.start(), model=target, tokenizer=tokenizer, chat_template=template, drafter=drafter
        )
        async with client_of(verifier, edge) as openai:
            yield openai
