"""`outrider compare`: block efficiency of drafters on the same texts of the same target."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from outrider.bench.benchmark.record import Environment, environment
from outrider.bench.comparison.codes import SentCodes
from outrider.bench.comparison.contenders import (
    NO_CODES,
    Contender,
    Variant,
    in_front,
    load_contenders,
    load_packages,
    variants_of,
)
from outrider.bench.comparison.figures import Figures, Trial
from outrider.bench.comparison.plot import check_plot, draw
from outrider.bench.comparison.record import Comparison, DrafterRecord, save
from outrider.bench.comparison.rounds import Rounds, synchronous_rounds
from outrider.bench.comparison.steps import StepCost, step_costs
from outrider.bench.comparison.table import tables
from outrider.bench.comparison.texts import Text, Writer
from outrider.cloud.projections import load_projections
from outrider.cloud.steering import Projection
from outrider.cloud.steering_codes import SteeringCodes
from outrider.cloud.target import Target, load_target
from outrider.deploy.prompts import Prompt, choose_prompts
from outrider.proto.errors import ConfigError
from outrider.proto.types import Sampling, SteeringPrecision

_PRECISIONS = {"int8": SteeringPrecision.INT8, "float16": SteeringPrecision.FLOAT16}


def compare(options: argparse.Namespace) -> int:
    """`outrider compare`."""
    for name in ("temperature", "age", "precision"):
        _check_list(name, getattr(options, name))
    if options.plot:
        check_plot(options.plot)
    prompts = choose_prompts(options.prompts, options.per_domain)
    packages = load_packages(options.package)
    if options.threads:
        torch.set_num_threads(options.threads)
    target = load_target(options.target, device=options.device, dtype=options.dtype)
    contenders = load_contenders(packages, target.tokenizer_sha256)
    comparison = _Comparing(options, target, contenders).of(prompts)
    Console(width=100, highlight=False).print(tables(comparison))
    if options.json:
        save(comparison, options.json)
    if options.plot:
        draw(comparison, options.plot)
    return 0


def _check_list(name: str, entries: Sequence[Any]) -> None:
    if not entries or len(set(entries)) != len(entries):
        raise ConfigError("must name something, and nothing twice", field=name)


class _Comparing:
    """One comparison from its drafters to its record."""

    def __init__(self, options: argparse.Namespace, target: Target, contenders: Sequence[Contender]) -> None:
        self._options = options
        self._target = target
        self._contenders = contenders
        self._console = Console(stderr=True, highlight=False)
        self._variants = {
            variant: contender
            for contender in contenders
            for variant in variants_of(contender, options.precision, options.age)
        }
        self._projections = self._wanted_projections()
        self._writer = Writer(target, self._projections, oldest=max(options.age))

    def of(self, prompts: Sequence[Prompt]) -> Comparison:
        """The whole comparison."""
        options = self._options
        tokenizer = Tokenizer.from_str(self._target.tokenizer_json)
        encoded = [(prompt, tuple(tokenizer.encode(prompt.text).ids)) for prompt in prompts]
        trials = [self._trial(encoded, temperature) for temperature in options.temperature]
        found = [Figures(trial, seed=options.seed) for trial in trials]
        shown = in_front(list(self._variants))
        last = next(variant for variant in shown if variant.drafter == self._contenders[-1].label)
        others = [variant for variant in shown if variant != last]
        return Comparison(
            environment=self._environment(len(prompts)),
            drafts=options.drafts,
            drafters=tuple(map(_record_of, self._contenders)),
            variants=tuple(self._variants),
            figures=tuple(figure for each in found for figure in each.figures()),
            ratios=tuple(ratio for each in found for ratio in each.ratios(last, others)),
            mean_ratios=tuple(ratio for each in found for ratio in each.mean_ratios(last, others)),
            texts=tuple(text for each in found for text in each.texts()),
            steps=tuple(self._steps(max(trials[0].texts, key=lambda text: text.tokens))),
        )

    def _steps(self, text: Text) -> Iterator[StepCost]:
        codes = SteeringCodes(self._target, self._projections)
        for projection in self._projections:
            yield from step_costs(self._target, codes, projection, text)

    def _wanted_projections(self) -> dict[str, Projection]:
        """Those whose codes are wanted, by id."""
        options = self._options
        found = load_projections(
            [str(path) for path in options.steering], self._target, name=options.target, model=options.target
        )
        steered = {contender.projection: contender for v, contender in self._variants.items() if v.codes != NO_CODES}
        wanted: dict[str, Projection] = {}
        for name, contender in steered.items():
            if name is None or name not in found:
                raise ConfigError(
                    f"none is projection {name}, whose codes {contender.label!r} takes; name its "
                    "projection.safetensors, or compare it with --precision none",
                    field="steering",
                )
            wanted[name] = found[name]
        return wanted

    def _trial(self, encoded: Sequence[tuple[Prompt, tuple[int, ...]]], temperature: float) -> Trial:
        options = self._options
        sampling = Sampling(temperature=temperature, seed=options.seed, max_tokens=options.max_tokens)
        began = time.monotonic()
        texts = self._writer.write(encoded, sampling)
        tokens = sum(text.tokens for text in texts)
        seconds = time.monotonic() - began
        self._say(f"T = {temperature:g}: {len(texts)} texts of {tokens} tokens by the target in {seconds:.0f} s")
        rounds: dict[Variant, list[Rounds]] = {variant: [] for variant in self._variants}
        drafted_from = time.monotonic()
        silent = not self._console.is_terminal
        for text in track(texts, "drafting", console=self._console, transient=True, disable=silent):
            for variant, contender in self._variants.items():  # in turn: a slow moment meets them all
                codes = _codes_for(variant, contender, text)
                rounds[variant].append(
                    synchronous_rounds(contender.drafter, text, sampling, codes, drafts=options.drafts)
                )
        self._say(
            f"T = {temperature:g}: {len(rounds)} drafters through them in {time.monotonic() - drafted_from:.0f} s"
        )
        return Trial(temperature, texts, rounds)

    def _environment(self, prompts: int) -> Environment:
        options = self._options
        return environment(
            command=shlex.join(["outrider", *sys.argv[1:]]),
            target=options.target,
            dtype=options.dtype,
            drafter=", ".join(contender.label for contender in self._contenders),
            drafter_version=None,
            target_threads=options.threads or None,
            drafter_threads=1,
            prompts=prompts,
            max_tokens=options.max_tokens,
            seed=options.seed,
        )

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim")


def _codes_for(variant: Variant, contender: Contender, text: Text) -> SentCodes | None:
    if contender.projection is None or variant.age is None:
        return None
    return SentCodes(text.codes[contender.projection], _PRECISIONS[variant.codes], variant.age)


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
