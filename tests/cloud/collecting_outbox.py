"""An outbox that a test reads: what the engine puts in, in its order."""

from __future__ import annotations

import queue
from typing import Any

from outrider.cloud.serving.slots import Outbox
from outrider.proto.types import Commit, Opened


class CollectingOutbox(Outbox):
    def __init__(self) -> None:
        self.items: queue.Queue[Any] = queue.Queue()

    def put(self, item: Any) -> None:
        self.items.put(item)

    def unread(self) -> int:
        return 0

    def opened(self) -> Opened:
        """The first frame."""
        item = self.items.get(timeout=60)
        assert isinstance(item, Opened), item
        return item

    def commit(self) -> Commit:
        """The next commit."""
        item = self.items.get(timeout=60)
        while isinstance(item, Opened):
            item = self.items.get(timeout=60)
        assert isinstance(item, Commit), item
        return item

    def rest(self) -> list[Commit]:
        """All commits up to the last one."""
        commits = [self.commit()]
        while commits[-1].finish is None:
            commits.append(self.commit())
        return commits

    def until_end(self) -> list[Any]:
        """All items up to the last commit or an error."""
        items: list[Any] = []
        while not items or not (isinstance(items[-1], Exception) or getattr(items[-1], "finish", None)):
            items.append(self.items.get(timeout=60))
        return items
