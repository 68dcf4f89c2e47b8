"""The record of lessons: part of one text with what the target said in the rows that verified it.

A verifier makes records (`outrider.cloud.learning.lessons`), a trainer reads them. An edge that learns from its own
texts makes them of what it knows (`record_of_text`).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from outrider.proto.codec import SAMPLING
from outrider.proto.errors import InvalidArgument
from outrider.proto.salts import SALT_BYTES
from outrider.proto.types import MAX_TOKEN_ID, SHA256, Sampling

if TYPE_CHECKING:
    import torch

TOP = 64  # likeliest tokens of a row, which teach as much as all do if the mass of the rest is known
MAX_TOKENS = 1 << 17
MAX_ROWS = 4096
MAX_NAME = 256  # characters
MASS_TOLERANCE = 0.02  # of the sum of a row's probabilities, which are rounded
MAX_BYTES = 1 << 22  # of an encoded record
_NARROW = 1 << 16  # token ids below it take two bytes
_MAX_SIZES = {"n": MAX_TOKENS, "m": MAX_ROWS, "s": TOP}
_ARRAYS: Mapping[str, tuple[type[np.generic], str]] = {  # type and axes
    "tokens": (np.uint32, "n"),
    "positions": (np.uint32, "m"),
    "top_ids": (np.uint32, "ms"),
    "top_logp": (np.float16, "ms"),
    "rest_logp": (np.float32, "m"),
    "weights": (np.float32, "m"),
}
_SALTS = ("session_salt", "key_salt")
_FACTS = ("model", "tokenizer_sha256", "prompt_class", "at_s", "start", "first_generated")


class Teaching(NamedTuple):
    """The target's likeliest tokens in m rows, as `LessonRecord` has it.

    Attributes:
        top_ids: [m, s] uint32.
        top_logp: [m, s] float16.
        rest_logp: [m] float32.
        finite: [m] bool, whether the row's logits were numbers.
    """

    top_ids: np.ndarray
    top_logp: np.ndarray
    rest_logp: np.ndarray
    finite: np.ndarray


@dataclass(slots=True, eq=False)
class StepRows:
    """Kept rows of one step, of all its texts.

    Attributes:
        logits: [r, vocab] float32 copies on the target's device, until they are read or dropped.
        said: what they say; None: they are not read yet, or were dropped unread.
    """

    logits: torch.Tensor | None
    said: Teaching | None = None

    @property
    def nbytes(self) -> int:
        """Size of the logits that wait."""
        return self.logits.nbytes if self.logits is not None else 0


@dataclass(frozen=True, eq=False)
class LessonRecord:
    """The m rows of one text that are kept, and n tokens of it; all arrays are read-only.

    Attributes:
        model: id of the target.
        session_salt: [16] bytes, the same for all records of a session (`salted`).
        key_salt: [16] bytes, the same for all sessions of an API key.
        prompt_class: kind of text, as in leases, below 16; 0: unknown.
        sampling: settings of the text with the seed of its noise, by which a drafter's hits can be computed again.
        at_s: time of the first row, Unix seconds.
        start: absolute position of `tokens[0]`.
        first_generated: absolute position of the first token after the prompt.
        tokens: [n] uint32, the text from `start` on, prompt included.
        positions: [m] uint32, absolute position of the token that the target chose in each row.
        top_ids: [m, s] uint32, the s = min(64, vocabulary) likeliest tokens of the raw logits; s = 0: unknown.
        top_logp: [m, s] float16, natural log of their probabilities, of the logits before any processing.
        rest_logp: [m] float32, natural log of the probability of all other tokens together; -inf: there are none.
        weights: [m] float32, 1 / probability that the row was kept, at least 1.
        tokenizer_sha256: hash of the target's tokenizer; empty: unknown.

    Raises:
        InvalidArgument: something does not fit together; the field is named.
    """

    model: str
    session_salt: bytes
    key_salt: bytes
    prompt_class: int
    sampling: Sampling
    at_s: float
    start: int
    first_generated: int
    tokens: np.ndarray
    positions: np.ndarray
    top_ids: np.ndarray
    top_logp: np.ndarray
    rest_logp: np.ndarray
    weights: np.ndarray
    tokenizer_sha256: str = ""

    def __post_init__(self) -> None:
        self._check_facts()
        self._check_arrays()
        for name in _ARRAYS:
            getattr(self, name).setflags(write=False)

    def __len__(self) -> int:
        return len(self.positions)

    @property
    def targets(self) -> np.ndarray:
        """The target's token in each row, [m] uint32."""
        targets: np.ndarray = self.tokens[self.positions - self.start]
        return targets

    def encode(self) -> bytes:
        """Return the record as bytes that `decode` reads: its arrays, and all else beside them, as safetensors."""
        from safetensors.numpy import save

        facts = {name: getattr(self, name) for name in _FACTS} | {name: getattr(self, name).hex() for name in _SALTS}
        arrays = {name: np.ascontiguousarray(getattr(self, name)) for name in _ARRAYS}
        if self.top_ids.max(initial=0) < _NARROW:
            arrays["top_ids"] = arrays["top_ids"].astype(np.uint16)
        arrays["facts"] = np.frombuffer(json.dumps(facts).encode(), np.uint8)
        arrays["sampling"] = np.frombuffer(SAMPLING.encode(self.sampling), np.uint8)
        return bytes(save(arrays))

    @classmethod
    def decode(cls, data: bytes) -> LessonRecord:
        """Return the record in `data`, which may come from anybody.

        Raises:
            InvalidArgument: it is none, or one that cannot be true; the field is named.
        """
        from safetensors import SafetensorError
        from safetensors.numpy import load

        if len(data) > MAX_BYTES:
            raise InvalidArgument(f"has {len(data)} bytes; {MAX_BYTES} are the most", field="lessons")
        try:
            arrays = load(data)
            given = json.loads(arrays["facts"].tobytes())
            facts: dict[str, Any] = {
                "model": str(given["model"]),
                "tokenizer_sha256": str(given["tokenizer_sha256"]),
                "prompt_class": int(given["prompt_class"]),
                "at_s": float(given["at_s"]),
                "start": int(given["start"]),
                "first_generated": int(given["first_generated"]),
                **{name: bytes.fromhex(given[name]) for name in _SALTS},
                "sampling": SAMPLING.decode(arrays["sampling"].tobytes()),
                **{name: arrays[name] for name in _ARRAYS},
            }
        except (SafetensorError, KeyError, TypeError, ValueError, OverflowError, RecursionError) as error:
            message = f"is no record of lessons, or one of another release: {error}"
            raise InvalidArgument(message, field="lessons") from error
        if facts["top_ids"].dtype == np.uint16:
            facts["top_ids"] = facts["top_ids"].astype(np.uint32)
        return cls(**facts)

    def _check_facts(self) -> None:
        _require(0 < len(self.model) <= MAX_NAME, "model", f"must have 1 to {MAX_NAME} characters")
        known = not self.tokenizer_sha256 or SHA256.fullmatch(self.tokenizer_sha256)
        _require(known, "tokenizer_sha256", "must be 64 hexadecimal digits")
        for name in _SALTS:
            _require(len(getattr(self, name)) == SALT_BYTES, name, f"must have {SALT_BYTES} bytes")
        _require(0 <= self.prompt_class < 16, "prompt_class", "must be in 0..15")
        _require(0 <= self.at_s < math.inf, "at_s", "must be Unix seconds")
        _require(0 <= self.start <= MAX_TOKEN_ID, "start", "must be a position")
        _require(0 < self.first_generated <= MAX_TOKEN_ID, "first_generated", "must be a position after a prompt")
        message = "has a grammar, a bias, allowed tokens, min_tokens or no_repeat_ngram_size: nothing is learned"
        _require(not self.sampling.constrains, "sampling", message)

    def _check_arrays(self) -> None:
        sizes = dict[str, int]()
        for name, (dtype, axes) in _ARRAYS.items():
            array = getattr(self, name)
            fits = array.dtype == dtype and array.ndim == len(axes)
            _require(fits, name, f"must be {np.dtype(dtype)} with {len(axes)} axes, and is {array.dtype} {array.shape}")
            for axis, size in zip(axes, array.shape, strict=True):
                limit = _MAX_SIZES[axis]
                _require(size <= limit, name, f"has the size {size}; {limit} is the most")
                _require(sizes.setdefault(axis, size) == size, name, f"has the size {size} beside {sizes[axis]}")
        for name in ("tokens", "top_ids"):
            most = getattr(self, name).max(initial=0)
            _require(most <= MAX_TOKEN_ID, name, f"holds a token id above {MAX_TOKEN_ID}")
        logp = self.top_logp.astype(np.float64)
        _require(((logp > -math.inf) & (logp <= 0)).all(), "top_logp", "must be finite logs of probabilities")
        mass = np.exp(logp).sum(axis=1) + np.exp(self.rest_logp.astype(np.float64))
        _require((np.abs(mass - 1) <= MASS_TOLERANCE).all(), "rest_logp", "must be the log of what the rest has")
        heavy = (self.weights >= 1) & (self.weights < math.inf)
        _require(heavy.all(), "weights", "must be finite numbers, 1 or more")
        positions = self.positions.astype(np.int64)
        first, end = max(self.start + 1, self.first_generated), self.start + len(self.tokens)
        inside = ((positions >= first) & (positions < end)).all()
        _require(inside, "positions", "must be those of generated tokens of the text that have one before them")


def _require(holds: object, field: str, message: str) -> None:
    if not holds:
        raise InvalidArgument(message, field=f"lessons.{field}")


def record_of_text(
    tokens: Sequence[int],
    first_generated: int,
    sampling: Sampling,
    *,
    model: str,
    session_salt: bytes,
    key_salt: bytes,
    prompt_class: int = 0,
    at_s: float = 0.0,
    tokenizer_sha256: str = "",
) -> LessonRecord:
    """Return the record of a text that nobody verified here: `tokens` from position 0, a row for each generated one.

    Losses of tokens alone learn from it. What is beyond `MAX_ROWS` generated tokens is left out.

    Raises:
        InvalidArgument: nothing may be learned from such a text, or it has no prompt.
    """
    tokens = tokens[: first_generated + MAX_ROWS]
    n = len(tokens) - first_generated
    return LessonRecord(
        model=model,
        session_salt=session_salt,
        key_salt=key_salt,
        prompt_class=prompt_class,
        sampling=sampling,
        at_s=at_s,
        start=0,
        first_generated=first_generated,
        tokens=np.array(tokens, np.uint32),
        positions=np.arange(first_generated, first_generated + n, dtype=np.uint32),
        top_ids=np.zeros((n, 0), np.uint32),
        top_logp=np.zeros((n, 0), np.float16),
        rest_logp=np.zeros(n, np.float32),
        weights=np.ones(n, np.float32),
        tokenizer_sha256=tokenizer_sha256,
    )
