"""Routes of the Responses API: responses are made by chats, and found again by their ids."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from outrider.edge.daemon.errors import json_response
from outrider.edge.daemon.responses import RESPONSE, RESPONSES
from outrider.edge.daemon.responses.schema import ResponsesRequest
from outrider.edge.daemon.responses.store import KeptResponse, ResponseStore
from outrider.edge.daemon.responses.translation import ResponsesTranslation, owner_of
from outrider.edge.daemon.schema import ChatRequest
from outrider.edge.daemon.texts import TextEndpoint
from outrider.edge.daemon.translation import TranslatedEndpoint, invalid

PAGE_ITEMS, MAX_PAGE_ITEMS = 20, 100
_LIMIT = re.compile("[1-9][0-9]{0,2}")


class ResponsesApi:
    """The handlers of the Responses API, with a store of their own; `chats` answers the chats."""

    def __init__(self, chats: TextEndpoint[ChatRequest]) -> None:
        self._chats = chats
        self._store = ResponseStore()

    def routes(self) -> list[Route]:
        """Return the routes."""
        create = TranslatedEndpoint(self._chats, ResponsesRequest, self._translated)
        return [
            Route(RESPONSES, create, methods=["POST"]),
            Route(RESPONSE, self._response, methods=["GET"]),
            Route(RESPONSE, self._delete, methods=["DELETE"]),
            Route(RESPONSE + "/input_items", self._input_items, methods=["GET"]),
        ]

    def _translated(self, request: ResponsesRequest, state: Mapping[str, Any]) -> ResponsesTranslation:
        return ResponsesTranslation(request, self._store, owner_of(state))

    def _find(self, request: HttpRequest) -> KeptResponse:
        return self._store.find(owner_of(request.scope["state"]), request.path_params["response_id"], time.monotonic())

    async def _response(self, request: HttpRequest) -> Response:
        return json_response(self._find(request).body)

    async def _delete(self, request: HttpRequest) -> Response:
        response_id = request.path_params["response_id"]
        self._store.delete(owner_of(request.scope["state"]), response_id, time.monotonic())
        return json_response({"id": response_id, "object": "response", "deleted": True})

    async def _input_items(self, request: HttpRequest) -> Response:
        """Answer with a page of the items that one response was asked with, the latest first unless asked otherwise."""
        items = list(self._find(request).items)
        asked = request.query_params
        if asked.get("order", "desc") == "desc":
            items.reverse()
        if (after := asked.get("after")) is not None:
            ids = [item["id"] for item in items]
            if after not in ids:
                raise invalid("after", "is no item of this response's input")
            items = items[ids.index(after) + 1 :]
        limit = asked.get("limit", str(PAGE_ITEMS))
        if not (_LIMIT.fullmatch(limit) and int(limit) <= MAX_PAGE_ITEMS):
            raise invalid("limit", f"must be 1 to {MAX_PAGE_ITEMS}")
        page = items[: int(limit)]
        first, last = (page[0]["id"], page[-1]["id"]) if page else (None, None)
        body = {"object": "list", "data": page, "first_id": first, "last_id": last, "has_more": len(page) < len(items)}
        return json_response(body)
