"""One loss on one stream: every text is measured before it is learned from."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from outrider.bench.learning.hits import TextHits, hits_of
from outrider.bench.learning.record import LearningRun
from outrider.cloud.learning.adapted import AdaptedDrafter
from outrider.cloud.learning.learner import Learner
from outrider.cloud.learning.own_text import record_of_text
from outrider.cloud.learning.parent import load_parent
from outrider.cloud.learning.record import LessonRecord
from outrider.cloud.learning.settings import OWN, TrainerSettings
from outrider.cloud.learning.trainer import Trainer
from outrider.deploy.termination import temporary_folder
from outrider.drafters.adapters import read_adapter
from outrider.proto.salts import SALT_BYTES

TEXTS_A_MEASUREMENT = 4  # of the eight of a step
CURVE_POINTS = 16
HERE = "here"  # the arm of an edge that learns from its own texts


@dataclass(frozen=True, slots=True)
class StreamTexts:
    """Texts of a run: the stream, fresh ones of its domain, some of other domains to measure on and to rehearse."""

    stream: Sequence[LessonRecord]
    fresh: Sequence[LessonRecord]
    kept: Mapping[str, Sequence[LessonRecord]]
    rehearsal: Sequence[LessonRecord]


@dataclass(frozen=True, slots=True)
class LearningTrial:
    """A run to make; `start` is "warm" or "cold"."""

    stream: str
    start: str
    arm: str
    rehearsed: float
    seed: int

    @property
    def name(self) -> str:
        """Name of its file."""
        return f"{self.stream}-{self.start}-{self.arm}-{self.rehearsed:g}-{self.seed}.json"


def run_arm(trial: LearningTrial, package: str, texts: StreamTexts, before: Before) -> LearningRun:
    """Let a drafter learn from the stream, in an order of the seed's.

    Args:
        trial: loss, share of rehearsal and seed, which is that of the order, the first matrices and the batches.
        package: drafter to begin with.
        texts: texts of the run.
        before: hits of the drafter as it begins.
    """
    with temporary_folder("outrider-bench-") as folder:
        pupil = (_OwnPupil if trial.arm == HERE else _Pupil)(trial, package, folder, texts.rehearsal)
        return _run(trial, pupil, texts, before)


class _Pupil:
    """A trainer whose weights are measured as they are."""

    def __init__(
        self, trial: LearningTrial, package: str, folder: Path, rehearsal: Sequence[LessonRecord], **changes: Any
    ) -> None:
        settings: dict[str, Any] = {"loss": trial.arm, "seed": trial.seed, "rehearsed": trial.rehearsed} | changes
        self.settings = TrainerSettings(drafter=package, folder=folder, **settings)
        self.trainer = self._trainer(rehearsal)

    def _trainer(self, rehearsal: Sequence[LessonRecord]) -> Trainer:
        return Trainer(self.settings, rehearsal)

    def take(self, record: LessonRecord) -> None:
        """Take a text to learn from."""
        self.trainer.buffer.add(record)

    def step(self) -> None:
        """Make a step."""
        self.trainer.step()

    def serve_by(self, drafter: AdaptedDrafter) -> None:
        """Load what would draft now into `drafter`."""
        drafter.load(self.trainer.published_matrices())


class _OwnPupil(_Pupil):
    """An edge that learns here: from the tokens alone, of one key; what has proved better drafts."""

    def __init__(self, trial: LearningTrial, package: str, folder: Path, rehearsal: Sequence[LessonRecord]) -> None:
        super().__init__(trial, package, folder, rehearsal, **OWN)

    def _trainer(self, rehearsal: Sequence[LessonRecord]) -> Trainer:  # noqa: ARG002 - an edge has nothing to rehearse
        self._learner = Learner(self.settings)
        return self._learner.trainer

    def take(self, record: LessonRecord) -> None:
        own = record_of_text(
            record.tokens.tolist(),
            record.first_generated,
            record.sampling,
            model=self.trainer.package.target,
            session_salt=record.session_salt,
            key_salt=bytes(SALT_BYTES),
            prompt_class=record.prompt_class,
            at_s=record.at_s,
        )
        self._learner.take(own.encode())

    def step(self) -> None:
        self._learner.step(0.0)

    def serve_by(self, drafter: AdaptedDrafter) -> None:
        if self._learner.newest.adapter is not None:
            matrices = drafter.matrices()
            drafter.load(matrices | read_adapter(self._learner.newest))


def _run(trial: LearningTrial, pupil: _Pupil, texts: StreamTexts, before: Before) -> LearningRun:
    trainer = pupil.trainer
    served = AdaptedDrafter(load_parent(trainer.package), rank=trainer.drafter.rank)
    order = np.random.default_rng([trial.seed, 9]).permutation(len(texts.stream))
    waiting: list[LessonRecord] = []
    curve: list[tuple[int, int, float]] = []  # tokens served, tokens measured, hits
    tokens, cpu_s = 0, 0.0
    for index in order.tolist():
        record = texts.stream[index]
        began = time.process_time()
        pupil.take(record)
        cpu_s += time.process_time() - began
        waiting.append(record)
        tokens += len(record)
        if not trainer.ready():
            continue
        pupil.serve_by(served)
        found = hits_of(served, waiting[:TEXTS_A_MEASUREMENT])
        curve.append((tokens, int(found.positions.sum()), float(found.hits.sum())))
        waiting.clear()
        began = time.process_time()
        pupil.step()
        cpu_s += time.process_time() - began
    pupil.serve_by(served)
    after = hits_of(served, texts.fresh)
    kept = {name: hits_of(served, records) for name, records in texts.kept.items()}
    exponent, half = regret(curve, before.fresh.share(), after.share())
    return LearningRun(
        stream=trial.stream,
        arm=trial.arm,
        start=trial.start,
        seed=trial.seed,
        rehearsed=trial.rehearsed,
        tokens=tokens,
        steps=trainer.state.step,
        before=before.fresh.shares(),
        after=after.shares(),
        error=after.errors_of_change(before.fresh),
        kept_before={name: hits.shares() for name, hits in before.kept.items()},
        kept_after={name: hits.shares() for name, hits in kept.items()},
        kept_errors={name: hits.errors_of_change(before.kept[name]) for name, hits in kept.items()},
        curve=thinned(curve),
        exponent=None if exponent is None else round(exponent, 3),
        half_gain_tokens=half,
        cpu_s=round(cpu_s, 1),
    )


@dataclass(frozen=True, slots=True, eq=False)
class Before:
    """Hits of a drafter before it learns."""

    fresh: TextHits
    kept: Mapping[str, TextHits]


def measure_start(package: str, texts: StreamTexts) -> Before:
    """Return a drafter's hits before it learns."""
    with temporary_folder("outrider-bench-") as folder:
        drafter = Trainer(TrainerSettings(drafter=package, folder=folder)).drafter
    return Before(hits_of(drafter, texts.fresh), {name: hits_of(drafter, each) for name, each in texts.kept.items()})


def thinned(curve: Sequence[tuple[int, int, float]]) -> list[tuple[int, float]]:
    """Return about `CURVE_POINTS` points: tokens served, and the mean of the hits since the point before."""
    parts = np.array_split(np.array(curve), min(CURVE_POINTS, len(curve)))
    return [(int(part[-1, 0]), round(float(part[:, 2].sum() / part[:, 1].sum()), 4)) for part in parts]


def regret(curve: Sequence[tuple[int, int, float]], before: float, after: float) -> tuple[float | None, int | None]:
    """Return the exponent b of the cumulative regret t^b to the last drafter, and the tokens to half the gain.

    The regret after t tokens is the sum of what the last drafter's share of hits, `after`, exceeds that of the time by;
    b is the slope of its logarithm over that of t, from a tenth of the stream on. Below 1 it flattens.
    """
    if after <= before or len(curve) < 8:
        return None, None
    tokens = np.array([point[0] for point in curve], dtype=float)
    shares = np.array([point[2] / point[1] for point in curve])
    lost = np.cumsum((after - shares) * np.diff(tokens, prepend=0.0))
    late = (tokens >= tokens[-1] / 10) & (lost > 0)
    exponent = float(np.polyfit(np.log(tokens[late]), np.log(lost[late]), 1)[0]) if late.sum() >= 4 else None
    width = max(1, len(shares) // 10)
    smooth = np.convolve(shares, np.ones(width) / width, mode="valid")
    reached = np.flatnonzero(smooth >= (before + after) / 2)
    return exponent, int(tokens[reached[0] + width - 1]) if len(reached) else None
