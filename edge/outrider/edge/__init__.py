"""The edge: client SDK, drafters and the link. Imports neither torch nor ray nor transformers.

from outrider.edge import Client, EdgeConfig

async with Client(EdgeConfig(coordinator="127.0.0.1:50050")) as client:
async for event in client.generate("def main():", max_tokens=64):
print(event.text, end="", flush=True)
"""

from __future__ import annotations

from outrider.edge.client import Client
from outrider.edge.config import EdgeConfig
from outrider.edge.events import Completion, Event, Finished, Tokens
from outrider.edge.sync_client import SyncClient
from outrider.proto.types import FinishReason, Provenance, Sampling

__all__ = [
    "Client",
    "Completion",
    "EdgeConfig",
    "Event",
    "FinishReason",
    "Finished",
    "Provenance",
    "Sampling",
    "SyncClient",
    "Tokens",
]
