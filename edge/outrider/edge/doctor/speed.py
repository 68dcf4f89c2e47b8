"""Checks of the speed of drafter, link and a whole text, and of the text itself."""

from __future__ import annotations

import asyncio
import statistics
import time
from dataclasses import replace
from typing import Any

import grpc
import grpc.aio

from outrider.drafters import NgramDrafter, ProposalRule
from outrider.drafters.pool import DrafterPool
from outrider.drafters.protocol import Drafter
from outrider.edge.client import Client
from outrider.edge.doctor.agreement import Visit
from outrider.edge.doctor.connection_check import TIMEOUT_S, Endpoint, ask_health
from outrider.edge.doctor.finding import Finding, failed, failed_by, ok, skipped, warning
from outrider.edge.event_stream import Completion
from outrider.proto import codec
from outrider.proto.errors import OutriderError
from outrider.proto.rpc_errors import from_rpc_error
from outrider.proto.types import Guarantee, RemoteFile, Sampling

PROMPT = "Once upon a time there was a small house at the edge of the forest, and in it lived"
TOKENS = 16
CALLS = 20
MAX_CALLS_S = 4.0  # for all calls
LONG_ROUND_TRIP_S = 0.25
MAX_UNEVENNESS = 3.0  # of slow calls to the median
LOADS = (16 << 10, 128 << 10, 512 << 10)  # bytes up, each only if the one before was quick
QUICK_S = 0.1
MAX_DOWN_BYTES = 2 << 20
MAX_DOWN_S = 2.0
SLOW_BYTES_S = 16 << 10  # 128 kbit/s: 200 tokens a second with their drafts, and room


async def load_drafter(visit: Visit) -> Finding:
    """Load the drafters as a client would: find, fetch, check every file against its hash, and try."""
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
    assert ready is not None  # noqa: S101 - it is prepared
    if ready.drafter_error:
        return failed(
            f"{wanted!r} cannot be used, texts would go on without drafts: {ready.drafter_error}",
            "mend or `outrider export` the package again, delete the folder of --cache, or give --drafter ngram",
        )
    pool, drafter = ready.drafters, ready.drafter
    if pool is None or drafter is None:
        return skipped("--drafter none: plain cloud streaming")
    if len(pool) > 1:
        return await asyncio.to_thread(_load_all, pool)
    if isinstance(drafter, NgramDrafter) and wanted == "auto":
        return warning(
            "no drafter package fits this target, so n-grams of the text itself are proposed",
            "train one (`outrider train drafter`), and serve it with `outrider coordinator --drafters DIR`",
        )
    return ok(
        f"{drafter.name} {drafter.version}{_way(pool, visit)}, every file as promised, "
        f"ready after {1000 * seconds:.0f} ms",
        name=drafter.name,
        by_text=bool(pool.by_text),
        version=drafter.version,
        ready_s=seconds,
    )


def _way(pool: DrafterPool, visit: Visit) -> str:
    """Return how it drafts, unless nobody knows the target's tokenizer."""
    if pool.by_text:
        return " drafts by text, since its tokenizer is another than the target's"
    return " drafts in the target's own tokens" if visit.opened is not None else ""


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
    seconds = time.monotonic() - began
    by_text = f"; by text, with tokenizers of their own: {', '.join(pool.by_text)}" if pool.by_text else ""
    return ok(
        f"{', '.join(pool.names)}: every file as promised, {sum(pool.bytes) / 1e6:.1f} MB in memory, "
        f"ready after {1000 * seconds:.0f} ms{by_text}",
        names=",".join(pool.names),
        by_text=",".join(pool.by_text),
        bytes=sum(pool.bytes),
    )


async def time_drafting(visit: Visit) -> Finding:
    """Time a drafted token on a short prefix, with nothing else to do."""
    client = visit.client
    if client is None or client.drafter is None:
        return skipped("there is no drafter")
    drafting_s, tokens = await asyncio.to_thread(_time_proposals, client.drafter, client.encode(PROMPT))
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


def _time_proposals(drafter: Drafter, prefix: tuple[int, ...]) -> tuple[float, int]:
    """Return seconds a token, and how many were proposed; the first reads the prefix and is not counted."""
    state = drafter.open(ProposalRule(Sampling(), prompt_length=len(prefix)))
    try:
        state.extend(prefix)
        state.propose(1)
        began = time.perf_counter()
        proposed = len(state.propose(TOKENS))
        return (time.perf_counter() - began) / max(1, proposed), proposed
    finally:
        state.close()


async def time_round_trips(visit: Visit) -> Finding:
    """Time small health calls one after the other on a warm connection: the network, and the server's answer."""
    at = visit.endpoints["verifier"]
    seconds: list[float] = []
    try:
        async with at.channel() as channel:
            await _time_call(channel, at, at.service)  # connects
            until = time.monotonic() + MAX_CALLS_S
            while len(seconds) < CALLS and time.monotonic() < until:
                seconds.append(await _time_call(channel, at, at.service))
    except grpc.aio.AioRpcError as error:
        return failed(
            f"the {at.role} stops answering: {from_rpc_error(error).message}",
            f"see whether `outrider {at.role}` still runs, and try `outrider doctor` again",
        )
    seconds.sort()
    median_s, slow_s = statistics.median(seconds), seconds[int(0.9 * (len(seconds) - 1))]
    words = f"{1000 * median_s:.1f} ms, one in ten over {1000 * slow_s:.1f} ms ({len(seconds)} health calls)"
    metrics = {"median_s": median_s, "p90_s": slow_s, "min_s": seconds[0], "calls": float(len(seconds))}
    if median_s > LONG_ROUND_TRIP_S:
        return warning(
            f"{words}: so long that drafts gain little",
            f"run a verifier nearer by; `outrider bench --rtt {1000 * median_s:.0f}` shows what such a link costs",
            **metrics,
        )
    if slow_s > MAX_UNEVENNESS * median_s and slow_s - median_s > 0.05:
        return warning(
            f"{words}: uneven, which makes rejected drafts expensive",
            f"a wire instead of Wi-Fi, or less load; `outrider bench --rtt {1000 * median_s:.0f} "
            f"--jitter {1000 * (slow_s - median_s) / 2:.0f}` shows what it costs",
            **metrics,
        )
    return ok(words, **metrics)


async def measure_rates(visit: Visit) -> Finding:
    """Measure bytes a second up to the verifier, and down from the coordinator, where there is one.

    Neither way is a test of the line. Up is the time of one large health call beyond that of a small one: gRPC opens
    its window as it goes, so the line may carry more. Down is one file from the coordinator, which need not be where
    the verifier is. Sessions need little: some 25 bytes a token up, and 30 down.
    """
    verifier = visit.endpoints["verifier"]
    try:
        up = await _measure_up(verifier)
        down = await _measure_down(visit)
    except grpc.aio.AioRpcError as error:
        return failed(
            f"a larger message does not get through: {from_rpc_error(error).message}",
            f"see whether `outrider {verifier.role}` still runs; a proxy on the way may bound messages",
        )
    words = f"at least {_megabit(up)} up to the {verifier.role}"
    words += f", {_megabit(down)} down from the coordinator" if down else "; down is not measured without a coordinator"
    metrics = {"up_bytes_s": up} | ({"down_bytes_s": down} if down else {})
    slow = [way for way, rate in (("up", up), ("down", down)) if rate and rate < SLOW_BYTES_S]
    if slow:
        return warning(
            f"{words}: slow {' and '.join(slow)}",
            "drafts will queue; give a small --window, or see `outrider bench --up 0.1 --down 0.1` for what is left",
            **metrics,
        )
    return ok(words, **metrics)


async def _measure_up(at: Endpoint) -> float:
    """Return bytes a second of health calls about services with long names, which there are none of."""
    async with at.channel() as channel:
        await _time_call(channel, at, "x")
        small_s = min([await _time_call(channel, at, "x") for _ in range(3)])
        rate = 0.0
        for size in LOADS:
            seconds = await _time_call(channel, at, "x" * size)
            rate = max(rate, size / max(1e-4, seconds - small_s))
            if seconds > QUICK_S:
                break
    return rate


async def _time_call(channel: grpc.aio.Channel, at: Endpoint, service: str) -> float:
    """Return the seconds of a health call; an answer that there is no such service is one, too."""
    began = time.monotonic()
    try:
        await ask_health(channel, service, at.metadata)
    except grpc.aio.AioRpcError as error:
        if error.code() != grpc.StatusCode.NOT_FOUND:
            raise
    return time.monotonic() - began


async def _measure_down(visit: Visit) -> float:
    """Return bytes a second of the largest file that the coordinator serves, cut short; 0 where there is none."""
    lease = visit.lease
    if lease is None:
        return 0.0
    at = visit.endpoints["coordinator"]
    files = [file for manifest in lease.drafters for file in manifest.files]
    files += [lease.tokenizer] if lease.tokenizer is not None else []
    if not files:
        return 0.0
    largest: RemoteFile = max(files, key=lambda file: file.bytes)
    async with at.channel() as channel:
        method: Any = channel.unary_stream(f"/{codec.CONTROL_SERVICE}/FetchFile")
        request = codec.encode_fetch(largest.sha256, 0)
        call = method(request, timeout=TIMEOUT_S + MAX_DOWN_S, metadata=at.metadata)
        began, received = time.monotonic(), 0
        async for data in call:
            received += len(data)
            if received >= MAX_DOWN_BYTES or time.monotonic() - began > MAX_DOWN_S:
                break
        seconds = time.monotonic() - began
        call.cancel()
    return received / max(1e-4, seconds)


def _megabit(rate: float) -> str:
    megabits = 8 * rate / 1e6
    return f"{megabits:.1f} Mbit/s" if megabits < 100 else f"{megabits:.0f} Mbit/s"


async def decode_text(visit: Visit) -> Finding:
    """Decode the same greedy text with the config's drafter and without any."""
    drafting = visit.client
    assert drafting is not None  # noqa: S101 - needed by this check
    plain = Client(replace(visit.config, drafter="none", drafts_here=0, tokenizer=visit.tokenizer))
    try:
        await plain.prepare()
        await drafting.complete(PROMPT, max_tokens=TOKENS, ignore_eos=True)  # the first one teaches its policies
        alone = await plain.complete(PROMPT, max_tokens=TOKENS, ignore_eos=True)
        drafted = await drafting.complete(PROMPT, max_tokens=TOKENS, ignore_eos=True)
    except OutriderError as error:
        return failed_by(error)
    finally:
        await plain.close()
    return _compare_texts(alone, drafted, visit)


def _compare_texts(alone: Completion, drafted: Completion, visit: Visit) -> Finding:
    s = drafted.statistics
    metrics = {
        "tokens": float(len(drafted.tokens)),
        "drafted_tokens_s": len(drafted.tokens) / drafted.seconds,
        "cloud_tokens_s": len(alone.tokens) / alone.seconds,
        "accepted": float(s.accepted),
        "acceptance": s.hits / s.compared if s.compared else 0.0,
        "steps": float(s.steps),
        "same": alone.ids == drafted.ids,
    }
    speeds = f"{metrics['drafted_tokens_s']:.1f} tok/s with drafts, {metrics['cloud_tokens_s']:.1f} without"
    if alone.ids != drafted.ids:
        exact = visit.opened is not None and visit.opened.guarantee is not Guarantee.DISTRIBUTION
        return warning(
            f"two greedy texts of {TOKENS} tokens differ"
            + (", though the verifier guarantees their bytes" if exact else ""),
            "near-ties fall either way; start `outrider verifier` with --exact tiles, which is slower",
            **metrics,
        )
    if s.drafter_error:
        return warning(
            f"the drafter gave up during the text: {s.drafter_error}",
            "give --drafter ngram, or mend the package with `outrider export`",
            **metrics,
        )
    return ok(
        f"{TOKENS} tokens, the same both ways; {s.accepted} were accepted drafts, {s.steps} target steps; {speeds} "
        "(too few to judge speed by; `outrider bench` measures it)",
        **metrics,
    )
