"""Models in GGUF files, each turned once into a folder that transformers loads as any other."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from outrider.cloud.models.model_cache import made_once
from outrider.proto.errors import ModelRefused, Unavailable
from outrider.proto.plumbing.files import sha256_of

VERSION = 1  # of what the conversion writes
_MAGIC = b"GGUF"
_SPARE_BYTES = 64 << 20  # that the conversion leaves on the disk
_SCALINGS = ("rope_freqs.weight", "rope_factors_long.weight", "rope_factors_short.weight")

log = logging.getLogger(__name__)


def converted(file: Path) -> Path:
    """Return the folder with the model of a GGUF file, converted at first use and kept in the cache.

    Its weights are those that the file stands for, in bfloat16. Tokenizer, chat template and the tokens that end a text
    are the file's.

    Raises:
        ModelRefused: the file is no GGUF, cut off, or of a kind that transformers does not read.
        Unavailable: the cache has no room, or cannot be written.
    """
    try:
        with file.open("rb") as content:
            magic = content.read(len(_MAGIC))
        status = file.stat()
        sha256 = _content(file.resolve(), (status.st_size, status.st_mtime_ns))
    except OSError as error:
        raise ModelRefused(f"cannot read {file}: {error.strerror or error}", field="target") from error
    if magic != _MAGIC:
        raise ModelRefused(f"{file.name} is no GGUF file; give one, or a folder of *.safetensors", field="target")
    return made_once(folder_name("gguf", sha256), lambda folder: convert(file, folder))


def folder_name(kind: str, sha256: str, template: str = "") -> str:
    """Return the name in the cache of what `convert` makes of the file with that hash."""
    return f"{kind}-{hashlib.sha256(f'{VERSION} {sha256} {template}'.encode()).hexdigest()[:16]}"


@functools.cache
def _content(file: Path, _unchanged: tuple[int, int]) -> str:
    """Return the hash of a file's content, which is read once while its size and the time of its last change stay."""
    return sha256_of(file)


def convert(file: Path, folder: Path, template: str = "") -> None:
    """Write the model of a GGUF file to `folder`, with `template` in place of its own chat template unless empty.

    Raises:
        ModelRefused: transformers cannot read the file, or leaves something of it out.
        Unavailable: the disk has no room.
    """
    log.warning("converting %s for its first use: %.1f MB, once", file.name, file.stat().st_size / 1e6)
    from safetensors import SafetensorError

    try:
        import accelerate  # noqa: F401 - transformers' reader asks for both
        import gguf  # noqa: F401
        from transformers.integrations.gguf.reader import read_gguf_metadata
    except ImportError as error:
        raise ModelRefused(
            f"a GGUF file is read by gguf, accelerate and a transformers of this year ({error}): "
            "pip install --upgrade gguf accelerate transformers",
            field="target",
        ) from error
    with _readable(file):
        metadata, tensors = read_gguf_metadata(str(file))
    _check(file, metadata, tensors)
    with _readable(file):
        model, tokenizer = _load(file)
    need, free = sum(each.nbytes for each in model.parameters()) + _SPARE_BYTES, shutil.disk_usage(folder).free
    if need > free:
        message = (
            f"{file.name} needs {need / 1e6:.0f} MB on the disk of {folder.parent}, which has {free / 1e6:.0f}; make "
            "room, or name another folder in XDG_CACHE_HOME"
        )
        raise Unavailable(message, field="target", code="OUT-409")
    ends = {model.generation_config.eos_token_id, metadata.get("tokenizer.ggml.eot_token_id")} - {None}
    model.generation_config.eos_token_id = sorted(ends) if len(ends) > 1 else next(iter(ends), None)
    if template:
        tokenizer.chat_template = template
    try:
        with _quiet():
            model.save_pretrained(folder)
            tokenizer.save_pretrained(folder)
        _drop_added_tokens(folder, model.config.vocab_size)
    except SafetensorError as error:  # its own kind where writing fails
        raise OSError(str(error)) from error


def _drop_added_tokens(folder: Path, vocab_size: int) -> None:
    """Take from a saved tokenizer the tokens that transformers adds beyond the model's vocabulary."""
    file, settings = folder / "tokenizer.json", folder / "tokenizer_config.json"
    tokenizer, config = (json.loads(path.read_text(encoding="utf-8")) for path in (file, settings))
    beyond = {token["content"] for token in tokenizer["added_tokens"] if token["id"] >= vocab_size}
    if not beyond:
        return
    tokenizer["added_tokens"] = [token for token in tokenizer["added_tokens"] if token["content"] not in beyond]
    file.write_text(json.dumps(tokenizer, ensure_ascii=False), encoding="utf-8")
    kept = {key: value for key, value in config.items() if not (isinstance(value, str) and value in beyond)}
    settings.write_text(json.dumps(kept, ensure_ascii=False, indent=2), encoding="utf-8")


def _check(file: Path, metadata: dict[str, Any], tensors: tuple[str, ...]) -> None:
    """Raise `ModelRefused` for what transformers' reader would silently ignore."""
    architecture = metadata["general.architecture"]
    if metadata.get("split.count", 0) > 1:
        raise ModelRefused(
            f"{file.name} is one of several parts; join them by `llama-gguf-split --merge`", field="target"
        )
    scaled = metadata.get(f"{architecture}.rope.scaling.type", "none") != "none" or set(tensors) & set(_SCALINGS)
    if scaled and architecture != "gpt-oss":
        raise ModelRefused(
            f"{file.name} scales its rotation, and transformers does not read how; take the model's safetensors",
            field="target",
        )


def _load(file: Path) -> tuple[Any, Any]:
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    with _quiet(), _reading_once():
        found: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
        found["config"] = AutoConfig.from_pretrained(file.parent, **found)  # else each of them reads the file for it
        tokenizer = AutoTokenizer.from_pretrained(file.parent, **found)
        found |= {"dtype": torch.bfloat16, "quantization_config": GgufConfig(dequantize=True)}
        loaded: Any = AutoModelForCausalLM.from_pretrained(file.parent, output_loading_info=True, **found)
    model, loading = loaded
    if missing := sorted(loading["missing_keys"]):  # else they would be random
        raise ValueError(f"it lacks {missing[0]} and {len(missing) - 1} other tensors")
    return model, tokenizer


@contextlib.contextmanager
def _reading_once() -> Iterator[None]:
    """Have the file parsed once, and its table of names built once: transformers asks for them 3 and 400 times."""
    import gguf

    slow = {name: getattr(gguf, name) for name in ("GGUFReader", "get_tensor_name_map")}
    for name, function in slow.items():
        setattr(gguf, name, functools.cache(function))
    try:
        yield
    finally:
        for name, function in slow.items():
            setattr(gguf, name, function)


@contextlib.contextmanager
def _readable(file: Path) -> Iterator[None]:
    """Raise `ModelRefused`, with the remedy, for any error of the block that reads `file`."""
    try:
        yield
    except Exception as error:  # on a file that is damaged or strange the readers raise whatever comes
        why = str(error).strip().split("\n")[0][:300] or type(error).__name__
        raise ModelRefused(
            f"{file.name} cannot be read: it is cut off, damaged, or of a kind that transformers does not know "
            f"({why}); fetch it again, or take the model's safetensors",
            field="target",
        ) from error


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Keep the bars of libraries from standard error, which has a line about the whole already."""
    with open(os.devnull, "w", encoding="utf-8") as nowhere, contextlib.redirect_stderr(nowhere):
        yield
