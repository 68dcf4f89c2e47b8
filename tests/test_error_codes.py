"""Codes of errors: each has an entry and is raised, and what users meet carries its code."""

from __future__ import annotations

import http.client
import json
import re
import socket
import time
from collections.abc import Collection
from pathlib import Path

import pytest
from loop_thread import LoopThread

from outrider.deploy.cli import main
from outrider.deploy.explain import entries
from outrider.edge import Client, EdgeConfig
from outrider.edge.daemon import DaemonConfig
from outrider.proto.error_codes import CODE, REMEDIES, code_in
from outrider.proto.errors import Unavailable
from research.lines import ROOMS

LIST = "error_codes.py"
NOWHERE = "127.0.0.1:1"


def raised(root: Path) -> set[str]:
    """Every code in the installed source but the list's own."""
    rooms = [root / folder for room, folder in ROOMS.items() if room not in ("tests", "research")]
    files = [path for room in rooms for path in room.rglob("*.py") if path.name != LIST]
    return {code for path in files for code in CODE.findall(path.read_text(encoding="utf-8"))}


def complaints(listed: Collection[str], explained: dict[str, str], used: Collection[str]) -> list[str]:
    said = [f"{code} has no entry" for code in listed if code not in explained]
    said += [f"the entry {code} is of no code" for code in explained if code not in listed]
    said += [f"{code} is raised nowhere" for code in listed if code not in used]
    said += [f"{code} is not listed" for code in used if code not in listed]
    form = re.compile(r"[A-Z].*\.\n\n\*\*Why:\*\* .*\n\n\*\*Do:\*\* ", re.DOTALL)
    return said + [f"{code} lacks a cause or a remedy" for code, text in explained.items() if not form.match(text)]


def test_each_code_has_one_entry_and_is_raised_and_no_other_is(root) -> None:
    explained, used = entries(), raised(root)
    assert len(explained) >= 20
    assert complaints(REMEDIES, explained, used) == []
    assert list(explained) == sorted(REMEDIES)
    page = (root / "docs/errors.md").read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", page, re.MULTILINE) == list(explained), "an anchor is its code"


def test_an_entry_or_a_code_that_lacks_its_other_half_is_noticed(root) -> None:
    explained, used = entries(), raised(root)
    without = {code: text for code, text in explained.items() if code != "OUT-101"}
    assert complaints(REMEDIES, without, used) == ["OUT-101 has no entry"]
    assert complaints(REMEDIES, explained, used - {"OUT-302"}) == ["OUT-302 is raised nowhere"]
    unlisted = [code for code in REMEDIES if code != "OUT-409"]
    assert complaints(unlisted, explained, used) == ["the entry OUT-409 is of no code", "OUT-409 is not listed"]
    no_remedy = explained | {"OUT-109": explained["OUT-109"].partition("**Do:**")[0]}
    assert complaints(REMEDIES, no_remedy, used) == ["OUT-109 lacks a cause or a remedy"]


def test_explain_prints_an_entry_or_lists_all_and_refuses_what_there_is_not(capsys) -> None:
    assert main(["explain", "out-104"]) == 0
    assert capsys.readouterr().out == f"OUT-104: {entries()['OUT-104']}\n"
    assert main(["explain"]) == 0
    listed = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in listed] == list(REMEDIES)
    assert listed[0] == "OUT-101  The coordinator cannot be reached."
    assert main(["explain", "OUT-999"]) == 1
    assert "`outrider explain` lists all" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "code"),
    [
        (f"run --coordinator {NOWHERE} x", "OUT-101"),
        ("verifier --listen 0.0.0.0:0", "OUT-106"),
        ("edge --coordinator HERE --listen HERE", "OUT-109"),
        ("verifier --target ./nowhere", "OUT-401"),
        ("edge --server http://HERE --tls-cert no.pem --tls-key no.pem --verifier HERE", ""),
        ("verifier --listen 127.0.0.1:0 --tls-cert no.pem --tls-key no.pem --target reference", "OUT-105"),
    ],
)
def test_the_command_line_names_the_command_that_explains_an_error(command, code, capsys) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        here = f"127.0.0.1:{taken.getsockname()[1]}"
        assert main(command.replace("HERE", here).split()) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert code_in(said) == code
    assert (f"(`outrider explain {code}`)" in said) == bool(code)


async def test_an_exception_of_the_sdk_has_its_code(tmp_path) -> None:
    with pytest.raises(Unavailable) as raised_here:
        async with Client(EdgeConfig(coordinator=NOWHERE, cache=tmp_path)):
            pass
    assert raised_here.value.code == "OUT-101"


def test_the_daemon_says_the_code_in_its_error_and_in_its_health(tmp_path) -> None:
    from outrider.edge.daemon.http_server import Daemon

    loop = LoopThread()
    daemon = Daemon(DaemonConfig(listen="127.0.0.1:0"), Client(EdgeConfig(coordinator=NOWHERE, cache=tmp_path)))
    host = loop.run(daemon.start()).removeprefix("http://")
    try:
        until = time.monotonic() + 20
        while "OUT-101" not in (health := ask(host, "GET", "/health")[1]["reason"]) and time.monotonic() < until:
            time.sleep(0.1)
        assert code_in(health) == "OUT-101"
        status, body = ask(host, "POST", "/v1/completions", {"model": "reference", "prompt": "x"})
        assert (status, body["error"]["code"]) == (503, "unavailable"), "OpenAI's field keeps its words"
        assert code_in(body["error"]["message"]) == "OUT-101"
        status, body = ask(host, "POST", "/v1/messages", {"model": "m", "max_tokens": 1, "messages": [TURN]})
        assert code_in(body["error"]["message"]) == "OUT-101"
    finally:
        loop.run(daemon.stop())
        loop.close()


TURN = {"role": "user", "content": "x"}


def ask(host: str, method: str, path: str, body: dict | None = None) -> tuple[int, dict]:
    connection = http.client.HTTPConnection(host, timeout=20)
    connection.request(method, path, json.dumps(body) if body else None, {"Content-Type": "application/json"})
    answer = connection.getresponse()
    found = answer.status, json.loads(answer.read())
    connection.close()
    return found
