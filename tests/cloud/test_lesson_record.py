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

from outrider.cloud.learning.record import MAX_BYTES, MAX_ROWS, MAX_TOKENS, LessonKind, LessonRecord
from outrider.proto.errors import InvalidArgument
from outrider.proto.salts import salted
from outrider.proto.types import BOUNDS, Grammar, GrammarKind, Sampling

PROMPT, TEXT = [1, 2, 3], [10, 11, 12, 13, 14, 15]
BLOCKS = {3: [10, 11, 99, 13], 6: [], 7: [14]}


def same(one: LessonRecord, other: LessonRecord) -> bool:
    pairs = [(getattr(one, field.name), getattr(other, field.name)) for field in fields(LessonRecord)]
    return all(a.dtype == b.dtype and np.array_equal(a, b) if isinstance(a, np.ndarray) else a == b for a, b in pairs)


def test_rows_tell_position_draft_kind_and_prefix() -> None:
    record = record_of(PROMPT, TEXT, BLOCKS)
    kinds = [LessonKind(kind).name for kind in record.kinds]
    assert kinds == ["ACCEPTED", "ACCEPTED", "MISSED", "SUFFIX", "SUFFIX", "OWN", "ACCEPTED", "OWN"]
    assert record.positions.tolist() == [3, 4, 5, 6, 7, 6, 7, 8]
    assert record.drafted.tolist() == [10, 11, 99, 13, -1, -1, 14, -1]
    assert record.row_drafter.tolist() == [0, 0, 0, 0, -1, -1, 0, -1]
    assert record.prefix(2).tolist() == [1, 2, 3, 10, 11]
    assert record.prefix(4).tolist() == [1, 2, 3, 10, 11, 99, 13]
    assert record.prefix(7).tolist() == [1, 2, 3, 10, 11, 12, 13, 14]
    assert record.rows_of(LessonKind.SUFFIX).tolist() == [3, 4]
    assert len(record) == 8


def test_a_record_of_the_end_of_a_text_counts_from_its_start() -> None:
    record = record_of(PROMPT, TEXT, BLOCKS, start=2)
    assert record.prefix(3).tolist() == [3, 10, 11, 99]
    assert record.positions.tolist() == [3, 4, 5, 6, 7, 6, 7, 8]


def test_a_row_takes_285_bytes_and_128_more_where_ids_are_wide() -> None:
    few, many = (record_of(PROMPT, [7] * 400, {3 + i: [] for i in range(n)}, vocab=300) for n in (100, 300))
    of_row = 64 * (2 + 2) + 4 + 4 + 4 + 4 + 4 + 1 + 8  # with weight, token, place and the block of one row
    assert len(many.encode()) - len(few.encode()) == 200 * of_row
    wide = replace(few, top_ids=few.top_ids + np.uint32(1 << 20))
    assert len(wide.encode()) - len(few.encode()) == 100 * 64 * 2 + len("false") - len("true")


def test_salts_are_equal_for_equal_names_and_secrets_only() -> None:
    assert salted(b"s", "alice") == salted(b"s", "alice")
    assert len({salted(b"s", "alice"), salted(b"s", "bob"), salted(b"t", "alice"), salted(b"", "alice")}) == 4
    assert b"alice" not in record_of(PROMPT, TEXT, BLOCKS, key="alice").encode()


@st.composite
def records(draw: st.DrawFn) -> LessonRecord:
    vocab = draw(st.sampled_from((5, 64, 65, 300)))
    token = st.integers(0, vocab - 1)
    prompt = draw(st.lists(token, min_size=1, max_size=6))
    text = draw(st.lists(token, min_size=1, max_size=12))
    blocks, at = {}, len(prompt)
    while at < len(prompt) + len(text):
        block = draw(st.lists(token, max_size=3))
        hits = 0
        while hits < len(block) and at + hits < len(prompt) + len(text) - 1 and draw(st.booleans()):
            block[hits] = (prompt + text)[at + hits]
            hits += 1
        committed = (prompt + text)[at : at + len(block) + 1]
        agreed = next((i for i, (d, t) in enumerate(zip(block, committed, strict=False)) if d != t), len(block))
        if at + agreed >= len(prompt) + len(text):
            break  # its own token would be after the text
        blocks[at] = block
        at += agreed + 1
    sampling = Sampling(
        temperature=draw(st.just(0.0) | st.floats(BOUNDS["temperature"].low, 3)),
        seed=draw(st.integers(0, (1 << 64) - 1)),
        top_k=draw(st.integers(0, 9)),
        repetition_penalty=draw(st.floats(0.5, 2)),
    )
    tokenizer = draw(st.sampled_from(("", "ab" * 32)))
    drafters = draw(st.sampled_from(((), ("tiny@1",), ("ünique@0123456789ab", "tiny@1"))))
    start = draw(st.integers(0, len(prompt) - 1))
    record = record_of(
        prompt, text, blocks, vocab=vocab, start=start, drafters=drafters, sampling=sampling, suffix_targets=vocab - 1
    )
    rows = np.array(draw(st.lists(st.booleans(), min_size=len(record), max_size=len(record))), bool)
    return kept(replace(record, tokenizer_sha256=tokenizer), rows)


def kept(record: LessonRecord, rows: np.ndarray) -> LessonRecord:
    of_rows = ["row_block", "row_index", "kinds", "targets", "top_ids", "top_logp", "rest_logp", "weights"]
    return replace(record, **{name: getattr(record, name)[rows] for name in of_rows})


@given(records())
def test_a_record_survives_its_encoding(record: LessonRecord) -> None:
    again = LessonRecord.decode(record.encode())
    assert again.tokenizer_sha256 == record.tokenizer_sha256
    assert same(again, record)
    assert again.encode() == record.encode()


@given(records(), st.data())
def test_bytes_that_were_changed_are_refused_or_make_a_record_that_fits_together(
    record: LessonRecord, data: st.DataObject
) -> None:
    encoded = bytearray(record.encode())
    for _ in range(data.draw(st.integers(1, 4))):
        encoded[data.draw(st.integers(0, len(encoded) - 1))] = data.draw(st.integers(0, 255))
    cut = data.draw(st.sampled_from((None, None, data.draw(st.integers(0, len(encoded))))))
    try:
        again = LessonRecord.decode(bytes(encoded[:cut]))
    except InvalidArgument:
        return
    assert all(len(again.prefix(row)) for row in range(len(again)))
    assert same(LessonRecord.decode(again.encode()), again)


@given(st.binary(max_size=200))
def test_a_strangers_bytes_are_refused(data: bytes) -> None:
    for hostile in (data, b"OUTLESN1" + data, b"OUTLESN1" + struct.pack("<I", len(data)) + data):
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
        ({"sizes": [1 << 62, 3, 5, 8, 64]}, "lessons.sizes"),
        ({"sizes": [MAX_TOKENS + 1, 3, 5, 8, 64]}, "lessons.sizes"),
        ({"sizes": [9, 3, 5, MAX_ROWS + 1, 64]}, "lessons.sizes"),
        ({"sizes": [9, 3, 5, 8, 65]}, "lessons.sizes"),
        ({"sizes": [9, 3, 5, -8, 64]}, "lessons.sizes"),
        ({"sizes": [9, 3, 5]}, "lessons.sizes"),
        ({"sizes": [9, 3, 5, 8, 63]}, "lessons.sizes"),
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
        ({"drafters": []}, "lessons.drafted_by"),
        ({"drafters": ["x" * 300]}, "lessons.drafters"),
        ({"drafters": ["x"] * 300}, "lessons.drafters"),
        ({"at_s": -1}, "lessons.at_s"),
        ({"at_s": math.nan}, "lessons.at_s"),
        ({"at_s": 10**400}, "lessons"),
        ({"start": 4}, "lessons.block_starts"),
        ({"start": -1}, "lessons.start"),
        ({"first_generated": 4}, "lessons.block_starts"),
        ({"first_generated": 0}, "lessons.first_generated"),
    ],
)
def test_a_header_that_cannot_be_true_is_refused_and_the_field_named(changes: dict[str, object], field: str) -> None:
    record = record_of(PROMPT, TEXT, BLOCKS)
    assert same(LessonRecord.decode(with_header(record)), record)
    with pytest.raises(InvalidArgument) as refused:
        LessonRecord.decode(with_header(record, **changes))
    assert refused.value.field == field


def test_a_record_of_a_release_before_says_nothing_of_its_tokenizer() -> None:
    record = replace(record_of(PROMPT, TEXT, BLOCKS), tokenizer_sha256="ab" * 32)
    assert LessonRecord.decode(with_header(record, tokenizer=...)).tokenizer_sha256 == ""


def test_a_record_above_the_limit_of_bytes_is_refused_unread() -> None:
    with pytest.raises(InvalidArgument, match="are the most"):
        LessonRecord.decode(record_of(PROMPT, TEXT, BLOCKS).encode() + bytes(MAX_BYTES))


def changed(record: LessonRecord, name: str, place: int | tuple[int, int], value: float) -> LessonRecord:
    array = getattr(record, name).copy()
    array[place] = value
    return replace(record, **{name: array})


@pytest.mark.parametrize(
    ("name", "place", "value", "field"),
    [
        ("kinds", 0, LessonKind.MISSED, "kinds"),
        ("kinds", 2, LessonKind.ACCEPTED, "kinds"),
        ("kinds", 2, LessonKind.SUFFIX, "kinds"),
        ("kinds", 3, LessonKind.MISSED, "kinds"),
        ("kinds", 4, LessonKind.OWN, "kinds"),
        ("kinds", 5, LessonKind.SUFFIX, "kinds"),
        ("kinds", 5, 4, "kinds"),
        ("targets", 5, 98, "targets"),
        ("targets", 0, 98, "kinds"),
        ("tokens", 4, 98, "kinds"),
        ("block_starts", 1, 2, "block_starts"),
        ("block_starts", 2, 10, "block_starts"),
        ("block_starts", 2, 9, "kinds"),
        ("block_ends", 0, 6, "block_ends"),
        ("block_ends", 2, 4, "block_ends"),
        ("row_block", 0, 3, "row_block"),
        ("row_index", 0, 5, "row_index"),
        ("drafted_by", 0, 1, "drafted_by"),
        ("drafts", 0, 1 << 31, "drafts"),
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
    record = record_of(PROMPT, TEXT, BLOCKS)
    with pytest.raises(InvalidArgument) as refused:
        changed(record, name, place, value)
    assert refused.value.field == f"lessons.{field}"


def test_wrong_types_and_shapes_are_refused() -> None:
    record = record_of(PROMPT, TEXT, BLOCKS)
    for name, value in (
        ("tokens", record.tokens.astype(np.int64)),
        ("kinds", record.kinds[:-1]),
        ("top_ids", record.top_ids[0]),
        ("top_logp", record.top_logp[:, :-1]),
        ("drafted_by", record.drafted_by[:-1]),
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
        record_of(PROMPT, TEXT, BLOCKS, sampling=sampling)


def test_the_rest_of_a_small_vocabulary_has_no_mass() -> None:
    ids, logp, rest = teaching(vocab=10, rows=2)
    assert ids.shape == logp.shape == (2, 10)
    assert np.isneginf(rest).all()
    assert len(LessonRecord.decode(record_of(PROMPT, [1, 2], {3: []}, vocab=10).encode())) == 1
