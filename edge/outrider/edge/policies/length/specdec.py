"""While a trained head sees a chance that all drafts are right."""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, field

from outrider.edge.policies.length.features import draft_inputs, signs_of
from outrider.edge.policies.length.network import Network
from outrider.edge.policies.length.trained import shipped
from outrider.proto.errors import InvalidArgument
from outrider.proto.policy.window import EdgeView
from outrider.proto.types import DraftToken


@dataclass(frozen=True, slots=True)
class SpecDecWindow:
    """SpecDec++ (Huang, Guo and Wang 2024, arXiv 2405.19715): stop where a rejection is likelier than `threshold`.

    Their theorem: of all policies, the best of a round stops once P(at least one draft is rejected) exceeds a
    threshold. Their estimate of it is 1 - prod_k P_head(draft k is accepted | those before it are), P_head a trained
    head. Theirs reads the drafter's hidden state. At an edge any drafter may draft and few show a hidden state, so ours
    reads what all say: probability, perturbed probability and entropy of the draft, temperature, and its depth among
    the drafts that no commit has settled.

    They look after every draft. A drafting job makes several tokens, so this asks for as many as will go by until the
    threshold is exceeded if each agrees with the chance that drafts have of late, and looks again after the job. Of
    thresholds from 0.3 to 0.98, 0.9 gives most tokens a second on hit traces of the embedded family, whose drafts are
    cheap.
    """

    threshold: float = 0.9
    most: int = 32
    head: Network = field(default_factory=lambda: shipped().head)

    def __post_init__(self) -> None:
        if not 0 <= self.threshold <= 1:
            raise InvalidArgument("the threshold must be a probability, 0 to 1", field="window")
        if self.most < 1:
            raise InvalidArgument("most must be 1 or more", field="window")

    def more(self, view: EdgeView) -> int:
        """Return the tokens to draft now."""
        room = self.most - view.in_flight
        survival = _survival(self.head, view.drafts, view.temperature, view.in_flight) if view.in_flight else 1.0
        if room <= 0 or 1 - survival > self.threshold:
            return 0
        return min(room, self._until_exceeded(survival, min(0.98, max(0.02, view.acceptance))))

    def _until_exceeded(self, survival: float, acceptance: float) -> int:
        """Return the least k for which 1 - survival * acceptance^k exceeds the threshold."""
        if self.threshold == 1:
            return self.most
        return math.floor(math.log((1 - self.threshold) / survival) / math.log(acceptance)) + 1


@functools.lru_cache(maxsize=16)  # a session asks several times before it drafts more or drafts are settled
def _survival(head: Network, drafts: tuple[DraftToken, ...], temperature: float, in_flight: int) -> float:
    """Return the chance that all drafts in flight are accepted."""
    _, confidence, entropy, perturbed = signs_of(drafts)
    return float(head.chances(draft_inputs(confidence, perturbed, entropy, temperature, range(in_flight))).prod())
