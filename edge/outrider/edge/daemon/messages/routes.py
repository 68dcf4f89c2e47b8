"""Routes of Anthropic's API, answered by chats."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.requests import Request as HttpRequest
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from outrider.edge.daemon.errors import ApiError, from_outrider, json_response
from outrider.edge.daemon.messages import COUNT_TOKENS, MESSAGES
from outrider.edge.daemon.messages.schema import CountRequest, MessagesRequest
from outrider.edge.daemon.messages.translation import NAMES, MessagesTranslation, prompt_chat
from outrider.edge.daemon.reading import read_request
from outrider.edge.daemon.schema import ChatRequest
from outrider.edge.daemon.texts import TextEndpoint
from outrider.edge.daemon.translation import TranslatedEndpoint, renamed
from outrider.proto.errors import OutriderError


def messages_routes(chats: TextEndpoint[ChatRequest]) -> list[Route]:
    """Return the routes; `chats` answers the chats."""
    create = TranslatedEndpoint(chats, MessagesRequest, MessagesTranslation)
    return [
        Route(MESSAGES, create, methods=["POST"]),
        Route(COUNT_TOKENS, CountEndpoint(chats), methods=["POST"]),
    ]


@dataclass(frozen=True)
class CountEndpoint:
    """Counts the tokens of a prompt, as ASGI; `chats` makes the prompt."""

    chats: TextEndpoint[ChatRequest]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer one request."""
        service = self.chats.service
        with service.limiter.enter(scope["state"]["key"]) as place:
            options = await read_request(CountRequest, HttpRequest(scope, receive), place, service.unknown_fields)
            served = service.cloud.serving()
            served.check_model(options.model)
            try:
                parsed = await self.chats.parse(prompt_chat(options), served)
            except OutriderError as error:
                raise renamed(from_outrider(error), NAMES) from error
            except ApiError as error:
                raise renamed(error, NAMES) from error
        await json_response({"input_tokens": parsed.prompt_tokens})(scope, receive, send)
