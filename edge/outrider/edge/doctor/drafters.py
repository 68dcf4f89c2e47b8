"""Whether the drafter loads, and how fast it drafts."""

from __future__ import annotations

import asyncio
import time
from dataclasses import replace

from outrider.edge.client import Client
from outrider.edge.doctor.finding import Finding, failed, ok, skipped, warning
from outrider.edge.doctor.remedies import failed_by
from outrider.edge.doctor.visit import Visit
from outrider.edge.drafters import NgramDrafter, ProposalRule
from outrider.edge.drafters.pool import DrafterPool
from outrider.edge.drafters.protocol import Drafter
from outrider.proto.errors import OutriderError
from outrider.proto.types import Sampling

TEXT = "Once upon a time there was a small house at the edge of the forest, and in it lived"
TOKENS = 16


async def load(visit: Visit) -> Finding:
    """As a client would: found, fetched, every file checked against its hash, tried once; several one by one."""
    wanted = visit.config.drafter
    client = Client(replace(visit.config, tokenizer=visit.tokenizer))
    began = time.monotonic()
    try:
        await client.prepare()
    except OutriderError as error:
        await client.close()
        return failed_by(error)
    visit.client = client
    ready, seconds = client.ready, time.monotonic() - began
    if ready is not None and ready.drafter_error:
        return failed(
            f"{wanted!r} cannot be used, texts would go on without drafts: {ready.drafter_error}",
            "mend or `outrider export` the package again, delete the folder of --cache, or give --drafter ngram",
        )
    pool = ready.drafters if ready is not None else None
    if pool is not None and len(pool) > 1:
        return await asyncio.to_thread(_load_all, pool)
    drafter = client.drafter
    if drafter is None:
        return skipped("--drafter none: plain cloud streaming")
    if isinstance(drafter, NgramDrafter) and wanted == "auto":
        return warning(
            "no drafter package fits this target, so n-grams of the text itself are proposed",
            "train one (`outrider train drafter`), and serve it with `outrider coordinator --drafters DIR`",
        )
    return ok(
        f"{drafter.name} {drafter.version}, every file as promised, ready after {1000 * seconds:.0f} ms",
        name=drafter.name,
        version=drafter.version,
        ready_s=seconds,
    )


def _load_all(pool: DrafterPool) -> Finding:
    began = time.monotonic()
    broken = {}
    for index, name in enumerate(pool.names):
        try:
            pool.load(index)
        except (OutriderError, OSError) as error:
            broken[name] = str(error).splitlines()[0]
    if broken:
        return warning(
            "the others draft without " + "; ".join(f"{name}: {reason}" for name, reason in broken.items()),
            "mend them, `outrider export` them again, or leave them out of --drafter",
        )
    return ok(
        f"{', '.join(pool.names)}: every file as promised, {sum(pool.bytes) / 1e6:.1f} MB in memory, "
        f"ready after {1000 * (time.monotonic() - began):.0f} ms",
        names=",".join(pool.names),
        bytes=sum(pool.bytes),
    )


async def draft(visit: Visit) -> Finding:
    """Milliseconds a token, on a short prefix, with nothing else to do."""
    client = visit.client
    if client is None or client.drafter is None:
        return skipped("there is no drafter")
    drafting_s, tokens = await asyncio.to_thread(_time, client.drafter, client.encode(TEXT))
    if not tokens:
        return skipped(f"{client.drafter.name} has nothing to propose after a text without repetitions")
    words = f"{1000 * drafting_s:.2f} ms a token"
    step_s = visit.lease.prior.step_s if visit.lease is not None else 0.0
    if step_s and drafting_s > step_s:
        return warning(
            f"{words}, slower than the target's step of {1000 * step_s:.1f} ms",
            "raise --drafter-threads, give a smaller drafter, or --drafter ngram",
            drafting_s=drafting_s,
            step_s=step_s,
        )
    return ok(f"{words}; the target's step takes {1000 * step_s:.1f} ms" if step_s else words, drafting_s=drafting_s)


def _time(drafter: Drafter, prefix: tuple[int, ...]) -> tuple[float, int]:
    """Seconds a token, and how many were proposed; the first reads the prefix and is not counted."""
    state = drafter.open(ProposalRule(Sampling(), prompt_length=len(prefix)))
    try:
        state.extend(prefix)
        state.propose(1)
        began = time.perf_counter()
        proposed = len(state.propose(TOKENS))
        return (time.perf_counter() - began) / max(1, proposed), proposed
    finally:
        state.close()
