"""Texts with the traces of several drafters, and what the best of them would have been in hindsight."""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol, TypeVar

from outrider.bench.replay.traces import LISTS, HitTrace
from outrider.proto.errors import ConfigError
from outrider.proto.policy.selection import RoundOutcome, SelectionView, Selector


@dataclass(frozen=True, slots=True)
class Text:
    """One text of the target with every drafter's trace on it.

    Attributes:
        traces: [K] traces of the drafters.
        changes: positions at which the domain changes, rising, within the text.

    Raises:
        ConfigError: no trace, traces of different texts, or changes out of order.
    """

    traces: tuple[HitTrace, ...]
    changes: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        if not self.traces:
            raise ConfigError("must hold the trace of one drafter or more", field="text.traces")
        first = self.traces[0]
        for trace in self.traces[1:]:
            if (trace.tokens, trace.prompt_tokens) != (first.tokens, first.prompt_tokens):
                raise ConfigError(
                    f"must be on one text; {trace.drafter} and {first.drafter} differ on {first.id!r}",
                    field="text.traces",
                )
        if any(a >= b for a, b in itertools.pairwise((0, *self.changes, len(first.tokens)))):
            raise ConfigError("must rise, and lie within the text", field="text.changes")

    @property
    def tokens(self) -> int:
        """Length of the text."""
        return len(self.traces[0].tokens)


def texts_of(traces: Mapping[str, Sequence[HitTrace]]) -> list[Text]:
    """Group traces of several drafters by prompt and seed, with drafters in the order of the mapping.

    Raises:
        ConfigError: a drafter has no trace of a text that another has, or their texts differ.
    """
    by_key = [{(trace.domain, trace.id, trace.seed): trace for trace in own} for own in traces.values()]
    for name, mine in zip(traces, by_key, strict=True):
        if mine.keys() != by_key[0].keys():
            _, missing, _ = sorted(mine.keys() ^ by_key[0].keys())[0]
            raise ConfigError(f"record every prompt with every drafter; {name} differs on {missing!r}", field="traces")
    return [Text(tuple(mine[key] for mine in by_key)) for key in (by_key[0] if by_key else ())]


def joined(texts: Sequence[Text]) -> Text:
    """Join texts into one, after the first one's prompt, whose domain changes where the next text begins.

    Raises:
        ConfigError: no text, or texts of different drafters.
    """
    if not texts or len({len(text.traces) for text in texts}) > 1:
        raise ConfigError("must be one or more, with the same drafters", field="texts")
    return Text(
        tuple(_joined(own) for own in zip(*(text.traces for text in texts), strict=True)),
        tuple(itertools.accumulate(text.tokens for text in texts[:-1])),
    )


def _joined(traces: Sequence[HitTrace]) -> HitTrace:
    """Join traces; a measure that one of them lacks is left out."""
    silent = [trace.silent or (False,) * len(trace.tokens) for trace in traces]
    lists = {name: [getattr(trace, name) for trace in traces] for name in LISTS}
    if any(trace.silent for trace in traces):
        lists["silent"] = silent
    chained: dict[str, Any] = {name: tuple(itertools.chain(*own)) if all(own) else () for name, own in lists.items()}
    return replace(traces[0], ended=False, **chained)


class Timed(Protocol):
    """Result of one text with one selector."""

    def elapsed(self) -> Sequence[float]:
        """[tokens] seconds that went into the text up to and with each token."""
        ...


RunT = TypeVar("RunT", bound=Timed)


def in_hindsight(text: Text, run: Callable[[Selector], RunT], *, warm_up_tokens: int = 0) -> RunT:
    """Play each stretch between changes of domain with the drafter that is the fastest there.

    A bound that knew every single bit and took another drafter each round would be met by nobody.

    Args:
        text: with its changes of domain.
        run: plays the text with a selector.
        warm_up_tokens: that `run` decodes before the text, with the same selector.
    """
    ends = (*text.changes, text.tokens)
    order: tuple[int, ...] = ()
    for end in ends:
        runs = [(run(_Ordered((*order, arm), ends, -warm_up_tokens)), (*order, arm)) for arm in range(len(text.traces))]
        best, order = min(runs, key=lambda entry: entry[0].elapsed()[end - 1])
    return best


@dataclass(slots=True)
class _Ordered(Selector):
    """One drafter for each stretch, the last of them for what is left; `at` is below 0 before the text."""

    order: tuple[int, ...]
    ends: tuple[int, ...]
    at: int

    def choose(self, view: SelectionView) -> int:
        del view
        return self.order[min(bisect.bisect_right(self.ends, self.at), len(self.order) - 1)]

    def learn(self, outcome: RoundOutcome) -> None:
        self.at += outcome.committed
