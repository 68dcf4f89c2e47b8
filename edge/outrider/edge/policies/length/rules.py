"""Length rules after papers and other systems, and what a round costs them (Leviathan et al. 2023)."""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass, field

from outrider.edge.policies.length.features import LENGTHS, block_inputs, draft_inputs, signals_of
from outrider.edge.policies.length.network import Network, shipped
from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.measures import ACCEPTANCE_PRIOR
from outrider.proto.policy.window import FIRST_WINDOW, TOKEN_BYTES, EdgeView
from outrider.proto.types import DraftToken


def waiting_s(view: EdgeView) -> float:
    """Return seconds of a round without drafts: the round trip, and a step with the row of the committed token."""
    return view.round_trip_s + view.step_s + view.row_s


def draft_s(view: EdgeView) -> float:
    """Return seconds that each draft adds to a round: drafting it, its row in a step, its bytes on the uplink."""
    return view.drafting_s + view.row_s + TOKEN_BYTES * view.byte_s


def expected_in_flight(view: EdgeView) -> float:
    """Return the mean number of drafts in flight that will be accepted, the sum of the chances of all up to each.

    Where only the chance of all is known, s for n drafts, the one up to draft j is taken as s^(j/n).
    """
    if len(view.chances) == view.in_flight:
        return sum(itertools.accumulate(view.chances, lambda before, chance: before * chance))
    return sum(math.pow(view.survival, j / view.in_flight) for j in range(1, view.in_flight + 1))


def _check_limits(threshold: float, *limits: int) -> None:
    if not 0 <= threshold <= 1:
        raise InvalidArgument("the threshold must be a probability, 0 to 1", field="window")
    if min(limits) < 1:
        raise InvalidArgument("numbers of tokens must be 1 or more", field="window")


@dataclass(frozen=True, slots=True)
class ThresholdWindow:
    """Rule to draft on while the drafter's probability of its last draft is at least `min_confidence`.

    Stop once q(x_k) is below it: the criterion of assisted generation in Hugging Face transformers
    (`assistant_confidence_threshold`, 0.4 by default, with 20 tokens at most), and at T = 0 Kangaroo's early stop of
    drafting (Liu et al. 2024, arXiv 2404.18911: once the most likely token's probability is below eta). The doubtful
    draft itself is still sent. A drafter that does not say how sure it is counts with its calibrated chance.

    They look after every draft. Here each look ends a drafting job, so `stride` drafts are made between two looks;
    replayed, 4 give more tokens a second than 1 or 2 on every link.
    """

    min_confidence: float = 0.4
    max_tokens: int = 20
    stride: int = 4

    def __post_init__(self) -> None:
        _check_limits(self.min_confidence, self.max_tokens, self.stride)

    def more(self, view: EdgeView) -> int:
        if view.in_flight and self._last(view) < self.min_confidence:
            return 0
        return max(0, min(self.stride, self.max_tokens - view.in_flight))

    @staticmethod
    def _last(view: EdgeView) -> float:
        if view.drafts and not math.isnan(view.drafts[-1].confidence):
            return view.drafts[-1].confidence
        return view.chances[-1] if view.chances else view.acceptance


@dataclass(frozen=True, slots=True)
class SpecDecWindow:
    """SpecDec++ (Huang, Guo and Wang 2024, arXiv 2405.19715), which stops at a chance of rejection above `threshold`.

    Their theorem: the best policy of a round stops once P(at least one draft is rejected) exceeds a threshold. Their
    estimate of it is 1 - prod_k P_head(draft k is accepted | those before it are), P_head a trained head. Theirs reads
    the drafter's hidden state. At an edge any drafter may draft and few show a hidden state, so ours reads what all
    say: probability, perturbed probability and entropy of the draft, temperature, and its depth among the drafts that
    no commit has met.

    They look after every draft. A drafting job makes several tokens, so this asks for the number after which the
    threshold is exceeded if each agrees with the chance that drafts have of late, and looks again after the job. Among
    thresholds from 0.3 to 0.98, 0.9 gives most tokens a second on hit traces of the embedded family, whose drafts are
    cheap.
    """

    threshold: float = 0.9
    max_tokens: int = 32
    head: Network = field(default_factory=lambda: shipped().head)

    def __post_init__(self) -> None:
        _check_limits(self.threshold, self.max_tokens)

    def more(self, view: EdgeView) -> int:
        room = self.max_tokens - view.in_flight
        survival = _survival(self.head, view.drafts, view.temperature, view.in_flight) if view.in_flight else 1.0
        if room <= 0 or 1 - survival > self.threshold:
            return 0
        return min(room, self._until_exceeded(survival, min(0.98, max(0.02, view.acceptance))))

    def _until_exceeded(self, survival: float, acceptance: float) -> int:
        """Return the least k for which 1 - survival * acceptance^k exceeds the threshold."""
        if self.threshold == 1:
            return self.max_tokens
        return math.floor(math.log((1 - self.threshold) / survival) / math.log(acceptance)) + 1


@functools.lru_cache(maxsize=16)  # a session asks several times before its drafts change
def _survival(head: Network, drafts: tuple[DraftToken, ...], temperature: float, in_flight: int) -> float:
    """Return the chance that all drafts in flight are accepted."""
    _, confidence, entropy, perturbed = signals_of(drafts)
    return float(head.chances(draft_inputs(confidence, perturbed, entropy, temperature, range(in_flight))).prod())


@dataclass(frozen=True, slots=True)
class SpecKvWindow:
    """SpecKV's gamma selection (Shukla 2026, arXiv 2605.02888), with the link in its objective.

    Theirs: a small MLP maps mean and maximum entropy, mean and minimum confidence of the drafts, how strongly the
    target is compressed, and a candidate gamma, to the share A(gamma) of drafts that will be accepted; the gamma of
    most tokens a step, gamma A(gamma) + 1, is chosen. From there are the network, its inputs of entropy and
    confidence, and the form of the choice.

    Ours: the signals are those of the drafts in flight, whose number is an input, since the rule is asked in
    mid-chain; the temperature stands where the compression stood, as what shifts acceptance at large; and the choice is
    of most tokens a second,

        gamma* = argmax over gamma of (1 + gamma A(gamma)) / (waiting_s + gamma draft_s),

    where round trip, step, row, uplink and drafting enter as they are measured. A network that had learnt them from
    some links would know no others.
    """

    lengths: tuple[int, ...] = LENGTHS
    network: Network = field(default_factory=lambda: shipped().block)

    def __post_init__(self) -> None:
        if not self.lengths or min(self.lengths) < 1:
            raise InvalidArgument("lengths must be 1 or more, and there must be one", field="window")

    def more(self, view: EdgeView) -> int:
        if not view.step_s:
            return max(0, min(FIRST_WINDOW, max(self.lengths)) - view.in_flight)
        now = (view.in_flight,) if view.in_flight else ()  # to draft no more
        lengths: tuple[int, ...] = (*now, *(length for length in self.lengths if length > view.in_flight))
        shares = _shares(self.network, view.drafts, view.temperature, view.in_flight, lengths)
        fixed_s, each_s = waiting_s(view), draft_s(view)
        rates = [(1 + n * share) / (fixed_s + n * each_s) for n, share in zip(lengths, shares, strict=True)]
        return lengths[rates.index(max(rates))] - view.in_flight


@functools.lru_cache(maxsize=16)  # a session asks several times before its drafts change
def _shares(
    network: Network, drafts: tuple[DraftToken, ...], temperature: float, in_flight: int, lengths: tuple[int, ...]
) -> tuple[float, ...]:
    """Return the accepted share [lengths] of a block of each length whose first `in_flight` drafts are there."""
    _, confidence, entropy, _ = signals_of(drafts)
    return tuple(network.chances(block_inputs(confidence, entropy, temperature, in_flight, lengths)).tolist())


@dataclass(frozen=True, slots=True)
class FlexSpecWindow:
    """Draft length by the channel and by the energy left, after FlexSpec (Li et al. 2026, arXiv 2601.00644).

    Theirs is the idea of a controller that sets the length from the state of the channel and the device's energy
    budget; the objective here is written for this system:

        n* = argmax over n of (1 + sum over k <= n of S_k) / (waiting_s + n (draft_s + energy_s)),

    S_k the chance that the first k drafts agree: those in flight as calibrated, each further one times `acceptance`;
    waiting_s holds round trip and step, draft_s drafting, row and uplink. Energy is a price per draft,
    drafting_w * drafting_s, and per byte, byte_j; a joule is worth joule_s (1 - b) / b seconds, b the share of the
    battery that is left: nothing on mains, joule_s at half, ever more as it empties. S_k falls, so the quotient rises
    to its maximum and then falls: the first draft that does not raise it ends the search.

    One draft is made where none is in flight, since nothing else can show that drafts have become better, unless it
    would not pay even with the chance that drafts have before any was seen.

    Attributes:
        max_tokens: most drafts in flight.
        drafting_w: power that drafting takes, in watts: one core of a phone's or laptop's processor.
        byte_j: energy of a byte on the uplink, in joules; 3.5 uJ on LTE (Huang et al. 2012, table 4).
        joule_s: worth of a joule at half battery, in seconds.
    """

    max_tokens: int = 64
    drafting_w: float = 3.0
    byte_j: float = 3.5e-6
    joule_s: float = 1.0

    def __post_init__(self) -> None:
        prices = (self.drafting_w, self.byte_j, self.joule_s)
        if self.max_tokens < 1 or not all(0 <= price < math.inf for price in prices):
            raise InvalidArgument("max_tokens must be 1 or more, and prices finite and 0 or more", field="window")

    def energy_s(self, view: EdgeView) -> float:
        """Return the worth of a draft's energy, in seconds."""
        joules = self.drafting_w * view.drafting_s + self.byte_j * TOKEN_BYTES
        worth = self.joule_s * (1 - view.battery) / view.battery if view.battery else math.inf
        return joules * worth if joules else 0.0

    def more(self, view: EdgeView) -> int:
        if not view.step_s:
            return max(0, min(FIRST_WINDOW, self.max_tokens) - view.in_flight)
        price_s = draft_s(view) + self.energy_s(view)
        if math.isinf(price_s):
            return 0
        tokens, cost_s = 1 + expected_in_flight(view), waiting_s(view) + view.in_flight * price_s
        chance, count = view.survival, 0
        while view.in_flight + count < self.max_tokens:
            chance *= view.acceptance
            if chance * cost_s <= tokens * price_s:
                break
            tokens, cost_s, count = tokens + chance, cost_s + price_s, count + 1
        if not view.in_flight and not count:
            return int(ACCEPTANCE_PRIOR * cost_s > price_s)
        return count


@dataclass(frozen=True, slots=True)
class PearlWindow:
    """Blocks of PEARL (Liu et al. 2024, arXiv 2408.11850), in which drafting and verifying overlap.

    Theirs: target and drafter work in lockstep, `length` drafts for each target step, the ratio of their speeds. After
    a miss the target decodes a token while the block after that miss is drafted, which verifies the block's first
    draft in advance (pre-verify); while a block is verified the next one is drafted (post-verify). So the length
    adapts: a drafter that hits goes on for block after block, one that misses has lost a block.

    Ours, over a link: the first draft after a miss leaves alone, the rest of the block when it is whole, and then block
    after block, until two are in flight. Together with `Patience(math.inf, 1, after_miss_s=0.0)`, at most `length`
    drafts a step and no drafts beside the target it is PEARL's schedule; `outrider bench` has it as the mode `pearl`.
    """

    length: int

    def __post_init__(self) -> None:
        if self.length < 1:
            raise InvalidArgument("a block must have 1 draft or more", field="window")

    def more(self, view: EdgeView) -> int:
        if not view.in_flight:
            return 1
        unsent = view.in_flight - view.sent
        whole = self._block(view.sent)
        if unsent >= whole:  # it leaves now
            unsent, whole = 0, self._block(view.in_flight)
        return whole - unsent if view.in_flight + whole - unsent <= 2 * self.length else 0

    def is_block(self, sent: int, unsent: int) -> bool:
        """Return whether the drafts are the first after a miss, the rest of its block, or a block."""
        return unsent >= self._block(sent)

    def _block(self, sent: int) -> int:
        """Return the drafts of the message after `sent` drafts in flight."""
        if not sent:
            return 1
        return max(1, self.length - 1) if sent == 1 else self.length


@dataclass(slots=True)
class AimdWindow:
    """Additive increase, multiplicative decrease (Chiu and Jain 1989: x + a_I, or x times b_D).

    Like TCP's, a window w grows by increase * hits / w: by `increase` when a whole window has hit. A miss makes it
    `decrease` times as wide. The schedule `heuristic` of assisted generation in Hugging Face transformers is a relative
    that increases by 2 after a round of nothing but hits and decreases by 1 otherwise: additive both ways, which
    after a change of subject takes a round for every token that the window is too wide.

    It knows of no link and no price. With m hits to a miss it comes to rest where growth and cut weigh the same,
    w = sqrt(increase * m / (1 - decrease)): 8 drafts for m = 3 with the defaults, where TCP's 1 and 1/2 would give far
    too few. It has a state: each text has one of its own, or texts share one that follow each other.
    """

    start: float = 8.0
    increase: float = 4.0
    decrease: float = 0.8
    max_tokens: int = 64
    tokens: float = field(init=False)

    def __post_init__(self) -> None:
        if not (1 <= self.start <= self.max_tokens and self.increase > 0 and 0 < self.decrease < 1):
            raise InvalidArgument(
                "the start must be from 1 to max_tokens, the increase above 0, the decrease between 0 and 1",
                field="window",
            )
        self.tokens = self.start

    def more(self, view: EdgeView) -> int:
        return max(0, int(self.tokens) - view.in_flight)

    def observe(self, hits: int, missed: bool) -> None:
        """Widen the window by `hits` drafts that a commit accepted, and narrow it where one `missed`."""
        self.tokens = min(float(self.max_tokens), self.tokens + self.increase * hits / self.tokens)
        if missed:
            self.tokens = max(1.0, self.tokens * self.decrease)
