"""`outrider submit`: send a command to a Ray cluster, follow it, and get what it wrote."""

from __future__ import annotations

import argparse
import asyncio
import json
import shlex
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console

from outrider.deploy.submit.fetch import fetch_file, read_manifest
from outrider.deploy.submit.follow import downloads, follow, screen_for
from outrider.deploy.submit.inputs import find_inputs, renamed, write_zip
from outrider.deploy.submit.job_server import Job, JobServer
from outrider.deploy.submit.wheel import find_wheel
from outrider.proto.errors import ConfigError, OutriderError

FETCH_KEY = "outrider_fetch"  # of the job's metadata: whoever follows it later knows what to get
DETACHED, STOPPED = 130, 143
# Options of commands that name what they write.
WRITING = ("output", "report", "json")
UNPACKED = "${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}"


def submit(options: argparse.Namespace) -> int:
    """`outrider submit`."""
    _check_one_purpose(options)
    if options.stop:
        ended = not JobServer(options.address).stop(options.stop)
        print(f"{options.stop} {'had ended' if ended else 'is asked to stop'}")
        return 0
    if options.follow:
        server = JobServer(options.address)
        server.job(options.follow)
        return _see_through(server, options.follow, options)
    arguments = _checked_command(options.arguments)
    server = JobServer(options.address)
    job_id = send(server, arguments, options)
    print(f"job {job_id} on {server.address}", flush=True)
    if options.no_wait:
        print(_how_to_go_on(server, job_id, options), flush=True)
        return 0
    return _see_through(server, job_id, options)


def send(server: JobServer, arguments: list[str], options: argparse.Namespace) -> str:
    """Upload wheel and inputs and start the job; its id."""
    here = Path.cwd()
    inputs = find_inputs(options.input, here)
    fetched = [_relative(path) for path in options.fetch] or written_by(arguments)
    job_id = options.name or f"outrider-{arguments[0]}-{uuid.uuid4().hex[:8]}"
    with tempfile.TemporaryDirectory(prefix="outrider-submit-") as temporary:
        folder = Path(temporary)
        wheel = None if options.wheel == "none" else find_wheel(options.wheel, folder)
        unpacked = [*inputs, *(find_inputs([str(wheel)], folder) if wheel and options.install == "pip" else ())]
        environment: dict[str, Any] = {"env_vars": dict(map(_variable, options.env))}
        if unpacked:
            write_zip(unpacked, folder / "inputs.zip")
            environment["working_dir"] = str(folder / "inputs.zip")
        if wheel and options.install == "pip":
            environment["pip"] = [f"{UNPACKED}/{wheel.name}[all]"]
        elif wheel:
            environment["py_modules"] = [str(wheel)]
        return server.submit(
            entrypoint([given.name for given in inputs], fetched, renamed(arguments, inputs)),
            submission_id=job_id,
            runtime_env=environment,
            metadata={FETCH_KEY: json.dumps(fetched)},
            entrypoint_num_cpus=options.cpus,
            entrypoint_num_gpus=options.gpus,
        )


def entrypoint(inputs: Sequence[str], fetched: Sequence[str], arguments: Sequence[str]) -> str:
    """The shell command of a job."""
    words = ["python", "-m", "outrider.deploy.submit.entry"]
    words += [word for name in inputs for word in ("--input", name)]
    words += [word for path in fetched for word in ("--fetch", path)]
    return shlex.join([*words, "--", *arguments])


def written_by(arguments: Sequence[str]) -> list[str]:
    """What a command says that it writes, as far as that lies in the job's own folder."""
    parsed = _parsed(arguments)
    named = [getattr(parsed, name, None) for name in WRITING]
    return [path.as_posix() for path in named if isinstance(path, Path) and not path.is_absolute()]


def fetch(server: JobServer, job: Job, output: Path, console: Console) -> int:
    """Get what the job was told to hand back; how many of the wanted paths it did not write."""
    wanted = json.loads(job.metadata.get(FETCH_KEY, "[]"))
    if not wanted:
        return 0

    def read(path: str) -> bytes:
        return server.read(job.node, path)

    try:
        manifest = read_manifest(read, job.id)
    except OutriderError as error:
        _complain(f"nothing of job {job.id} can be fetched: {error.message}")
        return len(wanted)
    with downloads(console) as progress:
        task = progress.add_task("", total=manifest.size)
        for file in manifest.files:
            fetch_file(read, job.id, file, output, lambda size: progress.advance(task, size))
    if manifest.files:
        print(f"{len(manifest.files)} files, {manifest.size / 1e6:.1f} MB, in {output}", flush=True)
    for path in manifest.missing:
        _complain(f"job {job.id} wrote no {path}")
    return len(manifest.missing)


def _see_through(server: JobServer, job_id: str, options: argparse.Namespace) -> int:
    """Follow, fetch, and end as the job ended."""
    console = Console()
    try:
        job = asyncio.run(follow(server, job_id, screen_for(console, job_id)))
    except KeyboardInterrupt:
        print(f"\n{job_id} goes on. {_how_to_go_on(server, job_id, options)}", flush=True)
        return DETACHED
    missing = fetch(server, job, options.output or Path(job_id), console)
    if job.state == "SUCCEEDED":
        return 1 if missing else 0
    if job.state == "STOPPED":
        _complain(f"job {job_id} was stopped")
        return STOPPED
    if job.exit_status:
        # Its log, which says why, has just been shown.
        _complain(f"job {job_id} failed with exit status {job.exit_status}")
        return job.exit_status
    _complain(f"job {job_id} did not run: {job.message.strip()}")
    return 1


def _how_to_go_on(server: JobServer, job_id: str, options: argparse.Namespace) -> str:
    base = f"outrider submit --address {server.address}"
    output = f" --output {shlex.quote(str(options.output))}" if options.output else ""
    return f"Follow it: {base} --follow {job_id}{output}\nStop it: {base} --stop {job_id}"


def _check_one_purpose(options: argparse.Namespace) -> None:
    given = [name for name in ("follow", "stop") if getattr(options, name)]
    if len(given) + bool(options.arguments) != 1:
        raise ConfigError("give a command after --, or --follow ID, or --stop ID", field="arguments")


def _checked_command(words: Sequence[str]) -> list[str]:
    """The command without its `--`; a mistake in it ends here, before anything is uploaded."""
    arguments = list(words[1:] if words[:1] == ["--"] else words)
    if not arguments or arguments[0] == "submit":
        raise ConfigError("must be another command of outrider, such as `-- train drafter …`", field="arguments")
    _parsed(arguments)
    return arguments


def _parsed(arguments: Sequence[str]) -> argparse.Namespace:
    from outrider.deploy.cli import build_parser

    return build_parser().parse_args(list(arguments))


def _relative(text: str) -> str:
    path = Path(text)
    if path.is_absolute() or ".." in path.parts:
        raise ConfigError(f"{text!r} must be relative: a job runs in a folder of its own", field="fetch")
    return path.as_posix()


def _variable(text: str) -> tuple[str, str]:
    name, equals, value = text.partition("=")
    if not name or not equals:
        raise ConfigError(f"{text!r} is not NAME=VALUE", field="env")
    return name, value


def _complain(text: str) -> None:
    print(f"outrider submit: {text}", file=sys.stderr, flush=True)
