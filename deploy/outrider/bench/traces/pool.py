"""Selectors of a pool of drafters on every row of texts and every link, against single drafters and the oracle."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.bench.links import BenchLink
from outrider.bench.metrics import Bootstrap
from outrider.bench.replay.texts import Text, joined, texts_of
from outrider.bench.traces.pool_results import DRAFTER, ORACLE, SELECTOR, Accumulator, Row
from outrider.bench.traces.recording import Recording
from outrider.bench.traces.stages import Segment, Stage, Trajectory
from outrider.edge.policies.selection import selector_named
from outrider.proto.errors import ConfigError

MIX, MIDWAY = "mix", "midway"
STATIC = "static"  # stands for every drafter alone
NOTED = 60  # positions of a regret curve, at equal distances and once more at equal ratios


Variants = Mapping[tuple[str, str], Sequence[Text]]  # of each prompt, by domain and id: its texts by seed


def variants_of(texts: Sequence[Text]) -> Variants:
    """Group texts by prompt, in their order."""
    found: dict[tuple[str, str], list[Text]] = {}
    for text in texts:
        trace = text.traces[0]
        found.setdefault((trace.domain, trace.id), []).append(text)
    return found


def row_names(variants: Variants) -> tuple[str, ...]:
    """Return the domains; where there are several, their mix and `midway` too."""
    domains = tuple(dict.fromkeys(domain for domain, _ in variants))
    return (*domains, MIX, MIDWAY) if len(domains) > 1 else domains


def segments(row: str, variants: Variants, seed: int) -> list[Segment]:
    """Return what a selector meets in one run, in random order: a text of each prompt of the row, by turns of the seed.

    `midway` joins each prompt's text with one of another domain, which changes with the seed.
    """
    rng = np.random.default_rng(seed)
    chosen = [
        Segment(texts[seed % len(texts)], prompt, (prompt[0],))
        for prompt, texts in variants.items()
        if row in (MIX, MIDWAY, prompt[0])
    ]
    shuffled = [chosen[i] for i in rng.permutation(len(chosen))]
    return _midway(shuffled, row_names(variants)[:-2], seed) if row == MIDWAY else shuffled


def _midway(segments: Sequence[Segment], domains: Sequence[str], seed: int) -> list[Segment]:
    """Join each text with one of another domain, how many places further changes with the seed."""
    further = 1 + seed % (len(domains) - 1)
    after = {domain: domains[(i + further) % len(domains)] for i, domain in enumerate(domains)}
    own = {domain: [segment for segment in segments if segment.domains == (domain,)] for domain in domains}
    met = dict.fromkeys(domains, 0)
    found = []
    for segment in segments:
        (domain,) = segment.domains
        others = own[after[domain]]
        other = others[met[domain] % len(others)]
        met[domain] += 1
        found.append(Segment(joined((segment.text, other.text)), segment.prompt, (domain, after[domain])))
    return found


@dataclass(frozen=True, slots=True)
class Pool:
    """Scope of a trial.

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
        """Return the number of runs."""
        return len(self.links) * len(row_names(variants_of(texts_of(self.recording.traces)))) * self.seeds

    def rows(self, done: Callable[[], object]) -> Iterator[Row]:
        """Yield rows link by link; `done` is called after each run."""
        variants = variants_of(texts_of(self.recording.traces))
        for link in self.links:
            stage = self.stage(link)
            for name in row_names(variants):
                runs = [segments(name, variants, seed) for seed in range(self.seeds)]
                yield self._row(link, stage, name, runs, done)

    def _columns(self) -> list[tuple[str, str]]:
        """Return kind and name of each column."""
        drafters = self.recording.traces if STATIC in self.selectors else ()
        selectors = [name for name in self.selectors if name != STATIC]
        return [*((DRAFTER, name) for name in drafters), *((SELECTOR, name) for name in selectors), (ORACLE, ORACLE)]

    def _row(
        self,
        link: BenchLink,
        stage: Stage,
        name: str,
        runs: Sequence[Sequence[Segment]],
        done: Callable[[], object],
    ) -> Row:
        prompts = {prompt: index for index, prompt in enumerate(sorted(segment.prompt for segment in runs[0]))}
        positions = _positions(min(sum(segment.text.tokens for segment in run) for run in runs))
        columns = {column: Accumulator(len(self.recording.traces), prompts, positions) for column in self._columns()}
        cloud_s = np.zeros(len(prompts))
        for seed, run in enumerate(runs):
            for segment in run:
                cloud_s[prompts[segment.prompt]] += stage.cloud_s(segment.text)
            best = stage.best([segment.text for segment in run])
            for column, total in columns.items():
                total.add(run, self._trajectories(stage, column, run, seed, best), best)
            done()
        resampled = Bootstrap([domain for domain, _ in prompts], seed=0)
        return Row(
            link.record,
            name,
            len(prompts),
            tuple(positions.tolist()),
            tuple(total.cell(*column, cloud_s, resampled) for column, total in columns.items()),
            tuple(c for column, total in columns.items() if column[0] != DRAFTER for c in total.changes(*column)),
        )

    def _trajectories(
        self, stage: Stage, column: tuple[str, str], run: Sequence[Segment], seed: int, best: list[Trajectory]
    ) -> list[Trajectory]:
        kind, name = column
        texts, drafters = [segment.text for segment in run], list(self.recording.traces)
        if kind == ORACLE:
            return best
        if kind == DRAFTER:
            return stage.alone(texts, drafters.index(name))
        return stage.trajectories(texts, selector_named(name)(len(drafters), np.random.default_rng(seed)))


def _positions(tokens: int) -> np.ndarray:
    """Return rising positions from 1 to `tokens`."""
    places = np.concatenate([np.geomspace(1, tokens, NOTED), np.linspace(1, tokens, NOTED)])
    return np.unique(np.rint(places).astype(np.int64))
