"""Selectors on hit traces: who would have drafted, how fast it would have gone, and what the oracle would have given.

Rounds are synchronous: the chosen drafter catches up and drafts, the target judges, the commit comes back. Idle
drafters read committed text only while the edge waits for a verdict, so scoring them costs no time; the prompt they
read while the target reads it, and what that wait is too short for counts.
"""

from __future__ import annotations

import bisect
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from outrider.bench.replay.traces import LISTS, HitTrace
from outrider.bench.simulator.costs import Costs
from outrider.bench.simulator.wire import ShapeAt
from outrider.proto.errors import ConfigError
from outrider.proto.policy.selection import Arm, RoundOutcome, SelectionView, Selector, StaticSelector


@dataclass(frozen=True, slots=True)
class Track:
    """A drafter's trace on a text.

    What its trace says of agreement and confidence behind a draft that missed stands for the drafter's own chain there,
    which no trace has.
    """

    trace: HitTrace

    @property
    def agreement(self) -> tuple[float, ...]:
        """[n] min(1, p(x) / q(x)) of the token that it proposes at each position of the text; empty: not recorded."""
        return self.trace.agreement

    def confidence(self, first: int, end: int) -> tuple[float, ...]:
        """[end - first] its probability of what it proposes at these positions; 0 where that is nothing."""
        said = self.trace.confidence[first:end]
        if not self.trace.silent:
            return said
        return tuple(0.0 if silent else q for silent, q in zip(self.trace.silent[first:end], said, strict=True))


@dataclass(frozen=True, slots=True)
class Text:
    """One text of the target with every drafter's trace on it.

    Attributes:
        tracks: [K] of the drafters.
        changes: positions at which the domain changes, rising, within the text.

    Raises:
        ConfigError: no track, tracks on different texts, or changes out of order.
    """

    tracks: tuple[Track, ...]
    changes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.tracks:
            raise ConfigError("must hold the trace of one drafter or more", field="text.tracks")
        first = self.tracks[0].trace
        for track in self.tracks[1:]:
            if (track.trace.tokens, track.trace.prompt_tokens) != (first.tokens, first.prompt_tokens):
                raise ConfigError(
                    f"must be on one text; {track.trace.drafter} and {first.drafter} differ on {first.id!r}",
                    field="text.tracks",
                )
        if any(a >= b for a, b in itertools.pairwise((0, *self.changes, len(first.tokens)))):
            raise ConfigError("must rise, and lie within the text", field="text.changes")

    @property
    def tokens(self) -> int:
        """Length of the text."""
        return len(self.tracks[0].trace.tokens)


def texts_of(traces: Mapping[str, Sequence[HitTrace]]) -> list[Text]:
    """Traces of several drafters, put together by prompt and seed; drafters in the order of the mapping.

    Raises:
        ConfigError: a drafter has no trace of a text that another has, or their texts differ.
    """
    by_key = [{(trace.domain, trace.id, trace.seed): trace for trace in own} for own in traces.values()]
    for name, mine in zip(traces, by_key, strict=True):
        if mine.keys() != by_key[0].keys():
            _, missing, _ = sorted(mine.keys() ^ by_key[0].keys())[0]
            raise ConfigError(f"record every prompt with every drafter; {name} differs on {missing!r}", field="traces")
    return [Text(tuple(Track(mine[key]) for mine in by_key)) for key in (by_key[0] if by_key else ())]


def joined(texts: Sequence[Text]) -> Text:
    """One text whose domain changes where one ends and the next begins; the first one's prompt.

    Raises:
        ConfigError: no text, or texts of different drafters.
    """
    if not texts or len({len(text.tracks) for text in texts}) > 1:
        raise ConfigError("must be one or more, with the same drafters", field="texts")
    return Text(
        tuple(Track(_joined([track.trace for track in own])) for own in zip(*(t.tracks for t in texts), strict=True)),
        tuple(itertools.accumulate(text.tokens for text in texts[:-1])),
    )


def _joined(traces: Sequence[HitTrace]) -> HitTrace:
    """A measure that one of them lacks is left out."""
    silent = [trace.silent or (False,) * len(trace.tokens) for trace in traces]
    lists = {name: [getattr(trace, name) for trace in traces] for name in LISTS}
    if any(trace.silent for trace in traces):
        lists["silent"] = silent
    chained: dict[str, Any] = {name: tuple(itertools.chain(*own)) if all(own) else () for name, own in lists.items()}
    return replace(traces[0], ended=False, **chained)


@dataclass(frozen=True, slots=True)
class Round:
    """One round of a run.

    Attributes:
        at: position of its first token in the text.
        arm: that drafted.
        committed: tokens.
        seconds: with the switch.
    """

    at: int
    arm: int
    committed: int
    seconds: float


@dataclass(frozen=True, slots=True)
class SelectionRun:
    """One text with one selector."""

    rounds: tuple[Round, ...]

    @property
    def tokens(self) -> int:
        """Of the text."""
        return sum(entry.committed for entry in self.rounds)

    @property
    def seconds(self) -> float:
        """From the first draft to the last commit."""
        return sum(entry.seconds for entry in self.rounds)

    @property
    def switches(self) -> int:
        """Rounds whose drafter was not the one of the round before."""
        return sum(a.arm != b.arm for a, b in itertools.pairwise(self.rounds))

    def elapsed(self) -> list[float]:
        """[tokens] seconds that went into the text up to and with each token; a round's are spread over its tokens."""
        per_token = (entry.seconds / entry.committed for entry in self.rounds for _ in range(entry.committed))
        return list(itertools.accumulate(per_token))

    def regret(self, oracle: Sequence[float]) -> list[float]:
        """[tokens] seconds behind the oracle's `elapsed` at each token; below 0 where a run was ahead of it."""
        return [mine - best for mine, best in zip(self.elapsed(), oracle, strict=True)]

    def choices(self) -> list[int]:
        """[tokens] the drafter of the round that committed each token."""
        return [entry.arm for entry in self.rounds for _ in range(entry.committed)]


def play(
    text: Text, arms: Sequence[Arm], selector: Selector, shape_at: ShapeAt, costs: Costs, drafts: int
) -> SelectionRun:
    """One text, round by round.

    Args:
        text: with a track for each arm.
        arms: the drafters and their costs.
        selector: keeps what it has learned from texts before.
        shape_at: the link; its clock starts anew with each text. Only the round trip counts: rounds are short
            messages.
        costs: of the verifier and the events; the drafter's own are the arms'.
        drafts: of a round, 1 or more.

    Raises:
        ConfigError: arms and tracks differ in number, or no drafts.
    """
    if len(arms) != len(text.tracks):
        raise ConfigError(f"must be {len(text.tracks)}, one for each track of the text", field="arms")
    if drafts < 1:
        raise ConfigError("must be 1 or more", field="drafts")
    return _Play(text, arms, selector, shape_at, costs, drafts).run()


class _Play:
    """One text on its way."""

    def __init__(
        self, text: Text, arms: Sequence[Arm], selector: Selector, shape_at: ShapeAt, costs: Costs, drafts: int
    ) -> None:
        self._tracks, self._end = text.tracks, text.tokens
        self._arms = arms
        self._selector = selector
        self._shape_at, self._costs, self._drafts = shape_at, costs, drafts
        self._events_s = costs.job_s + costs.cloud_event_s + costs.edge_event_s + costs.commit_s
        self._at = 0
        self._now = 0.0
        self._read = [-text.tracks[0].trace.prompt_tokens] * len(arms)  # nobody has read the prompt
        self._current: int | None = None
        self._late_s = [0.0] * len(arms)  # of the first round, where it is this arm's, beside its own switch

    def run(self) -> SelectionRun:
        if self._selector.catches_up:
            self._read_prompt()
        rounds = []
        while self._at < self._end:
            rounds.append(self._round())
        return SelectionRun(tuple(rounds))

    def _round(self) -> Round:
        view = SelectionView.of_rounds(
            self._arms,
            [self._at - read for read in self._read],
            drafts=self._drafts,
            round_trip_s=self._shape_at(self._now).rtt_s + self._events_s,
            step_s=self._costs.verify_s(self._drafts + 1) - self._costs.row_s * (self._drafts + 1),
            row_s=self._costs.row_s,
            current=self._current,
        )
        chosen = self._selector.choose(view)
        began = self._at
        hits: list[tuple[bool | None, ...]] = [()] * len(self._arms)
        confidence: list[tuple[float, ...]] = [()] * len(self._arms)
        hits[chosen], confidence[chosen] = self._caught_up(chosen, self._at)
        drafted, accepted = self._drafted(chosen)
        committed = min(accepted + 1, self._end - began)
        seconds = view.switch_s[chosen] + self._round_s(view, chosen, drafted)
        if self._current is None:
            seconds += self._late_s[chosen]
        self._at += committed
        self._read[chosen] = self._at
        hits[chosen] += (True,) * accepted + (False,) * (committed - accepted)
        verified = min(accepted + 1, drafted)
        said = self._tracks[chosen].confidence(began, began + verified)
        confidence[chosen] += said + (math.nan,) * (committed - verified)
        left_s = view.waiting_s
        for arm in self._selector.score(view, chosen):
            catch_up_s = self._arms[arm].catch_up_s
            tokens = min(began - self._read[arm], math.floor(left_s / catch_up_s) if catch_up_s else self._end)
            hits[arm], confidence[arm] = self._caught_up(arm, self._read[arm] + tokens)
            left_s -= tokens * catch_up_s
        if self._at == self._end:  # of the rest nobody will hear: a selector of many texts must not wait for it
            for arm, read in enumerate(self._read):
                unread = self._end - max(0, read)
                hits[arm] += (None,) * unread
                confidence[arm] += (math.nan,) * unread
        self._current = chosen
        self._now += seconds
        # Of all drafts, as the paper has it: the mean over the verified ones alone is biased.
        agreement = self._tracks[chosen].agreement[began : began + drafted]
        self._selector.learn(
            RoundOutcome(
                view=view,
                arm=chosen,
                committed=committed,
                verified=verified,
                accepted=accepted,
                agreement=sum(agreement) / len(agreement) if agreement else math.nan,
                seconds=seconds,
                hits=tuple(hits),
                confidence=tuple(confidence),
            )
        )
        return Round(began, chosen, committed, seconds)

    def _read_prompt(self) -> None:
        """All arms read it while the target does, which is time enough or not; never for less than one arm alone."""
        prompt = self._tracks[0].trace.prompt_tokens
        reading_s = [arm.catch_up_s * prompt for arm in self._arms]
        waiting_s = self._shape_at(0.0).rtt_s + self._events_s + self._costs.prefill_s(prompt)
        self._late_s = [max(own_s, sum(reading_s) - waiting_s) for own_s in reading_s]
        self._read = [0] * len(self._arms)
        self._selector.read_prompt([track.trace.prompt_log_q for track in self._tracks])

    def _round_s(self, view: SelectionView, arm: int, drafted: int) -> float:
        """Fewer drafts than planned, at the text's end or before a silent drafter, take less."""
        unverified_s = self._costs.verify_s(self._drafts + 1) - self._costs.verify_s(drafted + 1)
        return view.round_s[arm] - unverified_s - (self._drafts - drafted) * self._arms[arm].drafting_s

    def _drafted(self, arm: int) -> tuple[int, int]:
        """(drafts, accepted ones) from here on; behind the end nobody drafts."""
        trace = self._tracks[arm].trace
        reach = range(self._at, min(self._at + self._drafts, self._end))
        drafted = sum(1 for _ in itertools.takewhile(lambda i: not trace.silent_at(i), reach))
        return drafted, sum(1 for _ in itertools.takewhile(lambda i: trace.hits[i], reach[:drafted]))

    def _caught_up(self, arm: int, until: int) -> tuple[tuple[bool, ...], tuple[float, ...]]:
        """The hits and the confidence of `arm` on what it reads now."""
        track, first, end = self._tracks[arm], max(0, self._read[arm]), max(0, until)
        self._read[arm] = max(self._read[arm], until)
        return track.trace.hits[first:end], track.confidence(first, end)


def best_single(
    texts: Sequence[Text], arms: Sequence[Arm], shape_at: ShapeAt, costs: Costs, drafts: int
) -> tuple[int, list[SelectionRun]]:
    """The drafter that alone would have been the fastest over all texts, and its runs."""
    runs = {
        arm: [play(text, arms, StaticSelector(arm), shape_at, costs, drafts) for text in texts]
        for arm in range(len(arms))
    }
    arm = min(runs, key=lambda index: sum(run.seconds for run in runs[index]))
    return arm, runs[arm]


class Timed(Protocol):
    """What came of one text with one selector."""

    def elapsed(self) -> Sequence[float]:
        """[tokens] seconds that went into the text up to and with each token."""
        ...


RunT = TypeVar("RunT", bound=Timed)


def oracle(text: Text, arms: Sequence[Arm], shape_at: ShapeAt, costs: Costs, drafts: int) -> SelectionRun:
    """`in_hindsight` of synchronous rounds."""
    return in_hindsight(text, lambda selector: play(text, arms, selector, shape_at, costs, drafts))


def in_hindsight(text: Text, run: Callable[[Selector], RunT]) -> RunT:
    """On each stretch between changes of domain the drafter that is the fastest there; `run` plays the text.

    A bound that knew every single bit and took another drafter each round would be met by nobody.
    """
    ends = (*text.changes, text.tokens)
    order: tuple[int, ...] = ()
    for end in ends:
        runs = [(run(_Ordered((*order, arm), ends)), (*order, arm)) for arm in range(len(text.tracks))]
        best, order = min(runs, key=lambda entry: entry[0].elapsed()[end - 1])
    return best


@dataclass(slots=True)
class _Ordered(Selector):
    """One drafter for each stretch, the last of them for what is left."""

    order: tuple[int, ...]
    ends: tuple[int, ...]
    at: int = 0

    def choose(self, view: SelectionView) -> int:
        del view
        return self.order[min(bisect.bisect_right(self.ends, self.at), len(self.order) - 1)]

    def learn(self, outcome: RoundOutcome) -> None:
        self.at += outcome.committed
