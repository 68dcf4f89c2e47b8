"""`outrider compare`: block efficiency of drafters on the same texts of the same target."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from outrider.bench.commands import CompareSettings
from outrider.bench.comparison.plots import check_plot, draw
from outrider.bench.comparison.record import NO_VECTORS, Comparison, DrafterRecord, SteeringCost, Variant, in_front
from outrider.bench.comparison.rounds import Rounds, SentVectors, synchronous_rounds
from outrider.bench.comparison.steps import steering_costs
from outrider.bench.comparison.summary import Summary, Trial
from outrider.bench.comparison.tables import tables
from outrider.bench.drafters import find_packages, load_drafters
from outrider.bench.environment import Environment, environment
from outrider.bench.outputs import hand_out
from outrider.cloud.config import VerifierConfig
from outrider.cloud.steering import Projection
from outrider.cloud.steering_vectors import SteeringVectors, load_projections
from outrider.cloud.target import Target, load_target
from outrider.cloud.text_writer import TextRequest, TextWriter, WrittenText
from outrider.deploy.arguments import Given
from outrider.deploy.prompts import Prompt, choose_prompts
from outrider.edge.drafters.packages import DrafterPackage
from outrider.edge.drafters.protocol import Drafter
from outrider.proto.errors import ConfigError
from outrider.proto.types import Sampling, SteeringPrecision

_PRECISIONS = {"int8": SteeringPrecision.INT8, "float16": SteeringPrecision.FLOAT16}


def compare(given: Given) -> int:
    """Run `outrider compare`."""
    options, steering = given(CompareSettings), given.fields(VerifierConfig)["steering"]
    hand_out(options.json, options.plot, lambda: _compare(options, steering), tables, draw, check_plot=check_plot)
    return 0


def _compare(options: CompareSettings, steering: Sequence[str]) -> Comparison:
    prompts = choose_prompts(options.prompts, options.per_domain)
    packages = find_packages(options.package, "package")
    if options.threads:
        torch.set_num_threads(options.threads)
    target = load_target(options.target, device=options.device, dtype=options.dtype)
    drafters = load_drafters(packages, target.tokenizer_sha256, "package")
    contenders = [Contender(label, package, drafters[label]) for label, package in packages.items() if package]
    return _Comparing(options, steering, target, contenders).of(prompts)


@dataclass(frozen=True, slots=True)
class Contender:
    """A drafter that is compared: the label that it is shown under, its package, and itself."""

    label: str
    package: DrafterPackage
    drafter: Drafter

    @property
    def projection(self) -> str | None:
        """Id of the projection whose steering vectors it takes; None: it takes none."""
        return None if self.package.steering is None else self.package.steering.projection

    def variants(self, precisions: Sequence[str], ages: Sequence[int]) -> list[Variant]:
        """Return all that it is compared as, by `precisions`, then by `ages`; one where it takes no vectors."""
        if self.projection is None:
            return [Variant(self.label)]
        return [
            Variant(self.label, precision, age)
            for precision in precisions
            for age in (ages if precision != NO_VECTORS else (None,))
        ]


class _Comparing:
    """One comparison from its drafters to its record."""

    def __init__(
        self, options: CompareSettings, steering: Sequence[str], target: Target, contenders: Sequence[Contender]
    ) -> None:
        self._options = options
        self._steering = steering
        self._target = target
        self._contenders = contenders
        self._console = Console(stderr=True, highlight=False)
        self._variants = {
            variant: contender
            for contender in contenders
            for variant in contender.variants(options.precision, options.age)
        }
        self._projections = self._wanted_projections()
        self._writer = TextWriter(target, self._projections, max_age=max(options.age))

    def of(self, prompts: Sequence[Prompt]) -> Comparison:
        """Compare the drafters on texts after `prompts`."""
        options = self._options
        tokenizer = Tokenizer.from_str(self._target.tokenizer_json)
        encoded = [(prompt, tuple(tokenizer.encode(prompt.text).ids)) for prompt in prompts]
        trials = [self._trial(encoded, temperature) for temperature in options.temperature]
        found = [Summary(trial, seed=options.seed) for trial in trials]
        shown = in_front(list(self._variants))
        last = next(variant for variant in shown if variant.drafter == self._contenders[-1].label)
        others = [variant for variant in shown if variant != last]
        return Comparison(
            environment=self._environment(len(prompts)),
            drafts=options.drafts,
            drafters=tuple(map(_record_of, self._contenders)),
            variants=tuple(self._variants),
            results=tuple(result for each in found for result in each.results()),
            ratios=tuple(ratio for each in found for ratio in each.ratios(last, others)),
            mean_ratios=tuple(ratio for each in found for ratio in each.mean_ratios(last, others)),
            texts=tuple(text for each in found for text in each.texts()),
            steps=tuple(self._steps(max(trials[0].texts, key=len))),
        )

    def _steps(self, text: WrittenText) -> Iterator[SteeringCost]:
        vectors = SteeringVectors(self._target, self._projections)
        for projection in self._projections:
            yield from steering_costs(self._target, vectors, projection, text)

    def _wanted_projections(self) -> dict[str, Projection]:
        """Return the projections whose steering vectors are wanted, by id."""
        options = self._options
        found = load_projections(list(self._steering), self._target, name=options.target, model=options.target)
        steered = {each.projection: each for variant, each in self._variants.items() if variant.vectors != NO_VECTORS}
        wanted: dict[str, Projection] = {}
        for name, contender in steered.items():
            if name is None or name not in found:
                raise ConfigError(
                    f"none is projection {name}, whose vectors {contender.label!r} takes; name its "
                    "projection.safetensors, or compare it with --precision none",
                    field="steering",
                )
            wanted[name] = found[name]
        return wanted

    def _trial(self, encoded: Sequence[tuple[Prompt, tuple[int, ...]]], temperature: float) -> Trial:
        options = self._options
        sampling = Sampling(temperature=temperature, seed=options.seed, max_tokens=options.max_tokens)
        began = time.monotonic()
        texts = self._writer.write([TextRequest(ids, sampling, p.id, p.domain) for p, ids in encoded])
        tokens = sum(len(text) for text in texts)
        seconds = time.monotonic() - began
        self._say(f"T = {temperature:g}: {len(texts)} texts of {tokens} tokens by the target in {seconds:.0f} s")
        rounds: dict[Variant, list[Rounds]] = {variant: [] for variant in self._variants}
        drafted_from = time.monotonic()
        silent = not self._console.is_terminal
        for text in track(texts, "drafting", console=self._console, transient=True, disable=silent):
            for variant, contender in self._variants.items():  # in turn: a slow moment meets them all
                vectors = _vectors_for(variant, contender, text)
                rounds[variant].append(
                    synchronous_rounds(contender.drafter, text, sampling, vectors, drafts=options.drafts)
                )
        self._say(
            f"T = {temperature:g}: {len(rounds)} drafters through them in {time.monotonic() - drafted_from:.0f} s"
        )
        return Trial(temperature, texts, rounds)

    def _environment(self, prompts: int) -> Environment:
        options = self._options
        return environment(
            target=options.target,
            dtype=options.dtype,
            max_tokens=options.max_tokens,
            seed=options.seed,
            drafter=", ".join(contender.label for contender in self._contenders),
            drafter_version=None,
            target_threads=options.threads or None,
            drafter_threads=1,
            prompts=prompts,
        )

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim")


def _vectors_for(variant: Variant, contender: Contender, text: WrittenText) -> SentVectors | None:
    if contender.projection is None or variant.age is None:
        return None
    return SentVectors(text.vectors[contender.projection], _PRECISIONS[variant.vectors], variant.age)


def _record_of(contender: Contender) -> DrafterRecord:
    package, steering = contender.package, contender.package.steering
    return DrafterRecord(
        contender.label,
        package.name,
        package.version,
        package.precision,
        package.parameters,
        None if steering is None else steering.projection,
        None if steering is None else steering.rank,
    )
