"""Texts with the traces of several drafters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.bench.replay.traces import LISTS, HitTrace
from outrider.proto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class PoolText:
    """One text of the target with every drafter's trace on it.

    Attributes:
        traces: [K] traces of the drafters.
        changes: positions at which the domain changes, rising, within the text.
        domains: domains that begin there.

    Raises:
        ConfigError: no trace, traces of different texts, or changes out of order.
    """

    traces: tuple[HitTrace, ...]
    changes: tuple[int, ...] = ()
    domains: tuple[str, ...] = ()

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

    @property
    def prompt(self) -> tuple[str, str]:
        """Domain and id of the prompt."""
        return self.traces[0].domain, self.traces[0].id


def texts_of(traces: Mapping[str, Sequence[HitTrace]]) -> list[PoolText]:
    """Group traces of several drafters by prompt and seed, with drafters in the order of the mapping.

    Raises:
        ConfigError: a drafter has no trace of a text that another has, or their texts differ.
    """
    by_key = [{(trace.domain, trace.id, trace.seed): trace for trace in own} for own in traces.values()]
    for name, mine in zip(traces, by_key, strict=True):
        if mine.keys() != by_key[0].keys():
            _, missing, _ = sorted(mine.keys() ^ by_key[0].keys())[0]
            raise ConfigError(f"record every prompt with every drafter; {name} differs on {missing!r}", field="traces")
    return [PoolText(tuple(mine[key] for mine in by_key)) for key in (by_key[0] if by_key else ())]


def joined(texts: Sequence[PoolText]) -> PoolText:
    """Join texts into one, after the first one's prompt, whose domain changes where the next text begins.

    Raises:
        ConfigError: no text, or texts of different drafters.
    """
    if not texts or len({len(text.traces) for text in texts}) > 1:
        raise ConfigError("must be one or more, with the same drafters", field="texts")
    return PoolText(
        tuple(_joined(own) for own in zip(*(text.traces for text in texts), strict=True)),
        tuple(itertools.accumulate(text.tokens for text in texts[:-1])),
        tuple(text.prompt[0] for text in texts[1:]),
    )


def _joined(traces: Sequence[HitTrace]) -> HitTrace:
    """Join traces; a measure that one of them lacks is left out."""
    lists = {name: [getattr(trace, name) for trace in traces] for name in LISTS}
    if any(lists["silent"]):
        lists["silent"] = [trace.silent or (False,) * len(trace.tokens) for trace in traces]
    chained: dict[str, Any] = {name: tuple(itertools.chain(*own)) if all(own) else () for name, own in lists.items()}
    return replace(traces[0], ended=False, **chained)
