"""The settings of one verifier."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from outrider.proto.address import http_url
from outrider.proto.errors import ConfigError
from outrider.proto.plumbing.cores import computing_cores
from outrider.proto.plumbing.serving import GrpcServerSettings
from outrider.proto.settings import above, at_least, between, declared, no_empty_text, option
from outrider.proto.tracing import trace_endpoint_option
from outrider.proto.types import Goal, Patience

MAX_PREFILL_ROWS = 512  # rows of prompts in one step
AUTO = "auto"
DTYPES = ("float32", "bfloat16", "float16")
ENGINE = "engine"
HERE = "drafting beside the target"
EVERYWHERE = ("0.0.0.0", "[::]")  # noqa: S104 - recognised, not bound
LEARNING = "learning"
TARGET = "target"
SERVING = "serving"
PROBES = "probes"
_OF_A_TARGET = (
    "learn",
    "steering",
    "dtype",
    "device",
    "threads",
    "kv_tokens",
    "page_size",
    "context_length",
    "exact",
    "min_step_s",
)


def parse_patience(text: str) -> Patience:
    """Read `MS` or `MS,DRAFTS`, where `inf` waits for ever; raise `ValueError` for anything else."""
    milliseconds, _, drafts = text.partition(",")
    try:
        return Patience(float(milliseconds) / 1000, int(drafts or 1))
    except ValueError as error:
        raise ValueError(f"{text!r} is not MS or MS,DRAFTS: {error}") from None


def parse_draft_with(text: str) -> str:
    """Read the name of a drafter, or the path of its folder, which is made absolute."""
    return absolute(text) if "/" in text or Path(text).is_dir() else text


def _check_price(value: float | None) -> None:
    if value is not None and not value >= 0:
        raise ValueError(f"{value} is below 0")


def _check_kv_tokens(value: int) -> None:
    if value != 0 and value < 16:
        raise ValueError(f"{value} is below 16; 0 takes what memory allows")


def absolute(path: str) -> str:
    """Return a path that names the same file for a process elsewhere on this machine, such as a Ray actor."""
    return str(Path(path).expanduser().absolute())


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierConfig(GrpcServerSettings):
    """Settings by which one verifier serves its target."""

    target: str = option(
        "reference",
        "target: known name, folder, GGUF file or hub name",
        metavar="NAME",
        group=TARGET,
        check=no_empty_text,
    )
    model: str = option("", "id by which edges ask for the target; empty: its name", metavar="NAME")
    name: str = option("verifier", "name of the verifier, unique in the cluster", metavar="NAME")
    advertise: str = option("", "host at which edges reach it; empty: the one of --listen", metavar="HOST")
    dtype: str = option(
        AUTO,
        "type of weights and KV cache; auto: on a CPU bfloat16 where it is fast and keeps bytes, else float32; "
        "elsewhere the model's own",
        choices=(AUTO, *DTYPES),
        group=TARGET,
    )
    device: str = option("cpu", "torch device, such as cpu, cuda or cuda:1", metavar="DEVICE", group=TARGET)
    threads: int = option(
        0,
        "torch threads on the CPU; 0: as many as there are cores, but one",
        flag="target-threads",
        group=TARGET,
        check=at_least(0),
    )
    kv_tokens: int = option(
        0, "positions in the KV cache of all sessions; 0: by memory", group=TARGET, check=_check_kv_tokens
    )
    page_size: int = option(16, "positions per page of the KV cache", check=at_least(1))
    context_length: int = option(0, "positions per session; 0: the target's limit", group=TARGET, check=at_least(0))
    exact: str = option(
        "auto",
        "whether a text keeps its bytes whatever shares its steps; auto: on a CPU, in slow tiles only where it must; "
        "tiles: always in them; off: no",
        choices=("auto", "tiles", "off"),
        group=TARGET,
    )
    no_prefix_cache: bool = option(
        False, "share no computed prompts and texts between the sessions of an API key", group=SERVING
    )
    max_sessions: int = option(32, "limit of sessions at once", group=SERVING, check=at_least(1))
    max_drafts: int | None = option(
        None,
        "limit of drafts verified in one step of a session; not set: 16, and 32 with --engine probes",
        check=at_least(1),
    )
    max_credit: int = option(64, "limit of unverified tokens of a session", check=at_least(1))
    max_gap_s: float = option(
        0.05,
        "longest step that reads prompts while other sessions decode, or half again as long as a step that reads none",
        group=SERVING,
        check=above(0),
    )
    prefill_chunk: int = option(
        0, "prompt tokens in one step while other sessions decode; 0: what --max-gap allows", check=at_least(0)
    )
    keep_s: float = option(
        300.0,
        "time to keep the KV cache of an idle conversation if there is room; 0: none",
        check=at_least(0),
    )
    patience: Patience | None = option(
        None,
        "time to wait for DRAFTS drafts before a step; 0: none, inf: no limit; not set: planned per session",
        metavar="MS[,DRAFTS]",
        parse=parse_patience,
    )
    steering: tuple[str, ...] = option(
        (),
        "projection for steered drafters: a file, or a folder written by `outrider train steer`",
        metavar="PATH",
        group=TARGET,
        check=no_empty_text,
        parse=absolute,
    )
    goal: Goal = option(Goal.LATENCY, "earliest tokens, or fewest target steps", group=SERVING)
    draft_here: str = option(
        "auto",
        "draft beside the target too, for sessions whose edges are far; auto: where a drafter for the target is at "
        "hand and the target leaves a core",
        choices=("auto", "on", "off"),
        group=HERE,
    )
    draft_with: str = option(
        "",
        "drafter beside the target: embedded name, `ngram`, or folder of a drafter or of a model with the target's "
        "tokenizer; empty: the first embedded one for its tokens",
        metavar="NAME",
        group=HERE,
        parse=parse_draft_with,
    )
    draft_threads: int = option(
        0,
        "threads that draft beside the target; 0: as many as the target leaves cores",
        group=HERE,
        check=at_least(0),
    )
    draft_price: float | None = option(
        None,
        "seconds of waiting that a second of drafting beside the target is worth, inf: any; not set: as many as leave "
        "texts as fast as with a drafter beside the target alone",
        metavar="SECONDS",
        group=HERE,
        check=_check_price,
        parse=float,
    )
    learn: bool = option(
        False,
        "keep texts in memory for a day, for `outrider trainer`: those whose edge and API key allow it, none else",
        group=LEARNING,
    )
    quiet_beat_s: float = option(
        0.034,
        "time between the messages of edges with --quiet-wire, the same for all: a little more than a step takes",
        group=SERVING,
        check=above(0),
    )
    min_step_s: float = option(0.0, "minimum time of a step, to imitate a larger target", check=at_least(0))
    drain_grace_s: float = option(
        10.0, "time for sessions to move to other verifiers before it ends", check=at_least(0)
    )
    stall_s: float = option(30.0, "time that a client may leave its commits unread", check=above(0))
    trace_endpoint: str = trace_endpoint_option()
    log_level: str = option("", "log level of an actor's process, which has no command line; empty: Ray's")
    log_format: str = option("text", "log format of an actor's process", choices=("text", "json"))

    engine: str = option(
        "transformers",
        "what computes: ours on transformers' models, stock vLLM (docs/vllm.md), or a server that is there already, "
        "which probes ask by HTTP (docs/servers.md)",
        choices=("transformers", "vllm", PROBES),
        group=ENGINE,
    )
    tensor_parallel: int = option(1, "processes, and GPUs, that share every layer", group=ENGINE, check=at_least(1))
    across_nodes: bool = option(False, "let Ray place these processes, on other machines too", group=ENGINE)
    quantization: str = option(
        "", "how the weights are quantised, as vLLM names it; empty: as the target says", metavar="NAME", group=ENGINE
    )
    kv_dtype: str = option("auto", "type of the KV cache, such as fp8; auto: that of the weights", group=ENGINE)
    memory_share: float = option(
        0.0, "share of a device's memory for weights and KV cache; 0: the default", group=ENGINE, check=between(0, 1)
    )

    target_url: str = option(
        "", "address of the server, such as http://127.0.0.1:8000", metavar="URL", group=PROBES, parse=http_url
    )
    target_model: str = option("", "its name of the model; empty: the only one", metavar="NAME", group=PROBES)
    target_tokenizer: Path | None = option(
        None,
        "folder of the model's tokenizer.json and configs; not set: where the server says its weights are",
        flag="tokenizer",
        metavar="DIR",
        group=PROBES,
    )
    target_key_file: Path | None = option(
        None, "file of the server's API key; not set: OUTRIDER_TARGET_KEY", group=PROBES
    )
    target_ca: Path | None = option(
        None, "certificate of the server's authority; not set: the public ones", group=PROBES
    )

    def check_together(self) -> None:
        """Refuse what the engine cannot do."""
        GrpcServerSettings.check_together(self)
        probes = self.engine == PROBES
        if probes and not self.target_url:
            raise ConfigError("is missing: give the server's address, http://HOST:PORT", field="target_url")
        for name, declaration in declared(VerifierConfig).items():
            group = declaration.option.group
            needed = {PROBES: PROBES, ENGINE: "vllm"}.get(group, self.engine)
            if name == "engine" or getattr(self, name) == declaration.default:
                continue
            if needed != self.engine:
                raise ConfigError(f"is for --engine {needed} alone", field=name)
            if probes and name in _OF_A_TARGET:
                raise ConfigError("cannot be had with --engine probes, whose server computes", field=name)
        if self.engine == "vllm":
            if self.exact == "tiles":
                raise ConfigError("is a promise of --engine transformers alone", field="exact")
            if self.learn:
                raise ConfigError("needs the target's logits, which --engine vllm keeps to itself", field="learn")

    @property
    def host(self) -> str:
        """Host under which edges reach it.

        Raises:
            ConfigError: it is this machine's address, and the machine's name has none.
        """
        listening = self.listen.rpartition(":")[0]
        if self.advertise or listening not in EVERYWHERE:
            return self.advertise or listening
        name = socket.gethostname()
        try:
            return socket.gethostbyname(name)
        except OSError as error:
            message = (
                f"is needed, since the name of the verifier's machine, {name}, has no address there: "
                "give the host at which edges reach it, or add the name to /etc/hosts"
            )
            raise ConfigError(message, field="advertise") from error

    @property
    def torch_threads(self) -> int:
        """Torch threads on the CPU: those asked for, else one core fewer than there are."""
        return self.threads or computing_cores()

    @property
    def most_drafts(self) -> int:
        """Most drafts that one step of a session verifies."""
        return self.max_drafts or (32 if self.engine == PROBES else 16)

    @property
    def model_id(self) -> str:
        """Id that edges ask for."""
        return self.model or (self.target_model if self.engine == PROBES else self.target)
