"""Jobs on a Ray cluster, without one: what is sent, what comes back and is checked, how a log is followed."""

from __future__ import annotations

import asyncio
import json
import os
import subprocess
import sys
import threading
import zipfile
from collections.abc import AsyncIterator, Callable, Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

from outrider.deploy.cli import build_parser, main
from outrider.deploy.submit import artefacts
from outrider.deploy.submit.artefacts import MANIFEST, Manifest, PackedFile, pack
from outrider.deploy.submit.command import entrypoint, written_by
from outrider.deploy.submit.fetch import fetch_file, read_manifest
from outrider.deploy.submit.follow import PROGRESS_LINE, PlainScreen, follow
from outrider.deploy.submit.inputs import find_inputs, renamed, write_zip
from outrider.deploy.submit.job_server import Job
from outrider.deploy.submit.packer import Packer
from outrider.deploy.submit.wheel import find_wheel
from outrider.proto.errors import ConfigError, DataLoss, NotFound, Unavailable

WHEEL = "outrider-0.1.0-py3-none-any.whl"


@pytest.fixture
def small_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Parts of 10 bytes."""
    monkeypatch.setattr(artefacts, "PART_BYTES", 10)
    monkeypatch.setattr("outrider.deploy.submit.fetch.PART_BYTES", 10)
    monkeypatch.setattr("outrider.deploy.submit.fetch.RETRY_S", 0.0)


class Logs:
    """The folder of logs as the job server hands it out; `spoil` changes what is read."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.reads: list[str] = []
        self.spoil: Callable[[bytes], bytes] = lambda data: data

    def __call__(self, path: str) -> bytes:
        self.reads.append(path)
        if not (self.folder / path).is_file():
            raise NotFound(f"{path} is not found")
        return self.spoil((self.folder / path).read_bytes())


@pytest.fixture
def packed(tmp_path: Path, small_parts: None) -> tuple[Logs, Manifest]:
    """A job `j` that wrote `run/a` of 35 bytes and `run/below/b`, which is empty."""
    work = tmp_path / "work"
    (work / "run" / "below").mkdir(parents=True)
    (work / "run" / "a").write_bytes(bytes(range(35)))
    (work / "run" / "below" / "b").touch()
    manifest = pack(work, ["run", "run/a", "nothing"], tmp_path / "logs" / artefacts.FOLDER / "j")
    return Logs(tmp_path / "logs"), manifest


def nothing(_: int) -> None:
    pass


def test_what_was_packed_comes_back_as_it_was(packed: tuple[Logs, Manifest], tmp_path: Path) -> None:
    logs, manifest = packed
    assert read_manifest(logs, "j") == manifest
    assert (manifest.missing, manifest.size) == (("nothing",), 35)
    got: list[int] = []
    for file in manifest.files:
        fetch_file(logs, "j", file, tmp_path / "out", got.append)
    assert (tmp_path / "out/run/a").read_bytes() == bytes(range(35))
    assert (tmp_path / "out/run/below/b").read_bytes() == b""
    assert sum(got) == 35


def test_an_interrupted_fetch_goes_on_where_it_was(packed: tuple[Logs, Manifest], tmp_path: Path) -> None:
    logs, manifest = packed
    file = next(file for file in manifest.files if file.path == "run/a")

    def break_off(_: bytes) -> bytes:
        if len(logs.reads) == 3:
            raise KeyboardInterrupt
        return (logs.folder / logs.reads[-1]).read_bytes()

    logs.spoil = break_off
    with pytest.raises(KeyboardInterrupt):
        fetch_file(logs, "j", file, tmp_path / "out", nothing)
    assert not (tmp_path / "out/run/a").exists()
    logs.spoil = lambda data: data
    logs.reads.clear()
    got: list[int] = []
    fetch_file(logs, "j", file, tmp_path / "out", got.append)
    assert (tmp_path / "out/run/a").read_bytes() == bytes(range(35))
    assert len(logs.reads) == 2, "two of four parts were here"
    assert got == [20, 10, 5]
    logs.reads.clear()
    fetch_file(logs, "j", file, tmp_path / "out", nothing)
    assert logs.reads == [], "what is whole is not fetched again"


def test_a_part_with_another_hash_is_asked_for_again_and_then_refused(
    packed: tuple[Logs, Manifest], tmp_path: Path
) -> None:
    logs, manifest = packed
    file = next(file for file in manifest.files if file.path == "run/a")
    spoilt = iter([True])
    logs.spoil = lambda data: b"other" if next(spoilt, False) else data
    fetch_file(logs, "j", file, tmp_path / "once", nothing)
    logs.spoil = lambda _: b"other"
    with pytest.raises(DataLoss):
        fetch_file(logs, "j", file, tmp_path / "always", nothing)
    assert not (tmp_path / "always/run/a").exists()


def test_a_file_that_is_there_and_differs_is_not_overwritten(packed: tuple[Logs, Manifest], tmp_path: Path) -> None:
    logs, manifest = packed
    (tmp_path / "out/run").mkdir(parents=True)
    (tmp_path / "out/run/a").write_text("mine")
    with pytest.raises(ConfigError, match="differs"):
        fetch_file(logs, "j", manifest.files[0], tmp_path / "out", nothing)
    assert (tmp_path / "out/run/a").read_text() == "mine"


@pytest.mark.parametrize("path", ["../a", "/etc/passwd", "", "a\\b", "a/../../b"])
def test_a_manifest_cannot_name_a_place_outside_the_output_folder(path: str) -> None:
    with pytest.raises(DataLoss):
        Manifest.from_json(json.dumps({"files": [{"path": path, "bytes": 0, "parts": []}], "missing": []}).encode())


@pytest.mark.parametrize("text", [b"", b"{", b"[]", b'{"files": [{}], "missing": []}'])
def test_a_manifest_that_is_cut_off_is_an_error_of_its_own(text: bytes) -> None:
    with pytest.raises(DataLoss):
        Manifest.from_json(text)
    with pytest.raises(DataLoss):
        PackedFile("a", 1, ())


def test_a_job_that_packed_nothing_says_so_after_a_while(tmp_path: Path) -> None:
    with pytest.raises(NotFound):
        read_manifest(Logs(tmp_path), "j", within_s=0)


# --- in the job ---


@pytest.mark.parametrize(("command", "status"), [(["models"], 0), (["fly"], 2)])
def test_a_job_ends_as_its_command_and_has_packed_what_it_wrote(
    tmp_path: Path, command: list[str], status: int
) -> None:
    logs, given = tmp_path / "session" / "logs", tmp_path / "given"
    logs.mkdir(parents=True)
    given.mkdir()
    (given / "text.txt").write_text("content")
    words = entrypoint(["text.txt"], ["text.txt", "none"], command).split()
    with (logs / "job-driver-j1.log").open("w") as log:
        done = subprocess.run([sys.executable, *words[1:]], cwd=given, stdout=log, check=False, timeout=100)
    assert done.returncode == status
    manifest = Manifest.from_json((logs / artefacts.FOLDER / "j1" / MANIFEST).read_bytes())
    assert [file.path for file in manifest.files] == ["text.txt"]
    assert manifest.missing == ("none",)
    assert not list((tmp_path / "session" / "outrider-jobs").iterdir()), "the job's folder is cleared"
    assert "packed 1 files" in (logs / "job-driver-j1.log").read_text()


def test_outside_a_job_the_entry_refuses(tmp_path: Path) -> None:
    call = [sys.executable, "-m", "outrider.deploy.submit.entry", "--", "models"]
    done = subprocess.run(call, capture_output=True, text=True, check=False, cwd=tmp_path, timeout=100)
    assert done.returncode == 2
    assert "jobs of Ray" in done.stderr


def test_a_job_that_is_killed_is_packed_as_far_as_it_came(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    (work / "checkpoint").write_text("so far")
    program = (
        "import sys, os, signal; from pathlib import Path; from outrider.deploy.submit.packer import Packer;"
        f"Packer(Path({str(work)!r}), Path({str(tmp_path / 'packed')!r}), ['checkpoint']);"
        "os.killpg(0, signal.SIGKILL)"
    )
    process = subprocess.run([sys.executable, "-c", program], start_new_session=True, check=False, timeout=100)
    assert process.returncode == -9
    manifest = read_manifest(lambda _: _read(tmp_path / "packed" / MANIFEST), "j", within_s=60)
    assert [file.path for file in manifest.files] == ["checkpoint"]


def _read(path: Path) -> bytes:
    if not path.exists():
        raise NotFound("not yet")
    return path.read_bytes()


def test_the_packer_works_when_all_that_hold_its_pipe_are_gone(tmp_path: Path) -> None:
    work = tmp_path / "work"
    work.mkdir()
    packer = Packer(work, tmp_path / "packed", ["late"])
    (work / "late").write_text("written after it began")
    packer.finish()
    assert [file.path for file in Manifest.from_json((tmp_path / "packed" / MANIFEST).read_bytes()).files] == ["late"]


# --- what is sent ---


def test_inputs_keep_their_place_below_this_folder_and_their_last_name_otherwise(tmp_path: Path) -> None:
    here, elsewhere = tmp_path / "here", tmp_path / "elsewhere"
    (here / "data").mkdir(parents=True)
    (elsewhere / "more").mkdir(parents=True)
    (here / "data" / "a.txt").write_text("a")
    (elsewhere / "more" / "b.txt").write_text("b")
    outside = str(elsewhere / "more")
    inputs = find_inputs(["data/a.txt", outside], here)
    assert [given.name for given in inputs] == ["data/a.txt", "more"]
    command = ["train", "--corpus", "data/a.txt", outside]
    assert renamed(command, inputs) == ["train", "--corpus", "data/a.txt", "more"]
    write_zip(inputs, tmp_path / "1.zip")
    os.utime(here / "data" / "a.txt", (1, 1))
    write_zip(inputs, tmp_path / "2.zip")
    assert (tmp_path / "1.zip").read_bytes() == (tmp_path / "2.zip").read_bytes(), "one upload for the same content"
    with zipfile.ZipFile(tmp_path / "1.zip") as archive:
        assert {name: archive.read(name) for name in archive.namelist()} == {"data/a.txt": b"a", "more/b.txt": b"b"}


def test_two_inputs_of_one_name_or_one_that_is_not_there_are_refused(tmp_path: Path) -> None:
    for folder in ("x", "y"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "same").touch()
    here = tmp_path / "here"
    here.mkdir()
    for wrong in (["../x/same", "../y/same"], ["nowhere"], ["."]):
        with pytest.raises(ConfigError) as refusal:
            find_inputs(wrong, here)
        assert refusal.value.field == "input"


def test_the_name_of_a_wheel_tells_its_content(tmp_path: Path) -> None:
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


def test_what_comes_back_is_by_default_what_the_command_writes() -> None:
    train = ["train", "drafter", "--corpus", "c", "--output", "run", "--steps", "1"]
    assert written_by(train) == ["run"]
    assert written_by(["bench", "--report", "r", "--json", "b.json"]) == ["r", "b.json"]
    assert written_by(["run", "x", "--json"]) == []
    assert written_by(["bench", "--report", "/elsewhere"]) == []


def test_the_options_of_the_command_are_its_own() -> None:
    options = build_parser().parse_args(["submit", "--output", "here", "--", "train", "drafter", "--output", "there"])
    assert options.output == Path("here")
    assert options.arguments[-2:] == ["--output", "there"]


# --- following ---


class ScriptedServer:
    """A job server whose streams break where the script says; then the job has ended."""

    def __init__(self, *streams: str) -> None:
        self.streams = list(streams)
        self.whole = streams[-1]

    async def log(self, _: str) -> AsyncIterator[str]:
        text = self.streams.pop(0)
        for at in range(0, len(text), 7):
            yield text[at : at + 7]
        if self.streams:
            raise Unavailable("broken")

    def job(self, job_id: str) -> Job:
        return Job(job_id, "RUNNING" if self.streams else "SUCCEEDED", "", 0, "n", {})


def test_each_line_is_shown_once_however_often_the_stream_breaks(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name in ("RETRY_S", "END_POLL_S"):
        monkeypatch.setattr(f"outrider.deploy.submit.follow.{name}", 0.0)
    whole = "first line\nsecond line\nthird line\nwithout an end"
    server = ScriptedServer(whole[:15], whole[:4], whole[:30], whole)
    job = asyncio.run(follow(server, "j", PlainScreen()))  # type: ignore[arg-type]
    assert capsys.readouterr().out == whole + "\n"
    assert job.ended


def test_a_line_of_progress_moves_the_bar_and_no_other_does() -> None:
    found = PROGRESS_LINE.match("training 12.5% step 3 loss 2.5 100 tokens/s 1:00 left")
    assert found is not None
    assert (found["stage"], found["percent"]) == ("training", "12.5")
    assert PROGRESS_LINE.match("finished after 3 steps") is None
    assert PROGRESS_LINE.match("  corpus/code  T=0 0.1") is None


# --- mistakes ---


class NotAJobServer(BaseHTTPRequestHandler):
    """Answers every question with the same page."""

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
        (["--", "train", "drafter"], 2, "--corpus"),
        (["--address", "127.0.0.1:8265", "--", "models"], 1, "is not http://HOST:PORT"),
        ([*nobody, "--", "models"], 1, "no job server answers at http://127.0.0.1:1"),
        ([*nobody, "--stop", "j"], 1, "no job server answers"),
        (["--address", web_server, "--follow", "j"], 1, "is no Ray job server"),
    ]:
        got, said = run(*arguments, capfd=capfd)
        assert (got, len(said.strip().splitlines())) == (status, 1), said
        assert says in said
