"""Targets that the package carries, found by name. Needs no torch."""

from __future__ import annotations

from pathlib import Path

from outrider.proto.errors import ModelRefused, NotFound

_FAMILY = Path(__file__).parent / "family"
_DRAFTERS = Path(__file__).parent / "drafters"


def embedded_targets() -> tuple[str, ...]:
    """Their names."""
    return tuple(sorted(folder.name for folder in _FAMILY.iterdir() if (folder / "config.json").is_file()))


def target_folder(name: str) -> Path:
    """Where the embedded target `name` lies."""
    return _FAMILY / name


def drafter_folder(name: str) -> Path | None:
    """Where the weights of the embedded drafter `name` lie, as transformers reads them; None: it is not embedded."""
    folder = _DRAFTERS / name
    return folder if (folder / "config.json").is_file() else None


def resolve_target(target: str) -> str:
    """The folder or hub name behind `target`: an embedded name, an existing folder, or else a hub name.

    Raises:
        NotFound: it looks like a folder, but there is none.
        ModelRefused: the folder has no safetensors weights.
    """
    if target in embedded_targets():
        return str(target_folder(target))
    folder = Path(target).expanduser()
    if folder.is_dir():
        if not any(folder.glob("*.safetensors")):
            raise ModelRefused(f"{target} holds no *.safetensors; convert the weights first", field="target")
        return str(folder)
    if target.startswith((".", "/", "~")) or target.count("/") > 1:
        raise NotFound(f"there is no folder {target}", field="target")
    return target
