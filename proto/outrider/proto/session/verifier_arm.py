"""The verifier's own drafter as an arm of the edge's selection: it costs the edge nothing, and only its hits matter."""

from __future__ import annotations

import math

from outrider.proto.policy.measures import Acceptance
from outrider.proto.types import Commit

BETTER = 0.1  # by which an end's acceptance must exceed the other's, as at the verifier
_STANDARD_ERRORS = 2.0
_MIN_TRIALS = 8.0
_QUIET_COMMITS = 8  # without a draft of the verifier's own, after which it is taken to draft no more


class VerifierArm:
    """Hits of the verifier's own drafter in one text, as commits show them, and whether it should draft in its stead.

    A chain of the edge and one of the verifier that part compete for the rows of a step, and what the verifier drafts
    comes a round trip sooner. So a drafter of the edge that hits less brings nothing where the verifier drafts: its
    chains die at tokens that the verifier has, and the edge lets it rest. One that hits as much is not at rest for its
    merit: there the chains are the same, and price and round trip decide (`policy.who_drafts`). One that hits more
    leads.

    The edge goes by its own counts of both, over the same newest tokens of the text: its resting drafter reads the text
    and is teacher-forced, for no bytes and a fraction of the drafting. Acceptances scatter, by sqrt(a (1 - a) / n)
    after n tokens, and the same drafter at both ends must not seem better at one: their difference counts beyond two of
    its standard errors, and from `BETTER` on.
    """

    def __init__(self) -> None:
        self.acceptance = Acceptance()
        self._trials = 0
        self._quiet_commits = _QUIET_COMMITS

    def take(self, commit: Commit) -> None:
        """Count the verifier's own drafts of a commit, which come after the edge's, up to the first miss."""
        self._quiet_commits = 0 if commit.verified_here else self._quiet_commits + 1
        if not commit.verified_here or commit.accepted < commit.verified - commit.verified_here:
            return
        for _ in range(commit.accepted_here):
            self.acceptance.add(True)
        if commit.accepted_here < commit.verified_here and commit.finish is None:
            self.acceptance.add(False)
        self._trials += commit.accepted_here + 1

    def is_better_than(self, mine: Acceptance) -> bool:
        """Return whether the verifier drafts, and hits surely more than a drafter of the edge."""
        known = self._trials >= _MIN_TRIALS and self._quiet_commits < _QUIET_COMMITS
        return known and _surely_more(self.acceptance, mine)

    def is_worse_than(self, mine: Acceptance) -> bool:
        """Return whether a drafter of the edge hits surely more than the verifier's."""
        return _surely_more(mine, self.acceptance)


def _surely_more(one: Acceptance, other: Acceptance) -> bool:
    variance = sum(each.rate * (1 - each.rate) / each.trials for each in (one, other))
    return one.rate - other.rate > max(BETTER, _STANDARD_ERRORS * math.sqrt(variance))
