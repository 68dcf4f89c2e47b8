"""`outrider train policy`: recorded hits to the weights of the trained length rules."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import numpy as np
from rich.console import Console

from outrider.bench.commands import PolicySettings
from outrider.bench.length_training.evaluation import Evaluation, evaluate, tables
from outrider.bench.length_training.fit import Fit
from outrider.bench.length_training.rows import block_rows, draft_rows
from outrider.bench.outputs import check_file
from outrider.bench.replay.traces import HitTrace, load_traces
from outrider.deploy.arguments import Given
from outrider.edge.policies.length.features import BLOCK_INPUTS, DRAFT_INPUTS
from outrider.edge.policies.length.network import Trained, save_trained
from outrider.proto.errors import ConfigError

MAX_ROWS = 400_000  # for each network; drawn if there are more


def train_policy(given: Given) -> int:
    """Run `outrider train policy`."""
    options = given(PolicySettings)
    check_file(options.output, "output")
    files = [path.expanduser() for path in options.traces]
    traces = [trace for path in files for trace in load_traces(path)]
    fit = Fit(hidden=options.hidden, steps=options.steps, seed=options.seed)
    trained, evaluations = train(traces, fit, options.held_out)
    hashes = b"".join(hashlib.sha256(path.read_bytes()).digest() for path in files)
    made = {"traces_sha256": hashlib.sha256(hashes).hexdigest(), **trained.made}
    try:
        version = save_trained(replace(trained, made=made), options.output)
    except OSError as error:
        raise ConfigError(f"cannot write {options.output}: {error.strerror}", field="output") from error
    Console(width=100, highlight=False).print(tables(evaluations))
    print(f"{options.output}: weights {version}; use them with --window specdec++@{options.output}, and with speckv")
    return 0


def train(traces: Sequence[HitTrace], fit: Fit, held_out: float = 0.2) -> tuple[Trained, Mapping[str, Evaluation]]:
    """Return both networks, and their evaluations on the share `held_out` of the prompts.

    Raises:
        ConfigError: there are too few traces.
    """
    known, unseen = split(traces, held_out, fit.seed)
    networks, evaluations = {}, {}
    for name, inputs, rows_of in (("head", DRAFT_INPUTS, draft_rows), ("block", BLOCK_INPUTS, block_rows)):
        rng = np.random.default_rng(fit.seed)
        rows = rows_of(known, rng).some(MAX_ROWS, rng)
        networks[name] = fit.network(inputs, rows)
        evaluations[name] = evaluate(networks[name], rows, rows_of(unseen, rng).some(MAX_ROWS, rng))
    made = {
        "texts": len(traces),
        "prompts": len({trace.id for trace in traces}),
        "drafters": sorted({f"{trace.drafter} {trace.drafter_version}" for trace in traces}),
        "temperatures": sorted({trace.temperature for trace in traces}),
        "held_out": held_out,
        **asdict(fit),
        "losses": {name: round(evaluation.loss, 4) for name, evaluation in evaluations.items()},
    }
    return Trained(**networks, made=made), evaluations


def split(traces: Sequence[HitTrace], held_out: float, seed: int) -> tuple[list[HitTrace], list[HitTrace]]:
    """Split by prompt, so that no drafter and no seed gives away another's text; return known and unseen traces."""
    prompts = sorted({(trace.domain, trace.id) for trace in traces})
    order = np.random.default_rng(seed).permutation(len(prompts))
    held = {prompts[i] for i in order[: round(held_out * len(prompts))]}
    if not held or len(held) == len(prompts):
        raise ConfigError(
            f"hold {len(prompts)} prompts, too few to keep {held_out:g} of them for evaluation; record more, "
            "or set --held-out",
            field="traces",
        )
    known = [trace for trace in traces if (trace.domain, trace.id) not in held]
    return known, [trace for trace in traces if (trace.domain, trace.id) in held]
