"""A target's chat template: how chats become prompts, with the special tokens that edges need for it."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from outrider.cloud.family_index import load_tokenizer, resolve_target

log = logging.getLogger(__name__)


def chat_template_json(target: str) -> str:
    """Return the chat template of an embedded name, a folder or a hub name; empty: it has none.

    Returns:
        A JSON object with `chat_template` and the special tokens that a template may name (`bos_token`,
        `eos_token`, …), wherever the repository keeps its template.
    """
    source = resolve_target(target)
    try:
        config = _of_folder(Path(source)) if Path(source).is_dir() else _of_hub(source)
    except (OSError, ValueError, KeyError) as error:  # decoding needs tokenizer.json alone, which was read before
        log.warning("%s is served without a chat template: %s", target, str(error).strip().split("\n")[0])
        return ""
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, Mapping):
        template = template.get("default")
    if not template:
        return ""
    special = {name: _text(token) for name, token in config.items() if name.endswith("_token") and _text(token)}
    return json.dumps({"chat_template": template, **special})


def _of_folder(folder: Path) -> Mapping[str, Any]:
    """Return the tokenizer's config; a template's own file goes before one in it, in transformers' order."""
    path, own = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {**config, "chat_template": own.read_text(encoding="utf-8")} if own.is_file() else config


def _of_hub(name: str) -> Mapping[str, Any]:
    tokenizer = load_tokenizer(name)
    return {**tokenizer.special_tokens_map, "chat_template": tokenizer.chat_template}


def _text(token: Any) -> str:
    """Return the text of a special token, given itself or an object with it as `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""
