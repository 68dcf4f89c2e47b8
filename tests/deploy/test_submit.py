"""Jobs on a Ray cluster, without one: requests, the output place, and the following of a log."""

from __future__ import annotations

import asyncio
import json
import os
import re
import shlex
import signal
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import fsspec
import pytest
import requests

from outrider.deploy import job as job_on_node
from outrider.deploy import submit
from outrider.deploy.cli import main
from outrider.deploy.job import Mirror
from outrider.proto.errors import ConfigError, Unavailable

TASK = {"mark": "", "marked": False, "resume": []}


@pytest.fixture(autouse=True)
def environment(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_RUNTIME_ENV_IGNORE_GITIGNORE"):
        monkeypatch.setenv(name, "")
    monkeypatch.setattr(submit, "RETRY_S", 0.0)
    for name in ("here", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.chdir(tmp_path / "here")


# --- on the node ---


def contents(place: str) -> dict[str, bytes]:
    files, root = fsspec.core.url_to_fs(place)
    return {path.removeprefix(f"{root}/"): files.cat_file(path) for path in files.find(root)}


@pytest.mark.parametrize("place", ["{}/shared/out", "memory://bucket{}/out"])
def test_the_place_has_what_the_command_wrote_for_a_later_job_to_resume(place: str, tmp_path: Path) -> None:
    task = TASK | {"output": place.format(tmp_path), "resume": ["run", "never-written"]}
    work, again = tmp_path / "here", tmp_path / "temporary"
    (work / "input.txt").write_text("given")
    mirror = Mirror(work, task)
    (work / "run" / "step-1").mkdir(parents=True)
    for name in ("run/step-1/model", "log"):
        (work / name).write_text("first")
    assert mirror.sync() == 2
    assert contents(task["output"]) == {"run/step-1/model": b"first", "log": b"first"}
    os.replace(work / "run" / "step-1", work / "run" / "step-2")
    (work / "log").write_text("other")
    (work / "input.txt").unlink()
    assert mirror.sync() == 2
    assert contents(task["output"]) == {"run/step-2/model": b"first", "log": b"other"}
    later = Mirror(again, task)
    assert [path.name for path in again.rglob("*") if path.is_file()] == ["model"]
    (again / "run" / "step-2" / "model").unlink()
    assert later.sync() == 0
    assert contents(task["output"]) == {"log": b"other"}


def test_the_oldest_of_the_changed_files_goes_first(tmp_path: Path) -> None:
    work = tmp_path / "here"
    mirror = Mirror(work, TASK | {"output": str(tmp_path / "out")})
    copied: list[str] = []
    put = SimpleNamespace(makedirs=lambda *_, **__: None, put_file=lambda source, _: copied.append(source[-1]))
    mirror._files = put
    for modified, name in ((10, "z"), (50, "a"), (30, "m")):
        (work / name).touch()
        os.utime(work / name, (modified, modified))
    assert (mirror.sync(), mirror.sync()) == (3, 3)
    assert copied == ["z", "m", "a"]


def job(folder: Path, program: str, monkeypatch: pytest.MonkeyPatch, **task: Any) -> tuple[int, Path]:
    """Run a job with a Python program as its command; return its status and the output place."""
    executable = folder / "python"
    executable.write_text(f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c {shlex.quote(program)}\n")
    executable.chmod(0o755)
    monkeypatch.setattr("tempfile.tempdir", str(folder / "temporary"))
    monkeypatch.setattr("sys.executable", str(executable))
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return job_on_node.main(TASK | {"output": str(folder / "out")} | task, []), folder / "out"


def test_what_a_command_writes_is_there_before_it_ends_and_though_it_fails(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_on_node, "SYNC_EVERY_S", 0.05)
    program = f"""
import pathlib, sys, time
pathlib.Path('early').write_text('here')
while not pathlib.Path({str(tmp_path / "out" / "early")!r}).exists():
    time.sleep(0.01)
sys.exit(3)
"""
    status, place = job(tmp_path, program, monkeypatch, mark=".j.submitted")
    assert (status, contents(str(place))) == (3, {"early": b"here"})
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.parametrize(
    ("task", "says"),
    [
        ({"mark": ".j.submitted", "marked": True}, "name one that all nodes share"),
        ({"mark": ".j.submitted", "output": "/proc/out"}, "/proc/out on"),
        ({"output": "nonsense://bucket/out"}, "Protocol not known"),
        ({"output": "s4://bucket/out"}, "Install s4fs in "),
    ],
)
def test_a_place_that_does_not_fit_ends_the_job_in_one_line_before_its_command(
    task: dict[str, Any], says: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    known = sys.modules["fsspec.registry"].known_implementations
    monkeypatch.setitem(known, "s4", {"class": "s4fs.S4", "err": "Install s4fs"})
    status, place = job(tmp_path, "raise RuntimeError", monkeypatch, **task)
    (line,) = capfd.readouterr().err.splitlines()
    assert status == 2
    assert line.startswith("outrider submit: output: ")
    assert says in line
    assert not place.exists()
    assert list((tmp_path / "temporary").iterdir()) == []


def test_files_that_cannot_be_brought_to_the_place_stay_and_their_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd
) -> None:
    (tmp_path / "out").touch()
    status, _ = job(tmp_path, "open('drafter', 'w').write('hours')", monkeypatch)
    assert status == 1
    kept = re.search(r"what is missing is in (.+)\n", capfd.readouterr().err)
    assert kept is not None
    assert Path(kept[1], "drafter").read_text() == "hours"


# --- from here ---


class Server:
    """Ray's client, for jobs that run nowhere: their log streams break by a script, and the last one ends the job."""

    def __init__(self, *streams: str, status: str = "SUCCEEDED", code: int | None = None, message: str = "") -> None:
        self.streams = list(streams)
        self.details = {"driver_exit_code": code, "message": message}
        self.status = status
        self.job: dict[str, Any] = {}
        self.stopped = 0

    def get_address(self) -> str:
        return "http://scripted"

    def submit_job(self, **job: Any) -> None:
        folder = Path(job["runtime_env"]["working_dir"])
        files = [path for path in folder.rglob("*") if path.is_file()]
        self.job = job | {"packed": {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}}

    def stop_job(self, _: str) -> bool:
        self.stopped += 1
        return True

    def get_job_info(self, _: str) -> SimpleNamespace:
        ended = len(self.streams) <= 1
        return SimpleNamespace(status=SimpleNamespace(value=self.status, is_terminal=lambda: ended), **self.details)

    async def tail_job_logs(self, _: str) -> AsyncIterator[str]:
        text = self.streams.pop(0)
        for at in range(0, len(text), 7):
            yield text[at : at + 7]
        if text == "Ctrl-C":
            signal.raise_signal(signal.SIGINT)
            await asyncio.sleep(0)
        if self.streams:
            raise aiohttp.ClientConnectionError("broken")


def sent(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> tuple[dict[str, Any], dict[str, Any], list[str]]:
    """Send the job of a command line; return Ray's request, and the task and command that the node gets."""
    server = Server()
    monkeypatch.setattr(submit, "JobSubmissionClient", lambda _: server)
    assert main(["submit", "--address", "http://scripted", "--no-wait", "--name", "j", *arguments]) == 0
    words = shlex.split(server.job["entrypoint"])
    assert words[:4] == ["exec", "python3", "-m", "outrider.deploy.job"]
    return server.job, json.loads(words[4]), words[5:]


def test_a_job_has_its_inputs_and_its_output_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "c.txt").write_text("text")
    train = ["--", "train", "teacher", "--output", "run", "--texts", "../c.txt"]
    request, task, words = sent(monkeypatch, "--env", "A=1", "--input", "../c.txt", *train)
    place = tmp_path / "here" / "j"
    assert task == {"output": str(place), "mark": ".j.submitted", "marked": True, "resume": ["run"]}
    assert words == ["train", "teacher", "--output", "run", "--texts", "c.txt"]
    assert request["packed"] == {"c.txt": b"text"}
    assert request["runtime_env"]["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "120", "A": "1"}
    assert any(Path(path, "deploy", "job.py").is_file() for path in request["runtime_env"]["py_modules"])
    assert [path.name for path in place.iterdir()] == [".j.submitted"]


def test_a_place_that_only_nodes_can_write_is_left_to_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").touch()
    for there in (str(tmp_path / "file" / "out"), "nonsense://bucket/out"):
        request, task, _ = sent(monkeypatch, "--installed", "--output", there, "--", "key", "alice")
        assert task == {"output": there, "mark": ".j.submitted", "marked": False, "resume": []}
        assert "py_modules" not in request["runtime_env"]
    assert sent(monkeypatch, "--", "key", "alice")[1]["mark"] == "", "a command that writes nothing needs no place"


def test_inputs_keep_their_path_below_this_folder_and_their_last_name_otherwise(tmp_path: Path) -> None:
    for name in ("here/data/a.txt", "there/more/b.txt", "there/data/c.txt"):
        (tmp_path / name).parent.mkdir(parents=True)
        (tmp_path / name).write_text(name)
    into = tmp_path / "temporary"
    assert submit.link_inputs(["data/a.txt", "../there/more"], into) == {
        "data/a.txt": "data/a.txt",
        "../there/more": "more",
    }
    assert {path.name: path.read_text() for path in into.glob("*/*")} == {
        "a.txt": "here/data/a.txt",
        "b.txt": "there/more/b.txt",
    }
    for at, wrong in enumerate((["../there/data", "data"], ["data", "data/a.txt"], ["nowhere"], ["."])):
        (into / str(at)).mkdir()
        with pytest.raises(ConfigError) as refusal:
            submit.link_inputs(wrong, into / str(at))
        assert refusal.value.field == "input"


def test_what_the_log_says_is_printed_once_however_often_the_stream_breaks(capsys) -> None:
    whole = "first line\nsecond line\nthird line\n"
    assert submit.follow(Server(whole[:15], whole[:4], whole[:30], whole), "j") == 0
    assert capsys.readouterr().out == whole


def test_ctrl_c_leaves_the_job_running() -> None:
    followed = Server("Ctrl-C", "never read")
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # whoever started the tests
    try:
        with pytest.raises(KeyboardInterrupt):
            submit.follow(followed, "j")
    finally:
        signal.signal(signal.SIGINT, before)
    assert followed.stopped == 0


def test_a_job_that_fails_is_one_line_that_says_why(capsys) -> None:
    message = "runtime_env setup failed.\nTraceback:\n  File x\nIOError: no space left"
    for code, status, says in [
        (3, 3, "exit status 3"),
        (None, 1, "runtime_env setup failed. … IOError: no space left"),
    ]:
        assert submit.follow(Server("", status="FAILED", code=code, message=message), "j") == status
        assert capsys.readouterr().err == f"outrider submit: job j failed: {says}\n"


NOBODY = "no Ray job server answers at http://"


@pytest.mark.parametrize(
    ("arguments", "status", "says"),
    [
        ("", 1, "give a command of outrider after --"),
        ("-- fly", 2, "'fly'"),
        ("-- train drafter", 2, "--output"),
        ("--address 127.0.0.1:8265 -- key alice", 1, "address: '127.0.0.1:8265' is not http://HOST:PORT"),
        ("--address http://127.0.0.1:1 -- key alice", 1, f"address: {NOBODY}127.0.0.1:1"),
        ("--address http://nowhere.invalid:8265 -- key alice", 1, f"{NOBODY}nowhere.invalid:8265"),
    ],
)
def test_whatever_is_wrong_is_one_line_that_says_what_to_do(arguments: str, status: int, says: str, capfd) -> None:
    try:
        got = main(["submit", *arguments.split()])
    except SystemExit as ended:
        got = int(ended.code or 0)
    (line,) = capfd.readouterr().err.strip().splitlines()
    assert got == status
    assert says in line


@pytest.mark.parametrize("missing", ["ray.job_submission", "aiohttp"])
def test_without_ray_or_its_jobs_one_line_names_the_extra(missing: str, monkeypatch: pytest.MonkeyPatch, capfd) -> None:
    monkeypatch.delitem(sys.modules, "outrider.deploy.submit")
    monkeypatch.setitem(sys.modules, missing, None)
    assert main(["submit", "--", "key", "alice"]) == 1
    (line,) = capfd.readouterr().err.splitlines()
    assert f"needs the extra [jobs], which is not all installed here (missing: {missing})" in line


@pytest.mark.parametrize(
    ("error", "says"),
    [
        (requests.exceptions.JSONDecodeError("no JSON", "<html>", 0), f"{NOBODY}head:8265; it is on port 8265"),
        (KeyError("ray_version"), f"{NOBODY}head:8265"),
        (
            RuntimeError("status code 500: Traceback:\n  File x\nValueError: j is taken"),
            "500: Traceback: … ValueError: j",
        ),
    ],
)
def test_errors_of_rays_client_are_one_line(error: Exception, says: str) -> None:
    with pytest.raises(Unavailable, match=re.escape(says)), submit.ray_errors("http://head:8265"):
        raise error
