"""A verifier of a small world, whose every interleaving is tried: what ships, with a target of one text.

What is left to chance or to policy elsewhere is a choice of whoever explores the world.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field, replace
from typing import Any

from small_rules import CHOICES, END, LETTERS, PROMPT, Action, Rules, Violation, drafts_of, ignore, target_token, terms
from small_states import Interned

from outrider.cloud.grammar.grammar import GrammarMatcher
from outrider.cloud.serving.batching import Share
from outrider.cloud.serving.runner import ModelRunner
from outrider.cloud.serving.sessions import Sessions
from outrider.cloud.serving.slots import ANYBODY, Outbox, Slot
from outrider.cloud.target.backend import StepOutput, StepRow
from outrider.cloud.target.sampler import Sampled
from outrider.proto.errors import OutriderError
from outrider.proto.session import Drafted
from outrider.proto.session.acceptance import branch_taken
from outrider.proto.session.both_ends import DraftingHere, LocalJob
from outrider.proto.session.verifier import Verified
from outrider.proto.types import (
    BlockBranch,
    Branches,
    CloudFrame,
    Commit,
    CommittedToken,
    Draft,
    DraftToken,
    EdgeFrame,
    Goaway,
    Open,
    token_ids,
)
from research.simulator.pages import CountedPages, toy_facts


class AtOnce(Executor):
    """Does its work while it is asked to."""

    def submit(self, work: Callable[..., Any], /, *arguments: Any, **named: Any) -> Any:
        """Return a result that is there."""
        done = Future[Any]()
        done.set_result(work(*arguments, **named))
        return done


@dataclass
class Alternation:
    """The parser of a grammar in which no letter follows itself, nor the last one of the prompt."""

    text: list[int] = field(default_factory=lambda: [*PROMPT])

    def consume_token(self, token: int) -> bool:
        """Take a token, if it is allowed."""
        if not self._allows(token):
            return False
        self.text.append(token)
        return True

    def _allows(self, token: int) -> bool:
        return token != END and self.text[-1:] != [token]

    def compute_bitmask(self) -> bytes:
        """Return a bit for each token that may come next."""
        return bytes([sum(self._allows(token) << token for token in (END, *LETTERS))])

    def rollback(self, tokens: int) -> bool:
        """Take tokens back."""
        del self.text[len(self.text) - tokens :]
        return True

    def is_error(self) -> bool:
        """Return whether it has failed: never."""
        return False

    def is_accepting(self) -> bool:
        """Return whether the text may end here."""
        return False

    def get_error(self) -> str:
        """Return what is wrong."""
        return ""


class SmallTarget(CountedPages):
    """A KV cache that counts, and a target that says one text."""

    def __init__(self) -> None:
        facts = replace(toy_facts("ab" * 32, len(LETTERS) + 1, 64, frozenset({END})), verifies_branches=True)
        super().__init__(64, facts, None)  # type: ignore[arg-type]

    def open(self, tokens: Sequence[int] = (), isolation: str = "") -> Any:
        """Open a sequence, of which nothing is computed already."""
        return super().open()

    def step(self, rows: Sequence[StepRow]) -> StepOutput:
        """Return the target's tokens, along a branch where they follow one."""
        sampled, followed = list[Sampled | None](), dict[int, int]()
        for number, row in enumerate(rows):
            whole = row.verification
            assert whole is not None
            prefix = tuple(whole.transcript)
            after = self._after(prefix, token_ids(whole.block), whole.allowed)
            beside = [BlockBranch(branch.index, branch.drafts) for branch in row.branches]
            taken = branch_taken(whole.block, beside, after)
            path = row.path(None)
            if taken is not None:
                place = followed[number] = beside.index(taken)
                path, branch = row.path(place), row.branches[place]
                onto = (*prefix, *token_ids(path[: branch.index + 1]))
                rest = self._after(onto, token_ids(branch.drafts[1:]), branch.verification.allowed)
                after = (*after[: branch.index + 1], *rest)
            self.compute(row.handle, len(row.tokens) + len(path))
            sampled.append(Sampled(tuple(map(CommittedToken, after)), None))
        return StepOutput(sampled, None, 0.0, followed=followed)

    @staticmethod
    def _after(prefix: tuple[int, ...], block: tuple[int, ...], allowed: Any) -> tuple[int, ...]:
        rows = [None] * (len(block) + 1) if allowed is None else allowed
        return tuple(target_token(prefix + block[:j], rows[j]) for j in range(len(block) + 1))


@dataclass(eq=False)
class Sent(Outbox):
    """Frames that a verifier has sent in a stream since anybody looked.

    Attributes:
        key: number of the stream.
        keeps: whether it goes on after the last commit of a turn.
        items: frames, and an error that ends the stream.
        ended: whether it has ended.
    """

    key: int
    keeps: bool
    items: list[CloudFrame | OutriderError] = field(default_factory=list)
    ended: bool = False

    def put(self, item: CloudFrame | OutriderError) -> None:
        """Send a frame, or the error that ends the stream."""
        if not self.ended:
            self.items.append(item)
            last = isinstance(item, Commit) and item.finish is not None and not self.keeps
            self.ended = last or isinstance(item, Goaway | OutriderError)

    def unread(self) -> int:
        """Return how many frames the client has not taken: the engine sees none."""
        return 0


class SmallVerifier:
    """A verifier's sessions.

    Attributes:
        name: tells its states from those of the other verifier, which announces another name.
        step: results of the step that runs; None: none does.
        held: frames that wait for its end, with the keys of their streams.
        boxes: what it says, by key.
        jobs: jobs of its own drafter by key, with the machine that wants them.
    """

    def __init__(self, rules: Rules, name: str) -> None:
        self.rules = rules
        self.name = name
        self.terms = terms(rules, name)
        self.pages = SmallTarget()
        self.sessions = Sessions(self.pages, self.terms, 4, ignore, ignore)
        self.sessions.here = DraftingHere("own@1") if rules.own else None
        self.step: list[tuple[int, Verified]] | None = None
        self.held: list[tuple[int, EdgeFrame]] = []
        self.boxes: dict[int, Sent] = {}
        self.jobs: dict[int, tuple[Any, LocalJob]] = {}

    def happen(self, event: Action, frames: Interned) -> tuple[tuple[int, int], ...]:
        """Take an event in; return the streams to which something is said, and the numbers of what is."""
        kind, *about = event
        if kind == "frame":
            self._receive(about[0], frames[about[1]])
        else:
            getattr(self, "_" + kind)(*about)
        said = []
        for key, box in self.boxes.items():
            said += [(key, frames.number(item)) for item in box.items]
            box.items.clear()
            if box.ended:
                self.sessions.close(key)
        if self.sessions.draining and not (len(self.sessions) or self.held or self.step):
            self.__init__(self.rules, self.name)
        return tuple(said)

    def options(self) -> tuple[tuple[Action, ...], tuple[Action, ...]]:
        """Return the events that come by themselves, and those that may come."""
        comes: list[Action] = [("commit",)] if self.step is not None else []
        for key, (session, job) in self.jobs.items():
            prefix = (*session.transcript, *token_ids(session.ends.chain()))
            comes += [("own", key, tokens) for tokens in self.rules.results(prefix, job.job.count)]
        if self.step is None and self.sessions.running():
            comes.append(("step",))
        may = [("asks", slot.key) for slot in self.sessions if self._may_draft(slot)]
        if len(self.sessions) and not self.sessions.draining:
            may.append(("drains",))
        return tuple(comes), tuple(may)

    @property
    def is_empty(self) -> bool:
        """Whether it holds nothing."""
        return not (len(self.sessions) or self.pages.held or self.jobs or self.held or self.step)

    def has_ended(self, key: int) -> bool:
        """Return whether it says nothing more in a stream."""
        return key in self.boxes and self.boxes[key].ended

    def drafts(self, key: int) -> tuple[list[int], int, tuple[int, ...]] | None:
        """Return the transcript of a stream's text, and number and drafts of its chain; None: no chain lives there."""
        slot = self.sessions.get(key)
        if slot is None or self.held or slot.session.finish is not None:
            return None
        received = slot.session.received
        return (slot.session.transcript, received.chain, token_ids(received.tokens)) if received._alive else None

    def _dies(self) -> None:
        self.__init__(self.rules, self.name)

    def _drains(self) -> None:
        self.sessions.drain()

    def _receive(self, key: int, frame: EdgeFrame) -> None:
        """Take a frame, after the step that runs."""
        if self.step is not None:
            self.held.append((key, frame))
        else:
            self._take(key, frame)

    def _gone(self, key: int) -> None:
        """Notice that a stream is gone."""
        self.held = [each for each in self.held if each[0] != key]
        self.boxes.pop(key, None)
        self.sessions.close(key)

    def _take(self, key: int, frame: EdgeFrame) -> None:
        now = 0.0
        if isinstance(frame, Open):
            matcher = None
            if frame.sampling.grammar is not None:
                matcher = GrammarMatcher(Alternation, len(LETTERS) + 1, frozenset({END}), AtOnce())
                matcher.resume(list(frame.committed))
            box = self.boxes[key] = Sent(key, self.rules.turns > 0)
            self.sessions.admit(key, frame, box, matcher, ANYBODY, now)
            self.sessions.start_waiting()
        elif (slot := self.sessions.expecting(key, frame)) is not None:
            self.sessions.take(slot, frame, None, now, now)
            self.sessions.start_waiting()

    def _step(self) -> None:
        """Begin a step of all that run, and know its results."""
        shares = []
        for slot in self.sessions.running():
            if (ends := slot.session.ends) is not None:
                ends.leads = CHOICES.of(2) if len(ends.tokens) and len(slot.session.received) else 0
            block = slot.session.block()
            shares.append(Share(slot, slot.num_uncomputed_tokens, block, slot.session.branches))
            self._check_tree(block, slot.session.branches)
        self.sessions.grow()
        shares = self.sessions.masked(shares, 0.0, ignore)
        result = ModelRunner(self.pages, {}).run(shares)
        self.step = [(slot.key, replace(each, queue_s=0.0, verify_s=0.0)) for slot, each in result.verified]

    def _check_tree(self, block: tuple[DraftToken, ...], beside: tuple[BlockBranch, ...]) -> None:
        places = [(branch.index, branch.drafts[0].id) for branch in beside]
        if len(set(places)) < len(places) or any((i, draft.id) in places for i, draft in enumerate(block)):
            raise Violation(f"two drafts of a step have one position and token: {token_ids(block)} and {places}")

    def _commit(self) -> None:
        """Commit what the step that runs has found."""
        results, self.step = self.step or [], None
        before = list(itertools.takewhile(lambda held: isinstance(held[1], Draft | Branches), self.held))
        for key, frame in before:
            self._take(key, frame)
        for key, verified in results:
            if (slot := self.sessions.get(key)) is not None:
                self.sessions.commit(slot, verified, 0.0)
        held, self.held = self.held[len(before) :], []
        for key, frame in held:
            self._take(key, frame)

    def _asks(self, key: int) -> None:
        """Let the own drafter go on with a text."""
        slot = self.sessions.get(key)
        assert slot is not None
        ends = slot.session.ends
        assert ends is not None
        self.jobs[key] = slot.session, ends.propose(ends.chain(), self.rules.own, 0.0)

    def _own(self, key: int, tokens: tuple[int, ...]) -> None:
        """Take what the own drafter proposes."""
        session, job = self.jobs.pop(key)
        session.ends.take(Drafted(job.job, drafts_of(self.rules, tokens), 0.0))

    def _may_draft(self, slot: Slot) -> bool:
        """Return whether the own drafter may go on with a text now."""
        if not self.rules.own or slot.key in self.jobs or slot.session.finish is not None:
            return False
        ends, block = slot.session.ends, None if self.step is None else 0
        room = slot.session.sampling.max_tokens - slot.session.generated - 1
        return ends is not None and ends.may_draft(block) and room > len(ends.chain())

    def check(self, is_text: Callable[[Sequence[int]], bool]) -> None:
        """Check that every transcript is the target's."""
        for slot in self.sessions:
            if not is_text(slot.session.transcript):
                raise Violation(f"{slot.session.transcript} is not the target's text")
