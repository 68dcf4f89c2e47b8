"""Where selectors of drafters play recorded texts: how long each token took, and who drafted it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np

from outrider.bench.replay.costs import Costs
from outrider.bench.replay.selection import Text, in_hindsight, play
from outrider.bench.replay.wire import ShapeAt
from outrider.proto.policy.selection import Arm, Selector, StaticSelector


@dataclass(frozen=True, slots=True, eq=False)
class Course:
    """One text with one selector.

    Attributes:
        at_s: [n] seconds that went into the text up to and with each token.
        choices: [n] index of the drafter in whose turn each token came.
    """

    at_s: np.ndarray
    choices: np.ndarray

    @property
    def seconds(self) -> float:
        """Of the whole text."""
        return float(self.at_s[-1])

    def elapsed(self) -> list[float]:
        """[n] as `at_s`."""
        return [float(seconds) for seconds in self.at_s]


def in_seconds(course: Course) -> float:
    """What the best of several has least of."""
    return course.seconds


class Stage(Protocol):
    """A link with machines at both ends."""

    def cloud_s(self, text: Text) -> float:
        """Seconds of cloud streaming, measured as `Course.seconds` is."""
        ...

    def alone(self, texts: Sequence[Text], arm: int) -> list[Course]:
        """The texts one after the other with one drafter."""
        ...

    def courses(self, texts: Sequence[Text], selector: Selector) -> list[Course]:
        """The texts one after the other; the selector keeps what it has learned."""
        ...

    def best(self, texts: Sequence[Text]) -> list[Course]:
        """In hindsight: on each stretch between changes of domain the drafter that is the fastest there."""
        ...


@dataclass(frozen=True, slots=True)
class Rounds:
    """Synchronous rounds, MetaSD's own setting (arXiv 2604.05417): draft, wait for the verdict, begin again.

    Attributes:
        arms: [K] drafters.
        shape_at: the link.
        costs: of the verifier and the events.
        drafts: of a round.
    """

    arms: Sequence[Arm]
    shape_at: ShapeAt
    costs: Costs
    drafts: int
    _known: dict[tuple[object, ...], Course] = field(init=False, default_factory=dict)  # of one drafter on one text

    def cloud_s(self, text: Text) -> float:
        """A step a token, and the link once."""
        events_s = self.costs.cloud_event_s + self.costs.edge_event_s
        return self.shape_at(0.0).rtt_s + events_s + text.tokens * (self.costs.verify_s(1) + self.costs.commit_s)

    def alone(self, texts: Sequence[Text], arm: int) -> list[Course]:
        """The texts with one drafter; what it gives on one does not depend on the others."""
        return [self._alone(text, arm) for text in texts]

    def courses(self, texts: Sequence[Text], selector: Selector) -> list[Course]:
        """The texts one after the other."""
        return [self._course(text, selector) for text in texts]

    def best(self, texts: Sequence[Text]) -> list[Course]:
        """In hindsight."""
        return [self._best(text) for text in texts]

    def _best(self, text: Text) -> Course:
        if text.changes:
            return in_hindsight(text, lambda selector: self._course(text, selector))
        return min((self._alone(text, arm) for arm in range(len(self.arms))), key=in_seconds)

    def _alone(self, text: Text, arm: int) -> Course:
        trace = text.tracks[arm].trace
        if text.changes:  # hardly met twice
            return self._course(text, StaticSelector(arm))
        key = (trace.domain, trace.id, trace.seed, arm)
        if key not in self._known:
            self._known[key] = self._course(text, StaticSelector(arm))
        return self._known[key]

    def _course(self, text: Text, selector: Selector) -> Course:
        run = play(text, self.arms, selector, self.shape_at, self.costs, self.drafts)
        return Course(np.array(run.elapsed()), np.array(run.choices(), dtype=np.int16))
