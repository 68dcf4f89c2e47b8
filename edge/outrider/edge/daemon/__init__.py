"""The edge daemon: OpenAI's HTTP API in front of one `Client`, on this machine. Needs only the extra `[edge]`.

http_server     sockets, TLS, and what is not HTTP
api_access      checks of every request, the limit on those that run, their lines in the log; origins of pages (CORS)
app             the routes, and the page at /, which is the files in page/
schema          what requests of OpenAI's API may say, field by field
body_reading    bodies of requests, read and checked within limits, and what becomes of unknown fields
parsed_request  from what a request says to prompts in tokens and `Sampling`
generation      decoding of a request's texts in typed steps, which every API writes in its own form:
answers         chats and completions
responses       OpenAI's Responses API, with responses that are kept in response_store
messages        Anthropic's API
endpoints       from the body of a request to the sending of its answer, at once or as a stream
daemon_metrics  counts of requests, and what an answer says about its drafts
http_errors     the error tree as HTTP statuses and error objects
cloud           the target and its tools, and whether the cloud is there, found out in the background
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from outrider.edge.tool_calls.formats import AUTO, NAMES
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.serving import ListeningSettings
from outrider.proto.settings import above, at_least, option

ANY = "*"
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://[^\s/*?#@,]+", re.IGNORECASE)
_NAME = re.compile(r"[A-Za-z0-9_-]+(\.[A-Za-z0-9_-]+)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class DaemonConfig(ListeningSettings):
    """Settings by which one daemon serves OpenAI's HTTP API."""

    listen: str = "127.0.0.1:8080"
    api_keys: Path | None = option(None, "keys that requests must show one of; not set: whoever reaches the port may")
    allow_host: tuple[str, ...] = option(
        (),
        "name by which clients reach a daemon without API keys, besides addresses and this machine's names; pages of "
        "other names, which may lead here by DNS rebinding, are refused",
        metavar="NAME",
    )
    allow_origin: tuple[str, ...] = option(
        (),
        "origin whose pages may use the API in a browser, as in https://app.example.com; *: any, only with --api-keys",
        metavar="ORIGIN",
    )
    strict: bool = option(False, "refuse requests with unknown fields; else a header of the answer names them")
    tool_format: str = option(
        AUTO, "format in which the target calls functions; auto: the one that its chat template shows", choices=NAMES
    )
    max_requests: int = option(256, "requests for texts at once", check=at_least(1))
    request_timeout_s: float = option(600.0, "time for a whole answer", check=above(0))
    grace_s: float = option(10.0, "time for running answers to end on exit", check=at_least(0))

    def check_together(self) -> None:
        """Refuse plain text beyond this machine unless that is allowed, and what is no origin or name of a host."""
        super(DaemonConfig, self).check_together()
        for origin in self.allow_origin:
            if origin != ANY and not _ORIGIN.fullmatch(origin):  # `null` is none: pages of any site can send it
                raise ConfigError(
                    f"{origin!r} is no origin; give scheme, name and port, such as https://app.example.com",
                    field="allow_origin",
                )
        if ANY in self.allow_origin and self.api_keys is None:
            raise ConfigError(
                "* lets every page that a browser here shows use the daemon; name the origins, or give --api-keys too",
                field="allow_origin",
            )
        for name in self.allow_host:
            if not _NAME.fullmatch(name):
                raise ConfigError(
                    f"{name!r} is not a host's name; give it without scheme, port or path", field="allow_host"
                )
