"""A tiny target and its drafters, for the tests of the bench."""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from outrider.cloud.steering import Projection
from outrider.cloud.testing import save_tiny_target
from outrider.edge.testing import tiny_drafter
from outrider.proto.testing import word_tokenizer
from outrider.proto.tokenizer import tokenizer_hash

SIZES = {
    "vocab_size": tiny_drafter.VOCAB,
    "hidden_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "intermediate_size": 24,
    "max_position_embeddings": 192,
    "initializer_range": 0.3,
    "bos_token_id": 0,
    "eos_token_id": 1,
}
WORDS = word_tokenizer(tiny_drafter.VOCAB)


@dataclass(frozen=True)
class Family:
    """The files of a target, a drafter, the same drafter with steering, and the projection of its vectors."""

    target: Path
    plain: Path
    steered: Path
    projection: Path


@pytest.fixture(scope="session")
def family(tmp_path_factory: pytest.TempPathFactory) -> Family:
    folder = tmp_path_factory.mktemp("family")
    found = Family(*(folder / name for name in ("target", "plain", "steered", "projection.safetensors")))
    save_tiny_target(found.target, seed=0, sharpness=1, **SIZES)
    projection = Projection((0, 1), hidden=32, rank=tiny_drafter.RANK, target="big").save(found.projection)
    tiny_package(found.plain, tiny_drafter.tiny_graph())
    manifest = tiny_drafter.STEERING_MANIFEST | {"projection": projection}
    graphs = tiny_drafter.tiny_graph(steered=True), tiny_drafter.steering_graph()
    tiny_package(found.steered, *graphs, steering=manifest)
    return found


def tiny_package(folder: Path, *graphs: object, **manifest: object) -> None:
    """Write a package with the target's tokenizer instead of its own."""
    folder.mkdir()
    tiny_drafter.write_package(folder, *graphs, name=folder.name, **manifest)
    (folder / "tokenizer.json").write_text(WORDS)
    promised = json.loads((folder / "manifest.json").read_text())
    promised["tokenizer_sha256"] = tokenizer_hash(WORDS)
    file = {"sha256": hashlib.sha256(WORDS.encode()).hexdigest(), "bytes": len(WORDS)}
    promised["files"]["tokenizer.json"] = file
    (folder / "manifest.json").write_text(json.dumps(promised))
