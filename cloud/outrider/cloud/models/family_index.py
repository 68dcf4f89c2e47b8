"""Models by name, whether the package carries them or not, their tokenizers and chat templates; without torch."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from outrider.cloud.models.fetched_model import FETCHED, fetched_folder
from outrider.cloud.models.gguf_file import converted
from outrider.proto.errors import InvalidArgument, ModelRefused, NotFound
from outrider.proto.tokenizer import TOKENIZER_FILE, shipped_tokenizer

if TYPE_CHECKING:
    from transformers import PreTrainedModel

ANSWERS_WITHIN_S = 5.0  # the hub
_LOGIN = "log in with `hf auth login`"
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


def eos_tokens(generation_config: Any, config: Any) -> frozenset[int]:
    """Return the ids that end a text, by a model's generation config (None: it has none) or else its text config."""
    eos = generation_config.eos_token_id if generation_config is not None else None
    if eos is None:
        eos = getattr(config, "eos_token_id", None)  # some configs do not know of one
    if eos is None:
        return frozenset()
    return frozenset([eos] if isinstance(eos, int) else eos)


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
        kind = "file" if target.endswith(".gguf") else "folder"
        raise NotFound(f"there is no {kind} {target}", field="target", code="OUT-401")
    if "/" not in target:
        missing = "" if embedded_targets() else "; `reference` comes with the distribution outrider-models"
        message = (
            f"there is no target {target!r}; give {' or '.join((*embedded_targets(), *FETCHED))}, a folder with "
            f"config.json and *.safetensors, a GGUF file, or a hub name such as Qwen/Qwen3-8B{missing}"
        )
        raise NotFound(message, field="target", code="OUT-401")
    return target


def find_target(target: str) -> str:
    """Return what `resolve_target` does, with its errors, once the hub is known to have what bears a hub name."""
    source = resolve_target(target)
    if not Path(source).is_dir():
        _check_hub(source)
    return source


def _check_hub(name: str) -> None:
    """Refuse a name `ORG/MODEL` unless the hub has the model, or this machine has it from there already.

    It is one quick question in place of the library's minute of retries. Where the hub does not answer, what this
    machine has is loaded without asking again.

    Raises:
        NotFound: there is no such model, or it is neither here nor within reach.
        ModelRefused: the hub shows it to others only.
    """
    from huggingface_hub import HfApi, constants, try_to_load_from_cache
    from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError

    hub = constants.ENDPOINT
    try:
        here = isinstance(try_to_load_from_cache(name, "config.json"), str)
        if not constants.HF_HUB_OFFLINE:
            HfApi().model_info(name, timeout=ANSWERS_WITHIN_S)
        elif not here:
            message = f"{name!r} is not on this machine, and HF_HUB_OFFLINE keeps the hub away"
            raise NotFound(message, field="target", code="OUT-402")
    except NotFound:
        raise
    except HFValidationError as error:
        raise NotFound(f"{name!r} is no hub name: {first_line(error)}", field="target") from error
    except GatedRepoError as error:
        message = f"{name!r} is gated: accept its terms on {hub}/{name}, and {_LOGIN}"
        raise ModelRefused(message, field="target", code="OUT-402") from error
    except RepositoryNotFoundError as error:
        message = f"{hub} has no model {name!r}, or shows it to others only; check the name, or {_LOGIN}"
        raise NotFound(message, field="target", code="OUT-402") from error
    except Exception as error:  # whatever the HTTP library of this release of the hub's raises
        why = f"{hub} cannot be reached: {first_line(error)}"
        if not here:
            raise NotFound(f"{name!r} is not on this machine, and {why}", field="target", code="OUT-402") from error
        log.warning("%s; %s is loaded as it is on this machine", why, name)
        constants.HF_HUB_OFFLINE = True  # else each file that a model may have is asked for, again and again


def first_line(error: Exception) -> str:
    """Return what a library's error says, without what follows in further lines."""
    return str(error).strip().split("\n")[0][:300] or type(error).__name__


def chat_template_json(target: str) -> str:
    """Return the chat template of an embedded name, a folder or a hub name; empty: it has none.

    Returns:
        A JSON object with `chat_template` and the special tokens that a template may name (`bos_token`,
        `eos_token`, …), wherever the repository keeps its template.
    """
    return template_json_of(resolve_target(target))


def template_json_of(source: str) -> str:
    """Return what `chat_template_json` does, of a folder, which needs no weights, or a hub name."""
    try:
        config = _template_settings(source)
    except (OSError, ValueError, KeyError) as error:  # decoding needs tokenizer.json alone, which was read before
        log.warning("%s is served without a chat template: %s", source, first_line(error))
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


def _template_settings(source: str) -> Mapping[str, Any]:
    """Return a tokenizer's config; in a folder a template's own file goes before one in it, in transformers' order."""
    folder = Path(source)
    if not folder.is_dir():
        tokenizer = load_tokenizer(source)
        return {**tokenizer.special_tokens_map, "chat_template": tokenizer.chat_template}
    path, own = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return {**config, "chat_template": own.read_text(encoding="utf-8")} if own.is_file() else config


def _text(token: Any) -> str:
    """Return the text of a special token, given itself or an object with it as `content`."""
    if isinstance(token, Mapping):
        token = token.get("content")
    return token if isinstance(token, str) else ""
