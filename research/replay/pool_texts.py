"""Texts with the traces of several drafters."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from outrider.proto.errors import ConfigError
from research.replay.hit_traces import LISTS, HitTrace


@dataclass(frozen=True, slots=True)
class PoolText:
    """One text of the target with every drafter's trace on it.

    Attributes:
        traces: [K] traces of one drafter or more, all on this text.
        changes: positions at which the domain changes, rising, within the text.
        domains: domains that begin there.

    Raises:
        ConfigError: changes out of order, or beyond the text.
    """

    traces: tuple[HitTrace, ...]
    changes: tuple[int, ...] = ()
    domains: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if any(a >= b for a, b in itertools.pairwise((0, *self.changes, self.tokens))):
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
    """Return the texts that drafters were recorded on, in their order, with drafters in the order of the mapping.

    Args:
        traces: [drafters][n] traces by drafter, all on the same texts.

    Raises:
        ConfigError: a drafter has other texts than the first one.
    """
    (first, texts), *others = ((name, [_text_of(trace) for trace in own]) for name, own in traces.items())
    for name, own in others:
        if own != texts:
            raise ConfigError(f"{name!r} has other texts than {first!r}; record them together", field="traces")
    return list(map(PoolText, zip(*traces.values(), strict=True)))


def _text_of(trace: HitTrace) -> tuple[object, ...]:
    return trace.domain, trace.id, trace.seed, trace.temperature, trace.prompt_tokens, trace.tokens


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
