"""What a comparison found, as frozen dataclasses and as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider.bench.benchmark.record import Environment
from outrider.bench.comparison.contenders import NO_CODES, Variant
from outrider.bench.comparison.steps import StepCost
from outrider.proto.errors import ConfigError


@dataclass(frozen=True, slots=True)
class DrafterRecord:
    """A drafter that was compared.

    Attributes:
        label: that it is shown under.
        name: in its manifest.
        version: in its manifest.
        precision: of its weights.
        parameters: of them.
        projection: of the codes that it takes; None: it takes none.
        rank: numbers in a code; None: it takes none.
    """

    label: str
    name: str
    version: str
    precision: str
    parameters: int
    projection: str | None
    rank: int | None


@dataclass(frozen=True, slots=True)
class Interval:
    """The 95 % confidence interval of a figure."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Figure:
    """One variant on one domain at one temperature.

    Attributes:
        temperature: of the texts.
        domain: of the prompts; None: all together.
        variant: of a drafter.
        texts: that were decoded.
        tokens: in them.
        steps: of the target.
        block_efficiency: tokens / steps.
        interval: of the block efficiency; None: a domain has but one prompt.
        acceptance: chance that a draft is right, given that those before it in its round were; None: none was judged.
        first_ms: median processor time of a round's first draft, which the code is applied for; None: there was none.
        next_ms: the same of the drafts after it.
    """

    temperature: float
    domain: str | None
    variant: Variant
    texts: int
    tokens: int
    steps: int
    block_efficiency: float
    interval: Interval | None
    acceptance: float | None
    first_ms: float | None
    next_ms: float | None


@dataclass(frozen=True, slots=True)
class Ratio:
    """The block efficiency of `variant` over that of `against`, on the same texts.

    Attributes:
        temperature: of the texts.
        domain: of the prompts; None: all.
        variant: whose block efficiency is divided.
        against: by whose.
        ratio: above 1, `variant` needs fewer steps.
        interval: of the ratio; None: a domain has but one prompt.
    """

    temperature: float
    domain: str | None
    variant: Variant
    against: Variant
    ratio: float
    interval: Interval | None


@dataclass(frozen=True, slots=True)
class TextRecord:
    """One text: its prompt, its length, and the target steps that each variant needed, in the order of `variants`."""

    temperature: float
    id: str
    domain: str
    prompt_tokens: int
    tokens: int
    steps: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Comparison:
    """Everything.

    Attributes:
        environment: on what and by which command.
        drafts: a round, at most.
        drafters: in the order of the command.
        variants: of them.
        figures: of every variant, at every temperature, of all prompts and of each domain where there are several.
        ratios: of the last drafter to the others; of all prompts together, and of each domain.
        mean_ratios: the mean of the domains' ratios, where there are several.
        texts: of which all this is made.
        steps: of the target, what codes add to them; empty where none were wanted.
    """

    environment: Environment
    drafts: int
    drafters: tuple[DrafterRecord, ...]
    variants: tuple[Variant, ...]
    figures: tuple[Figure, ...]
    ratios: tuple[Ratio, ...]
    mean_ratios: tuple[Ratio, ...]
    texts: tuple[TextRecord, ...]
    steps: tuple[StepCost, ...] = ()

    @property
    def temperatures(self) -> tuple[float, ...]:
        """In the order of the command."""
        return tuple(dict.fromkeys(figure.temperature for figure in self.figures))

    @property
    def domains(self) -> tuple[str | None, ...]:
        """In the order of the prompts, and None for all of them at last."""
        return tuple(dict.fromkeys(figure.domain for figure in self.figures))

    def by_variant(self, temperature: float, domain: str | None) -> Mapping[Variant, Figure]:
        """The figures of one temperature and domain."""
        return {f.variant: f for f in self.figures if (f.temperature, f.domain) == (temperature, domain)}

    def name(self, variant: Variant) -> str:
        """The drafter's label, and its codes where it is compared with several kinds of them."""
        several = len({other.codes for other in self.variants if other.drafter == variant.drafter}) > 1
        codes = "no codes" if variant.codes == NO_CODES else variant.codes
        return f"{variant.drafter} ({codes})" if several else variant.drafter


def save(comparison: Comparison, path: Path) -> None:
    """Write the JSON file.

    Raises:
        ConfigError: the file cannot be written.
    """
    text = json.dumps(asdict(comparison), indent=1, allow_nan=False) + "\n"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"cannot write {path}: {error.strerror}", field="json") from error
