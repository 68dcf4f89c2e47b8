"""To the length where a small network sees most tokens a second."""

from __future__ import annotations

import functools
from dataclasses import dataclass, field

from outrider.edge.policies.length.features import LENGTHS, block_inputs, signs_of
from outrider.edge.policies.length.network import Network
from outrider.edge.policies.length.rounds import draft_s, waiting_s
from outrider.edge.policies.length.trained import shipped
from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.window import FIRST_WINDOW, EdgeView
from outrider.proto.types import DraftToken


@dataclass(frozen=True, slots=True)
class SpecKvWindow:
    """SpecKV's gamma selection (Shukla 2026, arXiv 2605.02888), with the link in its objective.

    Theirs: a small MLP maps the mean and the most entropy, the mean and the least confidence of the drafts, how
    strongly the target is compressed, and a candidate gamma, to the share A(gamma) of drafts that will be accepted;
    the gamma of most tokens a step, gamma A(gamma) + 1, is chosen. From there are the network, its inputs of entropy
    and confidence, and the form of the choice.

    Ours: drafts in flight are the chain whose signals are read, and how many they are is an input, since the rule is
    asked in mid-chain; the temperature stands where the compression stood, as what shifts acceptance at large; and
    the choice is of most tokens a second,

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
        """Return the tokens to draft now."""
        if not view.step_s:
            return max(0, min(FIRST_WINDOW, max(self.lengths)) - view.in_flight)
        now = (view.in_flight,) if view.in_flight else ()  # to draft no more
        lengths = (*now, *(length for length in self.lengths if length > view.in_flight))
        shares = _shares(self.network, view.drafts, view.temperature, view.in_flight, lengths)
        fixed_s, each_s = waiting_s(view), draft_s(view)
        rates = [(1 + n * share) / (fixed_s + n * each_s) for n, share in zip(lengths, shares, strict=True)]
        return lengths[rates.index(max(rates))] - view.in_flight


@functools.lru_cache(maxsize=16)  # a session asks several times before it drafts more or drafts are settled
def _shares(
    network: Network, drafts: tuple[DraftToken, ...], temperature: float, in_flight: int, lengths: tuple[int, ...]
) -> list[float]:
    """Return the accepted share [lengths] of a block of each length whose first `in_flight` drafts are there."""
    _, confidence, entropy, _ = signs_of(drafts)
    return network.chances(block_inputs(confidence, entropy, temperature, in_flight, lengths)).tolist()
