"""Record of the rules and drafters that Outrider does without."""

from __future__ import annotations

from pydantic.dataclasses import dataclass

from outrider.bench.environment import Environment
from outrider.bench.record import RECORD, Count, Metric


@dataclass(frozen=True, slots=True, config=RECORD)
class ListResult:
    """Acceptance at one temperature with several drafts a position.

    Attributes:
        drafts: drafts a position, k.
        shared_noise: chance that the target's token is among the drafter's k best of log q + G.
        transport: the most that any rule can accept of k independent draws from q; None: at temperature 0, where all
            draws are one.
    """

    temperature: Metric
    drafts: Count
    shared_noise: Metric
    transport: Metric | None


@dataclass(frozen=True, slots=True, config=RECORD)
class BlockResult:
    """Mean accepted drafts of a chain at one temperature.

    Attributes:
        drafts: drafts of the chain.
        shared_noise: with shared noise.
        by_tokens, by_blocks: with q on the wire, each draft judged by itself, and all together.
        paths: chains that were judged.
    """

    temperature: Metric
    drafts: Count
    shared_noise: Metric
    by_tokens: Metric
    by_blocks: Metric
    paths: Count


@dataclass(frozen=True, slots=True, config=RECORD)
class LayerResult:
    """The target's first layers with its own head as a drafter.

    Attributes:
        layers: number of layers; all of them are the target itself.
        parameters: weights that a step reads, the head's included.
        step_ms: processor time of a step of one row.
        greedy: share of positions where it has the target's most likely token.
        shared_noise: chance of the target's token at temperature 1.
    """

    layers: Count
    parameters: Count
    step_ms: Metric
    greedy: Metric
    shared_noise: Metric


@dataclass(frozen=True, slots=True, config=RECORD)
class PassTime:
    """Processor time of the drafter for a number of tokens.

    Attributes:
        one_by_one_ms: time to propose them one after the other.
        one_pass_ms: time of one pass over as many rows, which a drafter of whole blocks would need at least.
    """

    tokens: Count
    one_by_one_ms: Metric
    one_pass_ms: Metric


@dataclass(frozen=True, slots=True, config=RECORD)
class RuleRecord:
    """All of it.

    Attributes:
        positions: positions of text that were judged, at each temperature.
        shared_noise, maximal: chances that one draft is accepted at temperature 1: with shared noise, and 1 - TV.
        greedy: the same at temperature 0, where all rules are one.
        coupled_hits: share of positions at temperature 1 whose draft, with the noise of the text, is its token.
    """

    environment: Environment
    positions: Count
    shared_noise: Metric
    maximal: Metric
    greedy: Metric
    coupled_hits: Metric
    lists: tuple[ListResult, ...]
    blocks: tuple[BlockResult, ...]
    layers: tuple[LayerResult, ...]
    passes: tuple[PassTime, ...]
