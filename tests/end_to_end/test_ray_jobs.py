"""Commands as jobs of a Ray cluster with its job server: sent, followed, stopped, resumed, joined."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command_processes import free_port
from random_models import teacher_of

from outrider.cloud.models.family_index import target_folder

pytestmark = [pytest.mark.ray, pytest.mark.soak, pytest.mark.timeout(500)]

TINY = ["--hidden", "32", "--layers", "1", "--mlp", "64", "--threads", "1"]


class RayHead:
    """A head node with a job server on loopback, in processes of its own."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        ports = {name: str(free_port()) for name in ("gcs", "client", "agent", "dashboard")}
        self.address = f"http://127.0.0.1:{ports['dashboard']}"
        self.environment = {
            **os.environ,
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "OMP_NUM_THREADS": "1",
            "RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S": "0",
            # A token of its own: nothing else on the machine can send jobs, and none lies in the user's home.
            "RAY_AUTH_MODE": "token",
            "RAY_AUTH_TOKEN": "0" * 64,
            "RAY_ADDRESS": "",
            "RAY_TMPDIR": str(folder),  # of any other Ray that a job should start
        }
        options = ["--head", "--block", "--disable-usage-stats", "--num-cpus", "2", "--include-dashboard", "true"]
        options += ["--port", ports["gcs"], "--ray-client-server-port", ports["client"]]
        options += ["--dashboard-agent-listen-port", ports["agent"], "--node-ip-address", "127.0.0.1"]
        options += ["--dashboard-host", "127.0.0.1", "--dashboard-port", ports["dashboard"], "--temp-dir", str(folder)]
        self.log = (folder / "head.log").open("w")
        command = [str(Path(sys.executable).with_name("ray")), "start", *options]
        self.process = subprocess.Popen(command, env=self.environment, stdout=self.log, stderr=self.log)

    def outrider(self, *arguments: str, folder: Path) -> subprocess.CompletedProcess[str]:
        """Run `outrider submit` against it."""
        with self.start(*arguments, folder=folder) as process:
            output, errors = process.communicate(timeout=300)
        return subprocess.CompletedProcess(process.args, process.returncode, output, errors)

    def start(self, *arguments: str, folder: Path) -> subprocess.Popen[str]:
        command = [sys.executable, "-m", "outrider.deploy", "submit", "--address", self.address, *arguments]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        return subprocess.Popen(command, env=self.environment, cwd=folder, text=True, **pipes)

    def stopped(self, job: str) -> str:
        """Stop a job as Ray's own command does, and return its log."""
        ray = [str(Path(sys.executable).with_name("ray")), "job"]
        at = ["--address", self.address, job]
        subprocess.run([*ray, "stop", *at], env=self.environment, check=True, capture_output=True, timeout=300)
        log = subprocess.run([*ray, "logs", *at], env=self.environment, capture_output=True, text=True, timeout=60)
        return log.stdout

    def wait_for_log(self, job: str, text: str) -> None:
        while not any(text in log.read_text() for log in self.folder.glob(f"session_2*/logs/job-driver-{job}.log")):
            time.sleep(0.2)

    def end(self) -> None:
        self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(60)
        except subprocess.TimeoutExpired:
            self.process.kill()
        self.log.close()


@pytest.fixture(scope="module")
def head(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayHead]:
    # The paths of Ray's sockets may have 107 bytes; those of pytest's folders are long.
    folder = Path(f"/tmp/ray-jobs-{os.getpid()}")
    folder.mkdir()
    head = RayHead(folder)
    try:
        while "Ray runtime started" not in (folder / "head.log").read_text():
            assert head.process.poll() is None, (folder / "head.log").read_text()
            time.sleep(0.2)
        yield head
    finally:
        head.end()
        until = time.monotonic() + 20  # the last of its processes may still write
        while folder.exists() and time.monotonic() < until:
            shutil.rmtree(folder, ignore_errors=True)
            time.sleep(0.1)


def test_a_drafter_is_trained_into_the_output_place_and_a_stopped_job_resumed(head: RayHead, tmp_path: Path) -> None:
    teacher_of(target_folder("reference"), tmp_path, (f"Sentence number {i} of many. " * 40 for i in range(12)))
    train = ["train", "drafter", "--teacher", "says", "--output", "run", *TINY]
    done = head.outrider("--input", "says", "--name", "train", "--", *train, "--steps", "2", folder=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "finished after 2 steps" in done.stdout
    assert f"files in {tmp_path / 'train'}" in done.stdout
    assert json.loads((tmp_path / "train/run/training.json").read_text())["steps"] == 2
    assert (tmp_path / "train/run/model.safetensors").stat().st_size > 100_000
    assert not (tmp_path / "train/says").exists(), "an input is no output"

    # Ctrl-C leaves the job running; a stop keeps what was learnt for a job to resume.
    place = f"file://{tmp_path}/kept"
    arguments = ["--input", "says", "--installed", "--output", place]
    with head.start("--name", "ended", *arguments, "--", *train, "--minutes", "30", folder=tmp_path) as sent:
        head.wait_for_log("ended", "% step ")
        sent.send_signal(signal.SIGINT)
        output, errors = sent.communicate(timeout=200)
    assert sent.returncode == 130, output + errors
    assert f"files in {place}" in head.stopped("ended")
    (checkpoint,) = (tmp_path / "kept/run/checkpoints").glob("step-*")
    step = int(checkpoint.name.removeprefix("step-"))
    again = [*arguments, "--name", "again", "--no-wait", "--", *train, "--minutes", "30", "--resume"]
    assert "`ray job stop again` ends it" in head.outrider(*again, folder=tmp_path).stdout
    head.wait_for_log("again", f"resumed after step {step}")
    head.stopped("again")


def test_a_job_that_fails_ends_the_command_as_it_ended_itself(head: RayHead, tmp_path: Path) -> None:
    command = ["run", "hi", "--coordinator", "nowhere"]
    failed = head.outrider("--installed", "--", *command, folder=tmp_path)
    assert failed.returncode == 1
    assert "is not host:port" in failed.stdout
    assert "failed: exit status 1" in failed.stderr


def test_a_node_that_cannot_run_the_command_or_write_its_output_says_so(head: RayHead, tmp_path: Path) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} -S "$@"\n')
    (tmp_path / "bin" / "python3").chmod(0o755)
    path = ["--env", f"PATH={tmp_path}/bin:/usr/bin:/bin"]  # as if Ray had been started by .venv/bin/ray alone
    for options, says in (
        (path, "the first python3 of Ray's PATH"),
        (["--output", "/proc/here"], "output: /proc/here on"),
    ):
        failed = head.outrider(*options, "--", "key", "alice", folder=tmp_path)
        assert failed.returncode == 2, failed.stdout + failed.stderr
        assert says in failed.stdout
        assert "Traceback" not in failed.stdout
        assert "failed: exit status 2" in failed.stderr


def test_a_cluster_in_a_job_joins_the_one_that_runs_it(head: RayHead, tmp_path: Path) -> None:
    up = ["up", "--listen", "127.0.0.1:0", "--target", "reference", "--target-threads", "1"]
    sent = head.outrider("--installed", "--name", "up", "--no-wait", "--", *up, folder=tmp_path)
    assert sent.returncode == 0, sent.stderr
    head.wait_for_log("up", "outrider run")
    assert not (head.folder / "ray").exists(), "no other Ray was started"
    head.stopped("up")
