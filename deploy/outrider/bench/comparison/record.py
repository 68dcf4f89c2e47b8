"""Record of a comparison."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from pydantic.dataclasses import dataclass

from outrider.bench.environment import Environment
from outrider.bench.metrics import Interval
from outrider.bench.record import RECORD, Count, Metric

NO_VECTORS = "none"


@dataclass(frozen=True, slots=True, config=RECORD)
class Variant:
    """A drafter with steering vectors of one kind.

    Attributes:
        drafter: label of the drafter.
        vectors: how they travel, `int8` or `float16`; `none`: it gets none.
        age: positions that they are older than the freshest; None: it gets none.
    """

    drafter: str
    vectors: str = NO_VECTORS
    age: Count | None = None


@dataclass(frozen=True, slots=True, config=RECORD)
class DrafterRecord:
    """A drafter that was compared, with name, version and precision from its manifest.

    Attributes:
        label: name in tables and plots.
        parameters: number of weights.
        projection: projection of the vectors that it takes; None: it takes none.
        rank: numbers in a vector; None: it takes none.
    """

    label: str
    name: str
    version: str
    precision: str
    parameters: Count
    projection: str | None
    rank: Count | None


@dataclass(frozen=True, slots=True, config=RECORD)
class VariantResult:
    """One variant on one domain at one temperature.

    Attributes:
        domain: domain of the prompts; None: all together.
        texts, tokens: number of texts, and of tokens in them.
        steps: target steps.
        block_efficiency: tokens / steps.
        interval: confidence interval of the block efficiency; None: a domain has but one prompt.
        acceptance: chance that a draft is right, given that those before it in its round were; None: none was verified.
        first_ms: median processor time of a round's first draft, with the vector; None: there was none.
        next_ms: the same for the drafts after it.
    """

    temperature: Metric
    domain: str | None
    variant: Variant
    texts: Count
    tokens: Count
    steps: Count
    block_efficiency: Metric
    interval: Interval | None
    acceptance: Metric | None
    first_ms: Metric | None
    next_ms: Metric | None


@dataclass(frozen=True, slots=True, config=RECORD)
class Ratio:
    """The block efficiency of `variant` over that of `against`, on the same texts.

    Attributes:
        domain: domain of the prompts; None: all.
        ratio: above 1, `variant` needs fewer steps.
        interval: confidence interval of the ratio; None: a domain has but one prompt.
    """

    temperature: Metric
    domain: str | None
    variant: Variant
    against: Variant
    ratio: Metric
    interval: Interval | None


@dataclass(frozen=True, slots=True, config=RECORD)
class TextRecord:
    """One text: its prompt, its length, and the target steps that each variant needed, in the order of `variants`."""

    temperature: Metric
    id: str
    domain: str
    prompt_tokens: Count
    tokens: Count
    steps: tuple[Count, ...]


@dataclass(frozen=True, slots=True, config=RECORD)
class SteeringCost:
    """One session's step of the target, as it verifies some drafts; processor and memory as they are.

    Attributes:
        projection: projection of the steering vectors.
        rows: rows that the target computes: the drafts and the token before them.
        plain_ms: median of the steps without a vector.
        ratio: median, over pairs of steps one after the other, of the one with a vector by the one without.
        low, high: quartiles of the ratio.
    """

    projection: str
    rows: Count
    plain_ms: Metric
    ratio: Metric
    low: Metric
    high: Metric


@dataclass(frozen=True, slots=True, config=RECORD)
class Comparison:
    """All results of a comparison.

    Attributes:
        environment: machine, versions and command.
        drafts: most drafts in a round.
        drafters: drafters, in the order of the command.
        variants: their variants.
        results: results of every variant at every temperature, for all prompts and, where there are several domains,
            for each.
        ratios: ratios of the last drafter to the others, for all prompts and for each domain.
        mean_ratios: means of the domains' ratios, where there are several.
        texts: texts behind the results.
        steps: cost of vectors to the target's steps; empty where none were wanted.
    """

    environment: Environment
    drafts: Count
    drafters: tuple[DrafterRecord, ...]
    variants: tuple[Variant, ...]
    results: tuple[VariantResult, ...]
    ratios: tuple[Ratio, ...]
    mean_ratios: tuple[Ratio, ...]
    texts: tuple[TextRecord, ...]
    steps: tuple[SteeringCost, ...] = ()

    @property
    def temperatures(self) -> tuple[float, ...]:
        """Temperatures, in the order of the command."""
        return tuple(dict.fromkeys(result.temperature for result in self.results))

    @property
    def domains(self) -> tuple[str | None, ...]:
        """Domains, in the order of the prompts, and at the end None for all of them."""
        return tuple(dict.fromkeys(result.domain for result in self.results))

    def by_variant(self, temperature: float, domain: str | None) -> Mapping[Variant, VariantResult]:
        """Return the results of one temperature and domain."""
        return {r.variant: r for r in self.results if (r.temperature, r.domain) == (temperature, domain)}

    def name(self, variant: Variant) -> str:
        """Return the drafter's label, and its vectors where it is compared with several kinds of them."""
        several = len({other.vectors for other in self.variants if other.drafter == variant.drafter}) > 1
        vectors = "no vectors" if variant.vectors == NO_VECTORS else variant.vectors
        return f"{variant.drafter} ({vectors})" if several else variant.drafter


def ages_of(variants: Sequence[Variant]) -> list[int]:
    """Return the ages of the variants' vectors, each once, in their order."""
    return list(dict.fromkeys(variant.age for variant in variants if variant.age is not None))


def in_front(variants: Sequence[Variant]) -> list[Variant]:
    """Return the variants to compare in detail: those without vectors, and those with vectors of the first age."""
    first = ages_of(variants)[:1]
    return [variant for variant in variants if variant.age is None or variant.age in first]
