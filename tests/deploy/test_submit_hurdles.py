"""A wrong python, a missing agent or an environment that cannot be made stops a job with one line."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from outrider.deploy.submit import command
from outrider.deploy.submit.command import ray_errors
from outrider.deploy.submit.hurdles import NEEDED, NO_PYTHON, agent_errors, entrypoint, not_run
from outrider.proto.errors import Unavailable

BASH = shutil.which("bash") or "/bin/bash"  # by which Ray starts jobs


def start(folder: Path) -> subprocess.CompletedProcess[str]:
    """Run a job's line as Ray would, in a PATH that has one folder before the system's tools, but no other python."""
    for tool in ("hostname", "echo"):
        (folder / tool).symlink_to(shutil.which(tool) or f"/bin/{tool}")
    line = entrypoint(["echo", "the job", "runs"])
    environment = {"PATH": str(folder), "HOME": os.environ.get("HOME", "/")}
    return subprocess.run([BASH, "-c", line], env=environment, capture_output=True, text=True, check=False)


def python_in(folder: Path, *options: str) -> None:
    (folder / "python").write_text(f'#!{BASH}\nexec {shlex.quote(sys.executable)} {" ".join(options)} "$@"\n')
    (folder / "python").chmod(0o755)


def test_a_job_runs_by_the_python_of_rays_environment(tmp_path) -> None:
    python_in(tmp_path)
    done = start(tmp_path)
    assert (done.returncode, done.stdout, done.stderr) == (0, "the job runs\n", "")


def test_a_python_that_is_not_rays_ends_the_job_in_one_line_that_says_so(tmp_path) -> None:
    python_in(tmp_path, "-I", "-S")  # without its environment's packages
    done = start(tmp_path)
    (line,) = done.stderr.splitlines()
    assert done.returncode == NO_PYTHON
    assert f"({tmp_path}/python) lacks {' '.join(NEEDED)}; start Ray there with its environment's bin folder" in line
    assert done.stdout == ""


def test_a_path_without_python_ends_the_job_in_one_line_too(tmp_path) -> None:
    (line,) = start(tmp_path).stderr.splitlines()
    assert "(none) lacks everything; start Ray there" in line


@pytest.mark.parametrize(
    "said",
    [
        "Request failed with status code 500: No available agent to submit job, please try again later.",
        "Request failed with status code 500: Traceback:\nKeyError: 'Agent info not found in KV'",
        "aiohttp.client_exceptions.ClientConnectorError: Cannot connect to host 127.0.0.1:52365",
    ],
)
def test_a_head_without_an_agent_is_named_with_both_reasons(said) -> None:
    with pytest.raises(Unavailable) as refusal, ray_errors("http://head:8265", "take the job", agent_errors("x")):
        raise RuntimeError(said)
    assert "ray[default]" in refusal.value.message
    assert "--dashboard-agent-listen-port" in refusal.value.message


PIP_FAILED = """runtime_env setup failed: Failed to set up runtime environment.
Could not create the actor because its associated runtime env failed to be created.
Traceback (most recent call last):
  File "runtime_env_agent.py", line 389, in _create_runtime_env_with_retry
ray._private.runtime_env.utils.SubprocessCalledProcessError: Run cmd[9] failed with the following details.
Command '['python', '-m', 'pip', 'install']' returned non-zero exit status 1.
Last 50 lines of stdout:
    ERROR: No matching distribution found for torch>=2.8
    note: see above"""


def test_an_environment_that_a_node_cannot_make_is_one_line_with_pips_own_reason(monkeypatch, capsys) -> None:
    job = SimpleNamespace(
        metadata={}, status=SimpleNamespace(value="FAILED"), driver_exit_code=None, message=PIP_FAILED
    )

    async def ended(*_: object) -> SimpleNamespace:
        return job

    monkeypatch.setattr(command, "follow", ended)
    assert command._see_through(None, "j", "http://head:8265") == 1
    (line,) = capsys.readouterr().err.splitlines()
    assert "job j did not run: its node could not make its environment: ERROR: No matching distribution" in line
    assert "--wheel none" in line


def test_a_job_that_did_not_run_for_another_reason_says_its_last_line() -> None:
    assert not_run("Traceback:\n  File x\nRuntimeError: the node is gone") == "RuntimeError: the node is gone"
    assert not_run("") == "it does not say why"
