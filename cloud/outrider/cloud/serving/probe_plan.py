"""When a text is probed, with how many drafts, and when its server goes on by itself.

A probe of k drafts brings (1 - h^(k+1)) / (1 - h) tokens where a draft holds with chance h (Leviathan et al. 2023,
equation 1), and takes the time of its rows: those of the text that no whole block of the server's cache holds, the
drafts, and one. The next one reads again what lies behind the last whole block, so a probe that ends on a block's
border is cheaper by that. The plan with most tokens a second wins; the other way is the server's own stream, or where
the text cannot be streamed (`Sampling` that is not greedy) a probe without drafts.
"""

from __future__ import annotations

import itertools
import math
import statistics
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field

from outrider.cloud.serving.batching import Batch, Batching, Share
from outrider.cloud.serving.slots import Slot
from outrider.proto.policy import Smoothed
from outrider.proto.policy.patience import expected_tokens
from outrider.proto.types import Sampling

KEPT = 24
WORTH = 1.15  # by which a probe must be better than the stream: its time is less sure
TRY_SHARE = 0.01  # of the time of streams, in which a probe is tried that seems not to pay: only probes show theirs
_UNTIMED_S = 1e-3  # of a row, until probes are timed


def streams(sampling: Sampling) -> bool:
    """Return whether the server's own greedy text is that of these settings."""
    edits = sampling.allowed_tokens or sampling.logit_bias or sampling.penalises or sampling.min_tokens
    return sampling.temperature == 0 and sampling.grammar is None and not edits


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
            ready_at = now if streaming else slot.session.ready_at(self._alone_s(slot), self.row_s)
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
        room = session.max_useful_drafts
        alone = 1 / max(self._alone_s(slot), 1e-9)
        of_any = [self._rate(slot, drafts) for drafts in range(max(0, room) + 1)]
        session.pays = max(of_any[1:], default=0.0) > WORTH * alone
        at_hand = of_any[: min(room, len(session.drafts())) + 1]
        best = max(range(len(at_hand)), key=at_hand.__getitem__)
        cost_s = self.probes.seconds(self.rows(len(session.transcript), best)) + self.firsts.seconds(1)
        due = TRY_SHARE * self._untried * self.tokens.seconds(1) > cost_s
        if greedy and (best == 0 or (at_hand[best] <= WORTH * alone and not due)):
            return None
        return best

    def _rate(self, slot: Slot, drafts: int) -> float:
        """Return the expected tokens a second of a probe with so many drafts."""
        session = slot.session
        length, chance = len(session.transcript), session.acceptance
        seconds = self.probes.seconds(self.rows(length, drafts)) or _UNTIMED_S * (drafts + 1)
        all_hold = chance**drafts
        if self.block_size:
            seconds += all_hold * self.row_s * ((length + drafts) % self.block_size)
        if slot in self.streaming:  # half a token is on its way, and after a miss the stream begins again
            again_s = max(0.0, self.firsts.seconds(1) - self.tokens.seconds(1))
            seconds += 0.5 * self.tokens.seconds(1) + (1 - all_hold) * again_s
        return expected_tokens(chance, drafts) / seconds
