"""Whether the cloud is there, looked for again and again in the background, so that requests need not wait for it."""

from __future__ import annotations

import asyncio
import logging
import math
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, NamedTuple

from tokenizers import Tokenizer

from outrider.drafters.token_text import TokenText, special_tokens
from outrider.edge.chat.rendering import TemplateProcess
from outrider.edge.chat.template import TemplateSource
from outrider.edge.client import Client
from outrider.edge.daemon.http_errors import ApiError
from outrider.edge.preparation import Ready
from outrider.edge.tool_calls.formats import AUTO, FORMATS, ToolFormat, format_of, knows_tools
from outrider.proto.address import split_address
from outrider.proto.error_codes import coded
from outrider.proto.errors import InvalidArgument, OutriderError, ResourceExhausted, Unavailable
from outrider.proto.session import EdgeStatistics

LOOK_EVERY_S = 2.0
LOOK_WITHIN_S = 120.0  # whatever a coordinator asks for
LOOK_SOON_S = 0.25  # while nothing answers at the coordinator's address; gRPC spaces the attempts to connect
ANSWER_WITHIN_S = 2.0
MAX_SILENT = 3  # verifiers that a look tries
WAIT_FOR_CLOUD_S = 5.0  # of a request without a token, once the cloud is known to be away
_GIVE = "give --tool-format to `outrider edge` if it speaks one of " + ", ".join(FORMATS)

log = logging.getLogger(__name__)


class Health(NamedTuple):
    """Answer of `/health`; `degraded` is plain cloud streaming, because the drafter failed."""

    status: Literal["ok", "degraded", "unavailable"]
    reason: str = ""


@dataclass(frozen=True, slots=True)
class ToolSupport:
    """Tools of one target.

    Attributes:
        format: format in which it calls functions; None: it cannot, or nobody knows.
        why_not: reason for that, and the remedy.
        template: the chat template's text for chats with tools.
        special: tokens of the format's markers that texts would leave out, by marker.
    """

    format: ToolFormat | None = None
    why_not: str = "has no chat template"
    template: str = ""
    special: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, source: TemplateSource | None, tokenizer: Tokenizer, name: str = AUTO) -> ToolSupport:
        """Find out by a chat template, and the operator's `--tool-format`."""
        if source is None:
            return cls()
        template = source.with_tools or source.text
        if not knows_tools(template):
            return cls(why_not="has a chat template that shows no tools to the model; leave tools out")
        spoken = format_of(template) if name == AUTO else FORMATS[name]
        if spoken is None:
            return cls(why_not=f"writes its calls in a format that its chat template does not tell; {_GIVE}")
        left_out = special_tokens(tokenizer)
        tokens = {marker: tokenizer.token_to_id(marker) for marker in spoken.markers}
        special = {marker: token for marker, token in tokens.items() if token in left_out}
        return cls(spoken, "", template, special)


@dataclass(frozen=True, slots=True)
class Served:
    """Parts that answer requests once the client is prepared."""

    ready: Ready
    template: TemplateProcess | None
    tokens: TokenText
    tools: ToolSupport = field(default_factory=ToolSupport)

    def check_model(self, model: str) -> None:
        """Raise `ApiError` 404 for another model than the one here."""
        if model != self.ready.model:
            message = f"no model {model[:100]!r} here; there is {self.ready.model!r}"
            raise ApiError(404, coded("OUT-308", message), param="model", code="model_not_found")


class Cloud:
    """One client's view of its cloud, which `watch` keeps fresh.

    It looks every `every_s` seconds, or as seldom as its coordinator asks for where many edges look; at once after a
    text is lost; and more often while the coordinator does not answer.

    Attributes:
        found: set once the cloud has been there.
    """

    def __init__(self, client: Client, tool_format: str = AUTO) -> None:
        self.client = client
        self._tool_format = tool_format
        self.served: Served | None = None
        self.every_s = LOOK_EVERY_S
        self._error: OutriderError | None = Unavailable(
            "preparing: looking for a verifier, its tokenizer and a drafter"
        )
        self._since = time.monotonic()
        self._drafter_error = ""
        self._asked_s = 0.0  # pause that the coordinator has asked for
        self._looked_at = -math.inf
        self._look_now = asyncio.Event()
        self.found = asyncio.Event()

    @property
    def health(self) -> Health:
        """Health by the last look, and by the texts since."""
        if self._error is not None:
            return Health("unavailable", str(self._error))
        if self._drafter_error:
            return Health("degraded", f"texts come by plain cloud streaming: {self._drafter_error}")
        return Health("ok")

    def serving(self) -> Served:
        """Return the client and tokenizer that answer requests; raise `ApiError` 503 while the cloud is away."""
        if self._error is not None or self.served is None:
            if time.monotonic() - self._looked_at > self.every_s:  # somebody waits for what may be there again
                self._look_now.set()
            raise ApiError(503, str(self._error), code="unavailable", retry_after_s=self.every_s)
        return self.served

    def hopeless(self) -> OutriderError | None:
        """Return why a text that has not begun should be given up; None while there is hope."""
        away_for_s = time.monotonic() - self._since
        return self._error if self._error is not None and away_for_s > WAIT_FOR_CLOUD_S else None

    def lost(self, error: OutriderError) -> None:
        """Look at once, since a text's stream was lost."""
        if isinstance(error, Unavailable):
            self._look_now.set()

    def ended(self, statistics: EdgeStatistics) -> None:
        """Note whether the drafter of a text that has ended did its work."""
        if statistics.drafter_error:
            self._drafter_error = statistics.drafter_error
        elif statistics.drafted:
            self._drafter_error = ""

    async def watch(self) -> None:
        while True:
            self._look_now.clear()
            await self._look()
            try:
                async with asyncio.timeout(self._pause_s):
                    await self._look_now.wait()
                await asyncio.sleep(0.1)  # many streams may be lost together: look once for all of them
            except TimeoutError:
                pass

    @property
    def _pause_s(self) -> float:
        """Time until the next look; a coordinator that answers is not asked more often for having nothing to give."""
        silent = isinstance(self._error, Unavailable) and self._error.field == "coordinator"
        return min(LOOK_SOON_S, self.every_s) if silent else max(self.every_s, min(self._asked_s, LOOK_WITHIN_S))

    async def close(self) -> None:
        """End the process that renders chats; the client is closed by whoever made it."""
        if self.served is not None and self.served.template is not None:
            await self.served.template.close()

    async def _look(self) -> None:
        error: OutriderError | None = None
        self._asked_s = 0.0
        try:
            if self.served is None:
                self.served = await self._prepare()
            await self._reach()
        except OutriderError as found:
            error = found
            self._asked_s = found.retry_after_s
        except Exception as found:  # a task's top: whatever it was, the next look may go well
            log.exception("looking for the cloud failed")
            error = Unavailable(f"{type(found).__name__}: {found}")
        self._looked_at = time.monotonic()
        changed, since = (error is None) != (self._error is None), self._since
        if changed:
            self._since = time.monotonic()
        if error is None and self._error is not None:
            # As loud as the line that said the cloud was away.
            level = logging.WARNING if self.found.is_set() else logging.INFO
            log.log(level, "the cloud is there, after %.1f s", self._since - since)
            self.found.set()
        elif error is not None and str(error) != str(self._error):
            log.warning("the cloud cannot be used: %s", error)
        self._error = error

    async def _prepare(self) -> Served:
        await self.client.prepare()
        ready = self.client.ready
        assert ready is not None  # noqa: S101 - prepare raises otherwise
        self._drafter_error = ready.shelf.error
        template = await _template(ready)
        tools = ToolSupport.of(template.source if template else None, ready.tokenizer, self._tool_format)
        return Served(ready, template, TokenText(ready.tokenizer), tools)

    async def _reach(self) -> None:
        """Raise what stands between the daemon and a new text, which tries other verifiers where one is silent."""
        silent: list[str] = []
        while True:
            try:
                lease = await self.client.inquire(silent)
            except ResourceExhausted as busy:
                self._asked_s = busy.retry_after_s
                return  # it is there
            self._asked_s = lease.ask_again_s
            if await _answers(lease.address):
                return
            if lease.verifier in silent or len(silent) == MAX_SILENT:
                raise Unavailable(f"the verifier at {lease.address} does not answer", code="OUT-102")
            silent.append(lease.verifier)


async def _template(ready: Ready) -> TemplateProcess | None:
    try:
        return await TemplateProcess.of(ready.chat_template)
    except InvalidArgument as error:
        log.warning("chats are refused, because the chat template of %s %s", ready.model, error.message)
        return None


async def _answers(address: str) -> bool:
    """Return whether somebody listens there; the coordinator has said whether it takes texts."""
    host, port = split_address(address, "address")
    try:
        async with asyncio.timeout(ANSWER_WITHIN_S):
            _, writer = await asyncio.open_connection(host, port)
    except (OSError, TimeoutError):
        return False
    writer.transport.abort()
    return True
