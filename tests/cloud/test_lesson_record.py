"""The record of lessons: what it holds, and that only records that can be true are read."""

from __future__ import annotations

import json
import math
import struct
from dataclasses import fields, replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from lesson_records import record_of, teaching

from outrider.cloud.learning.lesson_record import MAX_BYTES, MAX_ROWS, MAX_TOKENS, LessonRecord
from outrider.proto.errors import InvalidArgument
from outrider.proto.salts import salted
from outrider.proto.types import BOUNDS, Grammar, GrammarKind, Sampling

PROMPT, TEXT = [1, 2, 3], [10, 11, 12, 13, 14, 15]
ROWS = [3, 4, 6, 8]


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
    assert len(many.encode()) - len(few.encode()) == 200 * of_row
    wide = replace(few, top_ids=few.top_ids + np.uint32(1 << 20))
    assert len(wide.encode()) - len(few.encode()) == 100 * 64 * 2 + len("false") - len("true")


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
    for hostile in (data, b"OUTLESN2" + data, b"OUTLESN2" + struct.pack("<I", len(data)) + data):
        with pytest.raises(InvalidArgument):
            LessonRecord.decode(hostile)


def with_header(record: LessonRecord, **changes: object) -> bytes:
    encoded = record.encode()
    (length,) = struct.unpack_from("<I", encoded, 8)
    header = json.loads(encoded[12 : 12 + length]) | changes
    packed = json.dumps({name: value for name, value in header.items() if value is not ...}).encode()
    return encoded[:8] + struct.pack("<I", len(packed)) + packed + encoded[12 + length :]


@pytest.mark.parametrize(
    ("changes", "field"),
    [
        ({"sizes": [1 << 62, 4, 64]}, "lessons.sizes"),
        ({"sizes": [MAX_TOKENS + 1, 4, 64]}, "lessons.sizes"),
        ({"sizes": [9, MAX_ROWS + 1, 64]}, "lessons.sizes"),
        ({"sizes": [9, 4, 65]}, "lessons.sizes"),
        ({"sizes": [9, -4, 64]}, "lessons.sizes"),
        ({"sizes": [9, 4]}, "lessons.sizes"),
        ({"sizes": [9, 4, 63]}, "lessons.sizes"),
        ({"sizes": 3}, "lessons"),
        ({"sampling": "AAA"}, "lessons"),
        ({"sampling": "/w=="}, "lessons"),
        ({"session": "00"}, "lessons.session_salt"),
        ({"key": "xx"}, "lessons"),
        ({"key": ...}, "lessons"),
        ({"class": 16}, "lessons.prompt_class"),
        ({"class": "many"}, "lessons"),
        ({"model": ""}, "lessons.model"),
        ({"tokenizer": "gpt"}, "lessons.tokenizer_sha256"),
        ({"at_s": -1}, "lessons.at_s"),
        ({"at_s": math.nan}, "lessons.at_s"),
        ({"at_s": 10**400}, "lessons"),
        ({"start": 4}, "lessons.positions"),
        ({"start": -1}, "lessons.start"),
        ({"first_generated": 4}, "lessons.positions"),
        ({"first_generated": 0}, "lessons.first_generated"),
    ],
)
def test_a_header_that_cannot_be_true_is_refused_and_the_field_named(changes: dict[str, object], field: str) -> None:
    record = record_of(PROMPT, TEXT, ROWS)
    assert same(LessonRecord.decode(with_header(record)), record)
    with pytest.raises(InvalidArgument) as refused:
        LessonRecord.decode(with_header(record, **changes))
    assert refused.value.field == field


def test_a_record_of_a_release_before_says_nothing_of_its_tokenizer() -> None:
    record = replace(record_of(PROMPT, TEXT, ROWS), tokenizer_sha256="ab" * 32)
    assert LessonRecord.decode(with_header(record, tokenizer=...)).tokenizer_sha256 == ""


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


def test_wrong_types_and_shapes_are_refused() -> None:
    record = record_of(PROMPT, TEXT, ROWS)
    for name, value in (
        ("tokens", record.tokens.astype(np.int64)),
        ("positions", record.positions[:-1]),
        ("top_ids", record.top_ids[0]),
        ("top_logp", record.top_logp[:, :-1]),
        ("weights", record.weights[:-1]),
    ):
        with pytest.raises(InvalidArgument):
            replace(record, **{name: value})


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


def test_the_rest_of_a_small_vocabulary_has_no_mass() -> None:
    ids, logp, rest = teaching(vocab=10, rows=2)
    assert ids.shape == logp.shape == (2, 10)
    assert np.isneginf(rest).all()
    assert len(LessonRecord.decode(record_of(PROMPT, [1, 2], [3], vocab=10).encode())) == 1
