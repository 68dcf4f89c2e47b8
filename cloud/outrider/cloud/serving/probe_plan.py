"""When a text is probed, with how many drafts, and when its server goes on by itself.

A probe of k drafts brings (1 - h^(k+1)) / (1 - h) tokens where a draft holds with chance h (Leviathan et al. 2023,
equation 1); after a miss 1 + f (1 - h^k) / (1 - h), f being the chance of a first draft to hold. Copies hold in runs,
and the stream tells for nothing whether one has begun. A probe takes the time of its rows: those of the text that no
whole block of the server's cache holds, the drafts, and one. The next one reads again what lies behind the last whole
block, so a probe that ends on a block's border is cheaper by that. The plan with most tokens a second wins; the other
way is the server's own stream, or where the text cannot be streamed (`Sampling` that is not greedy) a probe without
drafts.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import cast

from outrider.cloud.serving.batching import Batch, Batching, Share
from outrider.cloud.serving.slots import Slot
from outrider.proto.policy import Smoothed
from outrider.proto.policy.patience import expected_tokens
from outrider.proto.types import Sampling

KEPT = 24
WORTH = 1.15  # by which a probe must be better than the stream: its time is less sure
TRY_SHARE = 0.01  # of the time of streams, in which a probe is tried that seems not to pay: only probes show theirs
FREE_SHARE = 0.02  # of a token's time, in which drafts are wanted for what the stream tells of them, if nothing else
KEEP_FIRST, KEEP_LATER = 0.75, 0.97  # of what was known of drafts after a miss and within a run, at each one more
MOST = 0.98  # of a chance, so that one lucky run decides nothing for good
ANSWER_S = 4e-3  # in which an edge answers a commit, beside the link
_UNTIMED_S = 1e-3  # of a row, until probes are timed


def streams(sampling: Sampling) -> bool:
    """Return whether the server's own greedy text is that of these settings."""
    edits = sampling.allowed_tokens or sampling.logit_bias or sampling.penalises or sampling.min_tokens
    return sampling.temperature == 0 and sampling.grammar is None and not edits


@dataclass(slots=True)
class Chain:
    """The runs of a text's drafts: whether the newest `holds`, and hits and trials after a miss and within a run."""

    holds: bool = False
    _first: tuple[float, float] = (0.0, 0.0)
    _later: tuple[float, float] = (0.0, 0.0)

    def compare(self, drafts: Iterable[int], tokens: Iterable[int]) -> None:
        """Note which drafts became text."""
        for draft, token in zip(drafts, tokens, strict=False):
            hit = draft == token
            if self.holds:
                self._later = (self._later[0] * KEEP_LATER + hit, self._later[1] * KEEP_LATER + 1)
            else:
                self._first = (self._first[0] * KEEP_FIRST + hit, self._first[1] * KEEP_FIRST + 1)
            self.holds = hit
            if not hit:
                break

    def chances(self, usual: float) -> tuple[float, float]:
        """Return the chances of the next draft and of each after it to hold, those before it having held.

        They begin from the `usual` one, which is worth one trial after a miss and four within a run.
        """
        later = min(MOST, (self._later[0] + 4 * usual) / (self._later[1] + 4))
        return later if self.holds else (self._first[0] + usual) / (self._first[1] + 1), later


@dataclass(slots=True)
class ServedText:
    """A text in a server's cache: `length` tokens that it has computed; and how its drafts hold."""

    length: int = 0
    num_pages: int = 0
    chain: Chain = field(default_factory=Chain)


def chain_of(slot: Slot) -> Chain:
    """Return how the drafts of a slot's text hold."""
    return cast("ServedText", slot.handle).chain


class Times:
    """The newest times of requests by their rows, and the line through them (Theil 1950, Sen 1968).

    Medians, since machines are shared, and a first probe of a size may have to be compiled: one that took far too long
    must not keep probes away for good.
    """

    def __init__(self) -> None:
        self._newest: deque[tuple[int, float]] = deque(maxlen=KEPT)
        self.base_s = self.row_s = 0.0

    def add(self, rows: int, seconds: float) -> None:
        self._newest.append((rows, seconds))
        if len({rows for rows, _ in self._newest}) > 1:
            pairs = itertools.combinations(self._newest, 2)
            slopes = [(there[1] - here[1]) / (there[0] - here[0]) for here, there in pairs if here[0] != there[0]]
            self.row_s = max(0.0, statistics.median(slopes))
        self.base_s = max(0.0, statistics.median(took - self.row_s * rows for rows, took in self._newest))

    def seconds(self, rows: int) -> float:
        """Return the time of a request with so many rows; 0: none was timed."""
        return self.base_s + self.row_s * rows


@dataclass(slots=True)
class ProbePlan(Batching):
    """The rules of one verifier's probes, with what it has measured of its server.

    Attributes:
        block_size: positions of a block of the server's prefix cache; 0: unknown.
        apart: whether each row of a probe may have to read the text by itself.
        probes, tokens, firsts: times of probes, of tokens of the server's own streams, and to the first token of a
            stream whose text is cached.
        usual: share of hits in the texts that have ended, from which the next ones begin.
        probing: slots whose probe is on its way.
        streaming: slots whose text the server writes by itself.
    """

    block_size: int = 0
    apart: bool = False
    probes: Times = field(default_factory=Times)
    tokens: Times = field(default_factory=Times)
    firsts: Times = field(default_factory=Times)
    probing: set[Slot] = field(default_factory=set)
    streaming: set[Slot] = field(default_factory=set)
    usual: Smoothed = field(default_factory=Smoothed)
    _untried: int = 0  # tokens that have come of streams since the newest probe

    def time_probe(self, rows: int, seconds: float) -> None:
        self.probes.add(rows, seconds)
        self.base_s, self.row_s, self._untried = self.probes.base_s, self.probes.row_s, 0

    def time_token(self, seconds: float) -> None:
        self.tokens.add(1, seconds)
        self._untried += 1

    def rows(self, length: int, drafts: int) -> int:
        """Return how many rows the server computes for a probe of a text of `length` tokens, whose blocks it has."""
        if self.apart:
            return length * (1 + drafts)
        tail = (length - 1) % self.block_size if self.block_size else 0
        return tail + 1 + drafts

    def plan(self, candidates: Iterable[Slot], now: float) -> Batch:
        """Return what begins now: a share whose block is None is to be streamed.

        A slot that streams is among them where a probe is worth its end.
        """
        shares, wake_at = list[Share](), math.inf
        for slot in candidates:
            if slot in self.probing:
                continue
            if not slot.session.generated and self.usual.seen:
                slot.session.received.acceptance.expect(self.usual.value)
            drafts, streaming = self._drafts_to_probe(slot), slot in self.streaming
            ready_at = now if streaming else self._ready_at(slot)
            if ready_at > now:
                wake_at = min(wake_at, ready_at)
            elif drafts is not None:
                shares.append(Share(slot, slot.num_uncomputed_tokens, tuple(slot.session.drafts()[:drafts])))
            elif not streaming:
                shares.append(Share(slot, slot.num_uncomputed_tokens, None))
        return Batch(shares, wake_at)

    def _alone_s(self, slot: Slot) -> float:
        """Return the time of a token of this text without drafts."""
        length = len(slot.session.transcript)
        return self.tokens.seconds(1) if streams(slot.session.sampling) else self.probes.seconds(self.rows(length, 0))

    def _drafts_to_probe(self, slot: Slot) -> int | None:
        """Return the number of drafts of the probe that is due; None: the server should go on by itself."""
        session, greedy = slot.session, streams(slot.session.sampling)
        room, alone_s = max(0, session.max_useful_drafts), max(self._alone_s(slot), 1e-9)
        alone, (first, later) = 1 / alone_s, chain_of(slot).chances(session.acceptance)
        free = greedy and 0 < session.report.drafting_s < FREE_SHARE * alone_s
        worth = (self._rate(slot, drafts, later, later) > WORTH * alone for drafts in range(1, room + 1))
        session.pays = free or any(worth)
        at_hand = [self._rate(slot, drafts, first, later) for drafts in range(min(room, len(session.drafts())) + 1)]
        best = max(range(len(at_hand)), key=at_hand.__getitem__)
        cost_s = self.probes.seconds(self.rows(len(session.transcript), best)) + self.firsts.seconds(1)
        due = TRY_SHARE * self._untried * self.tokens.seconds(1) > cost_s
        if greedy and (best == 0 or (at_hand[best] <= WORTH * alone and not due)):
            return None
        return best

    def _ready_at(self, slot: Slot) -> float:
        """Return when a text that waits for nothing goes on: after its edge's next drafts where these come at once."""
        session, alone_s = slot.session, self._alone_s(slot)
        ready_at = session.ready_at(alone_s, self.row_s)
        within_s = session.report.round_trip_s + ANSWER_S
        due = session.waits_for_drafts and session.credit and ANSWER_S < within_s <= alone_s  # at once, as is known
        if session.drafts() or not due:
            return ready_at
        first, later = chain_of(slot).chances(session.acceptance)
        pays = any(self._rate(slot, drafts, first, later) * alone_s > WORTH for drafts in (4, 8, 16))
        return max(ready_at, session.ready_since + within_s) if pays else ready_at

    def _rate(self, slot: Slot, drafts: int, first: float, later: float) -> float:
        """Return the expected tokens a second of a probe of so many drafts, by the chances of the first and others."""
        length = len(slot.session.transcript)
        seconds = self.probes.seconds(self.rows(length, drafts)) or _UNTIMED_S * (drafts + 1)
        all_hold = first * later ** (drafts - 1) if drafts else 1.0
        if self.block_size:
            seconds += all_hold * self.row_s * ((length + drafts) % self.block_size)
        if slot in self.streaming:  # half a token is on its way, and after a miss the stream begins again
            again_s = max(0.0, self.firsts.seconds(1) - self.tokens.seconds(1))
            seconds += 0.5 * self.tokens.seconds(1) + (1 - all_hold) * again_s
        return (1 + (first * expected_tokens(later, drafts - 1) if drafts else 0.0)) / seconds
