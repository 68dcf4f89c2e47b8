"""The tokenizer of a drafter in training, which must be the target's: it learns what the target says in its tokens."""

from __future__ import annotations

from pathlib import Path

from outrider.cloud.target.target import tokenizer_json
from outrider.proto.errors import InvalidArgument
from outrider.proto.tokenizer import TOKENIZER_FILE, tokenizer_hash


def check_tokenizer(drafter: str, tokenizer_sha256: str, target: str, *, field: str) -> None:
    """Raise InvalidArgument unless a drafter has the tokenizer of a target.

    Args:
        drafter: its name, for the message.
        tokenizer_sha256: hash of its tokenizer.
        target: folder or hub name of the target.
        field: setting that names the drafter.
    """
    if tokenizer_sha256 != tokenizer_hash(tokenizer_json(target, target)):
        raise InvalidArgument(
            f"{drafter!r} has another tokenizer than the target, so its tokens are other text; take one of this target",
            field=field,
        )


def check_tokenizer_of_folder(folder: Path, target: str, *, field: str) -> None:
    """Raise what `check_tokenizer` does of the model in a folder; one without a tokenizer passes."""
    if (folder / TOKENIZER_FILE).is_file():
        own = tokenizer_hash((folder / TOKENIZER_FILE).read_text(encoding="utf-8"))
        check_tokenizer(str(folder), own, target, field=field)


def save_tokenizer(target: str, folder: Path) -> None:
    """Give a drafter's folder the target's `tokenizer.json`, which transformers would write with changes of its own."""
    (folder / TOKENIZER_FILE).write_text(tokenizer_json(target, target), encoding="utf-8")
