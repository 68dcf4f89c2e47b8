"""What came of a grid, as frozen dataclasses and as JSON."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from outrider.bench.benchmark.record import LinkRecord
from outrider.bench.replay.optimum import tokens_per_second
from outrider.bench.replay.replay import Outcome


@dataclass(frozen=True, slots=True)
class Figure:
    """One drafter with one window over one link.

    Attributes:
        link: that lay between.
        drafter: None: cloud streaming.
        window: its policy; None: cloud streaming.
        domain: of the prompts; None: all together.
        tokens: of the texts.
        seconds: from the requests to the last tokens, summed.
        tokens_per_second: tokens / seconds.
        ratio: to the tokens a second of cloud streaming over the same link.
        steps_per_token: target steps a token.
        acceptance: chance that a draft is right, given those before it in its chain; None: none was judged.
        first_token_ms: median.
        uplink_bytes_per_token: on the link.
        downlink_bytes_per_token: on the link.
        window_mean: unverified tokens that the policy wished for, on average over the times that it was asked; None:
            of cloud streaming, and of one domain.
    """

    link: LinkRecord
    drafter: str | None
    window: str | None
    domain: str | None
    tokens: int
    seconds: float
    tokens_per_second: float
    ratio: float
    steps_per_token: float
    acceptance: float | None
    first_token_ms: float
    uplink_bytes_per_token: float
    downlink_bytes_per_token: float
    window_mean: float | None = None


@dataclass(frozen=True, slots=True)
class Replayed:
    """Everything.

    Attributes:
        command: that replayed.
        goal: of the deployment.
        pace_ms: a step took at least so long.
        seed: of the jitter.
        costs: of the machines, as they were recorded.
        figures: link by link: cloud streaming, then every drafter with every window; of all prompts, and then of each
            domain where there are several.
    """

    command: str
    goal: str
    pace_ms: float
    seed: int
    costs: Mapping[str, Any]
    figures: tuple[Figure, ...]

    @property
    def links(self) -> tuple[LinkRecord, ...]:
        """In the order of the command."""
        return tuple(dict.fromkeys(figure.link for figure in self.figures))

    @property
    def drafters(self) -> tuple[str, ...]:
        """In the order of the command."""
        return tuple(dict.fromkeys(figure.drafter for figure in self.figures if figure.drafter is not None))

    @property
    def windows(self) -> tuple[str, ...]:
        """In the order of the command."""
        return tuple(dict.fromkeys(figure.window for figure in self.figures if figure.window is not None))

    @property
    def domains(self) -> tuple[str, ...]:
        """In the order of the prompts; none where there is but one."""
        return tuple(dict.fromkeys(figure.domain for figure in self.figures if figure.domain is not None))

    def over(self, link: LinkRecord, domain: str | None = None) -> tuple[Figure, ...]:
        """The figures of one link and domain, cloud streaming first."""
        return tuple(figure for figure in self.figures if (figure.link, figure.domain) == (link, domain))


def figure_of(link: LinkRecord, outcomes: Sequence[Outcome], cloud: Sequence[Outcome], **named: Any) -> Figure:
    """The figure of texts, of which `cloud` are the same ones by cloud streaming; `named`: its other fields."""
    tokens = sum(len(outcome.arrivals) for outcome in outcomes)
    compared = sum(outcome.statistics.compared for outcome in outcomes)
    speed = tokens_per_second(outcomes)
    return Figure(
        link,
        tokens=tokens,
        seconds=sum(outcome.seconds for outcome in outcomes),
        tokens_per_second=speed,
        ratio=speed / tokens_per_second(cloud),
        steps_per_token=sum(outcome.statistics.steps for outcome in outcomes) / tokens,
        acceptance=sum(outcome.statistics.hits for outcome in outcomes) / compared if compared else None,
        first_token_ms=1e3 * median(outcome.first_token_s for outcome in outcomes),
        uplink_bytes_per_token=sum(outcome.uplink_bytes for outcome in outcomes) / tokens,
        downlink_bytes_per_token=sum(outcome.downlink_bytes for outcome in outcomes) / tokens,
        **named,
    )


def fastest(figures: Sequence[Figure]) -> Figure:
    """The one of most tokens a second; of several, the first."""
    return max(figures, key=lambda figure: figure.tokens_per_second)
