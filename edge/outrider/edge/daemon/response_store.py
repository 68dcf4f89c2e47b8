"""Responses that were kept for their successors, in memory and within limits."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from outrider.edge.daemon.http_errors import ApiError, json_bytes

MAX_RESPONSES = 4096
MAX_BYTES = 64 << 20
MAX_AGE_S = 24 * 3600.0
MAX_HISTORY_BYTES = 8 << 20  # as much as a request may send at once

_FIELD = "previous_response_id"

KeptItem = dict[str, Any]


@dataclass(slots=True)
class KeptResponse:
    """One turn of a conversation.

    Attributes:
        body: the response as its client got it.
        items: items of its own input.
        used_at: time of its last use, in seconds of the caller's clock.
        num_bytes: size of both as JSON.
    """

    body: dict[str, Any]
    items: list[KeptItem]
    used_at: float
    num_bytes: int = field(init=False)

    def __post_init__(self) -> None:
        self.num_bytes = len(json_bytes(self.body)) + len(json_bytes(self.items))

    @property
    def previous(self) -> str | None:
        """Id of the response that this one follows."""
        previous: str | None = self.body["previous_response_id"]
        return previous


class ResponseStore:
    """Responses by owner and id, in memory alone; nobody but its owner finds one.

    What has not been used for long is forgotten, and beyond the limits what was used longest ago, of the owner with
    the most bytes. A response counts as used with each of its successors, so that none loses its beginning.

    Args:
        max_responses: number of all responses at most.
        max_bytes: bytes of all responses at most.
        max_age_s: seconds after its last use for which a response is kept.
    """

    def __init__(
        self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES, max_age_s: float = MAX_AGE_S
    ) -> None:
        self._max_responses = max_responses
        self._max_bytes = max_bytes
        self._max_age_s = max_age_s
        self._of: dict[str, OrderedDict[str, KeptResponse]] = {}  # by owner, the least recently used first
        self._bytes_of: dict[str, int] = {}

    def __len__(self) -> int:
        return sum(map(len, self._of.values()))

    @property
    def num_bytes(self) -> int:
        """Bytes of all responses."""
        return sum(self._bytes_of.values())

    def keep(self, owner: str, body: dict[str, Any], items: list[KeptItem], now: float) -> None:
        """Keep a response, and forget what is beyond the limits."""
        kept = KeptResponse(body, items, now)
        self._of.setdefault(owner, OrderedDict())[body["id"]] = kept
        self._bytes_of[owner] = self._bytes_of.get(owner, 0) + kept.num_bytes
        for _ in self._chain(owner, body["id"], now):
            pass  # each is used by it
        while len(self) > self._max_responses or self.num_bytes > self._max_bytes:
            largest = max(self._bytes_of, key=self._bytes_of.__getitem__)
            self._drop(largest, next(iter(self._of[largest])))

    def find(self, owner: str, response_id: str, now: float) -> KeptResponse:
        """Return a response; raise `ApiError` 404 where this owner has none by that id."""
        self._forget_old(now)
        of_owner = self._of.get(owner)
        if of_owner is None or response_id not in of_owner:
            raise _not_found(response_id)
        return of_owner[response_id]

    def delete(self, owner: str, response_id: str, now: float) -> None:
        """Forget a response, without which its successors cannot go on; raise `ApiError` 404 where there is none."""
        self.find(owner, response_id, now)
        self._drop(owner, response_id)

    def history(self, owner: str, response_id: str, now: float) -> list[KeptItem]:
        """Return the items of the conversation up to a response and with it, the earliest first.

        Raises:
            ApiError: 404, a part of it is not here, or not this owner's; 400, it is longer than any request.
        """
        self._forget_old(now)
        chain = list(self._chain(owner, response_id, now))
        last = chain[-1].previous if chain else response_id
        if last is not None:
            raise _not_found(last, param=_FIELD)
        if sum(kept.num_bytes for kept in chain) > MAX_HISTORY_BYTES:
            message = f"{_FIELD}: its conversation has more than {MAX_HISTORY_BYTES} bytes; begin another"
            raise ApiError(400, message, param=_FIELD, code="context_length_exceeded")
        return [item for kept in reversed(chain) for item in (*kept.items, *kept.body["output"])]

    def _chain(self, owner: str, response_id: str, now: float) -> Iterator[KeptResponse]:
        """Yield a response and those before it, as far as they are here, and mark them as used in this order."""
        of_owner = self._of.get(owner, OrderedDict())
        at: str | None = response_id
        while at is not None and (kept := of_owner.get(at)) is not None:
            kept.used_at = now
            of_owner.move_to_end(at)
            yield kept
            at = kept.previous

    def _forget_old(self, now: float) -> None:
        for owner, of_owner in list(self._of.items()):
            while of_owner and next(iter(of_owner.values())).used_at < now - self._max_age_s:
                self._drop(owner, next(iter(of_owner)))

    def _drop(self, owner: str, response_id: str) -> None:
        self._bytes_of[owner] -= self._of[owner].pop(response_id).num_bytes
        if not self._of[owner]:
            del self._of[owner], self._bytes_of[owner]


def _not_found(response_id: str, param: str | None = None) -> ApiError:
    message = (
        f"no response {response_id[:100]!r} here: it was not stored, has been deleted or forgotten, or belongs to "
        "another API key; send the whole conversation as input"
    )
    return ApiError(404, message, param=param, code="previous_response_not_found" if param else "not_found")
