"""`outrider traces record`: the target's own texts, written once, and where each drafter would have said the same."""

from __future__ import annotations

import argparse
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace

import torch
from rich.console import Console
from rich.progress import track
from tokenizers import Tokenizer

from outrider.cloud.target import Target, load_target
from outrider.deploy.bench.record import environment
from outrider.deploy.compare.texts import Text, Writer
from outrider.deploy.outputs import check_file
from outrider.deploy.prompts import Prompt, choose_prompts
from outrider.deploy.replay.record import record_trace
from outrider.deploy.replay.traces import HitTrace, save_traces
from outrider.deploy.traces.costs import CostSheet, costs_path, save_costs
from outrider.deploy.traces.drafter_probe import DrafterProbe
from outrider.deploy.traces.drafters import Packages, find_drafters, load_drafters
from outrider.deploy.traces.target_probe import TargetProbe
from outrider.edge.drafters.protocol import Drafter
from outrider.proto.errors import ConfigError
from outrider.proto.types import Sampling


def record(options: argparse.Namespace) -> int:
    """`outrider traces record`."""
    costs_file = costs_path(options.output, "output")
    sampling = Sampling(temperature=options.temperature, seed=options.seed, max_tokens=options.max_tokens)
    prompts = choose_prompts(options.prompts, options.per_domain)
    packages = find_drafters(options.drafter)
    check_file(options.output, "output")
    check_file(costs_file, "output")
    if options.threads:
        torch.set_num_threads(options.threads)
    target = load_target(options.target, device=options.device, dtype=options.dtype)
    recorder = Recorder(target, load_drafters(packages, target.tokenizer_sha256), sampling)
    traces, sheet = recorder.record(prompts)
    sheet = replace(sheet, environment=_environment(options, packages, len(prompts)))
    try:
        save_traces(traces, options.output)
        save_costs(sheet, costs_file)
    except OSError as error:
        raise ConfigError(f"cannot write {options.output}: {error.strerror}", field="output") from error
    print(f"{len(traces)} traces in {options.output}, what the machines took in {costs_file}")
    return 0


class Recorder:
    """The hits of `drafters`, by the names that the traces call them, in texts of `target`."""

    def __init__(self, target: Target, drafters: Mapping[str, Drafter], sampling: Sampling) -> None:
        self._target = target
        self._drafters = drafters
        self._sampling = sampling
        self._console = Console(stderr=True, highlight=False)

    def record(self, prompts: Sequence[Prompt]) -> tuple[list[HitTrace], CostSheet]:
        """One trace for every prompt and drafter, prompt by prompt, and what the machines took."""
        texts = self._texts(prompts)
        target_costs = TargetProbe(self._target, self._sampling).costs(texts)
        self._say(f"a step takes {target_costs.step_s * 1e3:.1f} ms + {target_costs.row_s * 1e3:.2f} ms a row")
        probes = {name: DrafterProbe(drafter, self._sampling) for name, drafter in self._drafters.items()}
        traces = []
        silent = not self._console.is_terminal
        for text in track(texts, "recording", console=self._console, transient=True, disable=silent):
            for name, drafter in self._drafters.items():  # in turn: a slow moment meets them all
                probes[name].after(text)
                traces.append(replace(self._trace(text, drafter), drafter=name))
        sheet = CostSheet(target_costs, {name: probe.costs() for name, probe in probes.items()})
        for name, costs in sheet.drafters.items():
            own = [trace for trace in traces if trace.drafter == name]
            hits = sum(sum(trace.hits) for trace in own) / sum(len(trace.hits) for trace in own)
            self._say(f"{name}: hits {hits:.1%} of all positions, {costs.drafting_s * 1e3:.2f} ms a token")
        return traces, sheet

    def _texts(self, prompts: Sequence[Prompt]) -> list[Text]:
        tokenizer = Tokenizer.from_str(self._target.tokenizer_json)
        encoded = [(prompt, tuple(tokenizer.encode(prompt.text).ids)) for prompt in prompts]
        self._say(f"the target writes {len(encoded)} texts")
        began = time.monotonic()
        texts = Writer(self._target, {}, oldest=0).write(encoded, self._sampling)
        self._say(f"{sum(text.tokens for text in texts)} tokens in {time.monotonic() - began:.0f} s")
        return texts

    def _trace(self, text: Text, drafter: Drafter) -> HitTrace:
        prompt, tokens = text.transcript[: text.prompt_length], text.transcript[text.prompt_length :]
        ended = tokens[-1] in self._target.eos_tokens
        return record_trace(text.prompt, prompt, tokens, drafter, self._sampling, ended=ended)

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim")


def _environment(options: argparse.Namespace, packages: Packages, prompts: int) -> dict[str, object]:
    versions = [package.version if package is not None else "-" for package in packages.values()]
    return asdict(
        environment(
            command=shlex.join(["outrider", *sys.argv[1:]]),
            target=options.target,
            dtype=options.dtype,
            drafter=", ".join(packages),
            drafter_version=", ".join(versions),
            target_threads=options.threads or None,
            drafter_threads=1,
            prompts=prompts,
            max_tokens=options.max_tokens,
            seed=options.seed,
        )
    )
