"""The committed protobuf code is what the pinned generator makes of the committed contract."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from outrider.proto.v1 import decoding_pb2

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
