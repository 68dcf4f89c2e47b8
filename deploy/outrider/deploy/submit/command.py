"""`outrider submit`: send a command to a Ray cluster and follow it."""

from __future__ import annotations

import asyncio
import hashlib
import importlib.util
import logging
import os
import shutil
import subprocess
import sys
import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import MappingProxyType
from typing import Any

from outrider.deploy.arguments import Given
from outrider.deploy.commands.operating import SubmitSettings
from outrider.deploy.submit.hurdles import agent_errors, entrypoint, not_run, reason
from outrider.deploy.submit.job import Place
from outrider.deploy.termination import temporary_folder
from outrider.proto.errors import ConfigError, NotFound, OutriderError, Unauthenticated, Unavailable
from outrider.proto.plumbing.extras import lacking

OUTPUT_KEY = "outrider_output"  # in the job's metadata, for those who follow it later
# Ray kills a job 3 s after it asks it to stop, too soon to copy a checkpoint; its supervisor reads this.
STOP_WAIT = {"RAY_JOB_STOP_WAIT_TIME_S": "120"}
DETACHED, STOPPED = 130, 143
# Options of commands that name what they write.
WRITING = ("output", "report", "json", "plot")
UNPACKED = "${RAY_RUNTIME_ENV_CREATE_WORKING_DIR}"
CHECKOUT = Path(__file__).resolve().parents[4]
ATTEMPTS = 5
RETRY_S = 1.0


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
        return _see_through(client, options.follow, options.address)
    job_id = send(client, arguments, written, options)
    print(f"job {job_id} on {options.address}", flush=True)
    if options.no_wait:
        print(_how_to_go_on(options.address, job_id), flush=True)
        return 0
    return _see_through(client, job_id, options.address)


def connect(address: str) -> Any:
    """Return Ray's `JobSubmissionClient`; raises `ConfigError`, or `Unavailable` if no job server answers there."""
    try:
        import requests
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise ConfigError(lacking("jobs", error.name or ""), field="ray") from error
    for name in ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"{address!r} is not http://HOST:PORT", field="address")
    for name in ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS"):  # Ray's client would prefer them to its argument
        os.environ.pop(name, None)
    os.environ["RAY_RUNTIME_ENV_IGNORE_GITIGNORE"] = "1"  # send inputs whole, even if a .gitignore is among them
    other = f"what answers at {address} is no Ray job server; that is the dashboard's port, 8265 by default"
    with ray_errors(address, "connect", {"404": Unavailable(other, field="address")}):
        try:
            return JobSubmissionClient(address)
        except (requests.exceptions.JSONDecodeError, requests.exceptions.HTTPError, KeyError) as error:
            raise Unavailable(other, field="address") from error


@contextmanager
def ray_errors(address: str, action: str, known: Mapping[str, OutriderError] = MappingProxyType({})) -> Iterator[None]:
    """Translate the errors of Ray's client; `known` maps parts of its messages to the errors that they mean."""
    import aiohttp
    import requests
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError as error:
        message = f"{address} wants Ray's token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE"
        raise Unauthenticated(message, field="address") from error
    except (requests.exceptions.RequestException, aiohttp.ClientError, ConnectionError) as error:
        message = f"no job server answers at {address}; it is on the dashboard's port of a head that has ray[default]"
        raise Unavailable(message, field="address") from error
    except (RuntimeError, ValueError) as error:
        for part, meaning in known.items():
            if part in str(error):
                raise meaning from error
        message = f"the job server at {address} cannot {action}: {reason(str(error))}"
        raise Unavailable(message, field="address") from error


def job_of(client: Any, job_id: str) -> Any:
    """Return Ray's `JobDetails` of a job; raises `NotFound`."""
    address = client.get_address()
    unknown = NotFound(f"there is no job {job_id!r} at {address}", field="job")
    with ray_errors(address, "describe the job", {"404": unknown}):
        return client.get_job_info(job_id)


def send(client: Any, arguments: list[str], written: list[str], options: SubmitSettings) -> str:
    """Upload wheel and inputs, start the job and return its id; `written` names what the command writes."""
    job_id = options.name or f"outrider-{arguments[0]}-{uuid.uuid4().hex[:8]}"
    place = absolute(options.output or job_id)
    words = ["python", "-m", "outrider.deploy.submit.job", "--output", place]
    environment: dict[str, Any] = {"env_vars": STOP_WAIT | dict(map(_variable, options.env))}
    with temporary_folder("outrider-submit-") as folder:
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
        known = {"already exists": taken, "exceeds the maximum": large, **agent_errors(options.address)}
        with ray_errors(options.address, "take the job", known):
            client.submit_job(
                entrypoint=entrypoint([*words, "--", *(inputs.get(word, word) for word in arguments)]),
                submission_id=job_id,
                runtime_env=environment,
                metadata={OUTPUT_KEY: place} if options.output or written else {},
                entrypoint_num_cpus=options.cpus,
                entrypoint_num_gpus=options.gpus,
            )
    return job_id


def absolute(place: str) -> str:
    """Return a place in the form that the job uses: a URL unchanged, a path from the root."""
    return place if "://" in place else str(Path(place).expanduser().absolute())


def link_inputs(spelled: Iterable[str], folder: Path, into: Path) -> dict[str, str]:
    """Link the inputs into the folder that Ray will pack, and return their names there by the user's spelling.

    What lies in `folder` keeps its relative path, anything else its last name; raises `ConfigError` if two inputs then
    have one name.
    """
    paths = {text: (folder / Path(text).expanduser()).resolve() for text in spelled}
    names = {}
    for text, path in paths.items():
        if not path.exists():
            raise ConfigError(f"there is no {text}", field="input")
        inside = path.is_relative_to(folder.resolve())
        names[text] = path.relative_to(folder.resolve()).as_posix() if inside else path.name
        if names[text] == ".":
            raise ConfigError("names the whole folder; name what the job needs of it", field="input")
    for text, name in sorted(names.items(), key=lambda item: item[1]):  # a folder before what lies in it
        if not (into / name).exists():
            (into / name).parent.mkdir(parents=True, exist_ok=True)
            (into / name).symlink_to(paths[text])
        elif (into / name).resolve() != paths[text]:
            raise ConfigError(f"{text} and another input would both be {name} in the job", field="input")
    return names


def find_wheel(wanted: str, folder: Path) -> Path:
    """Put the wheel `wanted` (a file; `auto`: built from the checkout) into `folder`, and return its path there.

    Its build number (PEP 427) becomes a hash of its content: Ray caches wheels by file name, and would otherwise run
    the first one of a version for ever.
    """
    wheel = _build(folder) if wanted == "auto" else Path(wanted).expanduser()
    if not wheel.is_file() or wheel.suffix != ".whl" or wheel.name.count("-") < 4:
        raise ConfigError(f"{wanted} is no wheel of Outrider", field="wheel")
    name, version, *_, python, abi, platform = wheel.name.split("-")
    build = f"0x{hashlib.sha256(wheel.read_bytes()).hexdigest()[:16]}"
    tagged = folder / "-".join((name, version, build, python, abi, platform))
    shutil.copyfile(wheel, tagged)
    return tagged


def _build(folder: Path) -> Path:
    if not (CHECKOUT / "pyproject.toml").is_file():
        raise ConfigError(
            "must be named, since this is no checkout to build one from; "
            "`python -m build --wheel` in a checkout makes one, and `none` uses what the cluster has installed",
            field="wheel",
        )
    command = [sys.executable, "-m", "build", "--wheel", "--outdir", str(folder / "built"), str(CHECKOUT)]
    if importlib.util.find_spec("hatchling") is not None:
        command.insert(4, "--no-isolation")  # seconds rather than a fresh environment
    done = subprocess.run(command, capture_output=True, text=True, check=False)  # noqa: S603 - a fixed program
    if done.returncode:
        reason = " ".join((done.stderr or done.stdout).strip().splitlines()[-3:])
        raise ConfigError(f"cannot be built: {reason}", field="wheel")
    (wheel,) = (folder / "built").glob("outrider-*.whl")
    return wheel


def _leave_mark(place: str, job_id: str, named: str) -> bool:
    """Mark the place so that the job can recognise it, and return whether it can be reached from here.

    A relative path must be reachable; an absolute path or a URL may be one that only nodes reach.
    """
    try:
        Place(place).leave_mark(job_id)
    except ConfigError as error:
        if "://" not in named and not Path(named).is_absolute():
            raise
        _complain(f"{error.message} from here; the job tries it from its node")
        return False
    return True


async def follow(client: Any, job_id: str) -> Any:
    """Print the log from its beginning until the job has ended, and return its `JobDetails`.

    A stream that breaks is opened again, begins at the log's beginning, and is printed from where it broke. Raises
    `Unavailable` if the server does not come back.
    """
    job_of(client, job_id)
    printed = 0  # characters
    last = "\n"
    failures = 0
    while True:
        at = 0
        try:
            with ray_errors(client.get_address(), "show the log"):
                async for piece in client.tail_job_logs(job_id):
                    failures = 0
                    print(piece[max(0, printed - at) :], end="", flush=True)
                    last = piece[-1:] or last
                    at += len(piece)
                    printed = max(printed, at)
        except Unavailable:
            failures += 1
            if failures >= ATTEMPTS:
                raise
        with suppress(Unavailable):  # then the next stream fails too
            job = await asyncio.to_thread(job_of, client, job_id)
            if job.status.is_terminal():
                print("" if last == "\n" else "\n", end="")
                return job
        await asyncio.sleep(RETRY_S)


def _see_through(client: Any, job_id: str, address: str) -> int:
    """Follow a job, say where its files are, and return its exit status."""
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
    if status := int(job.driver_exit_code or 0):
        _complain(f"job {job_id} failed with exit status {status}")
    else:
        _complain(f"job {job_id} did not run: {not_run(job.message or '')}")
    return status or 1


def _how_to_go_on(address: str, job_id: str) -> str:
    base = f"outrider submit --address {address}"
    return f"Follow it: {base} --follow {job_id}\nStop it: {base} --stop {job_id}"


def _checked_command(words: Sequence[str], parse: Callable[[Sequence[str]], Given]) -> tuple[list[str], list[str]]:
    """Return the command without its `--`, and the names of what it writes in the job's folder.

    A mistake in the command ends the process before anything is uploaded.
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
