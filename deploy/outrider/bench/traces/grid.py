"""Links, windows and drafters, each with each, replayed on the session machine with a virtual clock."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.bench.benchmark.links import BenchLink
from outrider.bench.replay.costs import Costs
from outrider.bench.replay.replay import Outcome, Policy, replay
from outrider.bench.replay.traces import HitTrace
from outrider.bench.traces.figures import Figure, figure_of
from outrider.bench.traces.recording import Recording
from outrider.bench.traces.windows import NotedWindow, policy_of
from outrider.proto.policy import SurvivalWindow
from outrider.proto.types import Goal

WARM_UP_TOKENS = 24  # of the first text, not counted: as `outrider bench` measures


@dataclass(frozen=True, slots=True)
class Grid:
    """What is tried.

    Attributes:
        recording: of whose drafters.
        links: over which.
        windows: names of window policies.
        goal: of the deployment.
        pace_s: a target step takes at least so long.
        seed: of the jitter.
    """

    recording: Recording
    links: Sequence[BenchLink]
    windows: Sequence[str]
    goal: Goal = Goal.LATENCY
    pace_s: float = 0.0
    seed: int = 0

    def __len__(self) -> int:
        """Replays of all texts."""
        return len(self.links) * (1 + len(self.recording.traces) * len(self.windows))

    def cells(self) -> Iterator[list[Figure]]:
        """The figures of each replay: of all prompts, and of each domain where there are several.

        Link by link: cloud streaming, then every drafter with every window.
        """
        drafters = self.recording.traces
        anybody = next(iter(drafters))  # of cloud streaming the texts alone count
        for link in self.links:
            cloud = self._replay(anybody, link, Policy(drafting=False))
            yield self._figures(link, cloud, cloud, {"drafter": None, "window": None}, None)
            for drafter in drafters:
                for window in self.windows:
                    policy = policy_of(window)
                    noted = NotedWindow(policy.window or SurvivalWindow())
                    outcomes = self._replay(drafter, link, replace(policy, window=noted, goal=self.goal))
                    yield self._figures(link, outcomes, cloud, {"drafter": drafter, "window": window}, noted.mean)

    def _replay(self, drafter: str, link: BenchLink, policy: Policy) -> list[Outcome]:
        traces: Sequence[HitTrace] = self.recording.traces[drafter]
        costs: Costs = self.recording.costs.of(drafter, pace_s=self.pace_s)
        return replay(traces, link.shape_at, costs, policy, warm_up_tokens=WARM_UP_TOKENS, seed=self.seed)

    def _figures(
        self,
        link: BenchLink,
        outcomes: Sequence[Outcome],
        cloud: Sequence[Outcome],
        named: dict[str, Any],
        window_mean: float | None,
    ) -> list[Figure]:
        found = [figure_of(link.record, outcomes, cloud, domain=None, window_mean=window_mean, **named)]
        domains = self.recording.domains
        for domain in domains if len(domains) > 1 else ():
            own = [index for index, trace in enumerate(self.recording.texts) if trace.domain == domain]
            of_domain = [outcomes[index] for index in own]
            found.append(figure_of(link.record, of_domain, [cloud[index] for index in own], domain=domain, **named))
        return found
