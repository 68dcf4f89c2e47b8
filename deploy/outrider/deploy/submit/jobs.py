"""Ray's job client with its errors translated, and a job's log as a person sees it."""

from __future__ import annotations

import asyncio
import logging
import os
import re
from collections.abc import AsyncGenerator, Iterator, Mapping
from contextlib import aclosing, contextmanager
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from outrider.proto.errors import ConfigError, NotFound, OutriderError, Unauthenticated, Unavailable

ATTEMPTS = 5
RETRY_S = 1.0
END_POLL_S = 0.3
# With these set, Ray's client would go there whatever address it is given.
OVERRIDING = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
# Ray is to send inputs whole, whatever a .gitignore among them says.
SENDING_ALL = {"RAY_RUNTIME_ENV_IGNORE_GITIGNORE": "1"}
# The lines of `outrider.cloud.training.report.LineReporter`: a stage, its share, its metrics.
PROGRESS_LINE = re.compile(r"^(?P<stage>[a-z][\w ,.:=/-]{0,60}?) (?P<percent>\d{1,3}(?:\.\d+)?)% ?(?P<metrics>.*)$")


def connect(address: str) -> Any:
    """Return Ray's `JobSubmissionClient` of a job server.

    Raises:
        ConfigError: Ray's client is not installed, or the address is none.
        Unavailable: nobody answers there, or something that is no job server.
        Unauthenticated: it wants a token.
    """
    try:
        import requests
        from ray.job_submission import JobSubmissionClient
    except ImportError as error:
        raise ConfigError(f"needs the package {error.name}; pip install 'outrider[jobs]'", field="ray") from error
    for name in ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk"):
        logging.getLogger(name).setLevel(logging.WARNING)
    if not address.startswith(("http://", "https://")):
        raise ConfigError(f"{address!r} is not http://HOST:PORT", field="address")
    for name in OVERRIDING:
        os.environ.pop(name, None)
    os.environ.update(SENDING_ALL)
    other = f"what answers at {address} is no Ray job server; that is the dashboard's port, 8265 by default"
    with ray_errors(address, "connect", {"404": Unavailable(other, field="address")}):
        try:
            return JobSubmissionClient(address)
        except (requests.exceptions.JSONDecodeError, requests.exceptions.HTTPError, KeyError) as error:
            raise Unavailable(other, field="address") from error


@contextmanager
def ray_errors(address: str, deed: str, known: Mapping[str, OutriderError] = MappingProxyType({})) -> Iterator[None]:
    """Raise the errors of Ray's client as ours; `known` maps a part of Ray's message to the error that it means."""
    import requests
    from ray.exceptions import AuthenticationError

    try:
        yield
    except AuthenticationError as error:
        message = f"{address} wants Ray's token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE"
        raise Unauthenticated(message, field="address") from error
    except (requests.exceptions.RequestException, ConnectionError) as error:
        raise Unavailable(f"no job server answers at {address}", field="address") from error
    except (RuntimeError, ValueError) as error:
        for part, meaning in known.items():
            if part in str(error):
                raise meaning from error
        lines = [line.strip() for line in str(error).replace("\\n", "\n").splitlines() if line.strip()]
        reason = lines[-1][:300] if lines else "it does not say why"  # a traceback has its message at the end
        raise Unavailable(f"the job server at {address} cannot {deed}: {reason}", field="address") from error


def job_of(client: Any, job_id: str) -> Any:
    """Return Ray's `JobDetails` of a job; raises `NotFound`."""
    address = client.get_address()
    unknown = NotFound(f"there is no job {job_id!r} at {address}", field="job")
    with ray_errors(address, "describe the job", {"404": unknown}):
        return client.get_job_info(job_id)


async def follow(client: Any, job_id: str, console: Console) -> Any:
    """Show the log from its beginning until the job has ended, and return its `JobDetails`.

    On a terminal, a progress line moves a bar below the log; elsewhere every line is printed as it is.

    Raises:
        Unavailable: the server stays away.
    """
    columns = (TextColumn("[bold]{task.fields[job]}"), TextColumn("{task.description}"), BarColumn(bar_width=24))
    watched = console.is_terminal
    with Progress(
        *columns, TaskProgressColumn(), TimeElapsedColumn(), console=console, transient=True, disable=not watched
    ) as bar:
        task = bar.add_task("waiting", total=None, job=job_id)
        async with aclosing(_lines(client, job_id)) as lines:
            async for line in lines:
                if watched and (found := PROGRESS_LINE.match(line)):
                    done = min(100.0, float(found["percent"]))
                    bar.update(task, description=found["stage"], total=100.0, completed=done)
                else:
                    console.print(line, markup=False, highlight=False, soft_wrap=True)
    return await asyncio.to_thread(job_of, client, job_id)


async def _lines(client: Any, job_id: str) -> AsyncGenerator[str]:
    """Yield the log's lines, each once; a broken stream is opened again, which begins at the log's beginning."""
    seen = 0
    begun = ""
    failures = 0
    while True:
        at = 0
        try:
            with ray_errors(client.get_address(), "hand out the log"):
                async for piece in client.tail_job_logs(job_id):
                    failures = 0
                    *whole, begun = (begun + piece[max(0, seen - at) :]).split("\n")
                    at += len(piece)
                    seen = max(seen, at)
                    for line in whole:
                        yield line
        except Unavailable:
            failures += 1
            if failures >= ATTEMPTS:
                raise
        for _ in range(10):  # the log ends a moment before the job's state says so
            if (await asyncio.to_thread(job_of, client, job_id)).status.is_terminal():
                if begun:
                    yield begun
                return
            await asyncio.sleep(END_POLL_S)
        await asyncio.sleep(RETRY_S)
