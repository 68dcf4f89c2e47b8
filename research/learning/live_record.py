"""The record of `python -m research learn`."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from outrider.bench.links import LinkRecord
from outrider.bench.record import RECORD, Count, Metric


@dataclass(frozen=True, slots=True, config=RECORD)
class DecodedTexts:
    """Texts that an edge decoded.

    Attributes:
        tokens_per_second: tokens over the sum of the texts' durations, so that of one session.
        tokens_per_step: tokens for each step of the target.
        greedy, sampled: share of drafts, up to the first miss of a chain, that hit at T = 0 and at T = 1.
        steered: share of the texts in which a steering vector was used.
    """

    texts: Count
    tokens: Count
    tokens_per_second: Metric
    tokens_per_step: Metric
    greedy: Metric
    sampled: Metric
    steered: Metric


@dataclass(frozen=True, slots=True, config=RECORD)
class OfferedVersion:
    """A version as `outrider status` shows it.

    Attributes:
        sequence: its number among the trainer's; 0: the drafter that learning began with.
        why: reason for its state.
        texts: texts on which edges have compared it with the version before.
        difference: mean difference of hit rates on them.
    """

    sequence: Count
    version: str
    state: str
    why: str
    texts: Count
    difference: float


@dataclass(frozen=True, slots=True, config=RECORD)
class ServingWindow:
    """Consecutive texts of the stream.

    Attributes:
        ended_s: time of its end after the stream's beginning.
        served: tokens of the stream until then.
        cached_bytes: bytes of drafters and tokenizers that the edge holds then, each file once.
        steps, candidates, published: those of the trainer, by its newest checkpoint.
        versions: states at the window's end.
    """

    decoded: DecodedTexts
    ended_s: Metric
    served: Count
    cached_bytes: Count
    steps: Count
    candidates: Count
    published: Count
    versions: tuple[OfferedVersion, ...]


@dataclass(frozen=True, slots=True, config=RECORD)
class LearningDemo:
    """One run.

    Attributes:
        before, after: the same fresh texts, one at a time, with the drafter that learning began with and with the
            version that was current after the stream, in turn.
        identical: those of them whose tokens were the same both times.
        uplink_bytes, downlink_bytes: bytes that the link has carried for the stream.
    """

    command: str
    target: str
    drafter: str
    stream: str
    min_step_ms: Metric
    link: LinkRecord
    sessions: Count
    before: DecodedTexts
    after: DecodedTexts
    identical: Count
    windows: tuple[ServingWindow, ...]
    uplink_bytes: Count
    downlink_bytes: Count
