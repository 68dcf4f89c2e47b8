"""`outrider rule-bench`: what other rules of acceptance and other drafters would bring on a target's own texts."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from statistics import fmean
from typing import Any

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer

from outrider.bench.environment import environment
from outrider.bench.outputs import check_file, progress
from outrider.bench.record import save
from outrider.bench.rules import couplings
from outrider.bench.rules.passes import layer_costs, pass_costs
from outrider.bench.rules.paths import Distributions, Models, hits_of, judged_paths, runs_of
from outrider.bench.rules.record import BlockResult, LayerResult, ListResult, RuleRecord
from outrider.bench.rules.settings import RuleSettings
from outrider.bench.rules.tables import tables
from outrider.cloud.config import VerifierConfig
from outrider.cloud.family_index import load_causal_lm, resolve_target
from outrider.cloud.learning.parent import load_parent
from outrider.cloud.target import load_target
from outrider.cloud.text_writer import TextRequest, TextWriter, WrittenText
from outrider.deploy.arguments import Given
from outrider.deploy.progress import waiting
from outrider.deploy.prompts import choose_prompts
from outrider.drafters import find_package
from outrider.proto.errors import TokenizerMismatch
from outrider.proto.types import Sampling


def rule_bench(given: Given) -> int:
    """Run `outrider rule-bench`."""
    options, verifier = given(RuleSettings), given(VerifierConfig)
    if options.json:
        check_file(options.json, "json")
    record = _RuleBench(options, verifier).run()
    Console(width=100, highlight=False).print(tables(record))
    if options.json:
        save(record, options.json)
    return 0


@dataclass(slots=True)
class _Sums:
    """Measures of every position at temperature 1."""

    shared_noise: list[float]
    maximal: list[float]
    hits: list[bool]
    ranks: list[np.ndarray]
    transport: dict[int, list[float]]


class _RuleBench:
    """One measurement from its options to its record."""

    def __init__(self, options: RuleSettings, verifier: VerifierConfig) -> None:
        self._options, self._verifier = options, verifier
        self._prompts = choose_prompts(options.prompts, options.per_domain)
        self._package = package = find_package(options.drafter)
        torch.set_num_threads(verifier.torch_threads)
        with waiting(f"loading the target {verifier.target}"):
            self._target = load_target(verifier.target, dtype="float32")
            target: Any = load_causal_lm(
                resolve_target(verifier.target), f"cannot load {verifier.target}", field="target"
            )
        if package.tokenizer_sha256 != self._target.tokenizer_sha256:
            raise TokenizerMismatch(f"{package.name} has another tokenizer than the target", field="drafter")
        drafter: Any = load_parent(package).model
        self._models = Models(target.eval(), drafter.eval())
        self._rng = np.random.default_rng(options.seed)
        self._console = Console(stderr=True, highlight=False)

    @torch.inference_mode()
    def run(self) -> RuleRecord:
        """Measure all of it."""
        sampled, greedy = (list(self._texts(temperature)) for temperature in (1.0, 0.0))
        sums, layers = self._positions(sampled)
        ranks_greedy, layers_greedy = self._greedy(greedy)
        ranks = np.concatenate(sums.ranks)
        lists = [
            ListResult(1.0, count, float((ranks <= count).mean()), fmean(sums.transport[count]))
            for count in self._options.lists
        ]
        lists += [ListResult(0.0, count, float((ranks_greedy <= count).mean()), None) for count in self._options.lists]
        made_in = environment(
            self._verifier,
            "float32",
            max_tokens=self._options.max_tokens,
            seed=self._options.seed,
            drafter=self._package.name,
            drafter_version=self._package.version,
            drafter_threads=1,
            prompts=len(self._prompts),
        )
        costs = layer_costs(self._models.target, sampled[0].transcript)
        return RuleRecord(
            environment=made_in,
            positions=len(sums.maximal),
            shared_noise=fmean(sums.shared_noise),
            maximal=fmean(sums.maximal),
            greedy=float((ranks_greedy <= 1).mean()),
            coupled_hits=fmean(sums.hits),
            lists=tuple(lists),
            blocks=tuple(self._blocks(sampled)),
            layers=tuple(
                LayerResult(number, cost.parameters, cost.step_ms, fmean(layers_greedy[number]), fmean(layers[number]))
                for number, cost in costs.items()
            ),
            passes=tuple(pass_costs(self._package, sampled[0].transcript)),
        )

    def _texts(self, temperature: float) -> Iterator[WrittenText]:
        """Yield the target's texts after the prompts."""
        tokenizer = Tokenizer.from_str(self._target.tokenizer_json)
        options = self._options
        requests = [
            TextRequest(
                tuple(tokenizer.encode(prompt.text).ids),
                Sampling(temperature=temperature, seed=options.seed + number, max_tokens=options.max_tokens),
            )
            for number, prompt in enumerate(self._prompts)
        ]
        yield from TextWriter(self._target).write(requests)

    def _each(self, doing: str, texts: Sequence[WrittenText]) -> Iterator[tuple[WrittenText, Distributions]]:
        with progress(self._console, doing, len(texts)) as advance:
            for text in texts:
                yield text, self._models.distributions(text)
                advance()

    def _positions(self, texts: Sequence[WrittenText]) -> tuple[_Sums, dict[int, list[float]]]:
        """Return the measures of every position at temperature 1, and the chances of the target's first layers."""
        options = self._options
        sums = _Sums([], [], [], [], {count: [] for count in options.lists})
        layers: dict[int, list[float]] = {}
        for text, found in self._each("positions at T = 1", texts):
            sums.hits += hits_of(text, found.by_drafter)
            for p, q in zip(found.by_target, found.by_drafter, strict=True):
                sums.shared_noise.append(couplings.shared_noise(p, q))
                sums.maximal.append(couplings.maximal(p, q))
                sums.ranks.append(couplings.ranks_under_shared_noise(p, q, options.draws, self._rng))
                for count, best in sums.transport.items():
                    best.append(couplings.best_of_transport(p, q, count))
            for number, rows in enumerate(found.by_layers, 1):
                pairs = zip(found.by_target, rows, strict=True)
                layers.setdefault(number, []).extend(couplings.shared_noise(p, q) for p, q in pairs)
        return sums, layers

    def _greedy(self, texts: Sequence[WrittenText]) -> tuple[np.ndarray, dict[int, list[bool]]]:
        """Return [n] the rank of the target's most likely token in the drafter's order, and the hits of its layers."""
        ranks: list[int] = []
        layers: dict[int, list[bool]] = {}
        for text, found in self._each("positions at T = 0", texts):
            for token, q in zip(text.tokens, found.by_drafter, strict=True):
                ranks.append(1 + int((q > q[token]).sum()))
            for number, rows in enumerate(found.by_layers, 1):
                layers.setdefault(number, []).extend(_top(rows) == np.asarray(text.tokens))
        return np.asarray(ranks), layers

    def _blocks(self, texts: Sequence[WrittenText]) -> Iterable[BlockResult]:
        """Return the expected accepted drafts of chains from the same places, by each rule."""
        options = self._options
        longest = max(options.blocks)
        ratios: list[np.ndarray] = []
        runs: list[int] = []
        with progress(self._console, "chains", len(texts)) as advance:
            for text in texts:
                hits = hits_of(text, self._models.distributions(text).by_drafter)
                starts = range(0, len(hits) - longest + 1, options.stride)
                if starts:
                    ratios += list(judged_paths(self._models, text, starts, longest, self._rng))
                    runs += runs_of(hits, longest)
                advance()
        for length in options.blocks:
            yield BlockResult(
                temperature=1.0,
                drafts=length,
                shared_noise=fmean(min(run, length) for run in runs),
                by_tokens=fmean(couplings.accepted_by_tokens(path[:length]) for path in ratios),
                by_blocks=fmean(couplings.accepted_by_blocks(path[:length]) for path in ratios),
                paths=len(ratios),
            )


def _top(rows: np.ndarray) -> np.ndarray:
    """Return [n] the most likely token of each of the distributions [n, vocab]."""
    best: np.ndarray = rows.argmax(axis=-1)
    return best
