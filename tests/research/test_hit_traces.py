"""Hit traces: recorded from a drafter whose hits are known, kept in a file, refused where they make no sense."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from scripted_drafters import ScriptedDrafter

from outrider.drafters.protocol import TokenPrefix
from outrider.proto.errors import ConfigError
from outrider.proto.types import DraftToken, Sampling
from research.text_writer import TextRequest
from research.traces.recordings import HitTrace, load_traces, save_traces
from research.traces.trace_recording import hits_of, sent_vectors

PROMPT = (7, 8, 9)
TEXT = (20, 21, 22, 23, 24)
FIELDS = {
    "id": "p",
    "domain": "code",
    "drafter": "d",
    "drafter_version": "1",
    "temperature": 0.5,
    "prompt_tokens": 3,
    "tokens": TEXT,
    "hits": (True, False, True, True, False),
    "confidence": (0.5, math.nan, 1.0, 0.25, 0.0),
}
MEASURED = {
    "perturbed_probability": (0.5, math.nan, 1.0, 0.25, 0.0),
    "agreement": (1.0, 0.5, 0.25, math.nan, 0.0),
    "seed": 7,
}


def recorded(script, **changes) -> HitTrace:
    request = TextRequest(PROMPT, Sampling(temperature=0.5), "p", "code")
    [trace] = hits_of({"scripted": ScriptedDrafter(script, q=0.7)}, request, TEXT, **changes)
    return trace


def test_a_scripted_drafter_hits_where_its_script_does() -> None:
    trace = recorded((*PROMPT, 20, 99, 22, 98, 24))
    assert trace.hits == (True, False, True, False, True)
    assert trace.confidence == (0.7,) * 5
    assert trace.silent == ()
    assert (trace.id, trace.domain, trace.drafter, trace.drafter_version) == ("p", "code", "scripted", "1")
    assert (trace.temperature, trace.prompt_tokens, trace.tokens, trace.ended) == (0.5, 3, TEXT, False)


def test_every_position_is_proposed_after_the_targets_own_tokens() -> None:
    asked = []

    def script(prefix):
        asked.append(tuple(prefix))
        return 99

    assert not any(recorded(script).hits)
    assert asked[-len(TEXT) :] == [PROMPT + TEXT[:i] for i in range(len(TEXT))]


def test_a_drafter_that_proposes_nothing_is_silent_and_not_wrong() -> None:
    trace = recorded(lambda prefix: None if len(prefix) % 2 else 21, ended=True)
    assert trace.silent == (True, False, True, False, True)
    assert trace.hits == (False, True, False, False, False)
    assert [math.isnan(value) for value in trace.confidence] == [True, False, True, False, True]
    assert trace.ended


class Leaning(TokenPrefix):
    """A state that proposes the number in its newest vector, and 99 without one."""

    def __init__(self) -> None:
        super().__init__()
        self.said = 99

    def steer(self, vector, since) -> None:
        assert since == len(PROMPT)
        self.said = 99 if vector is None else round(float(vector[0]))

    def propose(self, n: int) -> tuple[DraftToken, ...]:
        return (DraftToken(self.said, 0.5),) * n

    def score(self, tokens):
        self.extend(tokens)
        return np.zeros(len(tokens))


class LeaningDrafter:
    name, version = "leaning", "1"

    def open(self, rule) -> Leaning:
        return Leaning()


@pytest.mark.parametrize("age", [0, 1, 2])
def test_a_steered_drafter_is_recorded_with_the_vector_that_is_there_by_then(age) -> None:
    vectors = sent_vectors(np.array([[22.0 + i] for i in range(len(TEXT))], dtype=np.float32), age)
    request = TextRequest(PROMPT, Sampling(temperature=0.5), "p", "code")
    drafters = {"leaning": LeaningDrafter()}
    [trace] = hits_of(drafters, request, TEXT, vectors={"leaning": vectors})
    # Before token i of the text the vector is that of position 3 + i - 2 - age; there it says 20 + 1 + i - age.
    assert trace.hits == tuple(token == (20 + 1 + i - age if i > age else 99) for i, token in enumerate(TEXT))
    [plain] = hits_of(drafters, request, TEXT)
    assert not any(plain.hits), "without vectors it is not steered"
    assert any(trace.hits) == (age == 1)


def test_traces_come_back_from_a_file(tmp_path) -> None:
    traces = [
        HitTrace(**FIELDS),
        HitTrace(**FIELDS | {"id": "é\n", "ended": True, "silent": (False, True, False, False, True)}),
        recorded((*PROMPT, 20)),
        recorded((*PROMPT, 20, 99), chances=lambda tokens: [token / 99 for token in tokens]),
        HitTrace(**FIELDS | MEASURED),
    ]
    path = tmp_path / "traces.jsonl"
    save_traces(traces, path)
    assert len(path.read_text().splitlines()) == 5
    assert "NaN" not in path.read_text()
    assert repr(load_traces(path)) == repr(traces)  # NaN is not equal to itself
    save_traces([], path)
    assert load_traces(path) == []


def test_agreement_is_about_the_proposed_token_and_at_most_one() -> None:
    asked = []

    def chances(tokens):
        asked.append(list(tokens))
        return [0.07, 0.35, 0.9, 0.9, 0.0]

    trace = recorded((*PROMPT, 20, 99, 22), chances=chances)
    assert asked == [[20, 99, 22, 0, 0]]  # where it is silent, any token
    assert trace.agreement[:3] == (0.1, 0.5, 1.0)
    assert all(map(math.isnan, trace.agreement[3:]))
    assert recorded((*PROMPT, 20)).agreement == ()


def test_the_beginning_of_a_trace_keeps_what_belongs_to_it() -> None:
    trace = HitTrace(**FIELDS | MEASURED).first(2)
    assert (trace.tokens, trace.hits, trace.silent, trace.seed) == (TEXT[:2], (True, False), (), 7)
    assert trace.agreement == (1.0, 0.5)


def test_a_file_from_before_there_were_measures_can_be_loaded(tmp_path) -> None:
    path = tmp_path / "traces.jsonl"
    old = {name: value for name, value in FIELDS.items() if name != "confidence"}
    path.write_text(json.dumps(old | {"confidence": [0.5, None, 1.0, 0.25, 0.0], "ended": False, "silent": []}) + "\n")
    assert repr(load_traces(path)) == repr([HitTrace(**FIELDS)])


def test_a_trace_without_confidence_can_be_loaded(tmp_path) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text(json.dumps({k: v for k, v in FIELDS.items() if k != "confidence"}) + "\n\n")
    [trace] = load_traces(path)
    assert all(map(math.isnan, trace.confidence))


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("hits", [True], "trace.hits: .*one entry for each token"),
        ("hits", [1, 0, 1, 1, 0], r"trace.hits\[0\]: .*must be true or false, not 1"),
        ("tokens", [], "trace.tokens: .*is empty"),
        ("tokens", "abcde", "trace.tokens: .*must be a list"),
        ("tokens", [20, 21, 22, 23, -1], r"trace.tokens\[4\]: .*must be 0 or more, not -1"),
        ("confidence", [0.5, 0.5, 0.5, 0.5, 1.5], r"trace.confidence\[4\]: .*must be a probability or null, not 1.5"),
        ("agreement", [0.5], "trace.agreement: .*one entry for each token"),
        ("entropy", [0.5] * 5, "trace.entropy: .*is unknown; remove it"),  # recorded before experiments ended
        (
            "perturbed_probability",
            [0.5, 0.5, 0.5, 0.5, 1.5],
            r"trace.perturbed_probability\[4\]: .*must be a probability or null, not 1.5",
        ),
        ("agreement", [0.5, 0.5, 0.5, 0.5, "1"], r'trace.agreement\[4\]: .*must be a number, not "1"'),
        ("seed", 0.5, "trace.seed: .*whole number"),
        ("silent", [True, False, False, False, False], "trace.silent: .*where the drafter hits"),
        ("prompt_tokens", 0, "trace.prompt_tokens: .*1 or more"),
        ("prompt_tokens", "3", "trace.prompt_tokens: .*whole number"),
        ("temperature", -1, "trace.temperature: .*0 or more"),
        ("id", 3, "trace.id: .*a string"),
        ("ended", 1, "trace.ended: .*true or false"),
        ("colour", "red", "trace.colour: .*is unknown; remove it"),
    ],
)
def test_a_wrong_line_is_named_with_its_field(tmp_path, field, value, message) -> None:
    path = tmp_path / "traces.jsonl"
    save_traces([HitTrace(**FIELDS)], path)
    good = json.loads(path.read_text())
    path.write_text(json.dumps(good) + "\n" + json.dumps(good | {field: value}) + "\n")
    with pytest.raises(ConfigError, match=message) as caught:
        load_traces(path)
    assert f"line 2 of {path} is no hit trace" in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "not JSON"),
        ("[1]", "traces: .*must be an object"),
        (json.dumps({"id": "p"}), "trace.domain: .*is missing"),
    ],
)
def test_a_line_that_is_no_trace_at_all_is_named(tmp_path, line, message) -> None:
    path = tmp_path / "traces.jsonl"
    path.write_text(line)
    with pytest.raises(ConfigError, match=message) as caught:
        load_traces(path)
    assert "line 1 of" in str(caught.value)


def test_a_file_that_cannot_be_read_is_named(tmp_path) -> None:
    with pytest.raises(ConfigError, match=r"traces: cannot read .*none: No such file"):
        load_traces(tmp_path / "none")


def test_a_text_that_ended_holds_its_end_once() -> None:
    with pytest.raises(ConfigError, match=r"trace\.tokens: .*before its end"):
        HitTrace(**FIELDS | {"tokens": (20, 24, 22, 23, 24), "ended": True})
