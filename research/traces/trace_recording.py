"""`python -m research traces record`: the target's own texts, written once, and each drafter's hits in them."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, replace
from statistics import median

import numpy as np
import torch
from rich.console import Console
from tokenizers import Tokenizer

from outrider.bench.environment import environment
from outrider.bench.record import check_file, save
from outrider.cloud.target.distribution import VerificationInput, processed_logits
from outrider.cloud.target.precision import dtype_name
from outrider.cloud.target.projection import Projection
from outrider.cloud.target.sampler import Sampler
from outrider.cloud.target.steering_vectors import load_projections
from outrider.cloud.target.target import SessionRows, Target, load_target
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.arguments import Given
from outrider.deploy.built_in_prompts import Prompt, choose_prompts
from outrider.deploy.process.progress import waiting
from outrider.drafters.proposals import ProposalRule
from outrider.drafters.protocol import Drafter, steering_of
from outrider.drafters.retrieval import RetrievalDrafter
from outrider.drafters.search import NGRAM, RETRIEVAL
from outrider.drafters.suffix_index import SuffixIndex
from outrider.proto.errors import ConfigError
from outrider.proto.policy import Line
from outrider.proto.types import DraftToken, Sampling, SteeringPrecision
from research.drafters import find_packages, load_drafters
from research.edits import edited
from research.outputs import progress
from research.recording import CostSheet, DrafterCosts, TargetCosts, costs_path
from research.replay.hit_recorder import Chances, HitRecorder
from research.replay.hit_traces import HitTrace, save_traces
from research.research_settings import RecordSettings
from research.simulator.clock import Costs
from research.text_writer import TextRequest, TextWriter, WrittenText
from research.vectors import SentVectors

# The target is timed after a few prompts, in steps that verify these numbers of drafts.
TARGET_TEXTS = 4
DRAFTS = (0, 1, 2, 4, 8, 16)
REPEATS = 5
# The drafters are timed after more prompts, in a few jobs each.
DRAFTER_TEXTS = 24
BLOCK = 8  # tokens a job
BLOCKS = 4


def record(given: Given) -> int:
    """Run `python -m research traces record`."""
    options, verifier = given(RecordSettings), given(VerifierConfig)
    costs_file = costs_path(options.output, "output")
    if options.seeds > 1 and options.temperature == 0:
        raise ConfigError("has no effect at temperature 0; set --temperature, or leave it out", field="seeds")
    sampling = Sampling(temperature=options.temperature, seed=options.seed, max_tokens=options.max_tokens)
    prompts = choose_prompts(options.prompts, options.per_domain)
    packages = find_packages(options.drafter, "drafter", without=(NGRAM, RETRIEVAL))
    check_file(options.output, "output")
    check_file(costs_file, "output")
    torch.set_num_threads(verifier.torch_threads)
    with waiting(f"loading the target {verifier.target}"):
        target = load_target(verifier.target, device=verifier.device, dtype=verifier.dtype)
    drafters = load_drafters(packages, target.tokenizer_json, "drafter")
    projections = _projections(target, drafters, verifier) if options.age >= 0 else {}
    seeds = range(1, options.seeds + 1)
    documents = options.edited, options.edits_of
    traces, sheet = Recorder(target, drafters, sampling, seeds, projections, options.age, documents).record(prompts)
    save_traces(traces, options.output)
    versions = [package.version if package is not None else "-" for package in packages.values()]
    made_in = environment(
        verifier,
        dtype_name(target.dtype),
        max_tokens=options.max_tokens,
        seed=options.seed,
        drafter=", ".join(packages),
        drafter_version=", ".join(versions),
        drafter_threads=1,
        prompts=len(prompts),
    )
    save(replace(sheet, environment=asdict(made_in)), costs_file, "output")
    print(f"{len(traces)} traces in {options.output}, the costs of the machines in {costs_file}")
    return 0


def _projections(target: Target, drafters: Mapping[str, Drafter], verifier: VerifierConfig) -> dict[str, Projection]:
    """Return the projections whose vectors the drafters take, by id."""
    shapes = {name: shape for name, drafter in drafters.items() if (shape := steering_of(drafter)) is not None}
    if not shapes:
        return {}
    facts, model = TransformersBackend(target).facts, verifier.target
    found = load_projections(list(verifier.steering), facts, name=model, model=model)
    for name, shape in shapes.items():
        if shape.projection not in found:
            raise ConfigError(
                f"none is projection {shape.projection}, whose vectors {name!r} takes; name its "
                "projection.safetensors, or record it with --age -1",
                field="steering",
            )
    return {shape.projection: found[shape.projection] for shape in shapes.values()}


class Recorder:
    """Records the hits of `drafters`, by the names of their traces, in texts of `target`."""

    def __init__(
        self,
        target: Target,
        drafters: Mapping[str, Drafter],
        sampling: Sampling,
        seeds: Sequence[int] = (),
        projections: Mapping[str, Projection] | None = None,
        age: int = 0,
        documents: tuple[float, int] = (0.1, 4),
    ) -> None:
        """Take what is recorded.

        Args:
            target: the model that writes.
            drafters: drafters to record.
            sampling: sampling of the texts.
            seeds: one for each text of a prompt; empty: one text, by the seed of `sampling`.
            projections: projections of the drafters to steer, by id; None: none is.
            age: positions by which the vectors are older than the freshest.
            documents: share of tokens in which the documents that drafters copy differ from the texts, and tokens of
                such an edit.
        """
        self._target = target
        self._drafters = drafters
        self._samplings = [replace(sampling, seed=seed) for seed in seeds or (sampling.seed,)]
        self._projections = projections or {}
        self._age = age
        self._documents = documents
        self._copiers = [drafter for drafter in drafters.values() if isinstance(drafter, RetrievalDrafter)]
        self._console = Console(stderr=True, highlight=False)

    def record(self, prompts: Sequence[Prompt]) -> tuple[list[HitTrace], CostSheet]:
        """Return a trace for every prompt, seed and drafter, prompt by prompt, and the costs of the machines."""
        texts, traces = self._traces(self._requests(prompts))
        sheet = CostSheet(target_costs(self._target, self._samplings[0], texts), self._drafter_costs(texts))
        self._say(f"a step takes {sheet.target.step_s * 1e3:.1f} ms + {sheet.target.row_s * 1e3:.2f} ms a row")
        for name, costs in sheet.drafters.items():
            own = [trace for trace in traces if trace.drafter == name]
            hits = sum(sum(trace.hits) for trace in own) / sum(len(trace.hits) for trace in own)
            self._say(f"{name}: hits {hits:.1%} of all positions, {costs.drafting_s * 1e3:.2f} ms a token")
        return traces, sheet

    def _requests(self, prompts: Sequence[Prompt]) -> list[TextRequest]:
        tokenizer = Tokenizer.from_str(self._target.tokenizer_json)
        encoded = [(prompt, tuple(tokenizer.encode(prompt.text).ids)) for prompt in prompts]
        return [TextRequest(ids, sampling, p.id, p.domain) for p, ids in encoded for sampling in self._samplings]

    def _traces(self, requests: Sequence[TextRequest]) -> tuple[list[WrittenText], list[HitTrace]]:
        """Return the texts, and the traces on them, in the order of the requests."""
        self._say(f"the target writes {len(requests)} texts")
        began = time.monotonic()
        found: dict[TextRequest, tuple[WrittenText, list[HitTrace]]] = {}
        with (
            closing(HitRecorder(self._drafters, requests)) as recorder,
            progress(self._console, "writing and recording", len(requests)) as advance,
        ):
            writer = TextWriter(self._target, self._projections)
            for text in writer.stream(requests):
                ended, vectors = text.tokens[-1] in self._target.eos_tokens, self._vectors(text)
                self._give_document(text)
                traces = recorder.record(
                    text.request, text.tokens, chances=chances_of(text), ended=ended, vectors=vectors
                )
                found[text.request] = replace(text, logits=None, vectors={}), traces
                advance()
        texts = [found[request][0] for request in requests]
        tokens, seconds = sum(len(text) for text in texts), time.monotonic() - began
        self._say(f"{tokens} tokens, with every drafter's, in {seconds:.0f} s: {tokens / seconds:.0f} a second")
        return texts, [trace for request in requests for trace in found[request][1]]

    def _give_document(self, text: WrittenText) -> None:
        """Let drafters that copy have one document, most of which the text repeats."""
        if not self._copiers:
            return
        share, run = self._documents
        document = edited(text.tokens, share, run, seed=text.request.sampling.seed)
        index = SuffixIndex([np.array(document, dtype=np.uint32)])
        for copier in self._copiers:
            copier.sources = lambda: (index,)

    def _vectors(self, text: WrittenText) -> dict[str, SentVectors]:
        """Return the text's vectors by the names of the drafters that they steer."""
        shapes = {name: steering_of(drafter) for name, drafter in self._drafters.items()}
        return {
            name: SentVectors(text.vectors[shape.projection], SteeringPrecision.INT8, self._age)
            for name, shape in shapes.items()
            if shape is not None and shape.projection in text.vectors
        }

    def _drafter_costs(self, texts: Sequence[WrittenText]) -> dict[str, DrafterCosts]:
        """Measure each drafter after some of the prompts."""
        probes = {name: DrafterProbe(drafter, self._samplings[0]) for name, drafter in self._drafters.items()}
        for text in texts[:: -(-len(texts) // DRAFTER_TEXTS)]:
            for probe in probes.values():  # all drafters a prompt, so that a slow moment meets them all
                probe.after(text)
        return {name: probe.costs() for name, probe in probes.items()}

    def _say(self, text: str) -> None:
        self._console.print(text, style="dim")


def chances_of(written: WrittenText) -> Chances:
    """Return the target's probabilities along one text, 0 beyond the vocabulary.

    At temperature 0 they are those at 1, as the verifier takes them.
    """
    if written.logits is None:
        raise ValueError("the text was written without its logits")
    prompt = written.request.prompt
    block = tuple(map(DraftToken, written.tokens[:-1]))
    verified = VerificationInput(written.request.sampling, list(prompt), len(prompt), block)
    with torch.inference_mode():
        scores = processed_logits(written.logits, verified)  # [n, vocab] float64
        log_totals = torch.logsumexp(scores, dim=-1)

    def chances(tokens: Sequence[int]) -> list[float]:
        wanted = torch.tensor(tokens, device=scores.device)
        known = wanted.clamp(max=scores.shape[1] - 1)
        p = torch.exp(scores.gather(1, known[:, None])[:, 0] - log_totals)
        return [float(chance) for chance in torch.where(known == wanted, p, 0.0)]

    return chances


def target_costs(target: Target, sampling: Sampling, texts: Sequence[WrittenText]) -> TargetCosts:
    """Time steps after prompts of middle length, without the very first step, which makes the target ready."""
    ordered = sorted(texts, key=lambda text: text.prompt_length)
    first = max(0, (len(ordered) - TARGET_TEXTS) // 2)
    chosen = ordered[first : first + TARGET_TEXTS]
    _steps_after(chosen[0], target, sampling, (0,), 1)
    reading: list[tuple[int, float]] = []
    by_rows: dict[int, list[float]] = {}
    for text in chosen:
        reading_s, steps = _steps_after(text, target, sampling, DRAFTS, REPEATS)
        reading.append((text.prompt_length, reading_s))
        for rows, seconds in steps:
            by_rows.setdefault(rows, []).append(seconds)
    line = Line(fade=1.0)
    for rows, all_s in by_rows.items():
        line.add(rows, median(all_s))
    prefill_s = median(max(0.0, seconds - line.base) / rows for rows, seconds in reading)
    return TargetCosts(line.base, line.slope, prefill_s)


def _steps_after(
    text: WrittenText, target: Target, sampling: Sampling, drafts: Sequence[int], repeats: int
) -> tuple[float, list[tuple[int, float]]]:
    """Return the seconds of reading the prompt, and rows and seconds of steps after it."""
    sampler, length = Sampler(target.device), text.prompt_length
    transcript = text.transcript[: length + 1]
    drafts = [count for count in drafts if len(transcript) + count <= target.context_length]
    cache = target.pool.allocate(len(transcript) + max(drafts))

    def step(known: Sequence[int], block: tuple[DraftToken, ...], rows: Sequence[int]) -> float:
        verified = VerificationInput(sampling, list(known), length, block)
        began = time.perf_counter()
        logits = target.forward([SessionRows(cache, tuple(rows), len(block) + 1)])
        sampler.sample(logits, [verified])
        return time.perf_counter() - began

    try:
        reading_s = step(transcript[:-1], (), transcript[:-1])
        steps = []
        for _ in range(repeats):
            for count in drafts:  # all counts a round, so that a slow moment meets them all
                cache.truncate(length)
                block = (DraftToken(transcript[-1]),) * count
                steps.append((count + 1, step(transcript, block, transcript[-1:] * (count + 1))))
    finally:
        target.pool.release(cache)
    return reading_s, steps


class DrafterProbe:
    """Times one drafter, text by text, in processor time: the drafters compute in this thread alone."""

    def __init__(self, drafter: Drafter, sampling: Sampling) -> None:
        self._drafter = drafter
        self._sampling = sampling
        self._token_s: list[float] = []
        self._reading: list[tuple[int, float]] = []  # tokens of a prompt, seconds with the one that was drafted

    def after(self, text: WrittenText) -> None:
        """Time one prompt, and a few blocks after it."""
        with closing(self._drafter.open(ProposalRule(self._sampling, prompt_length=text.prompt_length))) as state:
            began = time.thread_time()
            state.extend(text.transcript[: text.prompt_length])
            state.propose(1)
            self._reading.append((text.prompt_length, time.thread_time() - began))
            for _ in range(BLOCKS):
                began = time.thread_time()
                drafted = len(state.propose(BLOCK))
                if drafted < 2:
                    return
                self._token_s.append((time.thread_time() - began) / drafted)

    def costs(self) -> DrafterCosts:
        """Return the medians; a drafter that never proposed anything has the usual drafting cost."""
        token_s = median(self._token_s) if self._token_s else Costs().drafting_s
        read = [max(0.0, seconds - token_s) / (tokens - 1) for tokens, seconds in self._reading if tokens > 1]
        return DrafterCosts(token_s, median(read) if read else 0.0)
