"""Ray's job client with its errors translated, and the following of a job's log."""

from __future__ import annotations

import asyncio
import logging
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import MappingProxyType
from typing import Any

from outrider.proto.errors import ConfigError, NotFound, OutriderError, Unauthenticated, Unavailable

ATTEMPTS = 5
RETRY_S = 1.0
END_POLL_S = 0.3
# If these are set, Ray's client ignores the address that it is given.
OVERRIDING = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
# Makes Ray send inputs whole, even if a .gitignore is among them.
SENDING_ALL = {"RAY_RUNTIME_ENV_IGNORE_GITIGNORE": "1"}


def connect(address: str) -> Any:
    """Return Ray's `JobSubmissionClient` of a job server.

    Raises:
        ConfigError: Ray's client is not installed, or the address is malformed.
        Unavailable: no job server answers there.
        Unauthenticated: the server wants a token.
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
def ray_errors(address: str, action: str, known: Mapping[str, OutriderError] = MappingProxyType({})) -> Iterator[None]:
    """Translate the errors of Ray's client; `known` maps parts of its messages to the errors that they mean."""
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
        raise Unavailable(f"the job server at {address} cannot {action}: {reason}", field="address") from error


def job_of(client: Any, job_id: str) -> Any:
    """Return Ray's `JobDetails` of a job; raises `NotFound`."""
    address = client.get_address()
    unknown = NotFound(f"there is no job {job_id!r} at {address}", field="job")
    with ray_errors(address, "describe the job", {"404": unknown}):
        return client.get_job_info(job_id)


async def follow(client: Any, job_id: str) -> Any:
    """Print the log from its beginning until the job has ended, and return its `JobDetails`.

    A stream that breaks is opened again, begins at the log's beginning, and is printed from where it broke.

    Raises:
        Unavailable: the server does not come back.
    """
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
        for _ in range(10):  # the log ends a moment before the job's state says so
            job = await asyncio.to_thread(job_of, client, job_id)
            if job.status.is_terminal():
                print("" if last == "\n" else "\n", end="")
                return job
            await asyncio.sleep(END_POLL_S)
        await asyncio.sleep(RETRY_S)
