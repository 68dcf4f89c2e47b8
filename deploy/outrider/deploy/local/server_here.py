"""A verifier in this process that asks a server elsewhere, for the one person whom `outrider edge --server` serves."""

from __future__ import annotations

import asyncio
import logging
import tempfile
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import Tokenizer

from outrider.cloud.probes.scoring import ServerFacts
from outrider.cloud.verifier_config import PROBES, VerifierConfig
from outrider.deploy.commands.edge_options import ServerSettings
from outrider.deploy.process.progress import waiting
from outrider.edge.chat.rendering import TemplateProcess
from outrider.proto.errors import ConfigError, InvalidArgument, Unavailable

if TYPE_CHECKING:
    from outrider.cloud.serving.probe_engine import ProbeEngine

AGAIN_S = 1.0
CHAT = ({"role": "user", "content": "What is 2 + 3?"},)

logger = logging.getLogger(__name__)


@asynccontextmanager
async def verifier_here(
    asked: ServerSettings, tokenizer: Path | None, *, wait: bool = True
) -> AsyncIterator[tuple[ServerFacts, dict[str, Any]]]:
    """Serve by the server that is asked for; yield its facts, and the fields of an `EdgeConfig` that decodes here.

    `tokenizer` is the folder of the model's files, or one of them; None: the server says where they are. `wait`: until
    it answers.

    Raises:
        Unavailable: nothing answers there, and nobody waits.
        ConfigError: it is no server that can score tokens, or a setting is missing; the field is named.
    """
    from outrider.cloud.serving.server_loading import load_probe_engine
    from outrider.cloud.serving.verifier_server import VerifierServer

    config = VerifierConfig(
        engine=PROBES,
        listen="127.0.0.1:0",
        name="here",
        draft_here="off",  # the edge's drafters are as near
        target_url=asked.server,
        target_model=asked.server_model,
        target_key_file=asked.server_key_file,
        target_ca=asked.server_ca,
        target_tokenizer=tokenizer,
    )
    with waiting(f"waiting for the server at {config.target_url}"):
        said = ""
        while True:
            try:
                engine = await load_probe_engine(config)
                break
            except ConfigError as error:
                field = error.field.replace("target_url", "server").replace("target_", "server_")
                raise ConfigError(error.message.replace("--target-", "--server-"), field=field) from error
            except Unavailable as error:
                if not wait:
                    raise Unavailable(error.message) from error
                if error.message != said:
                    logger.warning("%s", error.message)
                said = error.message
                await asyncio.sleep(AGAIN_S)
    server = VerifierServer(config, engine=engine)
    address = await server.start()
    try:
        if not await _renders_alike(engine):
            line = "%s renders chats by another template than that of its tokenizer; give its file by --chat-template"
            logger.warning(line, config.target_url)
        with tempfile.TemporaryDirectory(prefix="outrider-") as folder:
            files = {"tokenizer": server.tokenizer_json, "chat_template": server.chat_template_json}
            paths = {name: Path(folder) / f"{name}.json" for name, text in files.items() if text}
            for name, path in paths.items():
                path.write_text(files[name], encoding="utf-8")
            where = {"coordinator": "", "verifier": address, "model": server.rules.model, **paths}
            yield engine.server.facts, where
    finally:
        await server.stop()


async def _renders_alike(engine: ProbeEngine) -> bool:
    """Return whether a chat has the same tokens here and at the server, as far as that tells."""
    there, facts = await engine.server.chat(CHAT), engine.target.facts
    if not there:
        return True
    try:
        process = await TemplateProcess.of(facts.chat_template_json)
    except InvalidArgument:
        return True  # the daemon says that chats are refused, and why
    if process is None:
        return False
    try:
        text = await process.render(CHAT, add_generation_prompt=True)
    finally:
        await process.close()
    here = Tokenizer.from_str(facts.tokenizer_json).encode(text, add_special_tokens=False).ids
    return here == list(there)
