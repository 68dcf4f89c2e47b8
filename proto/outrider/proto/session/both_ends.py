"""Drafts of one text from both ends: the edge's chain, and that of the verifier's own drafter."""

from __future__ import annotations

import math

from outrider.proto.policy.both_ends import Division, EndsView, division_of
from outrider.proto.policy.measures import TextCalibration
from outrider.proto.policy.patience import LATE, MARGIN_S, Plan, VerifierView
from outrider.proto.session.events import Drafted
from outrider.proto.session.local import DraftingHere, LocalDrafts, LocalJob, common_length
from outrider.proto.session.received import ReceivedDrafts
from outrider.proto.types import DraftToken, Patience

FIRST_DRAFTS, FIRST_SURVIVAL = 4, 0.2  # while no step has been measured
MAX_COVERED = 255
_BETTER = 0.1  # by which an end's acceptance must exceed the other's before its chain is preferred


class BothEnds:
    """The division of drafting in one text.

    Attributes:
        here: the verifier's own drafter.
        local: its chain.
        edge_pays: whether the edge's drafts are worth their while.
        covered: tokens after the newest commit that the verifier has by its own drafts before the edge's answer.
    """

    def __init__(self, here: DraftingHere, received: ReceivedDrafts, transcript: list[int], fixed: int | None) -> None:
        """Divide the drafting of one text.

        Args:
            here: the verifier's own drafter.
            received: drafts of the edge.
            transcript: tokens so far, which grow with every commit.
            fixed: drafts made here before every step, none during one; None: as the policy divides them.
        """
        self.here = here
        self.local = LocalDrafts(transcript, TextCalibration(here.calibration))
        self.edge_pays = True
        self.covered = 0
        self._received = received
        self._fixed = fixed
        self._view: EndsView | None = None
        self._division: Division | None = None

    def begin_turn(self, received: ReceivedDrafts, transcript: list[int], kept: int) -> None:
        """Go on with another turn, whose transcript begins with the first `kept` tokens of the last."""
        self.local.begin_turn(transcript, kept)
        self._received = received
        self.edge_pays, self.covered = True, 0

    # --- the chain ---

    def chain(self) -> tuple[list[DraftToken], int]:
        """Return the drafts that follow the transcript, and how many of the first are the edge's.

        The edge's chain leads, and the verifier's continues it. Where they part, the edge's leads unless its drafts
        have missed more often.
        """
        edge, own = self._received.tokens, self.local.tokens
        same = common_length(edge, own)
        if same == len(edge):
            return own if len(own) > same else edge, same
        if same == len(own) or not self._is_better_here():
            return edge, len(edge)
        return own, same

    @property
    def drafts_here(self) -> bool:
        """Whether the verifier's own drafter is at work on this text."""
        return self.local.running is not None

    def take(self, done: Drafted) -> None:
        """Take the result of a job in."""
        if done.drafts:
            self.here.drafting_s.add(done.seconds / len(done.drafts))
        self.local.take(done)

    def commit(self, tokens: tuple[int, ...]) -> float:
        """Compare the verifier's own drafts with `tokens`, which now end the transcript.

        Returns:
            Time that its drafter has worked since the commit before, in seconds.
        """
        drafting_s = self.local.commit(tokens)
        self.covered = self._covered()
        return drafting_s

    # --- who drafts ---

    def plan(self, view: VerifierView, *, edge_drafts: bool) -> Plan:
        """Return how long the next step waits, and for how many drafts."""
        have = len(self.chain()[0])
        division = self.divide(view, edge_drafts=edge_drafts)
        needed = min(view.max_drafts, self._needed(division))
        if have >= needed:
            return Plan(Patience(0.0))
        wait_s = (needed - have) * self.here.drafting_s.value
        if self._waits_for_edge(division, needed - have, view):
            wait_s = view.round_trip_s + (view.since_miss + needed) * view.drafting_s - view.since_miss_s
        return Plan(Patience(LATE * wait_s + MARGIN_S, needed), wait_s, needed)

    def job(self, view: VerifierView, block: int | None, *, edge_drafts: bool) -> LocalJob | None:
        """Return the next job for the verifier's own drafter; None: it has nothing to do now.

        Args:
            view: knowledge of the verifier about the session.
            block: drafts that the step which begins now verifies; None: none begins.
            edge_drafts: whether more drafts of the edge may come.
        """
        if self.local.running is not None or (self.local.stopped and block is None):
            return None
        chain, _ = self.chain()
        division = self.divide(view, edge_drafts=edge_drafts)
        wanted = self._needed(division)
        worth_s, price = (division.costs.token_s, division.price) if division is not None else (0.0, 0.0)
        price_s = price * self.here.drafting_s.value
        if block is None:
            wanted -= len(chain)
            if wanted <= 0 or self._waits_for_edge(division, wanted, view):
                return None
            price_s += self.here.drafting_s.value + view.row_s
        else:
            if division is None or not division.ahead or self._fixed is not None:
                return None
            wanted += block + 1 - len(chain)
        if wanted <= 0:
            return None
        min_survival = 0.0 if self._fixed is not None else min(1.0, price_s / worth_s) if worth_s else FIRST_SURVIVAL
        return self.local.propose(chain, min(wanted, view.max_drafts + 1), min_survival)

    def divide(self, view: VerifierView, *, edge_drafts: bool) -> Division | None:
        """Return the division for the present measurements; None: no step has been measured, or it is fixed."""
        if self._fixed is not None or not view.step_s:
            return None
        edge_s = view.drafting_s if edge_drafts and view.drafting_s else math.inf
        if self._is_better_here():
            edge_s = math.inf
        own, edge = self.local.calibration.common.acceptance.rate, self._received.acceptance.rate
        acceptance = own if edge_s == math.inf else max(own, edge)
        now = EndsView(
            acceptance=acceptance,
            step_s=view.step_s,
            row_s=view.row_s,
            max_drafts=view.max_drafts,
            edge_s=edge_s,
            round_trip_s=view.round_trip_s,
            here_s=max(1e-6, self.here.drafting_s.value * acceptance / own),
            price=self.here.price,
            goal=view.goal,
        )
        if self._view is None or not now.is_like(self._view):
            self._view, self._division = now, division_of(now)
            self.edge_pays = self._division.edge_pays or not view.drafting_s
        return self._division

    def _needed(self, division: Division | None) -> int:
        if self._fixed is not None:
            return self._fixed
        return FIRST_DRAFTS if division is None else division.drafts

    def _waits_for_edge(self, division: Division | None, lacking: int, view: VerifierView) -> bool:
        if division is None or self._view is None or self._received.complete:
            return False
        return division.waits_for_edge(lacking, view.since_miss, view.since_miss_s, self._view)

    def _is_better_here(self) -> bool:
        own, edge = self.local.calibration.common.acceptance, self._received.acceptance
        return own.rate > edge.rate + _BETTER

    def _covered(self) -> int:
        """Return how far the text is before the edge's answer to the newest commit can come."""
        view, division = self._view, self._division
        if self._fixed is not None or view is None or division is None or not division.costs.here_s:
            return 0
        return min(MAX_COVERED, int(view.round_trip_s / division.costs.token_s))
