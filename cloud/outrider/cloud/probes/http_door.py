"""Requests to a server of a model over HTTP: keys, TLS, proxies, deadlines, retries and streams."""

from __future__ import annotations

import asyncio
import json
import ssl
import time
from collections.abc import AsyncGenerator, Awaitable, Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies, proxy_bypass

import aiohttp

from outrider.proto.address import http_url
from outrider.proto.errors import ConfigError, Internal, ModelRefused, Unavailable

KEEP_ALIVE_S = 4.0  # vLLM and llama-server close idle connections after 5 s
CONNECT_S = 10.0
TRANSIENT = frozenset({408, 429, 500, 502, 503, 504})
MAX_MESSAGE = 300

Read = TypeVar("Read")
Json = dict[str, Any]


@dataclass(frozen=True, slots=True)
class ServerAddress:
    """The place of a server, and how it is asked.

    Attributes:
        url: root of its API, as `http://127.0.0.1:8000`; a `/v1` at its end is left out.
        api_key: sent as a bearer token, and written nowhere.
        ca: file of the certificates that sign the server's; None: those of this machine.
        timeout_s: longest wait for any answer.
        patience_s: how long a request is sent again to a server that is down or fails.
    """

    url: str
    api_key: str = field(default="", repr=False)
    ca: Path | None = None
    timeout_s: float = 300.0
    patience_s: float = 10.0

    def __post_init__(self) -> None:
        try:
            object.__setattr__(self, "url", http_url(self.url))
        except ValueError as error:
            raise ConfigError(str(error), field="target_url") from None
        if not (self.api_key.isascii() and self.api_key.isprintable()) or " " in self.api_key:
            raise ConfigError("the key is one line of printable characters without spaces", field="target_key_file")


class Refusal(Internal):
    """The server answers, and does not do as it is asked: a status of 4xx."""

    usual_code = "OUT-503"

    def __init__(self, http_status: int, message: str) -> None:
        super().__init__(f"the server refuses a request ({http_status}): {message}")
        self.http_status = http_status


class HttpDoor:
    """One server's connections, in one event loop.

    Whatever is sent has no effect beyond its answer, so it is sent again where a connection breaks before one came.
    """

    def __init__(self, address: ServerAddress) -> None:
        self.address = address
        url = urlsplit(address.url)
        proxies = {} if proxy_bypass(url.hostname or "") else getproxies()
        try:
            context: ssl.SSLContext | bool = ssl.create_default_context(cafile=address.ca) if address.ca else True
        except (OSError, ssl.SSLError) as error:
            message = f"cannot read certificates from {address.ca}: {error}; give a file in PEM format"
            raise ConfigError(message, field="target_ca") from None
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0, keepalive_timeout=KEEP_ALIVE_S, ssl=context),
            headers={"Authorization": f"Bearer {address.api_key}"} if address.api_key else {},
            json_serialize=partial(json.dumps, separators=(",", ":")),
            proxy=proxies.get(url.scheme) or proxies.get("all"),
            read_bufsize=1 << 20,
        )
        self._slowest_s: float | None = None  # of the answers so far; old ones fade
        self._heard_at = time.monotonic()
        self._broken = False
        self._asking = asyncio.Lock()

    @property
    def doubtful(self) -> bool:
        """Whether another server may have come to this address since the last answer."""
        return self._broken or time.monotonic() - self._heard_at > KEEP_ALIVE_S

    async def be_sure(self, model: str, how_changed: Callable[[], Awaitable[str]], *, doubtful: bool = False) -> None:
        """Ask which model is here where another may have come, or `doubtful` says so; ModelRefused: another has.

        `how_changed` returns how; empty: it is as it was.
        """
        if not (doubtful or self.doubtful):
            return
        async with self._asking:
            if doubtful or self.doubtful:
                if how := await how_changed():
                    raise self.changed(model, how)
                self._broken, self._heard_at = False, time.monotonic()

    def changed(self, model: str, how: str) -> ModelRefused:
        """Return the error of a server that has another model now."""
        said = f"{self.address.url} no longer serves {model!r} as it did: {how}; start the verifier again"
        return ModelRefused(said, field="target_model")

    async def ask(self, path: str, body: Mapping[str, Any] | None = None, **how: Any) -> Json:
        """Return what `read` does as the JSON object that it is."""
        raw = await self.read(path, body, **how)
        try:
            answer = json.loads(raw)
        except ValueError:
            answer = None
        if not isinstance(answer, dict):
            raise Internal(f"{self.address.url}{path} answers with no JSON object", field="target_url", code="OUT-503")
        return answer

    async def read(self, path: str, body: Mapping[str, Any] | None = None, *, tokens: int = 0, **how: Any) -> bytes:
        """Return the answer to a POST of `body`, or to a GET.

        Args:
            path: below the server's root.
            body: sent as JSON.
            tokens: that the server may have to read for it, which takes longer.
            how: `headers` beside those of every request; `within_s`, how long it is sent again where it fails, in
                place of the address's patience; `handled`, statuses of 401 and 403 that are the caller's to understand.

        Raises:
            Unavailable: no answer came, and then `retry_after_s` is set, or the key or TLS is at fault.
            Refusal: the server answers with an error.
        """
        wait = aiohttp.ClientTimeout(total=self._deadline_s(tokens), sock_connect=CONNECT_S)
        began = time.monotonic()
        raw = await self._send(path, body, wait, aiohttp.ClientResponse.read, **how)
        self._heard_at = time.monotonic()
        self._slowest_s = max(self._heard_at - began, 0.98 * (self._slowest_s or 0.0))
        return raw

    async def stream(
        self, path: str, body: Mapping[str, Any], *, tokens: int = 0, **how: Any
    ) -> AsyncGenerator[Json, None]:
        """Yield the events of an answer that comes in parts; to close the generator ends the request."""

        async def unread(answer: aiohttp.ClientResponse) -> aiohttp.ClientResponse:
            return answer

        wait = aiohttp.ClientTimeout(sock_read=self._deadline_s(tokens), sock_connect=CONNECT_S)
        answer = await self._send(path, body, wait, unread, **how)
        rest = b""
        try:
            async for part in answer.content.iter_any():
                self._heard_at = time.monotonic()
                *events, rest = (rest + part).split(b"\n\n")
                for event in events:
                    if event.startswith(b"data: {"):
                        yield json.loads(event[6:])
        except (aiohttp.ClientError, OSError) as error:  # a timeout is an OSError
            self._broken = True
            said = f"{self.address.url} broke off a text: {_brief(error)}"
            raise Unavailable(said, field="target_url", retry_after_s=1.0) from None
        finally:
            answer.close()  # keeps the connection if all was read

    async def _send(
        self,
        path: str,
        body: Mapping[str, Any] | None,
        wait: aiohttp.ClientTimeout,
        read: Callable[[aiohttp.ClientResponse], Awaitable[Read]],
        *,
        headers: Mapping[str, str] | None = None,
        within_s: float | None = None,
        handled: tuple[int, ...] = (),
    ) -> Read:
        url, method, pause_s = self.address.url, "GET" if body is None else "POST", 0.0
        until = time.monotonic() + (self.address.patience_s if within_s is None else within_s)
        while True:
            try:
                answer = await self._session.request(method, url + path, json=body, headers=headers, timeout=wait)
                if answer.status == 200:
                    return await read(answer)
                message = _message(await answer.read(), self.address.api_key)
                if answer.status in (401, 403) and answer.status not in handled:
                    remedy = "; give the server's --api-key by --target-key-file" if answer.status == 401 else ""
                    said = f"{url} refuses this client ({answer.status}): {message}{remedy}"
                    raise Unavailable(said, field="target_key_file", code="OUT-503")
                if answer.status not in TRANSIENT:
                    raise Refusal(answer.status, message)
                said = f"fails ({answer.status}): {message}"
            except aiohttp.ClientSSLError as error:
                remedy = "name the file of the CA's certificates by --target-ca, or http:// for a server without TLS"
                said = f"no TLS with {url}: {_brief(error)}; {remedy}"
                raise Unavailable(said, field="target_url", code="OUT-503") from None
            except TimeoutError:
                self._broken = True
                said = f"{url} did not answer within {wait.total or wait.sock_read:.0f} s; it hangs, or is overloaded"
                raise Unavailable(said, field="target_url", retry_after_s=1.0, code="OUT-503") from None
            except (aiohttp.ClientError, OSError) as error:
                said = f"cannot be reached: {_brief(error)}; is the server running there?"
            self._broken = True
            if time.monotonic() + pause_s > until:
                raise Unavailable(f"{url} {said}", field="target_url", retry_after_s=1.0, code="OUT-503")
            await asyncio.sleep(pause_s)  # at once at first: the server may have closed an idle connection
            pause_s = min(2 * pause_s or 0.1, 2.0)

    def _deadline_s(self, tokens: int) -> float:
        """Generous, by what answers have taken: the machine may be shared, and a long text may have to be read."""
        if self._slowest_s is None:
            return self.address.timeout_s
        return min(self.address.timeout_s, 30 + 20 * self._slowest_s + tokens / 50)

    async def close(self) -> None:
        """Close all connections."""
        await self._session.close()


def _brief(error: BaseException) -> str:
    return (str(error) or type(error).__name__).splitlines()[0][:MAX_MESSAGE]


def _message(raw: bytes, key: str) -> str:
    """Return what the body of an error says, in one line and without the key."""
    said = text = raw.decode(errors="replace")
    try:
        found = json.loads(text)
        for name in ("error", "message", "detail"):
            found = found.get(name, found) if isinstance(found, dict) else found
        said = found if isinstance(found, str) else text
    except ValueError:
        pass
    return " ".join((said.replace(key, "…") if key else said).split())[:MAX_MESSAGE]


@contextmanager
def understood() -> Iterator[None]:
    """Say of an answer that has another form than it should: the server is none of its kind, or of another release."""
    try:
        yield
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        message = f"the server answers in a form of its own: {type(error).__name__}: {error}"
        raise Internal(message, code="OUT-503") from error
