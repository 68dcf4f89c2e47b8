"""Jobs on a Ray cluster, without one: requests, the output place, and the following of a log."""

from __future__ import annotations

import asyncio
import os
import re
import shlex
import signal
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import aiohttp
import fsspec
import pytest

from outrider.deploy.cli import main, parse
from outrider.deploy.commands.operating import SubmitSettings
from outrider.deploy.submit import command
from outrider.deploy.submit import job as job_on_node
from outrider.deploy.submit.command import absolute, find_wheel, follow, link_inputs, send
from outrider.deploy.submit.job import Mirror, Place
from outrider.proto.errors import ConfigError, Unavailable

WHEEL = "outrider-0.1.0-py3-none-any.whl"


# --- the output place ---


@pytest.fixture(params=["path", "url"])
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Place:
    """Return an output place: a folder of this machine, or an object store."""
    if request.param == "path":
        return Place(str(tmp_path / "shared" / "out"))
    return Place(f"memory://bucket-{tmp_path.name}/out")


def contents(place: Place) -> dict[str, bytes]:
    """Return all files of a place."""
    files, root = fsspec.core.url_to_fs(place.url)
    return {path.removeprefix(f"{root}/"): files.cat_file(path) for path in files.find(root)}


@pytest.fixture
def work(tmp_path: Path) -> Path:
    """Return the folder of a job with the input `input.txt`."""
    work = tmp_path / "work"
    work.mkdir()
    (work / "input.txt").write_text("given")
    return work


def test_the_place_gets_what_the_command_wrote_and_none_of_its_inputs(place: Place, work: Path) -> None:
    mirror = Mirror(work, place)
    (work / "run" / "below").mkdir(parents=True)
    (work / "run" / "a").write_bytes(bytes(range(35)))
    (work / "run" / "below" / "empty").touch()
    mirror.sync()
    assert contents(place) == {"run/a": bytes(range(35)), "run/below/empty": b""}
    assert mirror.summary == f"2 files, 0.0 MB, in {place.url}\n"


def test_a_round_copies_what_changed_alone_and_deletes_what_the_command_deleted(
    place: Place, work: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    mirror = Mirror(work, place)
    (work / "step-1").mkdir()
    for name in ("step-1/model", "log"):
        (work / name).write_text("first")
    mirror.sync()
    copied: list[str] = []
    put = Place.put
    monkeypatch.setattr(Place, "put", lambda self, source, name: (copied.append(name), put(self, source, name)))
    os.replace(work / "step-1", work / "step-2")
    (work / "log").write_text("other")
    os.utime(work / "log", ns=(1, time.time_ns() + 10**9))
    mirror.sync()
    assert sorted(copied) == ["log", "step-2/model"]
    assert contents(place) == {"step-2/model": b"first", "log": b"other"}
    assert not Path(place.url, "step-1").exists()
    copied.clear()
    mirror.sync()
    assert copied == []


def test_an_input_that_the_command_deletes_takes_nothing_from_the_place(place: Place, work: Path) -> None:
    (work / "old").write_text("of another job")
    Mirror(work.parent / "nothing", place)._place.put(work / "old", "input.txt")
    mirror = Mirror(work, place)
    (work / "input.txt").unlink()
    mirror.sync()
    assert contents(place) == {"input.txt": b"of another job"}


def test_the_oldest_file_goes_first(work: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    copied: list[str] = []
    monkeypatch.setattr(Place, "put", lambda _self, _source, name: copied.append(name))
    mirror = Mirror(work, Place(str(tmp_path / "out")))
    for age, name in ((10, "z-weights"), (5, "a-last"), (7, "m-between")):
        (work / name).touch()
        os.utime(work / name, (time.time() - age, time.time() - age))
    mirror.sync()
    assert copied == ["z-weights", "m-between", "a-last"]


def test_a_later_job_begins_with_what_an_earlier_one_left(place: Place, work: Path) -> None:
    first = Mirror(work, place)
    (work / "run").mkdir()
    (work / "run" / "checkpoint").write_text("1")
    (work / "other").write_text("not asked for")
    first.sync()
    again = work.with_name("again")
    again.mkdir()
    second = Mirror(again, place)
    second.fetch(["run", "never-written"])
    assert [path.name for path in again.rglob("*") if path.is_file()] == ["checkpoint"]
    (again / "run" / "checkpoint").unlink()
    (again / "run" / "newer").write_text("2")
    second.sync()
    assert contents(place) == {"run/newer": b"2", "other": b"not asked for"}


def test_the_mark_distinguishes_a_shared_folder_from_one_of_the_same_name(place: Place, tmp_path: Path) -> None:
    place.leave_mark("j")
    with pytest.raises(ConfigError, match="that all nodes share") as refusal:
        place.take_mark("k")
    assert refusal.value.field == "output"
    place.take_mark("j")
    assert contents(place) == {}


def test_a_place_that_cannot_be_written_says_why(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for url, why in [
        (str(tmp_path / "file" / "out"), "cannot be written"),
        ("nonsense://bucket/out", "cannot be reached: Protocol not known"),
        ("/proc/out", "cannot be written"),
    ]:
        with pytest.raises(ConfigError, match=why) as refusal:
            Place(url).leave_mark("j")
        assert refusal.value.field == "output"
        assert url in refusal.value.message


def test_a_store_whose_driver_is_missing_names_the_package(monkeypatch: pytest.MonkeyPatch) -> None:
    known = sys.modules["fsspec.registry"].known_implementations
    monkeypatch.setitem(known, "s4", {"class": "s4fs.S4", "err": "Install s4fs"})
    with pytest.raises(ConfigError, match="needs a package: Install s4fs"):
        Place("s4://bucket/out")


# --- in the job ---


@pytest.mark.parametrize(("words", "status"), [(["models"], 0), (["fly"], 2)])
def test_a_job_ends_as_its_command_does(tmp_path: Path, words: list[str], status: int) -> None:
    call = [sys.executable, "-m", "outrider.deploy.submit.job", "--output", str(tmp_path / "out"), "--", *words]
    done = subprocess.run(call, cwd=tmp_path, env=os.environ | {"TMPDIR": str(tmp_path)}, check=False, timeout=100)
    assert done.returncode == status
    assert list(tmp_path.iterdir()) == [], "nothing was written, and the job's folder is cleared"


def job(
    folder: Path, program: str, *words: str, monkeypatch: pytest.MonkeyPatch, every_s: float = 30.0
) -> tuple[int, Path]:
    """Run a job with a Python program as its command; return its status and the output place."""
    place = folder / "out"
    executable = folder / "python"
    executable.write_text(f'#!/bin/sh\nexec {shlex.quote(sys.executable)} -c "$OUTRIDER_TEST_PROGRAM"\n')
    executable.chmod(0o755)
    (folder / "temporary").mkdir()
    monkeypatch.setenv("OUTRIDER_TEST_PROGRAM", program)
    monkeypatch.setattr("tempfile.tempdir", str(folder / "temporary"))
    monkeypatch.setattr("sys.executable", str(executable))
    monkeypatch.setattr(job_on_node, "SYNC_EVERY_S", every_s)
    monkeypatch.setattr("signal.signal", lambda *_: None)
    return job_on_node.main(["--output", str(place), *words, "--", "models"]), place


def test_what_a_failed_command_wrote_is_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = "import sys; open('part', 'w').write('so far'); sys.exit(3)"
    status, place = job(tmp_path, program, "--probe", "j", monkeypatch=monkeypatch)
    assert (status, (place / "part").read_text()) == (3, "so far")
    assert [path.name for path in place.iterdir()] == ["part"]
    assert list((tmp_path / "temporary").iterdir()) == []


def test_what_a_command_writes_is_in_the_place_before_it_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    program = f"""
import pathlib, time
pathlib.Path('early').write_text('here')
while not pathlib.Path({str(tmp_path / "out" / "early")!r}).exists():
    time.sleep(0.01)
"""
    status, place = job(tmp_path, program, monkeypatch=monkeypatch, every_s=0.05)
    assert (status, (place / "early").read_text()) == (0, "here")


def test_a_job_on_a_node_that_does_not_share_the_folder_ends_before_its_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    status, place = job(tmp_path, "open('/dev/null/never')", "--mark", "j", monkeypatch=monkeypatch)
    assert status == 2
    assert not place.exists()
    error = capfd.readouterr().err
    assert error.startswith("outrider submit: output: ")
    assert "name a folder that all nodes share" in error
    assert list((tmp_path / "temporary").iterdir()) == []


def test_files_that_cannot_be_brought_to_the_place_stay_and_their_folder_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "out").touch()
    status, _ = job(tmp_path, "open('drafter', 'w').write('hours')", monkeypatch=monkeypatch)
    assert status == 1
    kept = re.search(r"what is missing there is in (.+) on ", capfd.readouterr().err)
    assert kept is not None
    assert Path(kept[1], "drafter").read_text() == "hours"


def test_a_command_that_is_stopped_is_waited_for_and_what_it_then_writes_is_kept(tmp_path: Path) -> None:
    (tmp_path / "go.py").write_text(
        "import sys\nfrom outrider.deploy.submit import job\n"
        "sys.executable = sys.argv[1]\nsys.exit(job.main(['--output', sys.argv[2], '--', 'models']))\n"
    )
    command = tmp_path / "command"
    command.write_text(
        f"#!/bin/sh\nexec {shlex.quote(sys.executable)} -c 'import pathlib, signal, sys, time\n"
        'def stop(*_):\n    time.sleep(0.3)\n    pathlib.Path("checkpoint").write_text("last"); sys.exit(7)\n'
        'signal.signal(signal.SIGTERM, stop)\nprint("ready", flush=True)\nsignal.pause()\'\n'
    )
    command.chmod(0o755)
    call = [sys.executable, str(tmp_path / "go.py"), str(command), str(tmp_path / "out")]
    with subprocess.Popen(call, stdout=subprocess.PIPE, start_new_session=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == b"ready\n"
        os.killpg(process.pid, signal.SIGTERM)
        assert process.wait(60) == 7
    assert (tmp_path / "out" / "checkpoint").read_text() == "last"


# --- what is sent ---


def test_inputs_keep_their_place_below_this_folder_and_their_last_name_otherwise(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    (here / "data").mkdir(parents=True)
    (elsewhere / "more").mkdir(parents=True)
    (here / "data" / "a.txt").write_text("a")
    (elsewhere / "more" / "b.txt").write_text("b")
    outside = str(elsewhere / "more")
    into = tmp_path / "into"
    into.mkdir()
    names = link_inputs(["data/a.txt", outside, "data"], here, into)
    assert names == {"data/a.txt": "data/a.txt", outside: "more", "data": "data"}
    assert (into / "data" / "a.txt").read_text() == "a"
    assert (into / "more" / "b.txt").read_text() == "b"


def test_two_inputs_of_one_name_or_one_that_is_not_there_are_refused(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same").touch()
    here = tmp_path / "here"
    here.mkdir()
    for wrong in (["../x/same", "../y/same"], ["nowhere"], ["."]):
        with pytest.raises(ConfigError) as refusal:
            link_inputs(wrong, here, here)
        assert refusal.value.field == "input"


def test_the_name_of_a_wheel_depends_on_its_content(tmp_path: Path) -> None:
    for folder, content in (("a", b"one"), ("b", b"two")):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / WHEEL).write_bytes(content)
    one, same, two = (find_wheel(str(tmp_path / folder / WHEEL), tmp_path).name for folder in ("a", "a", "b"))
    assert one == same != two
    assert one.startswith("outrider-0.1.0-0")
    assert one.endswith("-py3-none-any.whl")
    for wrong in (tmp_path / "no.whl", tmp_path):
        with pytest.raises(ConfigError) as refusal:
            find_wheel(str(wrong), tmp_path)
        assert refusal.value.field == "wheel"


class Server:
    """A recorder of requests in place of Ray's client, with the content of the folder that Ray would pack."""

    def __init__(self, error: Exception | None = None) -> None:
        self.error = error
        self.job: dict[str, Any] = {}
        self.packed: dict[str, bytes] = {}

    def submit_job(self, **job: Any) -> None:
        if self.error:
            raise self.error
        self.job = job
        if folder := job["runtime_env"].get("working_dir"):
            for path in Path(folder).rglob("*"):
                if path.is_file():
                    self.packed[path.relative_to(folder).as_posix()] = path.read_bytes()


def sent(*arguments: str, server: Server | None = None) -> Server:
    """Send the job of a command line."""
    server = server or Server()
    options = parse(["submit", *arguments])(SubmitSettings)
    send(server, *command._checked_command(options.arguments, parse), options)
    return server


TRAIN = ["--", "train", "drafter", "--output", "run", "--steps", "1", "--corpus"]


def test_a_job_has_its_inputs_and_its_output_place(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "here").mkdir()
    (tmp_path / "c.txt").write_text("text")
    monkeypatch.chdir(tmp_path / "here")
    arguments = ["--wheel", "none", "--name", "j", "--env", "A=1"]
    server = sent(*arguments, "--input", "../c.txt", *TRAIN, "../c.txt")
    place = tmp_path / "here" / "j"
    assert server.job["entrypoint"].endswith(
        f"; exec python -m outrider.deploy.submit.job --output {shlex.quote(str(place))} --inputs --mark j "
        "--resume run -- train drafter --output run --steps 1 --corpus c.txt"
    )
    assert server.packed == {"c.txt": b"text"}
    assert server.job["runtime_env"]["env_vars"] == {"RAY_JOB_STOP_WAIT_TIME_S": "120", "A": "1"}
    assert server.job["metadata"] == {"outrider_output": str(place)}
    Place(str(place)).take_mark("j")

    assert sent(*arguments, "--", "models").job["entrypoint"].endswith(f"--output {shlex.quote(str(place))} -- models")
    assert sent(*arguments, "--", "models").job["metadata"] == {}
    assert sent(*arguments, "--output", "o", "--", "models").job["metadata"] == {
        "outrider_output": str(tmp_path / "here" / "o")
    }


def test_the_options_that_name_outputs_are_known(tmp_path: Path) -> None:
    for words, written in [
        (["train", "drafter", "--corpus", "c", "--output", "run", "--steps", "1"], ["run"]),
        (["bench", "--report", "r", "--json", "b.json"], ["r", "b.json"]),
        (["export", "run", "package", "--name", "mine"], ["package"]),
        (["run", "x", "--json"], []),
        (["bench", "--report", "/elsewhere"], []),
    ]:
        assert command._checked_command(("--", *words), parse) == (words, written)


def test_a_place_that_only_nodes_can_write_is_left_to_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").touch()
    options = ["--wheel", "none", "--name", "j", "--output"]
    for there in (str(tmp_path / "file" / "out"), "nonsense://bucket/out"):
        entrypoint = sent(*options, there, "--", "models").job["entrypoint"]
        assert f"--output {shlex.quote(there)} --probe j --" in entrypoint
        assert "the job tries it from its node" in capfd.readouterr().err
    with pytest.raises(ConfigError, match="cannot be written"):
        sent(*options, "file/out", "--", "models")


def test_what_ray_refuses_names_the_option(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for error, field in [
        (RuntimeError("Job with submission_id j already exists"), "name"),
        (ValueError("Package size (600.00MiB) exceeds the maximum size of 512.00MiB."), "input"),
    ]:
        with pytest.raises(ConfigError) as refusal:
            sent("--wheel", "none", "--", "models", server=Server(error))
        assert refusal.value.field == field


def test_the_options_of_the_command_are_its_own() -> None:
    options = parse(["submit", "--output", "here", "--", "train", "drafter", "--output", "there"])(SubmitSettings)
    assert options.output == "here"
    assert options.arguments[-2:] == ("--output", "there")


def test_a_url_is_a_place_as_it_is_and_a_path_is_made_absolute(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.chdir(tmp_path)
    assert absolute("s3://bucket/run") == "s3://bucket/run"
    assert absolute("run") == str(tmp_path / "run")
    assert absolute("~/run") == str(Path.home() / "run")


# --- following ---


class ScriptedServer:
    """Ray's client for a job whose log streams break by a script; the job ends with the last one.

    None in place of a stream: the server is away until somebody has tried to open it.
    """

    def __init__(self, *streams: str | None) -> None:
        self.streams = list(streams)

    def get_address(self) -> str:
        return "http://scripted"

    async def tail_job_logs(self, _: str) -> AsyncIterator[str]:
        text = self.streams.pop(0)
        if text is None:
            raise aiohttp.ClientConnectionError("refused")
        for at in range(0, len(text), 7):
            yield text[at : at + 7]
        if self.streams:
            raise RuntimeError("broken")

    def get_job_info(self, _: str) -> SimpleNamespace:
        if self.streams and self.streams[0] is None:
            raise ConnectionError("refused")
        return SimpleNamespace(status=SimpleNamespace(is_terminal=lambda: not self.streams))


def test_what_the_log_says_is_printed_once_however_often_the_stream_breaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "RETRY_S", 0.0)
    whole = "first line\nsecond line\nthird line\nwithout an end"
    server = ScriptedServer(whole[:15], whole[:4], whole[:30], whole)
    job = asyncio.run(follow(server, "j"))
    assert capsys.readouterr().out == whole + "\n"
    assert job.status.is_terminal()


def test_a_server_that_is_away_for_a_while_is_asked_again_and_then_given_up(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "RETRY_S", 0.0)
    asyncio.run(follow(ScriptedServer("first", None, None, "first\nlast\n"), "j"))
    assert capsys.readouterr().out == "first\nlast\n"
    with pytest.raises(Unavailable, match="no job server answers at http://scripted"):
        asyncio.run(follow(ScriptedServer("first", *[None] * 9, "never read"), "j"))


# --- mistakes ---


class NotAJobServer(BaseHTTPRequestHandler):
    """A server that answers every request with the same page."""

    def do_GET(self) -> None:
        self.send_response(200)
        self.end_headers()
        self.wfile.write(b"<html>a page</html>")

    def log_message(self, *_: object) -> None:
        pass


@pytest.fixture
def web_server() -> Iterator[str]:
    server = HTTPServer(("127.0.0.1", 0), NotAJobServer)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def run(*arguments: str, capfd: pytest.CaptureFixture[str]) -> tuple[int, str]:
    try:
        status = main(["submit", *arguments])
    except SystemExit as ended:
        status = int(ended.code or 0)
    return status, capfd.readouterr().err


def test_whatever_is_wrong_is_one_line_that_says_what_to_do(
    capfd: pytest.CaptureFixture[str], web_server: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    nobody = ["--address", "http://127.0.0.1:1"]
    for arguments, status, says in [
        ([], 1, "give a command after --"),
        (["--follow", "j", "--stop", "j"], 1, "give a command after --"),
        (["--follow", "j", "--", "models"], 1, "give a command after --"),
        (["--", "submit", "--", "models"], 1, "must be another command"),
        (["--", "fly"], 2, "'fly'"),
        (["--", "train", "drafter"], 2, "--output"),
        (["--address", "127.0.0.1:8265", "--", "models"], 1, "is not http://HOST:PORT"),
        ([*nobody, "--", "models"], 1, "no job server answers at http://127.0.0.1:1"),
        ([*nobody, "--stop", "j"], 1, "no job server answers"),
        (["--address", web_server, "--follow", "j"], 1, "is no Ray job server"),
    ]:
        got, said = run(*arguments, capfd=capfd)
        assert (got, len(said.strip().splitlines())) == (status, 1), said
        assert says in said
