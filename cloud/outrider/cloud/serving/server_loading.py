"""From a server's address to an engine of probes: what it can do, and the tokens and limits of its model."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tokenizers import Tokenizer

from outrider.cloud.models.family_index import eos_tokens, find_target, first_line, template_json_of
from outrider.cloud.probes.canary import examine
from outrider.cloud.probes.http_door import ServerAddress
from outrider.cloud.probes.scoring import ServerFacts
from outrider.cloud.serving.local_source import local_source
from outrider.cloud.serving.probe_engine import ProbeEngine
from outrider.cloud.target.backend import TargetFacts
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.files import read_key
from outrider.proto.plumbing.logs import about
from outrider.proto.tokenizer import TOKENIZER_FILE, tokenizer_hash

KEY_VARIABLE = "OUTRIDER_TARGET_KEY"
_FILES = (TOKENIZER_FILE, "tokenizer_config.json", "chat_template.jinja", "config.json", "generation_config.json")

log = logging.getLogger(__name__)


async def load_probe_engine(config: VerifierConfig) -> ProbeEngine:
    """Return an engine by the server of `config`, which is asked what it can do, and timed.

    Raises:
        Unavailable: nothing answers there.
        ConfigError: it is no server that can score tokens, or a setting is missing; the field is named.
    """

    @cache
    def tokens_of(root: str) -> ModelTokens:
        return ModelTokens.of(tokenizer_folder(config.target_tokenizer, root))

    path = config.target_key_file
    key = os.environ.get(KEY_VARIABLE, "").strip() if path is None else read_key(path, "target_key_file")
    address = ServerAddress(config.target_url, api_key=key, ca=config.target_ca)
    server = await examine(address, config.target_model, lambda root: tokens_of(root).vocab_size)
    try:
        for flag in server.facts.lacking:
            log.warning("the server at %s lacks %s", config.target_url, flag, extra=about(verifier=config.name))
        facts = tokens_of(server.facts.root).facts(server.facts)
        engine = ProbeEngine(
            server, facts, replace(config, target_model=server.facts.model), local_source(config, facts)
        )
        await engine.measure()
    except BaseException:
        await server.close()
        raise
    line = "%s at %s serves %s: a token of its stream takes %.1f ms, a probe of 9 rows %.1f ms"
    stream_s, probe_s = engine.requests.tokens.seconds(1), engine.requests.probes.seconds(9)
    log.info(line, server.facts.kind, config.target_url, engine.rules.model, 1e3 * stream_s, 1e3 * probe_s)
    return engine


def tokenizer_folder(given: Path | None, root: str) -> Path:
    """Return the folder of the model's tokenizer: the one given, or `root`, where the server says its weights are.

    Raises:
        ConfigError: there is none with a `tokenizer.json`.
    """
    if given is not None:
        folder = given.expanduser()
        folder = folder.parent if folder.is_file() else folder
        if not (folder / TOKENIZER_FILE).is_file():
            raise ConfigError(f"{given} holds no {TOKENIZER_FILE}; give the folder of the model's", field="tokenizer")
        return folder
    remedy = f"give the folder of the model's {TOKENIZER_FILE} and configs"
    if not root:
        raise ConfigError(f"is missing, and the server does not say where its weights are: {remedy}", field="tokenizer")
    folder = Path(root)
    if (folder / TOKENIZER_FILE).is_file():
        return folder
    if folder.is_absolute() or root.count("/") != 1:
        raise ConfigError(f"is missing, and {root} is not here: {remedy}", field="tokenizer")
    from huggingface_hub import snapshot_download

    try:
        find_target(root)  # one quick question, where the hub may be out of reach
        return Path(snapshot_download(root, allow_patterns=list(_FILES)))
    except Exception as error:  # whatever the HTTP library of this release of the hub's raises
        why = f"is missing, and the hub does not give {root}: {first_line(error)}; {remedy}"
        raise ConfigError(why, field="tokenizer") from error


@dataclass(frozen=True, slots=True)
class ModelTokens:
    """The tokens of a served model, by the files of its tokenizer's folder."""

    folder: Path
    tokenizer_json: str
    vocab_size: int
    eos: frozenset[int]

    @classmethod
    def of(cls, folder: Path) -> ModelTokens:
        """Read a folder; raises `ConfigError` where a file is damaged, or none says which tokens end a text."""
        tokenizer_json = (folder / TOKENIZER_FILE).read_text(encoding="utf-8")
        try:
            tokenizer = Tokenizer.from_str(tokenizer_json)
        except Exception as error:  # a plain one, whatever is wrong
            message = f"{folder / TOKENIZER_FILE} is no tokenizer: {first_line(error)}"
            raise ConfigError(message, field="tokenizer") from error
        config = _read(folder / "config.json")
        config = config.get("text_config", config)
        files = (_read(folder / "generation_config.json"), config)
        eos = eos_tokens(*(SimpleNamespace(eos_token_id=file.get("eos_token_id")) for file in files))
        if not eos:
            named = _read(folder / "tokenizer_config.json").get("eos_token")
            text = named.get("content") if isinstance(named, Mapping) else named
            token = tokenizer.token_to_id(text) if isinstance(text, str) else None
            eos = frozenset(() if token is None else (token,))
        if not eos:
            message = f"{folder} does not say which token ends a text: add the model's generation_config.json"
            raise ConfigError(message, field="tokenizer")
        vocab = max(max(tokenizer.get_vocab().values()) + 1, int(config.get("vocab_size", 0)))
        return cls(folder, tokenizer_json, vocab, eos)

    def facts(self, server: ServerFacts) -> TargetFacts:
        """Return the facts of the target that `server` computes."""
        return TargetFacts(
            tokenizer_json=self.tokenizer_json,
            tokenizer_sha256=tokenizer_hash(self.tokenizer_json),
            vocab_size=self.vocab_size,
            context_length=server.context_length,
            eos_tokens=self.eos,
            hidden_size=0,
            num_layers=0,
            device=None,
            precision=f"{server.kind}, {server.root or server.model}",
            server=server.words,
            chat_template_json=template_json_of(str(self.folder)),
        )


def _read(path: Path) -> dict[str, Any]:
    """Return an object of JSON; empty: there is no such file."""
    try:
        found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"{path} is no JSON: {error}", field="tokenizer") from error
    return found if isinstance(found, dict) else {}
