"""The most sessions that one verifier holds, found by repeated trials."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from research.fleet.many_sessions import Load, load
from research.fleet.prices import Device, VerifierPrices
from research.fleet.schemes import Scheme
from research.simulator.wire import ShapeAt
from research.traces.recordings import HitTrace

PRECISION = 8  # sizes that are tried differ by this part, and by 1 below this number
MIN_SECONDS = 1.0  # that a trial measures, however many its sessions are


@dataclass(frozen=True, slots=True, kw_only=True)
class Bounds:
    """Conditions under which sessions are held.

    Attributes:
        gap_s: longest 99th percentile of the time between tokens, in seconds.
        pace_s: longest mean time a token of a session, in seconds; infinite: any.
        max_sessions: sessions beyond which none are tried.
        session_seconds: time that a trial measures, of all sessions together.
    """

    gap_s: float = 0.075
    pace_s: float = 0.025
    max_sessions: int = 1024
    session_seconds: float = 40.0

    def hold(self, found: Load) -> bool:
        return found.gap_p99_s <= self.gap_s and found.tokens_per_second * self.pace_s >= len(found.tokens)

    def trial_s(self, sessions: int) -> float:
        return max(MIN_SECONDS, self.session_seconds / sessions)


@dataclass(frozen=True, slots=True)
class Held:
    """The most sessions that are held, the scheme that holds them, and how they fare; None: not even one."""

    sessions: int
    scheme: Scheme
    load: Load | None


def sizes_to(limit: int) -> list[int]:
    """Return the numbers of sessions that are tried, from 1 to `limit`."""
    sizes = [1]
    while sizes[-1] < limit:
        sizes.append(min(limit, sizes[-1] + max(1, sizes[-1] // PRECISION)))
    return sizes


def most_sessions(held: Callable[[int], bool], limit: int, guess: int = 1) -> int:
    """Return the most sessions that are held, of the sizes up to `limit`; 0: not even one.

    The answer is bracketed around the guess, in steps that double, and the bracket halved: more sessions are harder to
    hold.
    """
    sizes = sizes_to(limit)
    low = min(range(len(sizes)), key=lambda i: abs(sizes[i] - guess))
    step = 1
    while low >= 0 and not held(sizes[low]):
        low, step = low - step, 2 * step
    low, step = max(low, -1), 1
    while low + step < len(sizes) and held(sizes[low + step]):
        low, step = low + step, 2 * step
    high = min(low + step, len(sizes))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if held(sizes[middle]) else (low, middle)
    return sizes[low] if low >= 0 else 0


def capacity(
    traces: Sequence[HitTrace],
    scheme: Scheme,
    prices: VerifierPrices,
    bounds: Bounds,
    *,
    devices: Sequence[Device],
    links: Sequence[ShapeAt],
    guess: int = 1,
    seed: int = 0,
) -> Held:
    """Return the most sessions of one verifier that `bounds` hold; the other arguments are those of `load`."""
    loads = dict[int, Load]()

    def held(sessions: int) -> bool:
        if sessions not in loads:
            loads[sessions] = load(
                traces,
                scheme,
                prices,
                sessions=sessions,
                devices=devices,
                links=links,
                seconds=bounds.trial_s(sessions),
                seed=seed,
            )
        return bounds.hold(loads[sessions])

    most = most_sessions(held, bounds.max_sessions, guess)
    return Held(most, scheme, loads.get(most))


def best_length(
    found: Callable[[Scheme, int], Held], scheme_of: Callable[[int], Scheme], lengths: Sequence[int]
) -> Held:
    """Return what the length that holds most sessions holds; lengths are tried until two have held fewer.

    `found` returns what a scheme holds, from a guess.
    """
    best: Held | None = None
    worse = 0
    for length in lengths:
        held = found(scheme_of(length), max(1, best.sessions if best is not None else 1))
        if best is None or held.sessions > best.sessions:
            best, worse = held, 0
        elif (worse := worse + 1) == 2:
            break
    if best is None:
        raise ValueError("there are no lengths")
    return best
