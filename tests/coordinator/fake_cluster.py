"""Fakes for tests and examples: a scripted fleet, and drafter packages of a few bytes."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import grpc
import grpc.aio

from outrider.coordinator.cluster import SendAway, VerifierInfo, VerifierState
from outrider.proto.channel import REPORT_METHOD
from outrider.proto.cluster_status import TrainerStatus
from outrider.proto.drafter_format import CACHE_LAYOUT, DRAFTER_FORMAT, MANIFEST
from outrider.proto.errors import NotFound, Unavailable
from outrider.proto.tokenizer import tokenizer_hash

TOKENIZER_JSON = json.dumps({"model": {"type": "WordLevel", "vocab": {"a": 0, "b": 1}, "unk_token": "a"}})
TOKENIZER_SHA256 = tokenizer_hash(TOKENIZER_JSON)
CHAT_TEMPLATE_JSON = json.dumps({"chat_template": "{{ messages[-1]['content'] }}"})


def ready(name: str, **fields: object) -> VerifierInfo:
    """Return a verifier of model `tiny` that is ready, with `fields` replaced."""
    info = VerifierInfo(
        name=name,
        address="127.0.0.1:1",
        model="tiny",
        tokenizer_sha256=TOKENIZER_SHA256,
        state=VerifierState.READY,
        max_sessions=4,
    )
    return replace(info, **fields)  # type: ignore[arg-type]


def add_report(server: grpc.aio.Server, report: bytes | str) -> None:
    """Have a server report what a verifier would, to whoever asks: bytes, or a ready verifier's of this name."""
    data = report if isinstance(report, bytes) else json.dumps(asdict(ready(report))).encode()

    async def answer(request: bytes, context: grpc.aio.ServicerContext) -> bytes:
        return data

    service, method = REPORT_METHOD.strip("/").split("/")
    handlers = {method: grpc.unary_unary_rpc_method_handler(answer)}
    server.add_generic_rpc_handlers((grpc.method_handlers_generic_handler(service, handlers),))


class ScriptedCluster:
    """A fleet of scripted `verifiers`; `reachable = False` makes it unavailable."""

    def __init__(self, *verifiers: VerifierInfo, tokenizer_json: str = TOKENIZER_JSON) -> None:
        self.verifiers = {verifier.name: verifier for verifier in verifiers}
        self.reachable = True
        self.refreshes = 0
        self.drained: list[str] = []
        self.allowed: frozenset[bytes] | None = None
        self.sent_away: list[SendAway] = []
        self.retired: frozenset[tuple[str, str]] = frozenset()
        self.trainers: tuple[TrainerStatus, ...] = ()
        self._tokenizer_json = tokenizer_json

    async def refresh(self) -> tuple[VerifierInfo, ...]:
        """Return the scripted verifiers."""
        self.refreshes += 1
        if not self.reachable:
            raise Unavailable("the cluster is away")
        return tuple(self.verifiers[name] for name in sorted(self.verifiers))

    async def drain(self, name: str) -> int:
        """Mark the verifier as draining and return its sessions."""
        self._require(name)
        self.drained.append(name)
        self.verifiers[name] = replace(self.verifiers[name], state=VerifierState.DRAINING)
        return self.verifiers[name].sessions

    async def send_away(self, sessions: SendAway) -> None:
        """Note the sessions."""
        self.sent_away.append(sessions)

    async def tokenizer_json(self, name: str) -> str:
        """Return the tokenizer that all verifiers share."""
        self._require(name)
        return self._tokenizer_json

    async def chat_template_json(self, name: str) -> str:
        """Return the chat template that all verifiers share."""
        self._require(name)
        return CHAT_TEMPLATE_JSON

    async def allow_learning(self, keys: frozenset[bytes]) -> None:
        """Note the keys."""
        self.allowed = keys

    async def retire_versions(self, versions: frozenset[tuple[str, str]]) -> None:
        """Note the versions."""
        self.retired |= versions

    async def close(self) -> None:
        """Do nothing."""

    def _require(self, name: str) -> None:
        if name not in self.verifiers:
            raise NotFound(f"there is no verifier {name!r}", field="verifier")


def write_package(
    folder: Path,
    *,
    name: str = "tiny-drafter",
    version: str = "1",
    target: str = "tiny",
    tokenizer_sha256: str = TOKENIZER_SHA256,
    files: Mapping[str, bytes] | None = None,
    **more: Any,
) -> Path:
    """Write a drafter package into `folder`, the manifest with `more` fields last, and return `folder`."""
    contents = {"model.onnx": b"onnx " + version.encode(), "tokenizer.json": TOKENIZER_JSON.encode(), **(files or {})}
    folder.mkdir(parents=True, exist_ok=True)
    for file_name, data in contents.items():
        (folder / file_name).write_bytes(data)
    manifest = {
        "format": DRAFTER_FORMAT,
        "name": name,
        "version": version,
        "kind": "onnx-lm",
        "target": target,
        "tokenizer_sha256": tokenizer_sha256,
        "precision": "float32",
        "cache": {"layers": 1, "kv_heads": 1, "head_dim": 1, "dtype": "float32", "layout": CACHE_LAYOUT},
        **dict.fromkeys(("vocab_size", "context_length", "candidates", "parameters"), 1),
        "files": {
            file_name: {"sha256": hashlib.sha256(data).hexdigest(), "bytes": len(data)}
            for file_name, data in contents.items()
        },
        **more,
    }
    (folder / MANIFEST).write_text(json.dumps(manifest))
    return folder
