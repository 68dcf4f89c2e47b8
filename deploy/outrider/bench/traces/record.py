"""`outrider traces record`: the target's own texts, written once, and where each drafter would have said the same."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace

import torch
from rich.console import Console
from tokenizers import Tokenizer

from outrider.bench.commands import RecordSettings
from outrider.bench.drafters import Packages, find_packages, load_drafters
from outrider.bench.environment import environment
from outrider.bench.outputs import check_file, progress
from outrider.bench.replay.record import PromptReaders, trace_of
from outrider.bench.replay.traces import HitTrace, save_traces
from outrider.bench.traces.probes import DrafterProbe, TargetChances, TargetProbe
from outrider.bench.traces.recording import CostSheet, DrafterCosts, costs_path, save_costs
from outrider.cloud.target import Target, load_target
from outrider.cloud.text_writer import TextRequest, TextWriter, WrittenText
from outrider.deploy.arguments import Given
from outrider.deploy.prompts import Prompt, choose_prompts
from outrider.edge.drafters.protocol import Drafter
from outrider.proto.errors import ConfigError
from outrider.proto.types import Sampling

PROBED_TEXTS = 24  # whose prompts the drafters are timed after


def record(given: Given) -> int:
    """Run `outrider traces record`."""
    options = given(RecordSettings)
    costs_file = costs_path(options.output, "output")
    sampling = Sampling(temperature=options.temperature, seed=options.seed, max_tokens=options.max_tokens)
    seeds = _seeds(options)
    prompts = choose_prompts(options.prompts, options.per_domain)
    packages = find_packages(options.drafter, "drafter", ngram=True)
    check_file(options.output, "output")
    check_file(costs_file, "output")
    if options.threads:
        torch.set_num_threads(options.threads)
    target = load_target(options.target, device=options.device, dtype=options.dtype)
    recorder = Recorder(target, load_drafters(packages, target.tokenizer_sha256, "drafter"), sampling, seeds)
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

    def __init__(
        self, target: Target, drafters: Mapping[str, Drafter], sampling: Sampling, seeds: Sequence[int] = ()
    ) -> None:
        """Take what is recorded; `seeds`: of the texts after each prompt; none: one text, by the seed of `sampling`."""
        self._target = target
        self._drafters = drafters
        self._samplings = [replace(sampling, seed=seed) for seed in seeds or (sampling.seed,)]
        self._console = Console(stderr=True, highlight=False)

    def record(self, prompts: Sequence[Prompt]) -> tuple[list[HitTrace], CostSheet]:
        """Return a trace for every prompt, seed and drafter, prompt by prompt, and what the machines took."""
        texts, traces = self._traces(self._requests(prompts))
        target_costs = TargetProbe(self._target, self._samplings[0]).costs(texts)
        self._say(f"a step takes {target_costs.step_s * 1e3:.1f} ms + {target_costs.row_s * 1e3:.2f} ms a row")
        sheet = CostSheet(target_costs, self._drafter_costs(texts))
        for name, costs in sheet.drafters.items():
            own = [trace for trace in traces if trace.drafter == name]
            hits = sum(sum(trace.hits) for trace in own) / sum(len(trace.hits) for trace in own)
            self._say(f"{name}: hits {hits:.1%} of all positions, {costs.drafting_s * 1e3:.2f} ms a token")
        return traces, sheet

    def _requests(self, prompts: Sequence[Prompt]) -> list[TextRequest]:
        """Return the texts to write, prompt by prompt."""
        tokenizer = Tokenizer.from_str(self._target.tokenizer_json)
        encoded = [(prompt, tuple(tokenizer.encode(prompt.text).ids)) for prompt in prompts]
        return [TextRequest(ids, sampling, p.id, p.domain) for p, ids in encoded for sampling in self._samplings]

    def _traces(self, requests: Sequence[TextRequest]) -> tuple[list[WrittenText], list[HitTrace]]:
        """Return the texts, and the traces on them, in the order of the requests."""
        self._say(f"the target writes {len(requests)} texts")
        began = time.monotonic()
        found: dict[TextRequest, tuple[WrittenText, list[HitTrace]]] = {}
        with (
            closing(PromptReaders(self._drafters, requests)) as readers,
            progress(self._console, "writing and recording", len(requests)) as advance,
        ):
            for text in TextWriter(self._target).stream(requests):
                found[text.request] = replace(text, logits=None), self._on(text, readers)
                advance()
        texts = [found[request][0] for request in requests]
        tokens, seconds = sum(len(text) for text in texts), time.monotonic() - began
        self._say(f"{tokens} tokens, and what every drafter says, in {seconds:.0f} s: {tokens / seconds:.0f} a second")
        return texts, [trace for request in requests for trace in found[request][1]]

    def _on(self, text: WrittenText, readers: PromptReaders) -> list[HitTrace]:
        """Return what each drafter would have said in place of the text's tokens."""
        request, tokens, chances = text.request, text.tokens, TargetChances(text)
        ended = tokens[-1] in self._target.eos_tokens
        forced = readers.propose_forced(request, tokens)
        found = {
            name: trace_of(
                request,
                text.prompt_length,
                tokens,
                drafter,
                request.sampling,
                forced[name][1],
                prompt_log_q=forced[name][0],
                chances=chances.of,
                ended=ended,
            )
            for name, drafter in self._drafters.items()
        }
        return [replace(trace, drafter=name) for name, trace in found.items()]

    def _drafter_costs(self, texts: Sequence[WrittenText]) -> dict[str, DrafterCosts]:
        """Measure each drafter after some of the prompts."""
        probes = {name: DrafterProbe(drafter, self._samplings[0]) for name, drafter in self._drafters.items()}
        for text in texts[:: -(-len(texts) // PROBED_TEXTS)]:
            for probe in probes.values():  # all drafters a prompt, so that a slow moment meets them all
                probe.after(text)
        return {name: probe.costs() for name, probe in probes.items()}

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim")


def _seeds(options: RecordSettings) -> range:
    if options.seeds > 1 and options.temperature == 0:
        raise ConfigError("has no effect at temperature 0; set --temperature, or leave it out", field="seeds")
    return range(1, options.seeds + 1)


def _environment(options: RecordSettings, packages: Packages, prompts: int) -> dict[str, object]:
    versions = [package.version if package is not None else "-" for package in packages.values()]
    return asdict(
        environment(
            target=options.target,
            dtype=options.dtype,
            max_tokens=options.max_tokens,
            seed=options.seed,
            drafter=", ".join(packages),
            drafter_version=", ".join(versions),
            target_threads=options.threads or None,
            drafter_threads=1,
            prompts=prompts,
        )
    )
