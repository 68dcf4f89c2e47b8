"""`outrider compare`: block efficiency of drafters on the same texts of the same target."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

import torch
from rich.console import Console
from tokenizers import Tokenizer

from outrider.bench.commands import CompareSettings
from outrider.bench.comparison.plots import check_plot, draw
from outrider.bench.comparison.record import NO_VECTORS, Comparison, DrafterRecord, SteeringCost, Variant, in_front
from outrider.bench.comparison.rounds import Rounds, synchronous_rounds
from outrider.bench.comparison.steps import steering_costs
from outrider.bench.comparison.summary import Summary, Trial
from outrider.bench.comparison.tables import tables
from outrider.bench.drafters import find_packages, load_drafters
from outrider.bench.environment import environment
from outrider.bench.outputs import hand_out, progress
from outrider.bench.vectors import SentVectors
from outrider.cloud.config import VerifierConfig
from outrider.cloud.precision import dtype_name
from outrider.cloud.steering import Projection
from outrider.cloud.steering_vectors import SteeringVectors, load_projections
from outrider.cloud.target import load_target
from outrider.cloud.text_writer import TextRequest, TextWriter, WrittenText
from outrider.cloud.transformers_backend import TransformersBackend
from outrider.deploy.arguments import Given
from outrider.deploy.progress import waiting
from outrider.deploy.prompts import Prompt, choose_prompts
from outrider.drafters.packages import DrafterPackage
from outrider.proto.errors import ConfigError
from outrider.proto.types import Sampling, SteeringPrecision

_PRECISIONS = {"int8": SteeringPrecision.INT8, "float16": SteeringPrecision.FLOAT16}


def compare(given: Given) -> int:
    """Run `outrider compare`."""
    options, verifier = given(CompareSettings), given(VerifierConfig)
    hand_out(
        options.json,
        options.plot,
        lambda: _Comparing(options, verifier).compare(),
        tables,
        draw,
        check_plot=check_plot,
    )
    return 0


class _Comparing:
    """One comparison from its options to its record."""

    def __init__(self, options: CompareSettings, verifier: VerifierConfig) -> None:
        self._options = options
        self._verifier = verifier
        self._prompts = choose_prompts(options.prompts, options.per_domain)
        packages = find_packages(options.package, "package")
        torch.set_num_threads(verifier.torch_threads)
        with waiting(f"loading the target {verifier.target}"):
            self._target = load_target(verifier.target, device=verifier.device, dtype=verifier.dtype)
        self._drafters = load_drafters(packages, self._target.tokenizer_json, "package")
        self._console = Console(stderr=True, highlight=False)
        self._records = {label: _record_of(label, package) for label, package in packages.items() if package}
        self._variants = [variant for record in self._records.values() for variant in self._variants_of(record)]
        self._projections = self._wanted_projections()
        self._writer = TextWriter(self._target, self._projections, max_age=max(options.age))

    def compare(self) -> Comparison:
        """Compare the drafters on texts after the prompts."""
        options = self._options
        tokenizer = Tokenizer.from_str(self._target.tokenizer_json)
        encoded = [(prompt, tuple(tokenizer.encode(prompt.text).ids)) for prompt in self._prompts]
        trials = [self._trial(encoded, temperature) for temperature in options.temperature]
        summaries = [Summary(trial, seed=options.seed) for trial in trials]
        shown = in_front(self._variants)
        last = next(variant for variant in shown if variant.drafter == list(self._drafters)[-1])
        others = [variant for variant in shown if variant != last]
        return Comparison(
            environment=environment(
                self._verifier,
                dtype_name(self._target.dtype),
                max_tokens=options.max_tokens,
                seed=options.seed,
                drafter=", ".join(self._drafters),
                drafter_version=None,
                drafter_threads=1,
                prompts=len(self._prompts),
            ),
            drafts=options.drafts,
            drafters=tuple(self._records.values()),
            variants=tuple(self._variants),
            results=tuple(result for each in summaries for result in each.results()),
            ratios=tuple(ratio for each in summaries for ratio in each.ratios(last, others)),
            mean_ratios=tuple(ratio for each in summaries for ratio in each.mean_ratios(last, others)),
            texts=tuple(text for each in summaries for text in each.texts()),
            steps=tuple(self._steps(max(trials[0].texts, key=len))),
        )

    def _variants_of(self, record: DrafterRecord) -> list[Variant]:
        """Return the variants of a drafter by precision, then by age; one where it takes no vectors."""
        if record.projection is None:
            return [Variant(record.label)]
        return [
            Variant(record.label, precision, age)
            for precision in self._options.precision
            for age in (self._options.age if precision != NO_VECTORS else (None,))
        ]

    def _wanted_projections(self) -> dict[str, Projection]:
        """Return the projections whose steering vectors are wanted, by id."""
        model = self._verifier.target
        found = load_projections(
            list(self._verifier.steering), TransformersBackend(self._target).facts, name=model, model=model
        )
        wanted: dict[str, Projection] = {}
        for label in dict.fromkeys(variant.drafter for variant in self._variants if variant.vectors != NO_VECTORS):
            name = self._records[label].projection or ""
            if name not in found:
                raise ConfigError(
                    f"none is projection {name}, whose vectors {label!r} takes; name its projection.safetensors, or "
                    "compare it with --precision none",
                    field="steering",
                )
            wanted[name] = found[name]
        return wanted

    def _trial(self, encoded: Sequence[tuple[Prompt, tuple[int, ...]]], temperature: float) -> Trial:
        options = self._options
        sampling = Sampling(
            temperature=temperature,
            seed=options.seed,
            max_tokens=options.max_tokens,
            noise=self._verifier.noise,
        )
        began = time.monotonic()
        texts = self._writer.write([TextRequest(ids, sampling, p.id, p.domain) for p, ids in encoded])
        tokens, seconds = sum(map(len, texts)), time.monotonic() - began
        self._say(f"T = {temperature:g}: {len(texts)} texts of {tokens} tokens by the target in {seconds:.0f} s")
        rounds: dict[Variant, list[Rounds]] = {variant: [] for variant in self._variants}
        began = time.monotonic()
        with progress(self._console, "drafting", len(texts)) as advance:
            for text in texts:
                for variant, found in rounds.items():  # in turn: a slow moment meets them all
                    drafter, vectors = self._drafters[variant.drafter], self._vectors(variant, text)
                    found.append(synchronous_rounds(drafter, text, sampling, vectors, drafts=options.drafts))
                advance()
        self._say(f"T = {temperature:g}: {len(rounds)} drafters through them in {time.monotonic() - began:.0f} s")
        return Trial(temperature, texts, rounds)

    def _vectors(self, variant: Variant, text: WrittenText) -> SentVectors | None:
        projection = self._records[variant.drafter].projection
        if projection is None or variant.age is None:
            return None
        return SentVectors(text.vectors[projection], _PRECISIONS[variant.vectors], variant.age)

    def _steps(self, text: WrittenText) -> Iterator[SteeringCost]:
        backend = TransformersBackend(self._target)
        vectors = SteeringVectors(backend, self._projections)
        for projection in self._projections:
            yield from steering_costs(backend, vectors, projection, text)

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim")


def _record_of(label: str, package: DrafterPackage) -> DrafterRecord:
    return DrafterRecord(
        label,
        package.name,
        package.version,
        package.precision,
        package.parameters,
        package.steering.projection if package.steering else None,
        package.steering.rank if package.steering else None,
    )
