"""Ray's job server, with its errors translated: the only file here that knows its client."""

from __future__ import annotations

import logging
import os
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from outrider.proto.errors import ConfigError, NotFound, OutriderError, Unauthenticated, Unavailable

READ_TIMEOUT_S = 120
# With these set, Ray's client would go there whatever address it is given.
OVERRIDING = ("RAY_API_SERVER_ADDRESS", "RAY_ADDRESS")
CHATTY = ("ray.dashboard.modules.dashboard_sdk", "ray.dashboard.modules.job.sdk")


@dataclass(frozen=True, slots=True)
class Job:
    """One job as the server knows it. `state` is Ray's: PENDING, RUNNING, STOPPED, SUCCEEDED, FAILED."""

    id: str
    state: str
    message: str
    exit_status: int | None
    node: str
    metadata: dict[str, str]

    @property
    def ended(self) -> bool:
        """Whether it will not change any more."""
        return self.state in ("STOPPED", "SUCCEEDED", "FAILED")


class JobServer:
    """One job server, by its HTTP address.

    Raises:
        ConfigError: Ray's client is not installed, or the address is none.
        Unavailable: nobody answers there, or something that is no job server.
        Unauthenticated: it wants a token.
    """

    def __init__(self, address: str) -> None:
        try:
            import requests
            from ray.exceptions import AuthenticationError
            from ray.job_submission import JobSubmissionClient
        except ImportError as error:
            raise ConfigError(f"needs the package {error.name}; pip install 'outrider[jobs]'", field="ray") from error
        for name in CHATTY:
            logging.getLogger(name).setLevel(logging.WARNING)
        if not address.startswith(("http://", "https://")):
            raise ConfigError(f"{address!r} is not http://HOST:PORT", field="address")
        self.address = address
        self._refusal = AuthenticationError
        self._failures = (RuntimeError, requests.exceptions.RequestException, ConnectionError)
        with self._translated("connect"), _unset(*OVERRIDING):
            try:
                self._client: Any = JobSubmissionClient(address)
            except (requests.exceptions.JSONDecodeError, requests.exceptions.HTTPError, KeyError) as error:
                raise Unavailable(self._no_job_server, field="address") from error
            except RuntimeError as error:
                if "404" not in str(error):
                    raise
                raise Unavailable(self._no_job_server, field="address") from error

    @property
    def _no_job_server(self) -> str:
        return f"what answers at {self.address} is no Ray job server; that is the dashboard's port, 8265 by default"

    def submit(self, entrypoint: str, **options: Any) -> str:
        """Start a job; its id. Raises `ConfigError` for a name that is taken, `Unavailable` for what Ray refuses."""
        with self._translated("take the job"):
            try:
                return str(self._client.submit_job(entrypoint=entrypoint, **options))
            except RuntimeError as error:
                if "already exists" not in str(error):
                    raise
                raise ConfigError(f"there is a job {options['submission_id']!r} already", field="name") from error

    def job(self, job_id: str) -> Job:
        """How it stands; raises `NotFound`."""
        with self._translated("tell of the job"):
            try:
                details = self._client.get_job_info(job_id)
            except RuntimeError as error:
                if "404" not in str(error):
                    raise
                raise NotFound(f"there is no job {job_id!r} at {self.address}", field="job") from error
        return Job(
            id=job_id,
            state=str(details.status.value),
            message=details.message or "",
            exit_status=details.driver_exit_code,
            node=details.driver_node_id or "",
            metadata=details.metadata or {},
        )

    def stop(self, job_id: str) -> bool:
        """Ask it to end; False: it had ended already. Raises `NotFound`."""
        self.job(job_id)
        with self._translated("stop the job"):
            return bool(self._client.stop_job(job_id))

    async def log(self, job_id: str) -> AsyncIterator[str]:
        """Its output from the beginning, as it comes, until it ends; raises `Unavailable` where the stream breaks."""
        with self._translated("hand out the log"):
            async for lines in self._client.tail_job_logs(job_id):
                yield lines

    def read(self, node: str, path: str) -> bytes:
        """A file below the folder of the logs on one node; raises `NotFound` or `Unavailable`."""
        query = {"node_id": node, "filename": path, "lines": -1, "timeout": READ_TIMEOUT_S}
        with self._translated("hand out files"):
            # Of the ways to a log file this is the one that changes no byte: the public ones decode it as text.
            reply = self._client._do_request("GET", "/api/v0/logs/file", params=query, timeout=READ_TIMEOUT_S)
            if reply.status_code != 200:
                kind = NotFound if "not found" in reply.text.lower() else Unavailable
                raise kind(f"{path} is not handed out: {_one_line(reply.text)}", field="artefacts")
            return bytes(reply.content)

    @contextmanager
    def _translated(self, deed: str) -> Iterator[None]:
        try:
            yield
        except OutriderError:
            raise
        except self._refusal as error:
            message = f"{self.address} wants Ray's token; set RAY_AUTH_MODE=token and RAY_AUTH_TOKEN_PATH=FILE"
            raise Unauthenticated(message, field="address") from error
        except self._failures as error:
            if isinstance(error, ConnectionError | OSError):
                raise Unavailable(f"no job server answers at {self.address}", field="address") from error
            message = f"the job server at {self.address} cannot {deed}: {_one_line(str(error))}"
            raise Unavailable(message, field="address") from error


@contextmanager
def _unset(*names: str) -> Iterator[None]:
    held = {name: os.environ.pop(name) for name in names if name in os.environ}
    try:
        yield
    finally:
        os.environ.update(held)


def _one_line(text: str) -> str:
    """The last line that says something, which is where tracebacks have their message."""
    lines = [line.strip() for line in text.replace("\\n", "\n").splitlines() if line.strip()]
    return lines[-1][:300] if lines else "it does not say why"
