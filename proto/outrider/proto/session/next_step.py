"""Decisions about a session's next step: when it begins, how many drafts it verifies, and who makes them."""

from __future__ import annotations

from collections.abc import Sequence

from outrider.proto.policy.patience import (
    LATE,
    MARGIN_S,
    Plan,
    Prospect,
    VerifierView,
    best_block,
    expected_tokens,
    overtakes,
    plan_for,
)
from outrider.proto.session.admission import VerifierRules
from outrider.proto.session.both_ends import BothEnds
from outrider.proto.session.local import LocalJob
from outrider.proto.session.received import ReceivedDrafts
from outrider.proto.session.step_tree import StepTree, step_tree
from outrider.proto.types import Continue, DraftToken, Goal, Open, Report

PROBE_EVERY, PROBE = 12, 6  # while drafts do not pay, PROBE of them are requested every PROBE_EVERY tokens
PROBE_RARELY_EVERY = 48  # where the verifier drafts itself


class NextStep:
    """The next step of one session, by what it has measured and received.

    Attributes:
        received: drafts of the edge.
        ends: drafts of both ends, where the verifier has a drafter of its own.
        report: newest report of the edge.
        drafting: whether the edge drafts.
        ready_since: time from which the step could begin, in seconds.
        pays: whether the edge's drafts are worth their while.
        of_edge: drafts of the newest block that the edge made, which come first.
        newest_block: [k] that block.
        tree: the drafts of its step.
    """

    def __init__(
        self, frame: Open, rules: VerifierRules, received: ReceivedDrafts, ends: BothEnds | None, now: float
    ) -> None:
        self.received = received
        self.ends = ends
        self.report = Report(frame.drafting)
        self.drafting = frame.drafting
        self.ready_since = now
        self.pays = True
        self.of_edge = 0
        self.newest_block: tuple[DraftToken, ...] = ()
        self.tree = StepTree(0)
        self._trees = rules.trees and frame.trees
        self.max_drafts = min(frame.max_drafts or rules.max_drafts, rules.max_drafts)
        self._rules = rules
        self._patience = frame.patience or rules.patience
        self._window = frame.window or rules.max_credit
        self._plan: Plan | None = None

    @property
    def probe_every(self) -> int:
        """Tokens from one request for probing drafts to the next."""
        return PROBE_EVERY if self.ends is None else PROBE_RARELY_EVERY

    def go_on_from(self, last: NextStep, transcript: list[int], frame: Continue, now: float) -> None:
        """Take over what the last turn's steps have measured and received; `frame` begins this one's transcript."""
        self.received = last.received.continued(transcript, frame.chain, now)
        self.report, self.ends = last.report, last.ends
        if self.ends is not None:
            self.ends.begin_turn(self.received, transcript, frame.start)

    def take_report(self, report: Report) -> None:
        """Replace the newest report of the edge."""
        self.report, self.drafting = report, report.drafting
        if report.acceptance:
            acceptance, resting = self.received.acceptance, self.ends is not None and self.ends.edge_rests
            (acceptance.restate if resting else acceptance.believe)(report.acceptance)

    def made_here(self, path: tuple[int, ...]) -> int:
        """Return how many drafts of the path [n] that a step has followed the verifier made, which come last."""
        return self.tree.made_here(path, self.newest_block, self.of_edge)

    def change_plans(self) -> None:
        """Plan again: what the step waited for has come, or will not."""
        self._plan = None

    @property
    def joins_any_step(self) -> bool:
        """Whether the session joins any step that begins for others, with drafts or without, at the price of a row."""
        return self._patience is None and self._rules.goal is Goal.LATENCY

    @property
    def planned(self) -> bool:
        """Whether the wait for drafts is planned, not fixed."""
        return self._patience is None

    @property
    def waits_for_drafts(self) -> bool:
        """Whether more drafts of the chain may come before the next commit."""
        from_edge = self.drafting and not self.received.complete
        if self.ends is None:
            return from_edge
        return self.ends.drafts_here or (self.ends.awaits_edge and from_edge)

    def chain(self) -> tuple[list[DraftToken], int]:
        """Return the drafts that follow the transcript, and how many of the first are the edge's."""
        if self.ends is not None:
            return self.ends.chain()
        return self.received.tokens, len(self.received)

    def block(self, step_s: float, row_s: float, room: int, *, probe: bool) -> tuple[DraftToken, ...]:
        """Return the drafts [k] to verify in a step now.

        Args:
            step_s: time of a step beside its rows, in seconds; 0: unknown, verify all.
            row_s: time of a row of every session in the step, in seconds.
            room: most drafts that the step can use.
            probe: whether to verify one even where none pays.
        """
        view = self._view(step_s, row_s, self.ready_since)
        worthwhile = best_block(view)
        pays = overtakes(view) if self.ends is None else self.ends.edge_pays
        self.pays = worthwhile > 0 and (not self.joins_any_step or pays)
        chain, of_edge = self.chain()
        if self.ends is not None and len(chain) > of_edge:
            worthwhile = self.ends.worth_their_rows(row_s)
        limit = max(0, min(worthwhile or int(probe), room))
        self.tree = StepTree(min(limit, len(chain)))
        if self._trees and worthwhile and room > 0:
            tree = self._step_tree(chain, of_edge, step_s, row_s, room)
            beside = tree.num_drafts - tree.chain
            self.tree = tree._replace(chain=min(self.tree.chain, self.max_drafts - beside)).pruned()
        block = chain[: self.tree.chain]
        self.of_edge = of_edge
        # The edge's drafter is rewarded for its own drafts alone.
        self.newest_block = (*block[:of_edge], *[DraftToken(draft.id) for draft in block[of_edge:]])
        return self.newest_block

    def _step_tree(self, chain: Sequence[DraftToken], of_edge: int, step_s: float, row_s: float, room: int) -> StepTree:
        return step_tree(
            chain,
            of_edge,
            self.received,
            self.ends.local if self.ends is not None else None,
            depth=room,
            room=self.max_drafts,
            row_share=row_s / step_s if step_s else 0.0,
        )

    def ready_at(self, step_s: float, row_s: float, room: int, credit: int) -> float:
        """Return the time by which the step should begin; infinite: at the next event.

        Args:
            step_s: as in `block`.
            row_s: as in `block`.
            room: as in `block`.
            credit: drafts that the edge may have in flight, which do not bound those made here.
        """
        patience = self._patience or self._planned(step_s, row_s).patience
        from_edge = self.ends is None or not self.ends.drafts_here
        enough = min(patience.drafts, room, *((self._window, credit) if from_edge else ()))
        if not self.waits_for_drafts or len(self.chain()[0]) >= enough:
            return self.ready_since
        return self.ready_since + min(patience.seconds, self._rules.max_patience_s)

    def prospect(self, step_s: float, row_s: float, now: float) -> Prospect:
        """Return the expected tokens of a step now, and of one after the drafts that are due.

        Drafts of the edge that are not here at the expected time may still be on their way: from then on they are
        expected at the end of a margin, and after that no more.
        """
        plan = self._planned(step_s, row_s)
        acceptance = self._acceptance()
        here = len(self.chain()[0])
        tokens_now = expected_tokens(acceptance, min(here, self.max_drafts))
        wait_s = self.ready_since + plan.expected_s - now
        if self.ends is None and wait_s <= MARGIN_S:
            wait_s += (LATE - 1) * plan.expected_s + MARGIN_S
        if not self.waits_for_drafts or (self.ends is None and wait_s <= 0):
            return Prospect(0.0, tokens_now, tokens_now)
        return Prospect(max(0.0, wait_s), tokens_now, expected_tokens(acceptance, max(plan.drafts, here)))

    def local_job(self, step_s: float, row_s: float, now: float, block: int | None) -> LocalJob | None:
        """Return the next job for the verifier's own drafter; None: it has nothing to do."""
        if self.ends is None or not self.ends.may_draft(block):
            return None
        if block is None:
            self._planned(step_s, row_s)
        return self.ends.job(self._view(step_s, row_s, now), block, edge_drafts=self.drafting)

    def _planned(self, step_s: float, row_s: float) -> Plan:
        """Return the plan for the drafts received when the session became ready; later ones do not change it."""
        if self._plan is None:
            view = self._view(step_s, row_s, self.ready_since)
            self._plan = plan_for(view) if self.ends is None else self.ends.plan(view, edge_drafts=self.drafting)
        return self._plan

    def _acceptance(self) -> float:
        """Return the chance that a draft of the next step agrees, given that all before it did."""
        if self.ends is None:
            return self.received.acceptance.rate
        return self.ends.acceptance(edge_drafts=self.drafting)

    def _view(self, step_s: float, row_s: float, now: float) -> VerifierView:
        return VerifierView(
            acceptance=self._acceptance(),
            step_s=step_s,
            row_s=row_s,
            drafting_s=self.report.drafting_s,
            round_trip_s=self.report.round_trip_s,
            max_drafts=self.max_drafts,
            received=len(self.received),
            since_miss=self.received.since_miss,
            since_miss_s=now - self.received.missed_at,
            goal=self._rules.goal,
        )
