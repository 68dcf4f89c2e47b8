"""`python -m research probes`: the edits that it chooses, what it reads of streams, and its table."""

from __future__ import annotations

import asyncio
import json
import subprocess
from dataclasses import replace
from pathlib import Path

import aiohttp
import pytest
from aiohttp import web

from outrider.proto.errors import ConfigError, Unavailable
from research.probes.code_edits import code_edits, edited_function
from research.probes.probe_bench import EDITS, MODELLED, OPEN, Task, TextResult, blocks_of, written


def function(name: str, *, lines: int = 9, **changed: str) -> str:
    """A function with a line of `lines` each, but for those that are changed by number, as in `line3="x = 1"`."""
    body = [changed.get(f"line{i}", f"{name}_{i} = {i}") for i in range(lines)]
    return "\n    ".join([f"def {name}():", *body]) + "\n"


LONG, OTHER, SHORT = function("long"), function("other"), function("short", lines=5)
SOURCE = f"import os\n\n{LONG}\n{OTHER}\n{SHORT}"


@pytest.fixture
def repository(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet", "--initial-branch", "main")
    return tmp_path


def git(folder: Path, *words: str) -> str:
    who = ("-c", "user.name=a", "-c", "user.email=a@example.com")
    run = subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True, text=True)
    return run.stdout.strip()


def commit(folder: Path, subject: str, **files: str) -> str:
    for name, text in files.items():
        (folder / name.replace("_", ".")).write_text(text)
    git(folder, "add", "--all")
    git(folder, "commit", "--quiet", "--message", subject)
    return git(folder, "rev-parse", "HEAD")


def test_commits_of_one_small_change_in_one_function_are_chosen_newest_first(repository) -> None:
    one_line = SOURCE.replace("long_3 = 3", "long_3 = 'three'")
    six_lines = one_line
    for i in range(6):
        six_lines = six_lines.replace(f"other_{i} = {i}\n", f"other_{i} = '{i}'\n")
    commit(repository, "Begin", a_py=SOURCE)
    first = commit(repository, "Say three", a_py=one_line)
    second = commit(repository, "Say six things", a_py=six_lines, notes_md="not code")
    commit(repository, "Change both", a_py=six_lines.replace("long_1", "one").replace("other_7", "seven"))
    edits = code_edits(repository, "HEAD", 2)
    assert [edit.commit for edit in edits] == [second, first]
    assert [edit.before for edit in edits] == [OTHER, LONG]
    assert "Change it: Say three\n" in edits[1].question
    assert LONG in edits[1].question
    assert [edit.commit for edit in code_edits(repository, first, 1)] == [first]
    with pytest.raises(ConfigError, match="has 2 edits"):
        code_edits(repository, "HEAD", 3)


def test_a_function_that_was_there_in_the_same_form_is_left_out(repository) -> None:
    changed = SOURCE.replace("long_3 = 3", "long_3 = 'three'")
    commit(repository, "Begin", a_py=SOURCE)
    commit(repository, "Say three", a_py=changed)
    back = commit(repository, "Say 3", a_py=SOURCE)
    again = commit(repository, "Say three at last", a_py=changed)
    assert [edit.commit for edit in code_edits(repository, "HEAD", 2)] == [again, back]
    with pytest.raises(ConfigError, match="has 2 edits"):
        code_edits(repository, "HEAD", 3)


def test_commits_of_two_files_and_files_that_come_or_go_are_left_out(repository) -> None:
    changed = SOURCE.replace("long_3 = 3", "long_3 = 'three'")
    commit(repository, "Begin", a_py=SOURCE)
    commit(repository, "Begin more", b_py=SOURCE)
    commit(repository, "Say three twice", a_py=changed, b_py=changed)
    (repository / "b.py").unlink()
    commit(repository, "Say it once")
    with pytest.raises(ConfigError, match="has 0 edits"):
        code_edits(repository, "HEAD", 1)


@pytest.mark.parametrize(
    ("old", "new"),
    [
        ("long_3", "long_3"),  # nothing
        ("import os", "import sys"),  # outside
        ("short_2 = 2", "two = 2"),  # of 6 lines
        ("def long()", "def longer()"),  # another name
        ("long_3 = 3", "long_3 = ("),  # no Python
        ("long_3 = 3", "\n    ".join(f"line_{i} = {i}" for i in range(7))),  # 7 changed lines
    ],
)
def test_other_changes_are_no_edits(old: str, new: str) -> None:
    assert edited_function(SOURCE, SOURCE.replace("long_3 = 3", "three = 3")) == LONG
    assert edited_function(SOURCE, SOURCE.replace(old, new)) is None


def test_functions_that_grow_beyond_the_limit_are_no_edits() -> None:
    before = function("long", lines=28)
    assert edited_function(before, before + "    more = 1\n") == before
    assert edited_function(before, before + "    more = 1\n    most = 2\n") is None


def test_a_method_loses_its_indentation_and_keeps_its_decorators() -> None:
    method = "@property\n" + LONG
    source = "class A:\n    " + "\n    ".join(method.splitlines()) + "\n"
    assert edited_function(source, source.replace("long_3 = 3", "three = 3")) == method


class Door:
    """A server that answers every request with the same pieces, and notes what it was asked."""

    def __init__(self, *chunks: dict, status: int = 200) -> None:
        self.chunks, self.status, self.asked = chunks, status, list[tuple[str, dict]]()

    async def _answer(self, request: web.Request) -> web.StreamResponse:
        self.asked.append((request.path, await request.json()))
        answer = web.StreamResponse(status=self.status)
        await answer.prepare(request)
        for chunk in self.chunks:
            await answer.write(f"data: {json.dumps(chunk)}\n\n".encode())
            await asyncio.sleep(0.02)
        await answer.write(b"data: [DONE]\n\n")
        return answer

    async def _ask(self, way: str, task: Task) -> tuple[str, float, float]:
        app = web.Application()
        app.router.add_post("/{path:.*}", self._answer)
        runner = web.AppRunner(app)
        await runner.setup()
        await (site := web.TCPSite(runner, "127.0.0.1", 0)).start()
        try:
            async with aiohttp.ClientSession() as http:
                port = site._server.sockets[0].getsockname()[1]  # type: ignore[union-attr]
                return await written(http, f"http://127.0.0.1:{port}", way, task, 7)
        finally:
            await runner.cleanup()

    def ask(self, way: str, task: Task) -> tuple[str, float, float]:
        return asyncio.run(self._ask(way, task))


TASK = Task(EDITS, "t", (1, 2, 3), {"messages": [], "prediction": {"type": "content", "content": "x"}})
USAGE = {"choices": [], "usage": {"prompt_tokens": 3}}


def test_plain_streams_are_asked_by_token_ids_and_our_chats_with_the_prediction() -> None:
    def piece(text: str) -> dict:
        return {"choices": [{"text": text}]}

    plain = Door(piece("a"), piece("bc"), USAGE)
    text, first_s, last_s = plain.ask("stream", TASK)
    assert text == "abc"
    assert 0 < first_s < last_s
    assert plain.asked[0][0] == "/v1/completions"
    assert plain.asked[0][1]["prompt"] == [1, 2, 3]
    chat = Door(*({"choices": [{"delta": delta}]} for delta in ({"role": "assistant"}, {"content": "abc"}, {})), USAGE)
    assert chat.ask("here", TASK)[0] == "abc"
    path, body = chat.asked[0]
    assert path == "/v1/chat/completions"
    assert body["prediction"]["content"] == "x"
    assert body["temperature"] == 0
    assert chat.ask("here", replace(TASK, chat={}))[0] == "abc"
    assert chat.asked[1][0] == "/v1/completions"


def test_errors_and_prompts_of_another_length_end_a_way() -> None:
    for door in (
        Door(status=503),
        Door({"error": {"message": "gone"}}),
        Door({**USAGE, "usage": {"prompt_tokens": 4}}),
    ):
        with pytest.raises(Unavailable, match=r"503|gone|4 were read"):
            door.ask("stream", TASK)


def result(
    way: str, name: str, seconds: float, *, work: str = OPEN, tokens: int = 60, equal: bool = True
) -> TextResult:
    return TextResult(work, way, "2 ms", name, tokens, seconds / 10, seconds, equal)


def test_ratios_are_to_the_plain_stream_of_the_same_text_by_median_runs() -> None:
    results = [
        *(result("ngram", "a", seconds, equal=seconds > 1) for seconds in (1.0, 3.0, 2.0)),
        result("stream", "a", 6.0),
        result("stream", "b", 3.0),
        result("ngram", "b", 6.0),
        result("stream", "nothing", 1.0, tokens=0),
        result("here", "b", 2.0, work=MODELLED),
        result("stream", "e", 4.0, work=EDITS),
    ]
    edits, open_texts, modelled = blocks_of(results)
    assert edits == [("edits", "2 ms", "plain stream", "15.0", "1.00", "1.00", "400", "1 of 1")]
    assert open_texts == [
        ("open", "2 ms", "plain stream", "15.0", "1.00", "1.00", "450", "2 of 2"),
        ("open", "2 ms", "its n-grams", "20.0", "1.75", "0.50", "250", "3 of 4"),
    ]
    assert modelled == [("model", "2 ms", "ours, in the edge", "30.0", "1.50", "1.50", "200", "1 of 1")]


def test_without_a_plain_stream_there_is_no_ratio() -> None:
    ((row,),) = blocks_of([result("ngram", "a", 2.0, equal=False)])
    assert row[3:] == ("30.0", "-", "-", "200", "0 of 1")
