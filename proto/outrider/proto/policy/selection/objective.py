"""What an arm's reward is worth."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from outrider.proto.policy.selection.arms import SelectionView
from outrider.proto.policy.selection.rewards import Reward

STAY_ROUNDS = 8.0  # that a choice is expected to last; its switch is shared by them


class Objective(Protocol):
    """Ranks arms by their rewards; rises with the reward."""

    def worth(self, reward: Reward, mean: float, view: SelectionView, arm: int) -> float:
        """Of an arm with this mean reward, 0 or more."""
        ...


@dataclass(frozen=True, slots=True)
class Alignment:
    """The reward itself, as MetaSD has it: all drafters are equally fast and switches are free."""

    def worth(self, reward: Reward, mean: float, view: SelectionView, arm: int) -> float:
        """The mean reward."""
        del reward, view, arm
        return mean


@dataclass(frozen=True, slots=True)
class Throughput:
    """Committed tokens a second, E[N]/E[T]: of rewards in rounds the long-run rate (renewal-reward theorem).

    Seconds of a round are known for each arm before it is chosen, so only E[N] is learned, and a link that changes
    is a new view, not a new lesson. A switch is shared by the rounds that it is expected to last.
    """

    stay_rounds: float = STAY_ROUNDS

    def worth(self, reward: Reward, mean: float, view: SelectionView, arm: int) -> float:
        """Tokens a second."""
        tokens = reward.tokens(min(1.0, max(0.0, mean)), view.drafts)
        return tokens / (view.round_s[arm] + view.switch_s[arm] / self.stay_rounds)


def share_of_best(objective: Objective, reward: Reward, mean: float, view: SelectionView, arm: int) -> float:
    """The worth over the most that any arm could be worth now: in [0, 1], as EXP3 wants its gains."""
    most = max(objective.worth(reward, 1.0, view, other) for other in view.arms)
    return objective.worth(reward, mean, view, arm) / most
