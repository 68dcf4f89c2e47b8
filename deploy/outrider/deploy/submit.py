"""`outrider submit`: send a command to a Ray cluster as a job, and follow it; `job.py` is its other end."""

from __future__ import annotations

import asyncio
import json
import logging
import os
import shlex
import sys
import time
import uuid
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import aiohttp
import requests
from ray.exceptions import AuthenticationError
from ray.job_submission import JobSubmissionClient

import outrider
from outrider.deploy.arguments import Given
from outrider.deploy.commands.operating import SubmitSettings
from outrider.deploy.process.termination import temporary_folder
from outrider.proto.errors import ConfigError, Unavailable

WRITING = ("output", "json", "plot")  # options of commands that name what they write
RETRY_S = 1.0


def submit(given: Given) -> int:
    """Run `outrider submit` and return its exit status."""
    options = given(SubmitSettings)
    if not options.arguments:
        raise ConfigError("is missing; give a command of outrider after --", field="arguments")
    if not options.address.startswith(("http://", "https://")):
        raise ConfigError(f"{options.address!r} is not http://HOST:PORT", field="address")
    arguments = list(options.arguments[options.arguments[:1] == ("--",) :])
    values = given.parse(arguments).values  # ends the process where there is a mistake
    for name in ("dashboard.modules.dashboard_sdk", "dashboard.modules.job.sdk", "_private.runtime_env.packaging"):
        logging.getLogger(f"ray.{name}").setLevel(logging.ERROR)
    os.environ["RAY_API_SERVER_ADDRESS"] = options.address  # which it would prefer to its argument
    os.environ["RAY_RUNTIME_ENV_IGNORE_GITIGNORE"] = "1"  # send inputs whole, even if a .gitignore is among them
    with ray_errors(options.address):
        client = JobSubmissionClient(options.address)
    written = [path for path in map(values.get, WRITING) if isinstance(path, Path) and not path.is_absolute()]
    job_id = send(client, arguments, [path.as_posix() for path in written], options)
    print(
        f"job {job_id} at {options.address}; `ray job stop {job_id}` ends it, `ray job logs` shows its log", flush=True
    )
    return 0 if options.no_wait else follow(client, job_id)


@contextmanager
def ray_errors(address: str) -> Iterator[None]:
    """Translate the errors of Ray's client; what the server itself says is passed on."""
    try:
        yield
    except (requests.exceptions.RequestException, aiohttp.ClientError, ConnectionError, KeyError) as error:
        message = f"no Ray job server answers at {address}; it is on port 8265 of a head that has ray[default]"
        raise Unavailable(message, field="address", code="OUT-502") from error
    except (AuthenticationError, RuntimeError, ValueError) as error:
        raise Unavailable(f"the job server at {address} says: {shortened(str(error))}") from error


def shortened(message: str) -> str:
    """Return the first and last line of a message, which may have a traceback between."""
    lines = [line.strip()[:300] for line in message.replace("\\n", "\n").split("\n") if line.strip()]
    return " … ".join(dict.fromkeys(lines[:1] + lines[-1:])) or "nothing"


def send(client: JobSubmissionClient, arguments: list[str], written: list[str], options: SubmitSettings) -> str:
    """Upload Outrider and the inputs, start the job and return its id; `written` names what the command writes."""
    job_id = options.name or f"outrider-{arguments[0]}-{uuid.uuid4().hex[:8]}"
    place = options.output if "://" in options.output else str(Path(options.output or job_id).expanduser().absolute())
    task: dict[str, Any] = {"output": place, "mark": "", "marked": False, "resume": written}
    if options.output or written:
        task["mark"] = f".{job_id}.submitted"
        with suppress(OSError):  # a folder that only the nodes reach
            if "://" not in place:
                Path(place).mkdir(parents=True, exist_ok=True)
                Path(place, f".{job_id}.submitted").touch()
                task["marked"] = True
    # Ray kills a job 3 s after it asks it to stop, too soon to copy a checkpoint; its supervisor reads this variable.
    variables = {"RAY_JOB_STOP_WAIT_TIME_S": "120", **dict(text.partition("=")[::2] for text in options.env)}
    environment: dict[str, Any] = {"env_vars": variables}
    if not options.installed:
        environment["py_modules"] = list(outrider.__path__)
    with temporary_folder("outrider-submit-") as folder:
        environment["working_dir"] = str(folder)
        names = link_inputs(options.input, folder)
        words = [json.dumps(task), *(names.get(word, word) for word in arguments)]
        entrypoint = f"exec python3 -m outrider.deploy.job {shlex.join(words)}"
        resources: dict[str, Any] = {"entrypoint_num_cpus": options.cpus, "entrypoint_num_gpus": options.gpus}
        with ray_errors(options.address):
            client.submit_job(entrypoint=entrypoint, submission_id=job_id, runtime_env=environment, **resources)
    return job_id


def link_inputs(spelled: Iterable[str], folder: Path) -> dict[str, str]:
    """Link the inputs into a folder, and return their names there: last names, or paths relative to the current one."""
    names = {}
    for text in sorted(spelled):  # a folder before what lies in it
        path = Path(text).expanduser().resolve()
        names[text] = path.relative_to(Path.cwd()).as_posix() if path.is_relative_to(Path.cwd()) else path.name
        link = folder.resolve() / names[text]
        if not path.exists() or link.exists() or link.resolve() != link:
            raise ConfigError(f"{text} is not there, lies in another input, or has its name", field="input")
        link.parent.mkdir(parents=True, exist_ok=True)
        link.symlink_to(path)
    return names


def follow(client: JobSubmissionClient, job_id: str) -> int:
    """Show a job's log until the job has ended, and return its exit status; Ctrl-C leaves it running.

    A stream that breaks is opened again, begins at the log's beginning, and is printed from where it broke.
    """
    printed, ended = 0, False

    async def show() -> None:
        nonlocal printed
        at = 0  # characters
        async for piece in client.tail_job_logs(job_id):
            print(piece[max(0, printed - at) :], end="", flush=True)
            at += len(piece)
            printed = max(printed, at)

    while not ended:
        with ray_errors(client.get_address()):
            job = client.get_job_info(job_id)
        ended = job.status.is_terminal()  # then its log is whole
        with suppress(Unavailable), ray_errors(client.get_address()):
            asyncio.run(show())
        time.sleep(0 if ended else RETRY_S)
    status = {"SUCCEEDED": 0, "STOPPED": 143}.get(job.status.value, int(job.driver_exit_code or 1))
    if status:
        why = f"exit status {status}" if job.driver_exit_code else shortened(job.message or "")
        print(f"outrider submit: job {job_id} {job.status.value.lower()}: {why}", file=sys.stderr)
    return status
