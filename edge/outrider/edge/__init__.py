"""The edge: client SDK, drafters and the link. Imports neither torch nor ray nor transformers.

Client        decodes texts, drafting here; `async for event in client.generate(...)`
SyncClient    the same without async
Conversation  several turns on one session, from `client.conversation(...)`
EdgeConfig    where, and with what

from outrider.edge import Client, EdgeConfig

    async with Client(EdgeConfig(coordinator="127.0.0.1:50050")) as client:
        async for event in client.generate("def main():", max_tokens=64):
            print(event.text, end="", flush=True)

Names are loaded when they are used: the command line reads settings below this package without numpy or ONNX Runtime.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from outrider.edge.client import Client, Conversation, Transcript
    from outrider.edge.edge_config import EdgeConfig
    from outrider.edge.event_stream import Completion, Event, Finished, Tokens
    from outrider.edge.request import Tenant
    from outrider.edge.sync_client import SyncClient, SyncConversation
    from outrider.proto.types import (
        CommittedToken,
        FinishReason,
        Grammar,
        GrammarKind,
        Provenance,
        Sampling,
        ServiceGoal,
    )

__all__ = [
    "Client",
    "CommittedToken",
    "Completion",
    "Conversation",
    "EdgeConfig",
    "Event",
    "FinishReason",
    "Finished",
    "Grammar",
    "GrammarKind",
    "Provenance",
    "Sampling",
    "ServiceGoal",
    "SyncClient",
    "SyncConversation",
    "Tenant",
    "Tokens",
    "Transcript",
]

_MODULES = {
    "outrider.edge.client": ("Client", "Conversation", "Transcript"),
    "outrider.edge.edge_config": ("EdgeConfig",),
    "outrider.edge.event_stream": ("Completion", "Event", "Finished", "Tokens"),
    "outrider.edge.request": ("Tenant",),
    "outrider.edge.sync_client": ("SyncClient", "SyncConversation"),
    "outrider.proto.types": (
        *("CommittedToken", "FinishReason", "Grammar", "GrammarKind", "Provenance", "Sampling", "ServiceGoal"),
    ),
}


def __getattr__(name: str) -> object:
    for module, names in _MODULES.items():
        if name in names:
            return getattr(importlib.import_module(module), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
