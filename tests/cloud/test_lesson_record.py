"""The record of lessons: what it holds, and that only records that can be true are read."""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Sequence
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from safetensors.numpy import load, save

from outrider.cloud.learning.lesson_record import MAX_BYTES, MAX_ROWS, MAX_TOKENS, LessonRecord
from outrider.proto.errors import InvalidArgument
from outrider.proto.salts import salted
from outrider.proto.types import BOUNDS, Grammar, GrammarKind, Sampling

PROMPT, TEXT = [1, 2, 3], [10, 11, 12, 13, 14, 15]
ROWS = [3, 4, 6, 8]


def record_of(
    prompt: list[int],
    text: list[int],
    positions: Sequence[int],
    *,
    vocab: int = 300,
    start: int = 0,
    key: str = "alice",
    sampling: Sampling | None = None,
) -> LessonRecord:
    """A record of prompt + text with rows of random logits at absolute `positions`."""
    logits = np.random.default_rng(0).normal(size=(len(positions), vocab)) * 3
    logp = logits - np.log(np.exp(logits).sum(axis=1, keepdims=True))
    ids = np.argsort(-logp, axis=1, kind="stable")[:, : min(64, vocab)]
    of_top = np.take_along_axis(logp, ids, axis=1)
    rest = 1 - np.exp(of_top).sum(axis=1)
    with np.errstate(divide="ignore"):
        of_rest = np.log(np.where(rest > 1e-12, rest, 0)).astype(np.float32)
    return LessonRecord(
        model="reference",
        session_salt=salted(b"", "s"),
        key_salt=salted(b"", key),
        prompt_class=3,
        sampling=sampling or Sampling(temperature=1.0, seed=(1 << 64) - 1, stop_tokens=(5,)),
        at_s=1e9,
        start=start,
        first_generated=len(prompt),
        tokens=np.array([*prompt, *text][start:], np.uint32),
        positions=np.array(positions, np.uint32),
        top_ids=ids.astype(np.uint32),
        top_logp=np.minimum(of_top, 0).astype(np.float16),
        rest_logp=np.minimum(of_rest, 0),
        weights=np.ones(len(positions), np.float32),
    )


def same(one: LessonRecord, other: LessonRecord) -> bool:
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(LessonRecord)]
    return all(a.dtype == b.dtype and np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


def test_rows_tell_the_targets_tokens_by_their_positions() -> None:
    record = record_of(PROMPT, TEXT, ROWS)
    assert record.targets.tolist() == [10, 11, 13, 15]
    assert len(record) == 4
    assert record_of(PROMPT, TEXT, ROWS, start=2).targets.tolist() == [10, 11, 13, 15]


def test_a_row_takes_268_bytes_and_128_more_where_ids_are_wide() -> None:
    few, many = (record_of(PROMPT, [7] * 400, range(3, 3 + n), vocab=300) for n in (100, 300))
    of_row = 64 * (2 + 2) + 4 + 4 + 4  # with the rest, its weight and its position
    assert len(many.encode()) - len(few.encode()) == pytest.approx(200 * of_row, abs=64)
    wide = replace(few, top_ids=few.top_ids + np.uint32(1 << 20))
    assert len(wide.encode()) - len(few.encode()) == pytest.approx(100 * 64 * 2, abs=64)


def test_salts_are_equal_for_equal_names_and_secrets_only() -> None:
    assert salted(b"s", "alice") == salted(b"s", "alice")
    assert len({salted(b"s", "alice"), salted(b"s", "bob"), salted(b"t", "alice"), salted(b"", "alice")}) == 4
    assert b"alice" not in record_of(PROMPT, TEXT, ROWS, key="alice").encode()


@st.composite
def records(draw: st.DrawFn) -> LessonRecord:
    vocab = draw(st.sampled_from((5, 64, 65, 300)))
    token = st.integers(0, vocab - 1)
    prompt = draw(st.lists(token, min_size=1, max_size=6))
    text = draw(st.lists(token, min_size=1, max_size=12))
    places = st.integers(len(prompt), len(prompt) + len(text) - 1)
    positions = sorted(draw(st.sets(places)))
    sampling = Sampling(
        temperature=draw(st.just(0.0) | st.floats(BOUNDS["temperature"].low, 3)),
        seed=draw(st.integers(0, (1 << 64) - 1)),
        top_k=draw(st.integers(0, 9)),
        repetition_penalty=draw(st.floats(0.5, 2)),
    )
    tokenizer = draw(st.sampled_from(("", "ab" * 32)))
    start = draw(st.integers(0, len(prompt) - 1))
    record = record_of(prompt, text, positions, vocab=vocab, start=start, sampling=sampling)
    return replace(record, tokenizer_sha256=tokenizer)


@given(records())
def test_a_record_survives_its_encoding(record: LessonRecord) -> None:
    again = LessonRecord.decode(record.encode())
    assert again.tokenizer_sha256 == record.tokenizer_sha256
    assert same(again, record)
    assert again.encode() == record.encode()


@given(records(), st.data())
def test_bytes_that_were_changed_are_refused_or_make_a_record_that_fits_together(record, data) -> None:
    encoded = bytearray(record.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from((None, None, data.draw(st.integers(0, len(encoded))))))
    try:
        again = LessonRecord.decode(bytes(encoded[:cut]))
    except InvalidArgument:
        return
    assert len(again.targets) == len(again)
    assert same(LessonRecord.decode(again.encode()), again)


@given(st.binary(max_size=200))
def test_a_strangers_bytes_are_refused(data: bytes) -> None:
    for hostile in (data, struct.pack("<Q", len(data)) + data):
        with pytest.raises(InvalidArgument):
            LessonRecord.decode(hostile)


def with_changes(record: LessonRecord, **changes: object) -> bytes:
    """Return an encoded record with other facts, or other arrays where a change is an array; `...` leaves one out."""
    arrays = load(record.encode())
    facts = json.loads(arrays["facts"].tobytes())
    for name, value in changes.items():
        (arrays if name in arrays else facts)[name] = value
    arrays["facts"] = np.frombuffer(json.dumps({k: v for k, v in facts.items() if v is not ...}).encode(), np.uint8)
    return save({name: array for name, array in arrays.items() if array is not ...})


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"tokens": np.zeros(MAX_TOKENS + 1, np.uint32)}, "lessons.tokens"),
        ({"positions": np.zeros(MAX_ROWS + 1, np.uint32)}, "lessons.positions"),
        ({"top_ids": np.zeros((4, 65), np.uint32)}, "lessons.top_ids"),
        ({"top_ids": np.zeros((4, 63), np.uint32)}, "lessons.top_logp"),
        ({"top_ids": np.zeros(4, np.uint32)}, "lessons.top_ids"),
        ({"tokens": np.zeros(9, np.int64)}, "lessons.tokens"),
        ({"tokens": ...}, "lessons"),
        ({"sampling": np.array([255], np.uint8)}, "lessons"),
        ({"sampling": ...}, "lessons"),
        ({"session_salt": "00"}, "lessons.session_salt"),
        ({"key_salt": "xx"}, "lessons"),
        ({"key_salt": ...}, "lessons"),
        ({"prompt_class": 16}, "lessons.prompt_class"),
        ({"prompt_class": "many"}, "lessons"),
        ({"model": ""}, "lessons.model"),
        ({"tokenizer_sha256": "gpt"}, "lessons.tokenizer_sha256"),
        ({"at_s": -1}, "lessons.at_s"),
        ({"at_s": math.nan}, "lessons.at_s"),
        ({"at_s": 10**400}, "lessons"),
        ({"start": 4}, "lessons.positions"),
        ({"start": -1}, "lessons.start"),
        ({"first_generated": 4}, "lessons.positions"),
        ({"first_generated": 0}, "lessons.first_generated"),
    ],
)
def test_what_cannot_be_true_is_refused_and_the_field_named(changes: dict[str, object], field: str) -> None:
    record = record_of(PROMPT, TEXT, ROWS)
    assert same(LessonRecord.decode(with_changes(record)), record)
    with pytest.raises(InvalidArgument) as refused:
        LessonRecord.decode(with_changes(record, **changes))
    assert refused.value.field == field


def test_a_record_above_the_limit_of_bytes_is_refused_unread() -> None:
    with pytest.raises(InvalidArgument, match="are the most"):
        LessonRecord.decode(record_of(PROMPT, TEXT, ROWS).encode() + bytes(MAX_BYTES))


def changed(record: LessonRecord, name: str, place: int | tuple[int, int], value: float) -> LessonRecord:
    array = getattr(record, name).copy()
    array[place] = value
    return replace(record, **{name: array})


@pytest.mark.parametrize(
    ("name", "place", "value", "field"),
    [
        ("positions", 0, 2, "positions"),
        ("positions", 3, 9, "positions"),
        ("tokens", 4, 1 << 31, "tokens"),
        ("top_ids", (0, 0), 1 << 31, "top_ids"),
        ("top_logp", (0, 0), np.nan, "top_logp"),
        ("top_logp", (0, 0), -np.inf, "top_logp"),
        ("top_logp", (0, 0), 0.5, "top_logp"),
        ("rest_logp", 0, np.nan, "rest_logp"),
        ("rest_logp", 0, 0.0, "rest_logp"),
        ("weights", 0, 0.5, "weights"),
        ("weights", 0, np.inf, "weights"),
        ("weights", 0, np.nan, "weights"),
    ],
)
def test_rows_that_cannot_be_true_are_refused(name: str, place: int, value: float, field: str) -> None:
    record = record_of(PROMPT, TEXT, ROWS)
    with pytest.raises(InvalidArgument) as refused:
        changed(record, name, place, value)
    assert refused.value.field == f"lessons.{field}"


@pytest.mark.parametrize(
    "sampling",
    [
        Sampling(logit_bias=((1, 1.0),)),
        Sampling(allowed_tokens=(1, 2)),
        Sampling(min_tokens=3),
        Sampling(grammar=Grammar(GrammarKind.JSON_OBJECT)),
    ],
)
def test_texts_that_were_constrained_make_no_record(sampling: Sampling) -> None:
    with pytest.raises(InvalidArgument, match="nothing is learned"):
        record_of(PROMPT, TEXT, ROWS, sampling=sampling)
