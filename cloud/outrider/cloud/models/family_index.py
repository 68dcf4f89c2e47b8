"""Models by name, whether the package carries them or not, their tokenizers and chat templates; without torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cloud.models.fetched_model import FETCHED, fetched_folder
from outrider.cloud.models.gguf_file import converted
from outrider.cloud.models.hub import check_hub
from outrider.proto.errors import InvalidArgument, ModelRefused, NotFound
from outrider.proto.tokenizer import TOKENIZER_FILE, shipped_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

_FAMILY = Path(__file__).parents[1] / "family"

log = logging.getLogger(__name__)


def embedded_targets() -> tuple[str, ...]:
    """Return the names of the targets."""
    return tuple(sorted(folder.name for folder in _FAMILY.iterdir() if (folder / "config.json").is_file()))


def target_folder(name: str) -> Path:
    """Return the folder of the embedded target `name`."""
    return _FAMILY / name


def tokenizer_file(source: str | Path) -> Path | None:
    """Return the tokenizer.json of a target's folder; None: it has none, or `source` is a hub name.

    An embedded target's manifest names its tokenizer by hash.
    """
    folder = Path(source)
    if folder.parent == _FAMILY:
        manifest = json.loads((folder / "manifest.json").read_text(encoding="utf-8"))
        return shipped_tokenizer(manifest["tokenizer_sha256"])
    own = folder / TOKENIZER_FILE
    return own if own.is_file() else None


def load_tokenizer(source: str) -> Any:
    """Return the transformers tokenizer of a folder or hub name; raise what `from_pretrained` does."""
    from transformers import AutoTokenizer

    file = tokenizer_file(source)
    found = {} if file is None else {"tokenizer_file": str(file)}
    return AutoTokenizer.from_pretrained(source, trust_remote_code=False, **found)


def load_causal_lm(
    source: str | Path,
    refusal: str,
    *,
    field: str,
    dtype: str = "float32",
    device: str = "cpu",
    attention: str | None = None,
) -> PreTrainedModel:
    """Load the transformers model of a folder or hub name: weights from safetensors only, no remote code.

    Raises:
        InvalidArgument: there is no such model; it says `refusal` about `field`.
    """
    from transformers import AutoModelForCausalLM

    from outrider.cloud.models.heads import has_small_head, load_with_small_head

    model: Any
    try:
        if has_small_head(Path(source)):
            model = load_with_small_head(Path(source), dtype=dtype, attention=attention)
        else:
            model = AutoModelForCausalLM.from_pretrained(
                source, dtype=dtype, use_safetensors=True, trust_remote_code=False, attn_implementation=attention
            )
    except (OSError, ValueError) as error:
        raise InvalidArgument(f"{refusal}: {error}", field=field) from error
    moved: PreTrainedModel = model.to(device)
    return moved


def resolve_target(target: str) -> str:
    """Return the folder or hub name that `target` stands for: a known name, a folder, a GGUF file, or a hub name.

    What must be fetched or converted first is, once; see `fetched_folder` and `converted` for their errors.

    Raises:
        NotFound: there is no such folder, file or known name, and it has not the form of a hub name.
        ModelRefused: the folder has no safetensors weights.
    """
    if target in embedded_targets():
        return str(target_folder(target))
    if target in FETCHED:
        return str(fetched_folder(target))
    folder = Path(target).expanduser()
    if folder.is_file():
        return str(converted(folder))
    if folder.is_dir():
        if not any(folder.glob("*.safetensors")):
            raise ModelRefused(f"{target} holds no *.safetensors; convert the weights first", field="target")
        return str(folder)
    if target.startswith((".", "/", "~")) or target.count("/") > 1 or target.endswith(".gguf"):
        raise NotFound(f"there is no {'file' if target.endswith('.gguf') else 'folder'} {target}", field="target")
    if "/" not in target:
        raise NotFound(
            f"there is no target {target!r}; give {' or '.join((*embedded_targets(), *FETCHED))}, a folder with "
            "config.json and *.safetensors, a GGUF file, or a hub name such as Qwen/Qwen3-8B",
            field="target",
        )
    return target


def find_target(target: str) -> str:
    """Return what `resolve_target` does, once the hub is known to have what bears a hub name.

    Raises:
        NotFound, ModelRefused: there is no such target, within seconds; or what `resolve_target` raises.
    """
    source = resolve_target(target)
    if not Path(source).is_dir():
        check_hub(source)
    return source


def chat_template_json(target: str) -> str:
    """Return the chat template of an embedded name, a folder or a hub name; empty: it has none.

    Returns:
        A JSON object with `chat_template` and the special tokens that a template may name (`bos_token`,
        `eos_token`, …), wherever the repository keeps its template.
    """
    source = resolve_target(target)
    try:
        config = _of_folder(Path(source)) if Path(source).is_dir() else _of_hub(source)
    except (OSError, ValueError, KeyError) as error:  # decoding needs tokenizer.json alone, which was read before
        log.warning("%s is served without a chat template: %s", target, str(error).strip().split("\n")[0])
        return ""
    template = config.get("chat_template")
    if isinstance(template, list):
        template = {entry["name"]: entry["template"] for entry in template}
    if isinstance(template, Mapping):
        template = template.get("default")
    if not template:
        return ""
    special = {name: _text(token) for name, token in config.items() if name.endswith("_token") and _text(token)}
    return json.dumps({"chat_template": template, **special})


def _of_folder(folder: Path) -> Mapping[str, Any]:
    """Return the tokenizer's config; a template's own file goes before one in it, in transformers' order."""
    path, own = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {**config, "chat_template": own.read_text(encoding="utf-8")} if own.is_file() else config


def _of_hub(name: str) -> Mapping[str, Any]:
    tokenizer = load_tokenizer(name)
    return {**tokenizer.special_tokens_map, "chat_template": tokenizer.chat_template}


def _text(token: Any) -> str:
    """Return the text of a special token, given itself or an object with it as `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""
