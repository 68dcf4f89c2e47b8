"""The sessions that take part in a verifier's next step, and when it begins: rules without thread, clock or model.

Sessions that have what they wait for are due, and so are those that still read a prompt. Sessions that wait for
drafts are co-scheduled where a row costs less than a step of their own, and a step that only decodes is delayed while
drafts that are about to arrive make tokens come faster. Where sessions have asked for a service, `service_goals` says
what such a step is held to. The engine and the simulator share these rules.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from outrider.cloud.serving.service_goals import StepGoals, prompt_order
from outrider.cloud.verifier_config import MAX_PREFILL_ROWS
from outrider.proto.policy import Smoothed
from outrider.proto.policy.patience import StepCost, batching_delay_s
from outrider.proto.session.verifier import VerifierRules, tokens_before_scores, unscored_tokens
from outrider.proto.types import BlockBranch, DraftToken, ServiceClass, class_of, token_ids

if TYPE_CHECKING:
    from outrider.cloud.serving.slots import Slot

MAX_SCORED_ROWS = 128  # of these, rows whose logits are all kept for log probabilities of prompts: [rows, vocab]
MIN_PREFILL_ROWS = 16  # beside those who decode, whatever a row costs
PREFILL_SHARE = 0.5  # of the time of a step without prompts that these may add, whatever the limit of the gap
FIRST_PREFILL_ROWS = 64  # beside those who decode, before the cost of a prompt's row is known
MAX_WAIT_S = 1.0  # after which the prompt that has waited longest is read beside shorter ones
MIN_DELAY_S = 0.0003  # below it a delay costs more than it brings
_MIN_STEP_S = 1e-4
_SESSIONS_WITH_WHOLE_CREDIT = 8
_FIRST_RAISE, _LAST_RAISE = 256, 1 << 16  # limited steps before a larger one is tried


def credit_of(rules: VerifierRules, num_sessions: int) -> int:
    """Return the unverified tokens that each session may have in flight.

    They are fewer the more sessions there are, and never fewer than one step verifies.
    """
    crowd = max(1, num_sessions // _SESSIONS_WITH_WHOLE_CREDIT)
    return max(min(rules.max_drafts, rules.max_credit), rules.max_credit // crowd)


@dataclass(frozen=True, slots=True)
class Share:
    """One session's share of a step.

    Attributes:
        num_tokens: uncomputed tokens of its transcript that the step computes, in their order.
        block: [k] drafts that the step verifies after them; None: more of the prompt is left for later steps.
        branches: drafts beside the block that it verifies too; no two, and no draft of the block, have one position and
            token.
    """

    slot: Slot
    num_tokens: int
    block: tuple[DraftToken, ...] | None
    branches: tuple[BlockBranch, ...] = ()

    @property
    def num_rows(self) -> int:
        return self.num_tokens + len(self.block or ()) + sum(len(branch.drafts) for branch in self.branches)

    @property
    def num_drafts(self) -> int:
        return self.num_rows - self.num_tokens

    @property
    def tokens_beside(self) -> tuple[tuple[int, tuple[int, ...]], ...]:
        """The branches' tokens, and how many drafts of the block come before them."""
        return tuple((branch.index, token_ids(branch.drafts)) for branch in self.branches)

    @property
    def only_decodes(self) -> bool:
        """Whether no row of it reads a prompt, which has another cost."""
        return self.block is not None and self.num_tokens == 1


@dataclass(frozen=True, slots=True)
class Batch:
    """The engine's next action: a step, or a time to look again.

    Attributes:
        shares: those of the step that begins now; empty: none does.
        wake_at: when to plan again if nothing happens before; infinite: at the next event.
        delayed: whether a step could begin now but waits for the drafts of others.
    """

    shares: Sequence[Share] = ()
    wake_at: float = math.inf
    delayed: bool = False

    @property
    def num_rows(self) -> int:
        return sum(share.num_rows for share in self.shares)

    @property
    def only_verifies(self) -> bool:
        """Whether every session gets a token from the step."""
        return all(share.block is not None for share in self.shares)

    @property
    def only_decodes(self) -> bool:
        """Whether no row of it reads a prompt."""
        return all(share.only_decodes for share in self.shares)


@dataclass(slots=True)
class RowLimit:
    """The most rows of a step, after larger steps have failed for their size.

    After a number of steps that it has held down it is doubled, in case the memory has come back, and each time that
    this proves wrong, it takes twice as many steps until the next trial.

    Attributes:
        rows: most rows; infinite: no step has failed for its size.
    """

    rows: float = math.inf
    _held: int = 0
    _held_before_raise: int = _FIRST_RAISE
    _proven: float = 0.0  # the limit before the newest trial; 0: there was none since the last failure

    def fail(self, rows: int, fitting: int) -> None:
        """Learn that a step of `rows` rows failed, and that steps of up to `fitting` did the same work."""
        if self._proven and rows > self._proven:
            self.rows = self._proven
            self._held_before_raise = min(2 * self._held_before_raise, _LAST_RAISE)
        else:
            self.rows = fitting
        self._held, self._proven = 0, 0.0

    def hold(self) -> None:
        """Note that a step would have been larger without the limit."""
        self._held += 1
        if self._held >= self._held_before_raise:
            self._proven, self._held = self.rows, 0
            self.rows *= 2


@dataclass(slots=True)
class Batching:
    """The rules of one verifier, with what it has measured of its steps.

    Attributes:
        max_gap_s: longest step in which prompts are read while others decode, seconds, where the step without them
            takes less than two thirds of it.
        prefill_chunk: rows of prompts in such a step instead; 0: as many as that time allows.
        cost: measured cost of steps that only decode.
        prefill_row_s: smoothed cost of a row of a prompt, seconds.
        base_s, row_s: line through that cost, with a row of every session that runs, seconds; 0: not measured yet.
    """

    max_gap_s: float = 0.05
    prefill_chunk: int = 0
    limit: RowLimit = field(default_factory=RowLimit)
    cost: StepCost = field(default_factory=StepCost)
    prefill_row_s: Smoothed = field(default_factory=Smoothed)
    base_s: float = 0.0
    row_s: float = 0.0
    _prompts_round_up: bool = False

    def measure(self, batch: Batch, seconds: float, num_sessions: int) -> None:
        """Learn from a step that took `seconds`, while `num_sessions` run."""
        of_prompts = sum(share.num_rows for share in batch.shares if not share.only_decodes)
        if not of_prompts:
            self.cost.add(batch.num_rows, seconds)
            self.base_s, self.row_s = self.cost.line(max(1, num_sessions))
        elif of_prompts >= MIN_PREFILL_ROWS and self.base_s:  # in a shorter one most of the time is the step's own
            rest_s = self.cost.seconds(max(1, batch.num_rows - of_prompts))
            self.prefill_row_s.add(max(0.0, seconds - rest_s) / of_prompts)

    def plan(self, candidates: Iterable[Slot], now: float) -> Batch:
        """Return the step that should begin now, or when to look again.

        Args:
            candidates: sessions that could take part, longest admitted first.
            now: time on the clock of the sessions' events.
        """
        due: list[Slot] = []
        waiting: list[Slot] = []
        reading: list[Slot] = []
        wake_at = math.inf
        slots = list(candidates)
        goals = StepGoals.of(slots, self.cost)
        for slot in slots:
            if slot.num_uncomputed_tokens > 1:
                reading.append(slot)
                continue
            ready_at = slot.session.ready_at(self.base_s, self.row_s)
            if goals is not None:
                ready_at = min(ready_at, goals.begin_by(slot))
            if ready_at <= now:
                due.append(slot)
            else:
                waiting.append(slot)
                wake_at = min(wake_at, ready_at)
        if not (due or reading):
            return Batch(wake_at=wake_at)
        pressing = goals.due_s if goals is not None else {}  # which do not wait for the step after this one
        co_scheduled = [slot for slot in waiting if slot.session.joins_any_step or slot in pressing]
        if not reading and (delay_s := self._delay_s(due, co_scheduled, now, goals)) > MIN_DELAY_S:
            return Batch(wake_at=now + delay_s, delayed=True)
        decoding: Sequence[Slot] = (*due, *co_scheduled)
        if goals is not None:
            decoding = goals.taking_part(decoding, now)
        if self.limit.rows < math.inf:
            return Batch(self._limited_shares(decoding, reading, now))
        return Batch(self._shares(decoding, reading, now, goals))

    def share_of(self, slot: Slot, max_tokens: int) -> Share:
        """Return the next `max_tokens` of a transcript, followed by the drafts where these are the last."""
        uncomputed = slot.num_uncomputed_tokens
        if uncomputed > max_tokens:
            return Share(slot, max_tokens, None)
        block = slot.session.block(self.base_s, self.row_s)
        return Share(slot, uncomputed, block, slot.session.branches)

    def _delay_s(
        self, due: Sequence[Slot], waiting: Sequence[Slot], now: float, goals: StepGoals | None = None
    ) -> float:
        """Return by how many seconds to delay the step, because others will have their drafts by then.

        The step still ends in time for the goals, with the drafts that are there already.
        """
        if not waiting:
            return 0.0
        prospects = [slot.session.prospect(self.base_s, self.row_s, now) for slot in waiting]
        tokens = sum(slot.session.prospect(self.base_s, self.row_s, now).tokens_now for slot in due)
        delay_s = batching_delay_s(tokens, prospects, max(self.base_s, _MIN_STEP_S))
        if goals is None:
            return delay_s
        slots = (*due, *waiting)
        rows = sum(1 + min(len(slot.session.drafts()), slot.session.max_useful_drafts) for slot in slots)
        return min(delay_s, goals.slack_s(slots, now) - self.cost.seconds(rows))

    def _shares(
        self, decoding: Sequence[Slot], reading: Sequence[Slot], now: float, goals: StepGoals | None = None
    ) -> tuple[Share, ...]:
        """Return shares of all sessions that decode, and of prompts as far as there is room."""
        shares = [self.share_of(slot, 1) for slot in decoding]
        if goals is not None and (slack_s := goals.slack_s(decoding, now)) < math.inf:
            return self._held_shares(shares, reading, now, goals, slack_s)
        room = self._prefill_rows(sum(share.num_rows for share in shares))
        return (*shares, *self._prompts(reading, room, now))

    def _held_shares(
        self, shares: Sequence[Share], reading: Sequence[Slot], now: float, goals: StepGoals, slack_s: float
    ) -> tuple[Share, ...]:
        """Return the shares of a step that should end within `slack_s`, less what is given up for that.

        Prompts keep a few rows, but for those of batch sessions, which do once one has waited for `MAX_WAIT_S`.
        """
        must_read = any(
            class_of(slot.session.service) is not ServiceClass.BATCH or now - slot.ready_since > MAX_WAIT_S
            for slot in reading
        )
        kept, prefill_row_s = MIN_PREFILL_ROWS if must_read else 0, self.prefill_row_s.value
        drafts = [(share.slot, share.num_drafts) for share in shares]
        given_up = goals.rows_to_cut(drafts, kept * prefill_row_s, now)
        shares = [cut(share, share.num_rows - given_up[share.slot]) for share in shares]
        rows = sum(share.num_rows for share in shares)
        room = self._prefill_rows(rows)
        if prefill_row_s:
            room = max(kept, min(room, int((slack_s - self.cost.seconds(rows)) / prefill_row_s)))
        return (*shares, *self._prompts(reading, room, now))

    def _prefill_rows(self, decoding_rows: int) -> int:
        """Return the most rows of prompts in a step that also has `decoding_rows` rows of those who decode."""
        if not decoding_rows:
            return MAX_PREFILL_ROWS
        if self.prefill_chunk:
            return self.prefill_chunk
        if not self.base_s:
            return 0  # else a crowd's first steps would all have prompts, whose rows would pass for a step's whole time
        if not self.prefill_row_s.seen:
            return FIRST_PREFILL_ROWS
        without_s = self.cost.seconds(decoding_rows)
        spare_s = max(self.max_gap_s - without_s, PREFILL_SHARE * without_s)
        rows = spare_s / max(self.prefill_row_s.value, 1e-9)  # a paced step may have them for nothing
        return max(MIN_PREFILL_ROWS, min(MAX_PREFILL_ROWS, int(rows)))

    def _prompts(self, reading: Sequence[Slot], room: int, now: float) -> list[Share]:
        """Return shares of prompts within `room` rows, drafts aside: the shortest first, as `prompt_order` has it.

        Half of the room is kept for the prompt that has waited longest, once that is longer than `MAX_WAIT_S`: short
        ones pass a long one, and never stop it. Of prompts that are scored `MAX_SCORED_ROWS` are read at most.
        """
        shortest_first = sorted(reading, key=prompt_order)
        overdue = [slot for slot in reading if now - slot.ready_since > MAX_WAIT_S]
        kept = 0
        if overdue:
            oldest = min(overdue, key=lambda slot: slot.ready_since)
            shortest_first.remove(oldest)
            shortest_first.append(oldest)
            kept = room // 2
        left, scored_left, shares = room - kept, MAX_SCORED_ROWS, []
        for slot in shortest_first:
            left += kept if slot is shortest_first[-1] else 0
            before = tokens_before_scores(slot.session, slot.num_uncomputed_tokens)
            scored = not before and unscored_tokens(slot.session, slot.num_uncomputed_tokens) > 0
            if (rows := min(left, scored_left if scored else before or left)) > 0:
                shares.append(self.share_of(slot, rows))
                left -= shares[-1].num_rows
                scored_left -= shares[-1].num_tokens if scored else 0
        return shares

    def _limited_shares(self, decoding: Sequence[Slot], reading: Sequence[Slot], now: float) -> tuple[Share, ...]:
        """Return shares within the limit: first of those that have been due for longest, and up to half for prompts.

        With room for one row, prompts get it every other time, so that nobody waits for ever.
        """
        limit = int(self.limit.rows)
        decoding = sorted(decoding, key=lambda slot: slot.session.ready_at(self.base_s, self.row_s))
        room = min(limit, self._prefill_rows(len(decoding)))
        if decoding:
            self._prompts_round_up = not self._prompts_round_up
            room = min((limit + self._prompts_round_up) // 2, room)
        of_prompts: list[Share] = []
        for share in self._prompts(reading, room, now):
            if room > 0:
                of_prompts.append(cut(share, room))
                room -= of_prompts[-1].num_rows
        left = limit - sum(share.num_rows for share in of_prompts)
        shares: list[Share] = []
        for slot in decoding:
            if left <= 0:
                break
            shares.append(cut(self.share_of(slot, 1), left))
            left -= shares[-1].num_rows
        if left <= 0:
            self.limit.hold()
        return (*shares, *of_prompts)


def cut(share: Share, max_rows: int) -> Share:
    """Return a share without the drafts that exceed `max_rows`."""
    if share.block is None:
        return share
    block, left, branches = share.block[: max_rows - share.num_tokens], max_rows - share.num_tokens, []
    left -= len(block)
    for branch in share.branches:
        if branch.index <= len(block) and len(branch.drafts) <= left:
            branches.append(branch)
            left -= len(branch.drafts)
    return replace(share, block=block, branches=tuple(branches))
