"""Prices of a server's probes beside a token of its own stream, and the share of hits at which a probe is even."""

from __future__ import annotations

import asyncio
import statistics
import time
from collections.abc import Iterator, Sequence
from contextlib import aclosing

import numpy as np
from pydantic.dataclasses import dataclass as record_dataclass

from outrider.bench.record import RECORD, Count, Metric
from outrider.bench.table import UNKNOWN, Block, number
from outrider.cloud.probes.canary import examine
from outrider.cloud.probes.http_door import ServerAddress
from outrider.cloud.probes.scoring import ScoringServer
from outrider.cloud.probes.vllm_server import canary_text
from outrider.cloud.serving.probe_engine import FEW, LOUDEST, SOME
from outrider.proto.policy.patience import expected_tokens

DRAFTS = (0, 4, 8, 16, 32)
WARM_UP, REPEATS, STREAMED = 2, 9, 48
HEADINGS = ("kind", "context", "at once", "stream, ms", *(f"K {drafts}" for drafts in DRAFTS))
LEGEND = (
    "ms of a token of the server's stream, and of a probe of K drafts behind a whole block, medians, with as many "
    "texts at once; in brackets the chance of each draft to hold at which the probe brings as much as the stream"
)


@record_dataclass(frozen=True, slots=True, config=RECORD)
class Price:
    """Median ms of a token of the stream and of a probe of `drafts`, with `sessions` texts of `context` tokens at once.

    `kind` is `greedy`, with lists of a few tokens, or `sampled`, with longer ones and tokens by name in each row.
    """

    kind: str
    context: Count
    sessions: Count
    drafts: Count
    token_ms: Metric
    probe_ms: Metric


async def prices(url: str, vocab: int, contexts: Sequence[int], sessions: Sequence[int]) -> list[Price]:
    """Return the prices of the only model of the server at a URL."""
    server = await examine(ServerAddress(url), "", lambda _: vocab)
    kinds = ("greedy", "sampled") if server.facts.names_in_rows else ("greedy",)
    try:
        found = list[Price]()
        for context in contexts:
            for count in sessions:
                found += await _prices(server, vocab, context, count, kinds)
        return found
    finally:
        await server.close()


async def _prices(server: ScoringServer, vocab: int, context: int, count: int, kinds: Sequence[str]) -> list[Price]:
    block = server.facts.block_size or 1
    length = context - context % block + 1
    texts = [canary_text(1 + 1000 * context + 100 * count + each, length, vocab) for each in range(count)]
    await asyncio.gather(*(server.probe(text, (), FEW) for text in texts))
    gaps = [gap for each in await asyncio.gather(*(_gaps(server, text) for text in texts)) for gap in each]
    token_ms, found, rng = 1e3 * statistics.median(gaps), list[Price](), np.random.default_rng(context + count)
    for kind in kinds:
        for drafts in DRAFTS:
            took = list[float]()
            for _ in range(WARM_UP + REPEATS):
                began = time.perf_counter()
                await asyncio.gather(*(_probe(server, kind, text, drafts, vocab, rng) for text in texts))
                took.append(time.perf_counter() - began)
            found.append(Price(kind, context, count, drafts, token_ms, 1e3 * statistics.median(took[WARM_UP:])))
    return found


async def _gaps(server: ScoringServer, text: Sequence[int]) -> list[float]:
    stamps = list[float]()
    async with aclosing(server.stream(text, STREAMED, frozenset(), 1)) as answers:
        async for _ in answers:
            stamps.append(time.perf_counter())
    return np.diff(stamps).tolist()


async def _probe(
    server: ScoringServer, kind: str, text: Sequence[int], drafts: int, vocab: int, rng: np.random.Generator
) -> None:
    """Send a probe of drafts that nobody has sent: rows of what is cached are lost."""
    new = canary_text(int(rng.integers(1 << 30)), drafts, vocab)
    if kind == "greedy":
        await server.probe(text, new, FEW)
    else:
        count = min(LOUDEST, server.facts.max_list)
        named = [rng.choice(vocab, count, replace=False).tolist() for _ in range(drafts + 1)]
        await server.probe(text, new, SOME, named)


def even(drafts: int, tokens: float) -> float | None:
    """Return the chance of each of K drafts to hold at which a probe brings so many tokens; None: it cannot."""
    if drafts + 1 < tokens:
        return None
    low, high = 0.0, 1.0
    for _ in range(30):
        chance = (low + high) / 2
        low, high = (chance, high) if expected_tokens(chance, drafts) < tokens else (low, chance)
    return high


def price_blocks(found: Sequence[Price]) -> Iterator[Block]:
    """Yield a block of the table for each kind and context."""
    rows = dict[tuple[str, int], dict[int, list[Price]]]()
    for each in found:
        rows.setdefault((each.kind, each.context), {}).setdefault(each.sessions, []).append(each)
    for (kind, context), by_sessions in rows.items():
        block = list[Sequence[str]]()
        for count, row in by_sessions.items():
            cells = [f"{each.probe_ms:.1f} ({_share(each)})" for each in row]
            block.append((kind, str(context), str(count), number(row[0].token_ms, 1), *cells))
        yield block


def _share(price: Price) -> str:
    chance = even(price.drafts, price.probe_ms / price.token_ms) if price.drafts else None
    return UNKNOWN if chance is None else f"{chance:.2f}"
