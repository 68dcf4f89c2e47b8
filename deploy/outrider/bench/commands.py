"""Options of the commands that measure: bench, engine-bench, compare, traces, train policy.

This module loads neither numpy nor torch, since help and completion read it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.bench.step_shape import StepShape
from outrider.cloud.config import HERE, TARGET, VerifierConfig
from outrider.cloud.learning.settings import LOSS_NAMES, REHEARSED, TrainerSettings
from outrider.deploy.arguments import Command, Part, part
from outrider.deploy.commands.decoding import BuiltInPrompts
from outrider.deploy.commands.operating import LinkSettings
from outrider.deploy.loss import PacketLoss
from outrider.edge.config import DRAFTING, EdgeConfig
from outrider.proto.errors import ConfigError
from outrider.proto.settings import REQUIRED, Settings, above, at_least, between, option
from outrider.proto.types import Goal, Sampling

PER_LINK = "one for all links, or one for each"
USUAL_MODES = ("cloud", "sync", "pearl", "colocated", "edge", "outrider", "optimum", "hf-generate", "hf-assisted")
MODES = (*USUAL_MODES, "edge-chains", "chains")
CROWD_MODES = ("cloud", "colocated", "edge", "outrider")
GOALS = ("latency", "efficiency")
LLAMA_8BIT = "llama-8bit"
PEERS = ("llama", LLAMA_8BIT, "vllm", "vllm-compiled")
OTHER_ENGINES = "other engines"
SELECTORS = "selectors (the recorded drafters are one pool then, and windows are left out)"


def check_once(entries: Sequence[object], field: str) -> None:
    """Refuse a list that names something twice."""
    for entry in entries:
        if entries.count(entry) > 1:
            raise ConfigError(f"names {entry!r} twice; once is enough", field=field)


def listed(default: tuple[Any, ...], text: str, **more: Any) -> Any:
    """Declare a list with commas."""
    return option(default, text, metavar="LIST", many="commas", **more)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkListSettings(Settings):
    """Emulated links."""

    rtt: tuple[float, ...] = listed(
        (2.0, 30.0, 120.0), "round-trip times of the links, ms; 0: no link", check=at_least(0)
    )
    up: tuple[float, ...] = listed((20.0,), f"rates from the edge, Mbit/s; {PER_LINK}; 0: no limit", check=at_least(0))
    down: tuple[float, ...] = listed((100.0,), f"rates to the edge, Mbit/s; {PER_LINK}; 0: no limit", check=at_least(0))
    jitter: tuple[float, ...] = listed(
        (0.0,), f"maximum random delay each way (uniform), ms; {PER_LINK}", check=at_least(0)
    )
    trace: tuple[str, ...] = listed((), "traces of further links: built-in names, or CSV files")


@dataclass(frozen=True, slots=True, kw_only=True)
class BenchSettings(Settings):
    """Ways of decoding to measure, and outputs."""

    sessions: int = option(1, "prompts decoded at once", check=at_least(1))
    mixed: bool = option(False, "distribute the sessions over all links at once")
    replay_edges: bool = option(
        False, "after --mixed, replay its modes with each edge on a machine of its own, outside the verifier's cores"
    )
    min_step: float = option(
        0.0, "minimum time of a target step, to imitate a larger target", metavar="MS", check=at_least(0)
    )
    modes: tuple[str, ...] = listed(
        USUAL_MODES,
        "ways of decoding: no drafts, rounds of drafts, PEARL's blocks, a drafter beside the target, edges alone, both "
        "ends, these two without trees (chains), the best in a replay; those of transformers (hf-) need --rtt with a "
        "0, and no --min-step",
        choices=MODES,
    )
    sync_length: int = option(0, "draft tokens per round; 0: the best one in a replay", check=at_least(0))
    pearl_length: int = option(
        0, "draft tokens per block of pearl; 0: as many as are drafted in a target step", check=at_least(0)
    )
    colocated_length: int = option(
        0, "drafts before every step of a drafter beside the target; 0: the best number in a replay", check=at_least(0)
    )
    hf_drafter: Path | None = option(None, "folder of the drafter for hf-assisted", metavar="DIR")
    no_logprobs: bool = option(False, "leave log probabilities out of commits")
    loss: tuple[PacketLoss, ...] = listed(
        (PacketLoss(),),
        "with --tun, packets lost each way, percent, or PERCENT:MS in bursts of that mean time; each with every link",
        parse=PacketLoss.parse,
    )
    json: Path | None = option(None, "file to write the record to")
    report: Path | None = option(None, "folder to write plots and an HTML page to", metavar="DIR")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings(Settings):
    """Steps of a target on a CPU, in turn with other engines: in CPU time with one thread, else by the wall clock."""

    steps: tuple[StepShape, ...] = listed(
        tuple(map(StepShape.parse, ("1x1", "1x5", "1x9", "4x1", "16x1"))),
        "steps to time: sessions x rows of each, branches beside them (1x5+3), after another context (1x5@600)",
        parse=StepShape.parse,
    )
    prefill: int = option(512, "tokens of a prompt to time, too; 0: none", check=at_least(0))
    context: tuple[int, ...] = listed((100, 1000), "tokens before the rows of a session", check=at_least(1))
    repetitions: int = option(20, "maximum of turns of each engine, of a few steps", check=at_least(1))
    seconds: float = option(
        60.0, "time for the turns of all steps together, each of which gets two turns or more", check=at_least(0)
    )
    temperature: float = option(0.0, "temperature of the sampling; 0: greedy", metavar="T", check=at_least(0))
    parts: bool = option(False, "time the parts of our steps, too")
    learning: bool = option(False, "compare steps with lessons kept to those without, too")
    json: Path | None = option(None, "file to write the record to")
    peers: tuple[str, ...] = listed(
        PEERS[:3],
        "other engines to take turns with, each in a process of its own; vllm-compiled takes minutes to load",
        choices=PEERS,
        group=OTHER_ENGINES,
    )
    llama_python: Path | None = option(
        None, "Python that has llama-cpp-python and gguf; not set: this one", metavar="FILE", group=OTHER_ENGINES
    )
    gguf: Path | None = option(
        None, "the target as a GGUF file for llama.cpp; not set: converted, if it is a Llama", group=OTHER_ENGINES
    )
    vllm_python: Path | None = option(
        None, "Python that has vLLM's build for CPUs; not set: this one", metavar="FILE", group=OTHER_ENGINES
    )

    def check_together(self) -> None:
        """Refuse a file that cannot have the types of two peers."""
        check_once(self.peers, "peers")
        if self.gguf and LLAMA_8BIT in self.peers:
            raise ConfigError(f"has one type; leave {LLAMA_8BIT} out of --peers", field="gguf")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings(Settings):
    """A chat through two daemons in turn, one of whose verifiers shares KV pages."""

    turns: int = option(10, "turns of the chat", check=at_least(1))
    max_tokens: int = option(96, "tokens of an answer", check=at_least(1))
    temperature: float = option(0.0, "temperature; 0: greedy", metavar="T", check=at_least(0))
    json: Path | None = option(None, "file to write the results to")


@dataclass(frozen=True, slots=True, kw_only=True)
class CopySettings(Settings):
    """Documents that texts repeat, and conditions."""

    edited: float = option(0.1, "share of tokens in which a document differs from its text", check=between(0, 1))
    run: tuple[int, ...] = listed((1, 10), "tokens that an edit replaces, inserts or deletes", check=at_least(1))
    min_step: float = option(
        0.0, "minimum time of a target step, to imitate a larger target", metavar="MS", check=at_least(0)
    )
    max_drafts: int = option(16, "limit of drafts verified in one step of a session", check=at_least(1))
    colocated_drafts: int = option(
        11, "drafts before every step where the verifier's drafter is alone", check=between(1, 255)
    )
    json: Path | None = option(None, "file to write the record to")

    def check_together(self) -> None:
        """Refuse a length that is given twice."""
        check_once(self.run, "run")


@dataclass(frozen=True, slots=True, kw_only=True)
class WritingSettings(Settings):
    """Texts that a target writes alone."""

    prompts: Path | None = option(None, "file of prompts, or folder of DOMAIN.jsonl; not set: built-in", metavar="PATH")
    per_domain: int = option(10, "prompts per domain", check=at_least(1))
    max_tokens: int = option(128, "tokens per text", check=at_least(1))


@dataclass(frozen=True, slots=True, kw_only=True)
class CompareSettings(WritingSettings):
    """Drafters to compare, and conditions."""

    package: tuple[str, ...] = option(
        REQUIRED,
        "drafter: an embedded name, FOLDER or NAME=FOLDER",
        metavar="PACKAGE",
        positional=True,
        many="words",
    )
    drafts: int = option(8, "drafts per round", metavar="K", check=at_least(1))
    temperature: tuple[float, ...] = listed((0.0, 1.0), "temperatures; 0 is greedy", check=at_least(0))
    age: tuple[int, ...] = listed(
        (0,),
        "positions by which vectors are older than the freshest; the first counts for the ratios",
        check=at_least(0),
    )
    precision: tuple[str, ...] = listed(
        ("int8",),
        "how vectors travel: int8, float16, none at all; the first counts for the ratios",
        choices=("int8", "float16", "none"),
    )
    seed: int = option(0, "seed of the noise and of the resampling", check=at_least(0))
    json: Path | None = option(None, "file to write all results to")
    plot: Path | None = option(None, "file to plot them in: .png, .pdf or .svg")

    def check_together(self) -> None:
        """Refuse lists that are empty, or name something twice."""
        for name in ("temperature", "age", "precision"):
            if not getattr(self, name):
                raise ConfigError("must name something", field=name)
            check_once(getattr(self, name), name)


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings(LinkListSettings):
    """A recording to replay, with windows or selectors."""

    traces: Path = option(REQUIRED, "file written by `outrider traces record`", metavar="FILE", positional=True)
    rtt: tuple[float, ...] = (2.0, 10.0, 60.0, 200.0)
    window: tuple[str, ...] = listed(
        ("adaptive", "4", "8", "16"),
        "adaptive, N unverified tokens at most, syncN: rounds of N drafts that wait for the verdict, or a rule: "
        "threshold[:X], specdec++[:X][@FILE], speckv[@FILE], flexspec[:X], aimd, pearl:N with PEARL's waits",
    )
    goal: Goal = option(Goal.LATENCY, "earliest tokens, or fewest target steps")
    min_step: float = option(
        0.0, "minimum time of a target step, to imitate a larger target", metavar="MS", check=at_least(0)
    )
    drafter: tuple[str, ...] = listed((), "recorded drafters to replay; not set: all")
    seed: int = option(0, "seed of the jitter", check=at_least(0))
    selector: tuple[str, ...] = listed(
        (),
        "static (each drafter alone), random, metasd-bd, metasd-be, exp3, thompson, halving, discounted, sliding, "
        "hedge, leader, routing; none named: windows as above",
        group=SELECTORS,
    )
    play: str = option(
        "rounds",
        "rounds: draft, and wait for the verdict; stream: draft ahead, with the first --window",
        choices=("rounds", "stream"),
        group=SELECTORS,
    )
    row: tuple[str, ...] = listed((), "domains to play, or mix, or midway; not set: all", group=SELECTORS)
    rounds: int = option(6, "drafts per round", metavar="K", group=SELECTORS, check=at_least(1))
    seeds: int = option(
        20, "number of runs, with different orders and random draws", group=SELECTORS, check=at_least(1)
    )
    json: Path | None = option(None, "file to write all results to")
    plot: Path | None = option(None, "folder to write plots to", metavar="DIR")


@dataclass(frozen=True, slots=True, kw_only=True)
class OverheadSettings(LinkListSettings):
    """A recording in whose replays the edge's own rules are timed."""

    traces: Path = option(REQUIRED, "file written by `outrider traces record`", metavar="FILE", positional=True)
    rtt: tuple[float, ...] = (10.0, 60.0, 200.0)
    selector: tuple[str, ...] = listed(("leader",), "selectors to time beside the first drafter alone")
    drafter: tuple[str, ...] = listed((), "recorded drafters of the pool; not set: all")
    min_step: float = option(
        30.0, "minimum time of a target step, to imitate a larger target", metavar="MS", check=at_least(0)
    )
    runs: int = option(3, "replays of each, of which the least time counts", check=at_least(1))
    json: Path | None = option(None, "file to write all results to")


def check_drafting(text: str) -> None:
    """Refuse a text that is not `CLOUD:EDGE`, two times above 0."""
    try:
        times = [float(part) for part in text.split(":")]
    except ValueError:
        times = []
    if len(times) != 2 or not all(0 < time < math.inf for time in times):
        raise ValueError(f"{text!r} is not CLOUD:EDGE in ms, such as 8:2")


@dataclass(frozen=True, slots=True, kw_only=True)
class EndsSettings(LinkListSettings):
    """A recording to replay by who drafts, with emulated drafters."""

    traces: Path = option(REQUIRED, "file written by `outrider traces record`", metavar="FILE", positional=True)
    rtt: tuple[float, ...] = (2.0, 10.0, 30.0, 60.0, 120.0, 200.0)
    up: tuple[float, ...] = (0.0,)
    down: tuple[float, ...] = (0.0,)
    drafting: tuple[str, ...] = listed(
        ("2:2", "8:2"),
        "times of a drafted token beside the target and at the edge, CLOUD:EDGE, ms",
        check=check_drafting,
    )
    min_step: float = option(
        30.0, "minimum time of a target step, to imitate a larger target", metavar="MS", check=at_least(0)
    )
    goal: tuple[str, ...] = listed(
        GOALS, "goals of edges and both ends: earliest tokens, least work of the cloud", choices=GOALS
    )
    optimum: bool = option(False, "replay the best policy in hindsight, too, which takes long")
    drafter: str = option("", "recorded drafter to replay; empty: the only one", metavar="NAME")
    json: Path | None = option(None, "file to write the record to")


@dataclass(frozen=True, slots=True, kw_only=True)
class CostSettings(Settings):
    """A benchmark whose work in the cloud is summed up."""

    record: Path = option(
        REQUIRED,
        "file that `outrider bench` or `outrider traces ends` wrote for --json",
        metavar="FILE",
        positional=True,
    )
    step_cores: float = option(
        0.0, "cores that a target step occupies; 0: the threads of the record's target", metavar="N", check=at_least(0)
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacitySettings(Settings):
    """A recording whose texts many sessions replay at once, and what they may cost."""

    traces: Path = option(REQUIRED, "file written by `outrider traces record`", metavar="FILE", positional=True)
    rtt: tuple[float, ...] = listed(
        (2.0, 10.0, 30.0, 60.0, 120.0, 200.0), "round-trip times of the links, ms", check=at_least(0)
    )
    drafting: tuple[float, ...] = listed((0.5, 2.0, 10.0), "times of a drafted token at either end, ms", check=above(0))
    draft_threads: tuple[int, ...] = listed((1,), "threads of the verifier that draft", check=at_least(1))
    modes: tuple[str, ...] = listed(
        CROWD_MODES, "who drafts: nobody, the verifier alone, edges alone, both", choices=CROWD_MODES
    )
    step_costs: tuple[str, ...] = listed(
        ("flat",),
        "assumed times of a step: by the recorded costs, or flat: the minimum and little for a row, as on a GPU",
        choices=("measured", "flat"),
    )
    min_step: float = option(
        30.0, "minimum time of a target step, to imitate a larger target", metavar="MS", check=above(0)
    )
    flat_row: float = option(0.1, "time of a row of flat steps", metavar="MS", check=at_least(0))
    gap: float = option(75.0, "longest 95th percentile of the gaps between tokens", metavar="MS", check=above(0))
    pace: float = option(25.0, "longest mean time a token of a session; 0: any", metavar="MS", check=at_least(0))
    max_sessions: int = option(128, "most sessions to try", check=at_least(1))
    seconds: float = option(
        48.0, "simulated time of a trial, of all sessions together, after a warm-up", metavar="S", check=above(0)
    )
    seeds: int = option(3, "searches of each capacity, with different texts and beginnings", check=at_least(1))
    drafter: str = option("", "recorded drafter to replay; empty: the only one", metavar="NAME")
    json: Path | None = option(None, "file to write all results to")
    plot: Path | None = option(None, "file to plot them in: .png, .pdf or .svg")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnBenchSettings(Settings):
    """Drafters that learn from streams of texts, each with every loss."""

    streams: tuple[Path, ...] = option(
        REQUIRED,
        "file of a domain to learn, as for `outrider train drafter`; each is learned by itself",
        metavar="FILE",
        positional=True,
        many="words",
    )
    drafter: str = option("general", "drafter to begin with: embedded name or package folder", metavar="NAME")
    cold: str = option("", "drafter that hardly knows anything, to begin with too; empty: none", metavar="NAME")
    target: str = option("reference", "target: embedded name, folder or hub name", metavar="NAME")
    kept: tuple[Path, ...] = option(
        (), "files of domains that must not be forgotten; some texts of them are rehearsed", many="words"
    )
    losses: tuple[str, ...] = listed(LOSS_NAMES, "losses to compare", choices=LOSS_NAMES)
    rehearsed: tuple[float, ...] = listed(
        (REHEARSED,), "shares of a batch that are rehearsed, with --kept", check=between(0, 1)
    )
    here: bool = option(
        False, "learn too as `outrider edge --learn-here` does: from tokens alone, drafting with what proved better"
    )
    tokens: int = option(60_000, "tokens of a stream at most, 96 a text", check=at_least(1))
    fresh: int = option(256, "texts of 96 tokens of each domain to measure on", check=at_least(2))
    seeds: int = option(5, "runs of each loss, with different orders of the stream", check=at_least(1))
    cold_seeds: int = option(1, "runs of each loss from --cold", check=at_least(0))
    minutes: float = option(0.0, "time after which no run begins; 0: no limit", metavar="M", check=at_least(0))
    output: Path = option(REQUIRED, "folder for texts and runs, which are not made again", metavar="DIR")
    json: Path | None = option(None, "file to write the record to")
    plot: Path | None = option(None, "file to draw the curves to")

    def check_together(self) -> None:
        """Refuse what is named twice."""
        check_once(self.streams, "streams")
        check_once(self.losses, "losses")
        check_once(self.rehearsed, "rehearsed")


@dataclass(frozen=True, slots=True, kw_only=True)
class LearnDemoSettings(Settings):
    """A cluster that learns, and an edge that decodes texts of one domain over an emulated link."""

    stream: Path = option(
        REQUIRED, "file of the domain to decode, as for `outrider train drafter`", metavar="FILE", positional=True
    )
    texts: int = option(400, "texts that the edge decodes", check=at_least(1))
    every: int = option(50, "texts of a line of the table", check=at_least(1))
    fresh: int = option(
        32, "texts to measure on afterwards, with the first drafter and the current version, in turn", check=at_least(2)
    )
    max_tokens: int = option(64, "tokens per text", check=at_least(1))
    sessions: int = option(4, "texts decoded at once", check=at_least(1))
    min_step: float = option(
        30.0, "minimum time of a target step, to imitate a larger target", metavar="MS", check=at_least(0)
    )
    rtt: float = option(10.0, "round-trip time of the link, ms", check=at_least(0))
    up: float = option(20.0, "rate from the edge, Mbit/s; 0: no limit", check=at_least(0))
    down: float = option(100.0, "rate to the edge, Mbit/s; 0: no limit", check=at_least(0))
    json: Path | None = option(None, "file to write the record to")


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicySettings(Settings):
    """Training of length rules on recorded traces."""

    traces: tuple[Path, ...] = option(
        REQUIRED, "file written by `outrider traces record`", metavar="FILE", positional=True, many="words"
    )
    output: Path = option(REQUIRED, "JSON file of the weights, for --window")
    hidden: int = option(16, "units of each network", check=at_least(1))
    steps: int = option(4000, "training steps, 256 rows each", check=at_least(1))
    held_out: float = option(0.2, "share of the prompts kept for evaluation", check=between(0, 1))
    seed: int = option(0, "seed of all random numbers", check=at_least(0))


BENCH = Command(
    "outrider.bench.benchmark.command:bench",
    (
        part(LinkListSettings),
        part(BuiltInPrompts),
        part(BenchSettings),
        part(LinkSettings, "tun"),
        part(Sampling),
        part(EdgeConfig, DRAFTING),
        part(VerifierConfig, TARGET),
        part(VerifierConfig, HERE, defaults={"draft_here": "on"}),
    ),
)


def loaded(*names: str, **defaults: Any) -> Part:
    """Choose options of a target that a command loads by itself; "target" names a group of options, too."""
    options = part(VerifierConfig, TARGET, flags={"threads": "threads"}, defaults=defaults)
    return tuple(argument for argument in options if argument.field.name in names)


# Records are compared between machines, so that their type must not follow the processor.
_WRITER = loaded("target", "dtype", "device", "threads", "noise", dtype="float32")
ENGINE_BENCH = Command(
    "outrider.bench.engine.command:engine_bench",
    (part(EngineSettings), loaded("target", "dtype", "threads", dtype="float32", threads=1)),
)
CHAT_BENCH = Command("outrider.bench.chat:chat_bench", (part(ChatSettings), part(VerifierConfig, TARGET)))
COPY_BENCH = Command(
    "outrider.bench.copying:copy_bench",
    (part(LinkListSettings), part(BuiltInPrompts), part(CopySettings), part(Sampling), part(VerifierConfig, TARGET)),
)
COMPARE = Command(
    "outrider.bench.comparison.command:compare",
    (part(CompareSettings), _WRITER, part(VerifierConfig, "steering")),
)
REPLAY = Command("outrider.bench.traces.replay:replay", (part(ReplaySettings),))
OVERHEAD = Command("outrider.bench.traces.overhead:overhead", (part(OverheadSettings),))
_PRICE = tuple(argument for argument in part(VerifierConfig, HERE) if argument.field.name == "draft_price")
ENDS = Command("outrider.bench.benchmark.ends:ends", (part(EndsSettings), _PRICE))
COSTS = Command("outrider.bench.benchmark.costs:costs", (part(CostSettings),))
CAPACITY = Command("outrider.bench.capacity.command:capacity", (part(CapacitySettings),))
LEARN_BENCH = Command("outrider.bench.learning.command:learn_bench", (part(LearnBenchSettings),))
LEARN_DEMO = Command(
    "outrider.bench.learning.live:learn_demo",
    (
        part(LearnDemoSettings),
        part(TrainerSettings),
        loaded("target", "threads", threads=1),
        part(VerifierConfig, "steering"),
        part(EdgeConfig, "steering"),
    ),
)
TRAIN_POLICY = Command("outrider.bench.length_training.command:train_policy", (part(PolicySettings),))
