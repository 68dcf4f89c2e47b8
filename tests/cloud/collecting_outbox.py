"""An outbox that a test reads: what the engine puts in, in its order."""

from __future__ import annotations

import queue
from typing import Any

from outrider.cloud.serving.slots import Outbox


class CollectingOutbox(Outbox):
    def __init__(self) -> None:
        self.items: queue.Queue[Any] = queue.Queue()

    def put(self, item: Any) -> None:
        self.items.put(item)

    def unread(self) -> int:
        return 0
