"""Messages travel as before, by their bytes recorded once, and the generated code is that of the contract."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import fields, is_dataclass
from pathlib import Path
from typing import Any

import pytest
from golden_messages import EXAMPLES

from outrider.proto import cluster_status, types
from outrider.proto.v1 import decoding_pb2

GOLDEN = json.loads((Path(__file__).parent / "golden_bytes.json").read_text())


def fields_with_values(value: Any) -> set[tuple[str, str]]:
    """(type, field) of every field under `value` that holds more than nothing."""
    if isinstance(value, tuple):
        return set().union(*map(fields_with_values, value))
    if not is_dataclass(value):
        return set()
    held = {entry.name: getattr(value, entry.name) for entry in fields(value)}
    found = {(type(value).__name__, name) for name, content in held.items() if content not in (0, "", b"", (), None)}
    return found.union(*map(fields_with_values, held.values()))


def test_there_are_bytes_of_every_example():
    assert set(GOLDEN) == set(EXAMPLES)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_message_has_the_bytes_that_it_always_had(name):
    example = EXAMPLES[name]
    assert example.encode(example.message).hex() == GOLDEN[name]


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_bytes_of_old_give_the_same_message(name):
    example = EXAMPLES[name]
    assert example.decode(bytes.fromhex(GOLDEN[name])) == example.message


def test_the_examples_set_every_field_of_every_message():
    found = (*vars(types).values(), *vars(cluster_status).values())
    messages = {kind for kind in found if isinstance(kind, type) and is_dataclass(kind)} - {types.NumberRange}
    assert len(messages) > 20
    wanted = {(kind.__name__, entry.name) for kind in messages for entry in fields(kind)}
    assert set().union(*(fields_with_values(example.message) for example in EXAMPLES.values())) == wanted


# --- the generated code ---


ROOT = Path(decoding_pb2.__file__).parents[3]
CONTRACT = "outrider/proto/v1/decoding.proto"


@pytest.fixture(scope="module")
def generated(tmp_path_factory):
    pytest.importorskip("grpc_tools", reason="needs grpcio-tools: pip install --group dev")
    folder = tmp_path_factory.mktemp("generated")
    command = [sys.executable, "-m", "grpc_tools.protoc", "-I", ".", f"--python_out={folder}", f"--pyi_out={folder}"]
    subprocess.run([*command, CONTRACT], cwd=ROOT, check=True, timeout=120)
    return folder / "outrider/proto/v1"


@pytest.mark.parametrize("name", ["decoding_pb2.py", "decoding_pb2.pyi"])
def test_regenerating_the_contract_gives_the_committed_file(generated, name):
    assert (generated / name).read_text() == (ROOT / "outrider/proto/v1" / name).read_text()
