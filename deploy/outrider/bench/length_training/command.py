"""`outrider train policy`: recorded hits to the weights of the trained length rules."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from rich.console import Console

from outrider.bench.commands import PolicySettings
from outrider.bench.length_training.evaluation import Evaluation, evaluate, tables
from outrider.bench.length_training.fit import Fit
from outrider.bench.length_training.rows import Rows, block_rows, draft_rows
from outrider.bench.outputs import check_file
from outrider.bench.replay.traces import HitTrace, load_traces
from outrider.deploy.arguments import Given
from outrider.edge.policies.length.features import BLOCK_INPUTS, DRAFT_INPUTS
from outrider.edge.policies.length.network import Trained, save_trained
from outrider.proto.errors import ConfigError

SAYINGS = frozenset((*DRAFT_INPUTS, *BLOCK_INPUTS)) - {"temperature", "depth", "known", "length"}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyTraining:
    """Training of both networks.

    Attributes:
        fit: settings of each fit.
        held_out: share of the prompts kept for evaluation.
        max_rows: rows that each learns from; drawn if there are more.
    """

    fit: Fit
    held_out: float = 0.2
    max_rows: int = 400_000

    def train(self, traces: Sequence[HitTrace]) -> tuple[Trained, Mapping[str, Evaluation]]:
        """Return both networks, and how they do on the held-out prompts.

        Raises:
            ConfigError: there are too few traces.
        """
        learnt, unseen = self._split(traces)
        networks, evaluations = {}, {}
        for name, inputs, rows_of in (("head", DRAFT_INPUTS, draft_rows), ("block", BLOCK_INPUTS, block_rows)):
            rng = np.random.default_rng(self.fit.seed)
            rows: Rows = rows_of(learnt, rng).some(self.max_rows, rng)
            networks[name] = self.fit.network(inputs, SAYINGS, rows)
            evaluations[name] = evaluate(networks[name], rows, rows_of(unseen, rng).some(self.max_rows, rng))
        made = {
            "texts": len(traces),
            "prompts": len({trace.id for trace in traces}),
            "drafters": sorted({f"{trace.drafter} {trace.drafter_version}" for trace in traces}),
            "temperatures": sorted({trace.temperature for trace in traces}),
            "held_out": self.held_out,
            **asdict(self.fit),
            "losses": {name: round(evaluation.loss, 4) for name, evaluation in evaluations.items()},
        }
        return Trained(**networks, made=made), evaluations

    def _split(self, traces: Sequence[HitTrace]) -> tuple[list[HitTrace], list[HitTrace]]:
        """Split by prompt, so that no drafter and no seed gives away another's text."""
        prompts = sorted({(trace.domain, trace.id) for trace in traces})
        rng = np.random.default_rng(self.fit.seed)
        held = {prompts[i] for i in rng.permutation(len(prompts))[: round(self.held_out * len(prompts))]}
        if not held or len(held) == len(prompts):
            raise ConfigError(
                f"hold {len(prompts)} prompts, too few to keep {self.held_out:g} of them for evaluation; record more, "
                "or set --held-out",
                field="traces",
            )
        learnt = [trace for trace in traces if (trace.domain, trace.id) not in held]
        return learnt, [trace for trace in traces if (trace.domain, trace.id) in held]


def train_policy(given: Given) -> int:
    """Run `outrider train policy`."""
    options = given(PolicySettings)
    check_file(options.output, "output")
    traces = [trace for path in options.traces for trace in load_traces(path.expanduser())]
    fit = Fit(hidden=options.hidden, steps=options.steps, seed=options.seed)
    trained, evaluations = PolicyTraining(fit=fit, held_out=options.held_out).train(traces)
    made = {"traces_sha256": _hash(options.traces), **trained.made}
    try:
        version = save_trained(Trained(trained.head, trained.block, made), options.output)
    except OSError as error:
        raise ConfigError(f"cannot write {options.output}: {error.strerror}", field="output") from error
    Console(width=100, highlight=False).print(tables(evaluations))
    print(f"{options.output}: weights {version}; use them with --window specdec++@{options.output}, and with speckv")
    return 0


def _hash(paths: Sequence[Path]) -> str:
    """Return the hash of all files, in their order."""
    whole = hashlib.sha256()
    for path in paths:
        whole.update(hashlib.sha256(path.expanduser().read_bytes()).digest())
    return whole.hexdigest()
