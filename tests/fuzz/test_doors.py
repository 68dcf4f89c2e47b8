"""The doors that strangers' bytes come through: their seeds and a few thousand damaged ones, without atheris."""

from __future__ import annotations

import importlib
import random
from collections.abc import Callable
from typing import Any

import calls_door
import codec_door
import grammar_door
import http_door
import pytest
import template_door
from run_doors import DOORS
from written_answer import WrittenAnswer

from outrider.cloud.grammar.grammar import GrammarMatcher
from outrider.edge.chat.template import ChatTemplate
from outrider.edge.tool_calls import formats, reading
from outrider.edge.tool_calls.reading import CallBegun
from outrider.proto.errors import Internal, InvalidArgument

INPUTS = {"codec_door": 4000, "grammar_door": 60, "template_door": 500, "calls_door": 150, "http_door": 500}


@pytest.mark.parametrize("name", DOORS)
def test_whatever_comes_to_a_door_is_taken_or_refused_by_name(name: str) -> None:
    door: Any = importlib.import_module(name)
    seeds = door.seeds()
    for data in seeds:
        door.try_input(data)
    rng = random.Random(8)
    for _ in range(INPUTS[name]):
        data = door.mutate(rng, rng.choice(seeds))
        try:
            door.try_input(data)
        except Exception:
            print(f"{name} fails on {data.hex()}")
            raise


# What each door leads to, how many right inputs one use of that stands for, and the uses that the seeds make at least.
BEHIND: dict[str, tuple[Any, str, Callable[[Any, Any], int], int]] = {
    "codec_door": (codec_door, "check_same", lambda *_: 1, 100),
    "grammar_door": (GrammarMatcher, "advance", lambda *_: 1, 20),
    "template_door": (ChatTemplate, "render", lambda *_: 1, 5),
    "calls_door": (WrittenAnswer, "add", lambda given, _: sum(isinstance(part, CallBegun) for part in given[1]), 12),
    "http_door": (http_door.Door, "talk", lambda _, answer: answer.startswith(b"HTTP/1.1 200 "), 9),
}


@pytest.mark.parametrize("name", DOORS)
def test_a_door_takes_its_right_inputs(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """They are no test of refusals alone: without the seeds' own right ones nothing behind a door is reached."""
    owner, attribute, stands_for, least = BEHIND[name]
    right, taken = getattr(owner, attribute), 0

    def counted(*given: Any, **named: Any) -> Any:
        nonlocal taken
        result = right(*given, **named)
        taken += stands_for(given, result)
        return result

    monkeypatch.setattr(owner, attribute, counted)
    door: Any = importlib.import_module(name)
    for data in door.seeds():
        door.try_input(data)
    assert taken >= least


def test_a_message_that_changes_on_its_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codec_door, "_PAIRS", ((lambda data: data, lambda message: message + b"x"),))
    with pytest.raises(AssertionError):
        codec_door.try_input(b"\0abc")


def test_a_refusal_without_a_reason_and_a_defect_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(*_: object) -> None:
        raise InvalidArgument("")

    def breaks(*_: object) -> None:
        raise Internal("a defect")

    monkeypatch.setattr(template_door.ChatTemplate, "__init__", refuses)
    with pytest.raises(AssertionError, match="says why"):
        template_door.try_input(b"x")
    monkeypatch.setattr(grammar_door, "_follow", breaks)
    with pytest.raises(Internal):
        grammar_door.try_input(b"\0")


def test_a_mask_that_depends_on_the_way_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = GrammarMatcher._row

    def forgetful(matcher: GrammarMatcher) -> Any:
        row = right(matcher)
        if row is not None and matcher._drafts:
            return row
        return row if row is None or matcher._consumed % 2 == 0 else ~row

    monkeypatch.setattr(GrammarMatcher, "_row", forgetful)
    with pytest.raises((AssertionError, InvalidArgument)):
        grammar_door._follow(grammar_door.Grammar(grammar_door.GrammarKind.REGEX, "[a-z ]{3,40}"), random.Random(1))


@pytest.mark.parametrize("form", ["hermes", "llama3", "mistral"])
def test_a_reader_that_reads_all_of_a_text_again_with_each_piece_is_found(form, monkeypatch) -> None:
    for module in (reading, formats):
        monkeypatch.setattr(module, "MAX_HEAD", 10**6)
    with pytest.raises(AssertionError, match="work grows faster"):
        calls_door.try_input(calls_door.written(form, 1, "", " ", "!"))


def test_a_daemon_that_breaks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    async def breaks(*_: object) -> None:
        raise KeyError("a defect")

    monkeypatch.setattr(http_door.Rendering, "render", breaks)
    http_door._door.cache_clear()
    with pytest.raises(AssertionError):
        http_door.try_input(http_door.seeds()[0])
    http_door._door.cache_clear()
