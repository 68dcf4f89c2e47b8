"""Options of the commands of `python -m research`.

This module loads neither numpy nor torch, since help and completion read it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider.bench.bench_settings import LinkListSettings, listed
from outrider.cloud.verifier_config import TARGET, VerifierConfig
from outrider.deploy.arguments import Command, part
from outrider.proto.errors import ConfigError
from outrider.proto.settings import REQUIRED, Settings, at_least, between, option
from outrider.proto.types import Goal

PROBE_WAYS = ("stream", "ngram", "draft", "here", "beside", "own")
PROBE_WORKS = ("edits", "open", "model", "bare")
PRICE_NAMES = ("here", "8b", "70b", "70b-8b")
DEVICE_NAMES = ("desktop GPU", "laptop", "phone", "small board")
CROWD_TRIALS = ("one", "two", "restart")
WIRES = ("cloud", "outrider", "quiet")
SELECTORS = "selectors (the recorded drafters are one pool then, with the first window)"


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplaySettings(LinkListSettings):
    """A recording to replay, with windows or selectors."""

    traces: Path = option(REQUIRED, "file that `traces record` wrote", metavar="FILE", positional=True)
    rtt: tuple[float, ...] = (2.0, 10.0, 60.0, 200.0)
    window: tuple[str, ...] = listed(
        ("adaptive", "4", "8", "16"),
        "adaptive, N unverified tokens at most, or syncN: rounds of N drafts that wait for the verdict",
    )
    goal: Goal = option(Goal.LATENCY, "earliest tokens, or fewest target steps")
    min_step: float = option(
        0.0, "minimum time of a target step, to imitate a larger target", metavar="MS", check=at_least(0)
    )
    drafter: tuple[str, ...] = listed((), "recorded drafters to replay; not set: all")
    seed: int = option(0, "seed of the jitter", check=at_least(0))
    selector: tuple[str, ...] = listed(
        (), "static (each drafter alone), leader, hedge, metasd-bd; none named: windows as above", group=SELECTORS
    )
    row: tuple[str, ...] = listed((), "domains to play, or mix; not set: all", group=SELECTORS)
    seeds: int = option(
        20, "number of runs, with different orders and random draws", group=SELECTORS, check=at_least(1)
    )
    json: Path | None = option(None, "file to write all results to")


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordSettings(Settings):
    """Texts that a target writes alone, and drafters to record."""

    prompts: Path | None = option(None, "file of prompts; not set: built-in")
    per_domain: int = option(10, "prompts per domain", check=at_least(1))
    max_tokens: int = option(128, "tokens per text", check=at_least(1))
    drafter: tuple[str, ...] = listed(
        ("general", "ngram"),
        "drafters: embedded names, package folders, ngram, or retrieval, which copies a document made of each text",
    )
    edited: float = option(
        0.1, "share of tokens in which the document of `retrieval` differs from the text", check=between(0, 1)
    )
    edits_of: int = option(4, "tokens that an edit of it replaces, inserts or deletes", metavar="N", check=at_least(1))
    temperature: float = option(0.0, "temperature; 0: greedy", metavar="T", check=at_least(0))
    seed: int = option(0, "seed of the noise; the same seed gives the same text", check=at_least(0))
    seeds: int = option(0, "texts per prompt, with seeds 1 to N; 0: one, with --seed", check=at_least(0))
    age: int = option(
        4, "positions by which vectors of steered drafters are older than the freshest; -1: none", check=at_least(-1)
    )
    output: Path = option(REQUIRED, ".jsonl with one trace per line; costs of the machines go to .costs.json beside it")


@dataclass(frozen=True, slots=True, kw_only=True)
class ProbeSettings(LinkListSettings):
    """Texts of a stock vLLM server, and ways to them."""

    works: tuple[str, ...] = listed(
        PROBE_WORKS,
        "edits with a prediction; prompts with nothing to draft from but themselves, with --drafter, with no drafter",
        choices=PROBE_WORKS,
    )
    repository: Path | None = option(None, "git directory whose history has the edits", metavar="DIR")
    revision: str = option("HEAD", "commit to look for edits from, backwards")
    target_folder: Path = option(REQUIRED, "folder of the target, as transformers saves it", metavar="DIR")
    draft_model: Path | None = option(None, "folder of a draft model for vLLM; not set: none", metavar="DIR")
    vllm_python: Path = option(Path(".venv-vllm/bin/python"), "Python that has vLLM")
    vllm_flags: str = option("--dtype float32 --block-size 32 --max-model-len 2048", "flags of its server")
    costs: tuple[int, ...] = listed((), "contexts at which probes are priced beside a token of the stream")
    at_once: tuple[int, ...] = listed((1,), "texts at once that are priced", check=at_least(1))
    ways: tuple[str, ...] = listed(
        PROBE_WAYS,
        "plain stream, vLLM's own n-grams or draft model, our verifier in the edge or beside vLLM, our own target",
        choices=PROBE_WAYS,
    )
    ngram_drafts: int = option(8, "drafts that vLLM looks up", check=at_least(1))
    drafter: str = option("smol", "drafter of our edges for model drafts")
    prompts: Path | None = option(None, "file of prompts with nothing to draft; not set: built-in")
    texts: int = option(16, "edits, and prompts with nothing to draft", check=at_least(1))
    max_tokens: int = option(160, "tokens per text", check=at_least(1))
    repeat: int = option(1, "runs of everything, of which a text counts by the median", check=at_least(1))
    json: Path | None = option(None, "file to write the record to")

    def check_together(self) -> None:
        """Refuse ways with nothing to compare them with, and vLLM's draft model without one."""
        if PROBE_WAYS[0] not in self.ways:
            raise ConfigError(f"lacks {PROBE_WAYS[0]}, with which the others are compared", field="ways")
        if "draft" in self.ways and self.draft_model is None:
            raise ConfigError("is missing; give a folder, or leave draft out of --ways", field="draft_model")
        if "edits" in self.works and self.repository is None:
            raise ConfigError("is missing; give a git directory, or leave edits out of --works", field="repository")


@dataclass(frozen=True, slots=True, kw_only=True)
class EavesdropperSettings(Settings):
    """Texts whose TLS records are seen, by whoever would like to know their prompts."""

    target: str = option("reference", "target whose texts are seen", metavar="NAME")
    wires: tuple[str, ...] = listed(WIRES, "streams without drafts, ours, and ours with --quiet-wire", choices=WIRES)
    prompts: int = option(100, "built-in prompts, of which each text has one", check=between(1, 160))
    train: int = option(3, "texts of each prompt from which the forest learns", check=at_least(1))
    test: int = option(2, "texts of each prompt that it then has to name", check=at_least(1))
    at_once: int = option(2, "texts at once, each over its own connection", check=at_least(1))
    max_tokens: int = option(48, "tokens per text", check=at_least(1))
    temperature: tuple[float, ...] = listed((0.0, 1.0), "temperatures; above 0 no two texts have one seed")
    rtt: float = option(10.0, "round trip of the emulated link", metavar="MS", check=at_least(0))
    min_step: float = option(30.0, "minimum time of a target step", metavar="MS", check=at_least(0))
    beat: float = option(34.0, "time between cells of the quiet wire", metavar="MS", check=at_least(1))
    seed: int = option(0, "seed of the order of the texts")
    json: Path | None = option(None, "file to write the record to")


@dataclass(frozen=True, slots=True, kw_only=True)
class TablesSettings(Settings):
    """Figures to take again."""

    names: tuple[str, ...] = listed((), "records of tables.toml to take; not set: all")
    small: bool = option(False, "small runs, of which only ratios are compared")
    write: bool = option(False, "take nothing, but make the pages' tables from the records of docs/figures")
    inputs: Path = option(Path("dist/inputs"), "folder of files that commands need", metavar="DIR")
    output: Path = option(Path("dist/records"), "folder for records and logs", metavar="DIR")


@dataclass(frozen=True, slots=True, kw_only=True)
class HeldSettings(Settings):
    """A recording to replay, and when a session is held."""

    traces: Path = option(REQUIRED, "file that `traces record` wrote", metavar="FILE", positional=True)
    gap: float = option(75.0, "longest 99th percentile of the time between tokens", metavar="MS", check=at_least(0))
    pace: float = option(25.0, "longest mean time a token of a session; 0: any", metavar="MS", check=at_least(0))
    json: Path | None = option(None, "file to write the record to")


@dataclass(frozen=True, slots=True, kw_only=True)
class CapacitySettings(HeldSettings):
    """Searches for the most sessions that one verifier holds."""

    prices: tuple[str, ...] = listed(("here", "70b"), "prices of the verifier", choices=PRICE_NAMES)
    devices: tuple[str, ...] = listed(("laptop",), "devices of the edges; rounds for the first", choices=DEVICE_NAMES)
    rtt: tuple[float, ...] = listed((2.0, 14.0, 30.0, 60.0, 120.0), "round trips, ms", check=at_least(0))
    sessions: tuple[int, ...] = listed((), "numbers of sessions to run, without a search", check=at_least(1))
    max_sessions: int = option(1024, "sessions beyond which none are tried", metavar="N", check=at_least(1))
    seconds: float = option(40.0, "time that a trial measures, of all sessions together", check=at_least(1))
    seeds: int = option(1, "searches, of which the median counts", check=at_least(1))
    plot: Path | None = option(None, "picture to draw, such as held.png")


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSettings(HeldSettings):
    """Texts that arrive at many edges and are placed on many verifiers."""

    arrivals: Path = option(REQUIRED, "AzureLLMInferenceTrace_conv.csv of github.com/Azure/AzurePublicDataset")
    price: str = option("70b", "prices of the verifiers", choices=PRICE_NAMES)
    edges: int = option(10_000, "number of edges", metavar="N", check=at_least(1))
    verifiers: tuple[int, ...] = listed((1, 4, 16, 64), "numbers of verifiers", check=at_least(1))
    texts: int = option(100, "texts of each verifier that go on at once, by the pace", metavar="N", check=at_least(1))
    seconds: float = option(6.0, "time that is measured after a warm-up", check=at_least(1))
    length: int = option(4, "drafts of a round, and of co-located drafting", metavar="N", check=at_least(1))
    seed: int = option(0, "seed of arrivals, links and jitter", check=at_least(0))


@dataclass(frozen=True, slots=True, kw_only=True)
class CheckSettings(Settings):
    """Benchmarks with many sessions to simulate again."""

    traces: Path = option(REQUIRED, "file that `traces record` wrote, of the same prompts", positional=True)
    measured: tuple[Path, ...] = listed((), "records that `outrider bench --sessions N --json` wrote")
    json: Path | None = option(None, "file to write the record to")


CAPACITY = Command("research.fleet.fleet_command:capacity_command", (part(CapacitySettings),))
FLEET = Command("research.fleet.fleet_command:fleet_command", (part(FleetSettings),))
CHECK = Command("research.fleet.fleet_command:check_command", (part(CheckSettings),))
REPLAY = Command("research.traces.replay:replay", (part(ReplaySettings),))
# Records are compared between machines, so that their type must not follow the processor.
_TARGET = part(VerifierConfig, TARGET, flags={"threads": "threads"}, defaults={"dtype": "float32"})
RECORD = Command(
    "research.traces.trace_recording:record",
    (
        part(RecordSettings),
        tuple(argument for argument in _TARGET if argument.field.name in ("target", "dtype", "device", "threads")),
        part(VerifierConfig, "steering"),
    ),
)
LINES = Command("research.lines:show")
TABLES = Command("research.tables_command:tables", (part(TablesSettings),))
EAVESDROPPER = Command("research.eavesdropper.eavesdropper_command:eavesdropper", (part(EavesdropperSettings),))
PROBES = Command("research.probes.probe_bench:probes", (part(ProbeSettings),))


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterSettings(Settings):
    """A cluster in namespaces of this machine, and which faults it meets."""

    folder: Path = option(Path("dist/cluster"), "folder for logs, keys and caches; what is there goes", metavar="DIR")
    rtt: float = option(20.0, "round trip between the routers of the edges and the cloud", metavar="MS")
    loss: float = option(0.0, "packets lost on the way, in percent", metavar="PERCENT", check=between(0, 50))
    short: bool = option(False, "three edges, and the faults that take no more than two minutes each")
    json: Path | None = option(None, "file to write the table to")


CLUSTER = Command("research.cluster.cluster_command:cluster", (part(ClusterSettings),))


@dataclass(frozen=True, slots=True, kw_only=True)
class CrowdSettings(Settings):
    """Edges of a fleet, and trials that its coordinators go through."""

    trials: tuple[str, ...] = listed(CROWD_TRIALS, "trials", choices=CROWD_TRIALS)
    edges: int = option(10_000, "edges", check=at_least(1))
    rates: tuple[float, ...] = listed(
        (100.0, 200.0, 300.0, 400.0, 600.0), "texts a second, until the coordinator breaks", check=at_least(1)
    )
    back: int = option(1000, "edges that come back after a restart", check=at_least(1))
    folder: Path = option(Path("dist/crowd"), "folder for keys, logs and drafters; what is there goes", metavar="DIR")
    json: Path | None = option(None, "file to write the record to")


CROWD = Command("research.crowd.crowd_command:crowd", (part(CrowdSettings),))
