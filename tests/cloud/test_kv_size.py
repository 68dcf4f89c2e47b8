"""The KV cache's size by memory."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from outrider.cloud.target import kv_size
from outrider.cloud.target.kv_size import CPU_SHARE, available_bytes, bytes_per_token, kv_tokens_by_memory
from outrider.cloud.target.target import load_target
from outrider.cloud.testing import save_tiny_target
from outrider.proto.errors import ModelRefused

CONFIG = LlamaConfig(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, hidden_size=64)
CPU = torch.device("cpu")


def machine(folder: Path, available_kib: int, limit: str = "", used: int = 0) -> tuple[Path, Path]:
    (folder / "meminfo").write_text(f"MemTotal: 999999 kB\nMemAvailable:   {available_kib} kB\nBuffers: 1 kB\n")
    if limit:
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
    return folder / "meminfo", folder


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("", 0, 1 << 20), ("max", 5, 1 << 20), ("300000", 100000, 200000), ("5000", 6000, 0), ("99999999", 1, 1 << 20)],
)
def test_a_container_takes_no_more_than_its_limit(tmp_path, limit, used, expected) -> None:
    assert available_bytes(*machine(tmp_path, 1024, limit, used)) == expected


def test_a_position_takes_keys_and_values_of_every_layer() -> None:
    assert bytes_per_token(CONFIG, torch.bfloat16) == 2 * 3 * 2 * 8 * 2
    assert bytes_per_token(CONFIG, torch.float32) == 2 * 3 * 2 * 8 * 4


def test_the_cache_takes_a_share_of_memory_and_no_more_than_can_be_of_use(monkeypatch) -> None:
    monkeypatch.setattr(kv_size, "available_bytes", lambda: 384 * 1000)
    assert kv_tokens_by_memory(CONFIG, torch.float32, CPU, 10**9) == int(1000 * CPU_SHARE)
    assert kv_tokens_by_memory(CONFIG, torch.float32, CPU, 100) == 100


def test_too_little_memory_is_refused_with_the_field(monkeypatch) -> None:
    monkeypatch.setattr(kv_size, "available_bytes", lambda: 384)
    with pytest.raises(ModelRefused, match="kv_tokens"):
        kv_tokens_by_memory(CONFIG, torch.float32, CPU, 10**9)


def test_more_positions_than_memory_are_refused_at_load(tmp_path) -> None:
    folder = str(save_tiny_target(tmp_path))
    with pytest.raises(ModelRefused, match="GiB of memory are left") as refusal:
        load_target(folder, kv_tokens=1 << 40)
    assert refusal.value.field == "kv_tokens"


def test_a_target_gets_what_its_sessions_can_fill(tmp_path) -> None:
    target = load_target(str(save_tiny_target(tmp_path)), max_sessions=3, context_length=64)
    assert target.pool.page_count * target.pool.page_size == 3 * 64


def test_a_context_is_no_longer_than_the_cache(tmp_path) -> None:
    assert load_target(str(save_tiny_target(tmp_path)), kv_tokens=100).context_length == 96
