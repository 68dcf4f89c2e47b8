"""Selectors of a pool of drafters on every row of texts and every link, against single drafters and the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.bench.benchmark.links import BenchLink
from outrider.bench.comparison.bootstrap import Bootstrap
from outrider.bench.replay.selection import texts_of
from outrider.bench.traces.pool_figures import DRAFTER, ORACLE, SELECTOR, Row
from outrider.bench.traces.recording import Recording
from outrider.bench.traces.rows import MIDWAY, MIX, Passage, passages, row_names, variants_of
from outrider.bench.traces.stages import Course, Stage
from outrider.bench.traces.tally import Tally
from outrider.edge.policies.selection import selector_named
from outrider.proto.errors import ConfigError

STATIC = "static"  # stands for every drafter alone
NOTED = 60  # positions of a regret curve, at equal distances and once more at equal ratios


@dataclass(frozen=True, slots=True)
class Pool:
    """What is tried.

    Attributes:
        recording: of the drafters of the pool.
        links: over which.
        selectors: names.
        stage: where a link is played.
        seeds: runs of each row; they differ in order, in texts where several were recorded, and in what selectors draw.

    Raises:
        ConfigError: a domain is called as one of the other rows.
    """

    recording: Recording
    links: Sequence[BenchLink]
    selectors: Sequence[str]
    stage: Callable[[BenchLink], Stage]
    seeds: int = 20

    def __post_init__(self) -> None:
        for domain in self.recording.domains:
            if domain in (MIX, MIDWAY):
                raise ConfigError(f"has a domain {domain!r}, which is the name of a row; rename it", field="traces")

    def __len__(self) -> int:
        """Runs."""
        return len(self.links) * len(row_names(variants_of(texts_of(self.recording.traces)))) * self.seeds

    def rows(self, done: Callable[[], object]) -> Iterator[Row]:
        """Link by link; `done` is called after each run."""
        variants = variants_of(texts_of(self.recording.traces))
        for link in self.links:
            stage = self.stage(link)
            for name in row_names(variants):
                runs = [passages(name, variants, seed) for seed in range(self.seeds)]
                yield self._row(link, stage, name, runs, done)

    def _columns(self) -> list[tuple[str, str]]:
        """Kind and name of each."""
        drafters = self.recording.traces if STATIC in self.selectors else ()
        selectors = [name for name in self.selectors if name != STATIC]
        return [*((DRAFTER, name) for name in drafters), *((SELECTOR, name) for name in selectors), (ORACLE, ORACLE)]

    def _row(
        self,
        link: BenchLink,
        stage: Stage,
        name: str,
        runs: Sequence[Sequence[Passage]],
        done: Callable[[], object],
    ) -> Row:
        prompts = {prompt: index for index, prompt in enumerate(sorted(passage.prompt for passage in runs[0]))}
        positions = _positions(min(sum(passage.text.tokens for passage in run) for run in runs))
        tallies = {column: Tally(len(self.recording.traces), prompts, positions) for column in self._columns()}
        cloud_s = np.zeros(len(prompts))
        for seed, run in enumerate(runs):
            for passage in run:
                cloud_s[prompts[passage.prompt]] += stage.cloud_s(passage.text)
            best = stage.best([passage.text for passage in run])
            for column, tally in tallies.items():
                tally.add(run, self._courses(stage, column, run, seed, best), best)
            done()
        resampled = Bootstrap([domain for domain, _ in prompts], seed=0)
        return Row(
            link.record,
            name,
            len(prompts),
            tuple(positions.tolist()),
            tuple(tally.cell(*column, cloud_s, resampled) for column, tally in tallies.items()),
            tuple(c for column, tally in tallies.items() if column[0] != DRAFTER for c in tally.changes(*column)),
        )

    def _courses(
        self, stage: Stage, column: tuple[str, str], run: Sequence[Passage], seed: int, best: list[Course]
    ) -> list[Course]:
        kind, name = column
        texts, drafters = [passage.text for passage in run], list(self.recording.traces)
        if kind == ORACLE:
            return best
        if kind == DRAFTER:
            return stage.alone(texts, drafters.index(name))
        return stage.courses(texts, selector_named(name)(len(drafters), np.random.default_rng(seed)))


def _positions(tokens: int) -> np.ndarray:
    """Rising, from 1 to `tokens`."""
    places = np.concatenate([np.geomspace(1, tokens, NOTED), np.linspace(1, tokens, NOTED)])
    return np.unique(np.rint(places).astype(np.int64))
