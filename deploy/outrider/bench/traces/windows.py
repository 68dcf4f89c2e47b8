"""Window policies by the names that they have on the command line."""

from __future__ import annotations

from dataclasses import dataclass

from outrider.bench.replay.optimum import synchronous
from outrider.bench.replay.replay import Policy
from outrider.edge.policies.length import RULES, rule_by_name
from outrider.edge.policies.length.names import USAGE
from outrider.proto.errors import ConfigError
from outrider.proto.policy import EdgeView, FixedWindow, LearningRule, SurvivalWindow, WindowPolicy

ADAPTIVE, SYNCHRONOUS = "adaptive", "sync"


@dataclass(slots=True)
class NotedWindow:
    """A window policy, and how many unverified tokens it has wished for whenever it was asked."""

    inner: WindowPolicy
    asked: int = 0
    wished: int = 0

    def more(self, view: EdgeView) -> int:
        """As the policy says."""
        count = self.inner.more(view)
        self.asked += 1
        self.wished += view.in_flight + count
        return count

    def settled(self, hits: int, missed: bool) -> None:
        """Tell a policy that learns."""
        if isinstance(self.inner, LearningRule):
            self.inner.settled(hits, missed)

    @property
    def mean(self) -> float:
        """Tokens; 0 before it was asked."""
        return self.wished / self.asked if self.asked else 0.0


def policy_of(name: str) -> Policy:
    """The policy of both sides: `adaptive`, a fixed window of `N` tokens, synchronous rounds of `syncN`, or a rule.

    Raises:
        ConfigError: it is none of these.
    """
    if name == ADAPTIVE:
        return Policy(window=SurvivalWindow())
    if name.partition("@")[0].partition(":")[0] in RULES:
        return Policy(window=rule_by_name(name))
    length = name.removeprefix(SYNCHRONOUS)
    if not (length.isascii() and length.isdecimal() and int(length) > 0):
        known = f"{ADAPTIVE}, N and {SYNCHRONOUS}N with N from 1 on, {USAGE}"
        raise ConfigError(f"{name!r} is none of {known}", field="window")
    return Policy(window=FixedWindow(int(length))) if length == name else synchronous(int(length))
