"""`outrider models`: the targets and drafters that are known by name."""

from __future__ import annotations

import json
import time
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table

from outrider.cloud.models.family_index import embedded_targets, target_folder
from outrider.cloud.models.fetched_model import FETCHED
from outrider.deploy.arguments import Given
from outrider.deploy.commands.training_options import ModelsSettings
from outrider.drafters import DrafterPackage, embedded_packages, find_package
from outrider.drafters.shelf import give_back, own_bytes
from outrider.proto.errors import ConfigError

if TYPE_CHECKING:
    from outrider.drafters.onnx import OnnxDrafter

CACHED_TOKENS = 512


def models(given: Given) -> int:
    """Run `outrider models`."""
    console = Console()
    console.print(_targets(), _drafters())
    if given(ModelsSettings).memory:
        console.print(_memory())
    for name, model in FETCHED.items():
        size = f"{model.wheel_bytes / 1e6:.0f} MB"
        made = ", ".join(each.name for each in map(find_package, embedded_packages()) if each.target == name)
        line = f"{name} is {model.title} ({model.license}): {size}, fetched on first use; "
        console.print(f"{line}made of it, and {model.license}: {made}", highlight=False, soft_wrap=True)
    console.print("any other --target is a folder, a GGUF file or a hub name, such as Qwen/Qwen3-8B", highlight=False)
    return 0


def _targets() -> Table:
    table = Table("target", "architecture", "layers", "hidden", "vocabulary", "context", "MB")
    for name in embedded_targets():
        config = json.loads((target_folder(name) / "config.json").read_text(encoding="utf-8"))
        size = (target_folder(name) / "model.safetensors").stat().st_size / 1e6
        keys = ("num_hidden_layers", "hidden_size", "vocab_size", "max_position_embeddings")
        table.add_row(name, config["architectures"][0], *(str(config[key]) for key in keys), f"{size:.1f}")
    for name, model in FETCHED.items():
        table.add_row(name, *model.shape)
    return table


def _drafters() -> Table:
    table = Table("drafter", "version", "made for", "parameters", "precision", "MB")
    for name in embedded_packages():
        package = find_package(name)
        size = sum(file.bytes for file in package.files) / 1e6
        parameters = f"{package.parameters / 1e6:.2f} M"
        table.add_row(package.name, package.version, package.target, parameters, package.precision, f"{size:.1f}")
    table.add_row("ngram", "-", "any", "-", "-", "-")
    return table


def _memory() -> Table:
    """Return the memory of each drafter beside ONNX Runtime itself, and of a session's cache in it."""
    packages = [find_package(name) for name in embedded_packages()]
    table = Table("drafter", "MB in memory", f"MB of cache a session, {CACHED_TOKENS} tokens", "ready after, ms")
    before = own_bytes()
    if before is None:
        raise ConfigError("needs a system that reports the memory of a process, such as Linux", field="memory")
    _load(packages[0])  # and drop: what comes first pays for ONNX Runtime
    give_back()
    table.add_row("ONNX Runtime", f"{((own_bytes() or 0) - before) / 1e6:.1f}", "-", "-")
    kept, sums = [], [0.0, 0.0]
    for package in packages:
        before = own_bytes() or 0
        began = time.perf_counter()
        kept.append(_load(package))
        ready_ms = 1000 * (time.perf_counter() - began)
        sizes = ((own_bytes() or 0) - before, package.cache.bytes_of(CACHED_TOKENS))
        sums = [total + size for total, size in zip(sums, sizes, strict=True)]
        table.add_row(package.name, *(f"{size / 1e6:.1f}" for size in sizes), f"{ready_ms:.0f}")
    table.add_row("all", *(f"{total / 1e6:.1f}" for total in sums), "-", style="bold")
    return table


def _load(package: DrafterPackage) -> OnnxDrafter:
    from outrider.drafters.onnx import OnnxDrafter

    return OnnxDrafter(package)
