"""`python -m research traces record`: the target's own texts, written once, and each drafter's hits in them."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from statistics import median

import numpy as np
import torch
from tokenizers import Tokenizer

from outrider.bench.bench_settings import check_once
from outrider.bench.environment import environment
from outrider.bench.record import check_file, save
from outrider.cloud.target.backend import dtype_name
from outrider.cloud.target.distribution import processed_logits
from outrider.cloud.target.projection import Projection
from outrider.cloud.target.sampler import Sampler
from outrider.cloud.target.steering_vectors import load_projections
from outrider.cloud.target.target import SessionRows, Target
from outrider.cloud.target.target_loading import load_target
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.target.verification import VerificationInput
from outrider.cloud.verifier_config import VerifierConfig
from outrider.deploy.arguments import Given
from outrider.deploy.built_in_prompts import Prompt, choose_prompts
from outrider.deploy.process.progress import say, stage, waiting
from outrider.drafters import DrafterPackage, NgramDrafter
from outrider.drafters.by_text import TextDrafter, Vocabulary
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.packages import find_package
from outrider.drafters.proposals import ProposalRule
from outrider.drafters.protocol import Drafter, DraftState, steering_of
from outrider.drafters.retrieval import RetrievalDrafter
from outrider.drafters.search import NGRAM, RETRIEVAL
from outrider.drafters.suffix_index import SuffixIndex
from outrider.proto.errors import ConfigError, OutriderError
from outrider.proto.policy import Line
from outrider.proto.policy.likely_branches import RUNNERS_UP
from outrider.proto.session import PROMPT_TOKENS
from outrider.proto.steering_vector import decode, encode
from outrider.proto.tokenizer import tokenizer_hash
from outrider.proto.types import DraftToken, Sampling, SteeringPrecision
from research.research_settings import RecordSettings
from research.simulator.clock import Costs
from research.text_writer import TextRequest, TextWriter, WrittenText
from research.traces.recordings import CostSheet, DrafterCosts, HitTrace, TargetCosts, costs_path, save_traces

# The target is timed after a few prompts, in steps that verify these numbers of drafts.
TARGET_TEXTS = 4
DRAFTS = (0, 1, 2, 4, 8, 16)
REPEATS = 5
# The drafters are timed after more prompts, in a few jobs each.
DRAFTER_TEXTS = 24
BLOCK = 8  # tokens a job
BLOCKS = 4
# The target's processed probabilities [n] of the tokens [n] that a drafter proposes in place of those of a text.
Chances = Callable[[Sequence[int]], Sequence[float]]
Vector = np.ndarray | None  # [rank]
_WITHOUT_PACKAGE = {NGRAM: NgramDrafter, RETRIEVAL: RetrievalDrafter}
Packages = Mapping[str, DrafterPackage | None]  # by name, in the order of the command; None: it needs none


def record(given: Given) -> int:
    """Run `python -m research traces record`."""
    options, verifier = given(RecordSettings), given(VerifierConfig)
    costs_file = costs_path(options.output, "output")
    if options.seeds > 1 and options.temperature == 0:
        raise ConfigError("has no effect at temperature 0; set --temperature, or leave it out", field="seeds")
    sampling = Sampling(temperature=options.temperature, seed=options.seed, max_tokens=options.max_tokens)
    prompts = choose_prompts(options.prompts, options.per_domain)
    packages = find_packages(options.drafter)
    check_file(options.output, "output")
    check_file(costs_file, "output")
    torch.set_num_threads(verifier.torch_threads)
    with waiting(f"loading the target {verifier.target}"):
        target = load_target(verifier.target, device=verifier.device, dtype=verifier.dtype)
    drafters = load_drafters(packages, target.tokenizer_json)
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


@dataclass(frozen=True, slots=True)
class Recorder:
    """Records the hits of drafters in texts of a target.

    Attributes:
        drafters: drafters to record, by the names of their traces.
        seeds: one for each text of a prompt; empty: one text, by the seed of `sampling`.
        projections: projections of the drafters to steer, by id.
        age: positions by which the vectors are older than the freshest.
        documents: share of tokens in which the documents that drafters copy differ from the texts, and tokens of such
            an edit.
    """

    target: Target
    drafters: Mapping[str, Drafter]
    sampling: Sampling
    seeds: Sequence[int] = ()
    projections: Mapping[str, Projection] = field(default_factory=dict)
    age: int = 0
    documents: tuple[float, int] = (0.1, 4)

    def record(self, prompts: Sequence[Prompt]) -> tuple[list[HitTrace], CostSheet]:
        """Return a trace for every prompt, seed and drafter, prompt by prompt, and the costs of the machines."""
        texts, traces = self._traces(self._requests(prompts))
        sheet = CostSheet(target_costs(self.target, self.sampling, texts), self._drafter_costs(texts))
        say(f"a step takes {sheet.target.step_s * 1e3:.1f} ms + {sheet.target.row_s * 1e3:.2f} ms a row")
        for name, costs in sheet.drafters.items():
            own = [trace for trace in traces if trace.drafter == name]
            hits = sum(sum(trace.hits) for trace in own) / sum(len(trace.hits) for trace in own)
            say(f"{name}: hits {hits:.1%} of all positions, {costs.drafting_s * 1e3:.2f} ms a token")
        return traces, sheet

    def _requests(self, prompts: Sequence[Prompt]) -> list[TextRequest]:
        tokenizer = Tokenizer.from_str(self.target.tokenizer_json)
        encoded = [(prompt, tuple(tokenizer.encode(prompt.text).ids)) for prompt in prompts]
        samplings = [replace(self.sampling, seed=seed) for seed in self.seeds or (self.sampling.seed,)]
        return [TextRequest(ids, sampling, p.id, p.domain) for p, ids in encoded for sampling in samplings]

    def _traces(self, requests: Sequence[TextRequest]) -> tuple[list[WrittenText], list[HitTrace]]:
        """Return the texts, and the traces on them, in the order of the requests."""
        found: dict[TextRequest, tuple[WrittenText, list[HitTrace]]] = {}
        with stage(f"writing {len(requests)} texts, with every drafter's proposals"):
            for text in TextWriter(self.target, self.projections).write(requests):
                self._give_document(text)
                traces = hits_of(
                    self.drafters,
                    text.request,
                    text.tokens,
                    chances=chances_of(text),
                    ended=text.tokens[-1] in self.target.eos_tokens,
                    vectors=self._vectors(text),
                )
                found[text.request] = replace(text, logits=None, vectors={}), traces
        texts = [found[request][0] for request in requests]
        return texts, [trace for request in requests for trace in found[request][1]]

    def _give_document(self, text: WrittenText) -> None:
        """Let drafters that copy have one document, most of which the text repeats."""
        document = edited(text.tokens, *self.documents, seed=text.request.sampling.seed)
        index = SuffixIndex([np.array(document, dtype=np.uint32)])
        for drafter in self.drafters.values():
            if isinstance(drafter, RetrievalDrafter):
                drafter.sources = lambda: (index,)

    def _vectors(self, text: WrittenText) -> dict[str, list[Vector]]:
        """Return the text's vectors by the names of the drafters that they steer."""
        shapes = {name: steering_of(drafter) for name, drafter in self.drafters.items()}
        return {
            name: sent_vectors(text.vectors[shape.projection], self.age)
            for name, shape in shapes.items()
            if shape is not None and shape.projection in text.vectors
        }

    def _drafter_costs(self, texts: Sequence[WrittenText]) -> dict[str, DrafterCosts]:
        """Measure each drafter after some of the prompts."""
        probes = {name: DrafterProbe(drafter, self.sampling) for name, drafter in self.drafters.items()}
        for text in texts[:: -(-len(texts) // DRAFTER_TEXTS)]:
            for probe in probes.values():  # all drafters a prompt, so that a slow moment meets them all
                probe.after(text)
        return {name: probe.costs() for name, probe in probes.items()}


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


def hits_of(
    drafters: Mapping[str, Drafter],
    request: TextRequest,
    tokens: Sequence[int],
    *,
    chances: Chances | None = None,
    ended: bool = False,
    vectors: Mapping[str, Sequence[Vector]] = {},
) -> list[HitTrace]:
    """Return what each drafter would have proposed in place of each of the `tokens` [n] that the target wrote.

    That is one batched pass; a drafter that `vectors` steer, by its name, reads token by token, each with the vector
    that is there by then. Without the target's `chances` the traces have no agreement.
    """
    rule = ProposalRule(request.sampling, prompt_length=len(request.prompt), runners_up=RUNNERS_UP)
    traces = []
    for name, drafter in drafters.items():
        with closing(drafter.open(rule)) as state:
            prompt_log_q = _read(state, request.prompt)
            sent = vectors.get(name)
            forced = state.propose_forced(tokens) if sent is None else _propose_steered(state, tokens, sent)
        silent = tuple(draft.id < 0 for draft in forced)
        traces.append(
            HitTrace(
                id=request.id,
                domain=request.domain,
                drafter=name,
                drafter_version=drafter.version,
                temperature=request.sampling.temperature,
                prompt_tokens=len(request.prompt),
                tokens=tuple(tokens),
                hits=tuple(own.id == token for own, token in zip(forced, tokens, strict=True)),
                confidence=_rounded(draft.confidence for draft in forced),
                ended=ended,
                silent=silent if any(silent) else (),
                perturbed_probability=_rounded(draft.perturbed_probability for draft in forced),
                agreement=_rounded(_agreement(forced, chances)) if chances else (),
                runner_up=_ranks(forced, tokens),
                seed=request.sampling.seed,
                prompt_log_q=prompt_log_q,
            )
        )
    return traces


def _read(state: DraftState, prompt: tuple[int, ...]) -> float:
    """Let an empty state read the prompt; return the log q of its end, in nats a token; NaN: it is one token."""
    first = max(1, len(prompt) - PROMPT_TOKENS)
    state.extend(prompt[:first])
    end = prompt[first:]
    return round(float(state.score(end).mean()), 4) if end else math.nan


def _propose_steered(state: DraftState, tokens: Sequence[int], vectors: Sequence[Vector]) -> tuple[DraftToken, ...]:
    """Return the proposals in place of each token after a prompt."""
    prompt, proposed = state.length, list[DraftToken]()
    for token, vector in zip(tokens, vectors, strict=False):
        state.steer(vector, prompt)
        proposed += state.propose_forced((token,))
    return tuple(proposed)


def _agreement(forced: Sequence[DraftToken], chances: Chances) -> Iterable[float]:
    """Return [n] min(1, p / q), an estimate of 1 - TV (`outrider.edge.selectors`); NaN: nothing proposed."""
    likely = chances([max(0, draft.id) for draft in forced])
    q = [draft.confidence for draft in forced]
    return (min(1.0, p / own) if own > 0 else math.nan for p, own in zip(likely, q, strict=True))


def _ranks(forced: Sequence[DraftToken], tokens: Sequence[int]) -> tuple[int, ...]:
    """Return [n] the rank of each token among the runners-up in its place, from 1 on; 0: it is none."""
    return tuple(
        draft.runners_up.index(token) + 1 if token in draft.runners_up else 0
        for draft, token in zip(forced, tokens, strict=True)
    )


def _rounded(values: Iterable[float]) -> tuple[float, ...]:
    return tuple(round(value, 4) for value in values)


def edited(tokens: Sequence[int], share: float, run: int, *, seed: int) -> list[int]:
    """Return tokens with `share` of them replaced, inserted or deleted in runs of `run`, by tokens of the same text."""
    draw_number = random.Random(f"{seed} {run} {len(tokens)}")
    document: list[int] = []
    place = 0
    while place < len(tokens):
        if draw_number.random() >= share / run:
            document.append(tokens[place])
            place += 1
            continue
        kind = draw_number.choice(("replace", "insert", "delete"))
        if kind != "delete":
            document += draw_number.choices(tokens, k=run)
        if kind != "insert":
            place += run
    return document


def sent_vectors(vectors: np.ndarray, age: int) -> list[Vector]:
    """Return the steering vectors that reach an edge in time for each token of a text, as what travels is rounded.

    They are `age` positions older than the freshest of `vectors` [n, rank], which belongs to the last position but
    one: the last token is committed, but not processed yet.
    """
    travelled = [decode(encode(vector, SteeringPrecision.INT8), len(vector)) for vector in vectors]
    return [*[None] * (1 + age), *travelled[: max(0, len(vectors) - 1 - age)]]


def find_packages(names: Sequence[str]) -> Packages:
    """Return the packages of embedded names and folders, by these; raises as `find_package` does."""
    if not names:
        known = ", or ".join(("an embedded drafter or a package folder", *_WITHOUT_PACKAGE))
        raise ConfigError(f"names none; name {known}", field="drafter")
    check_once(names, "drafter")
    try:
        return {name: None if name in _WITHOUT_PACKAGE else find_package(name) for name in names}
    except OutriderError as error:
        raise type(error)(error.message, field="drafter") from error


def load_drafters(packages: Packages, tokenizer_json: str) -> dict[str, Drafter]:
    """Load the drafters, on one thread each; those with another tokenizer than the target's draft by text."""
    try:
        return {
            name: _load(package, tokenizer_json) if package is not None else _WITHOUT_PACKAGE[name]()
            for name, package in packages.items()
        }
    except OutriderError as error:
        raise type(error)(error.message, field="drafter") from error


def _load(package: DrafterPackage, tokenizer_json: str) -> Drafter:
    drafter = OnnxDrafter(package)
    if package.tokenizer_sha256 == tokenizer_hash(tokenizer_json):
        return drafter
    own = package.tokenizer_path.read_text(encoding="utf-8")
    return TextDrafter(drafter, Vocabulary(own), Vocabulary(tokenizer_json))
