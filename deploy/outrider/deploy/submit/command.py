"""`outrider submit`: send a command to a Ray cluster and follow it; what it writes goes to the output place."""

from __future__ import annotations

import asyncio
import shlex
import sys
import tempfile
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from outrider.deploy.arguments import Given
from outrider.deploy.commands.operating import SubmitSettings
from outrider.deploy.submit.jobs import connect, follow, job_of, ray_errors
from outrider.deploy.submit.place import Place, absolute
from outrider.deploy.submit.upload import find_wheel, link_inputs
from outrider.proto.errors import ConfigError

OUTPUT_KEY = "outrider_output"  # of the job's metadata: whoever follows it later learns where its files are
# Ray kills a job that it stops after 3 s, too few for a checkpoint and its copying; its supervisor reads this.
STOP_WAIT = {"RAY_JOB_STOP_WAIT_TIME_S": "120"}
DETACHED, STOPPED = 130, 143
# Options of commands that name what they write.
WRITING = ("output", "report", "json", "plot")
UNPACKED = "${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}"


def submit(given: Given) -> int:
    """Run `outrider submit` and return its exit status."""
    options = given(SubmitSettings)
    if sum(map(bool, (options.follow, options.stop, options.arguments))) != 1:
        raise ConfigError("give a command after --, or --follow ID, or --stop ID", field="arguments")
    if options.arguments:
        arguments, written = _checked_command(options.arguments, given.parse)
    client = connect(options.address)
    if options.stop:
        job_of(client, options.stop)
        with ray_errors(options.address, "stop the job"):
            was_running = client.stop_job(options.stop)
        print(f"{options.stop} {'is asked to stop' if was_running else 'had ended'}")
        return 0
    if options.follow:
        job_of(client, options.follow)
        return _see_through(client, options.follow, options.address)
    job_id = send(client, arguments, written, options)
    print(f"job {job_id} on {options.address}", flush=True)
    if options.no_wait:
        print(_how_to_go_on(options.address, job_id), flush=True)
        return 0
    return _see_through(client, job_id, options.address)


def send(client: Any, arguments: list[str], written: list[str], options: SubmitSettings) -> str:
    """Upload wheel and inputs, start the job and return its id.

    Args:
        client: Ray's `JobSubmissionClient`.
        arguments: the command to run.
        written: names below the job's folder that the command says it writes.
        options: of `outrider submit`.
    """
    job_id = options.name or f"outrider-{arguments[0]}-{uuid.uuid4().hex[:8]}"
    place = absolute(options.output or job_id)
    words = ["python", "-m", "outrider.deploy.submit.entry", "--output", place]
    environment: dict[str, Any] = {"env_vars": STOP_WAIT | dict(map(_variable, options.env))}
    with tempfile.TemporaryDirectory(prefix="outrider-submit-") as temporary:
        folder = Path(temporary)
        unpacked = folder / "unpacked"
        unpacked.mkdir()
        inputs = link_inputs(options.input, Path.cwd(), unpacked)
        if options.wheel != "none":
            by_pip = options.install == "pip"
            wheel = find_wheel(options.wheel, unpacked if by_pip else folder)
            environment |= {"pip": [f"{UNPACKED}/{wheel.name}[all]"]} if by_pip else {"py_modules": [str(wheel)]}
        if any(unpacked.iterdir()):
            environment["working_dir"] = str(unpacked)
            words += ["--inputs"]
        if options.output or written:
            words += ["--mark" if _leave_mark(place, job_id, options.output) else "--probe", job_id]
            words += [word for name in written for word in ("--resume", name)]
        taken = ConfigError(f"there is a job {job_id!r} already", field="name")
        large = ConfigError("is more than Ray takes; put it on a shared store", field="input")
        with ray_errors(options.address, "take the job", {"already exists": taken, "exceeds the maximum": large}):
            client.submit_job(
                entrypoint=shlex.join([*words, "--", *(inputs.get(word, word) for word in arguments)]),
                submission_id=job_id,
                runtime_env=environment,
                metadata={OUTPUT_KEY: place} if options.output or written else {},
                entrypoint_num_cpus=options.cpus,
                entrypoint_num_gpus=options.gpus,
            )
    return job_id


def _leave_mark(place: str, job_id: str, named: str) -> bool:
    """Mark the place for the job to recognise, and return whether that was possible from here.

    A relative path means a folder of this machine. A path from the root, or a URL, may be one that only nodes reach.
    """
    try:
        Place(place).leave_mark(job_id)
    except ConfigError as error:
        if "://" not in named and not Path(named).is_absolute():
            raise
        _complain(f"{error.message} from here; the job tries it from its node")
        return False
    return True


def _see_through(client: Any, job_id: str, address: str) -> int:
    """Follow a job, say where its files are, and end as it ended."""
    try:
        job = asyncio.run(follow(client, job_id))
    except KeyboardInterrupt:
        print(f"\n{job_id} goes on. {_how_to_go_on(address, job_id)}", flush=True)
        return DETACHED
    if place := (job.metadata or {}).get(OUTPUT_KEY):
        print(f"output: {place}", flush=True)
    if job.status.value == "SUCCEEDED":
        return 0
    if job.status.value == "STOPPED":
        _complain(f"job {job_id} was stopped")
        return STOPPED
    if job.driver_exit_code:
        # Its log, which says why, has just been shown.
        _complain(f"job {job_id} failed with exit status {job.driver_exit_code}")
        return int(job.driver_exit_code)
    _complain(f"job {job_id} did not run: {(job.message or '').strip()}")
    return 1


def _how_to_go_on(address: str, job_id: str) -> str:
    base = f"outrider submit --address {address}"
    return f"Follow it: {base} --follow {job_id}\nStop it: {base} --stop {job_id}"


def _checked_command(words: Sequence[str], parse: Callable[[Sequence[str]], Given]) -> tuple[list[str], list[str]]:
    """Return the command without its `--`, and what it says that it writes in the job's folder.

    A mistake in the command ends here, before anything is uploaded.
    """
    arguments = list(words[1:] if words[:1] == ("--",) else words)
    if not arguments or arguments[0] == "submit":
        raise ConfigError("must be another command of outrider, such as `-- train drafter …`", field="arguments")
    values = parse(arguments).values
    named = [values.get(name) for name in WRITING]
    return arguments, [path.as_posix() for path in named if isinstance(path, Path) and not path.is_absolute()]


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError(f"{text!r} is not NAME=VALUE", field="env")
    return name, value


def _complain(text: str) -> None:
    print(f"outrider submit: {text}", file=sys.stderr, flush=True)
