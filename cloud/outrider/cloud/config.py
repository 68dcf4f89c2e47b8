"""The settings of one verifier."""

from __future__ import annotations

import socket
from dataclasses import dataclass
from pathlib import Path

from outrider.proto.plumbing.serving import GrpcServerSettings
from outrider.proto.settings import above, at_least, no_empty_text, option
from outrider.proto.tracing import trace_endpoint_option
from outrider.proto.types import Goal, Patience

DTYPES = ("float32", "bfloat16", "float16")
KV_TOKENS = 32768
EVERYWHERE = ("0.0.0.0", "[::]")  # noqa: S104 - recognised, not bound
TARGET = "target"


def parse_patience(text: str) -> Patience:
    """Read `MS` or `MS,DRAFTS`; `inf` waits for ever. Raises `ValueError`."""
    milliseconds, _, drafts = text.partition(",")
    try:
        return Patience(float(milliseconds) / 1000, int(drafts or 1))
    except ValueError as error:
        raise ValueError(f"{text!r} is not MS or MS,DRAFTS: {error}") from None


def absolute(path: str) -> str:
    """Return a path that names the same file for a process elsewhere on this machine, such as a Ray actor."""
    return str(Path(path).expanduser().absolute())


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierConfig(GrpcServerSettings):
    """How one verifier serves its target."""

    target: str = option(
        "reference", "embedded name, folder, or hub name", metavar="NAME", group=TARGET, check=no_empty_text
    )
    model: str = option("", "id that edges ask for; empty: the target's name", metavar="NAME")
    name: str = option("verifier", "name, unique in the cluster", metavar="NAME")
    advertise: str = option("", "host by which edges reach it; empty: the one it listens on", metavar="HOST")
    dtype: str = option(
        "float32", "type of weights and KV cache; float32 keeps the text bit for bit", choices=DTYPES, group=TARGET
    )
    device: str = option("cpu", "torch device: cpu, cuda, cuda:1", metavar="DEVICE", group=TARGET)
    threads: int = option(
        0, "torch threads on the CPU; 0: torch's choice", flag="target-threads", group=TARGET, check=at_least(0)
    )
    kv_tokens: int = option(
        KV_TOKENS, "positions in the KV cache, all sessions together", group=TARGET, check=at_least(16)
    )
    page_size: int = option(16, "positions a page of the KV cache", check=at_least(1))
    context_length: int = option(0, "positions a session; 0: the target's own", group=TARGET, check=at_least(0))
    batch_invariant: bool = option(False, "same bytes whatever shares a step, in bfloat16 too; slower", group=TARGET)
    max_sessions: int = option(32, "texts that it decodes at once", group=TARGET, check=at_least(1))
    max_drafts: int = option(16, "drafts verified in one step of a session", check=at_least(1))
    max_credit: int = option(64, "unverified tokens of a session", check=at_least(1))
    prefill_chunk: int = option(64, "prompt tokens in one step while other sessions decode", check=at_least(1))
    keep_s: float = option(
        300.0,
        "how long an idle conversation's KV cache is kept while nobody else needs the room; 0: never",
        group=TARGET,
        check=at_least(0),
    )
    patience: Patience | None = option(
        None,
        "wait up to MS (or inf) for DRAFTS drafts before a step; 0 runs ahead; not set: planned per session",
        metavar="MS[,DRAFTS]",
        group=TARGET,
        parse=parse_patience,
    )
    steering: tuple[str, ...] = option(
        (),
        "projection for steered drafters: a file, or a folder that `outrider train steer` wrote",
        metavar="PATH",
        group=TARGET,
        check=no_empty_text,
        parse=absolute,
    )
    goal: Goal = option(Goal.LATENCY, "soonest tokens, or fewest target steps", group=TARGET)
    min_step_s: float = option(
        0.0, "least time of a step, to stand for a larger target in benchmarks", check=at_least(0)
    )
    drain_grace_s: float = option(10.0, "time for sessions to move away when it is to end", check=at_least(0))
    watch_node_s: float = option(1.0, "time between looks whether Ray drains the node; 0: never", check=at_least(0))
    stall_s: float = option(30.0, "how long a client may leave its commits unread", check=above(0))
    trace_endpoint: str = trace_endpoint_option()
    log_level: str = option("", "log level of an actor's process, which has no command line; empty: Ray's")
    log_format: str = option("text", "log format of an actor's process", choices=("text", "json"))

    @property
    def host(self) -> str:
        """Host under which edges reach it."""
        listening = self.listen.rpartition(":")[0]
        if self.advertise or listening not in EVERYWHERE:
            return self.advertise or listening
        return socket.gethostbyname(socket.gethostname())

    @property
    def model_id(self) -> str:
        """Id that edges ask for."""
        return self.model or self.target
