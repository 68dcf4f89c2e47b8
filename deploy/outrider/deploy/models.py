"""`outrider models`: the targets and drafters that are known by name."""

from __future__ import annotations

import json

from rich.console import Console
from rich.table import Table

from outrider.cloud.models.family_index import embedded_targets, target_folder
from outrider.cloud.models.fetched_model import FETCHED
from outrider.deploy.arguments import Given
from outrider.drafters import embedded_packages, find_package


def models(_: Given) -> int:
    """Run `outrider models`."""
    console = Console()
    console.print(_targets(), _drafters())
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
