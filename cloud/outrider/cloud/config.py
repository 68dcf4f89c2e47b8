"""What a verifier is told when it starts; checked here, fixed afterwards."""

from __future__ import annotations

import math
import socket
from dataclasses import dataclass

from outrider.proto.address import is_local_address
from outrider.proto.errors import ConfigError
from outrider.proto.figures_server import check_metrics_listen
from outrider.proto.plumbing.tls import ServerTls
from outrider.proto.tracing import check_tracing
from outrider.proto.types import Goal, Patience

ALONE_PREFILL_ROWS = 512  # of a prompt in one step while nobody decodes
DTYPES = ("float32", "bfloat16", "float16")
EVERYWHERE = ("0.0.0.0", "[::]")  # noqa: S104 - recognised, not bound


@dataclass(frozen=True, slots=True, kw_only=True)
class VerifierConfig:
    """Frozen and validated.

    Attributes:
        target: a name of the embedded family, a folder, or a hub name.
        model: the id that edges ask for; empty: as `target`.
        name: of this verifier, unique in its cluster.
        listen: host:port; port 0 takes a free one.
        advertise: host by which edges reach it; empty: that of `listen`, or this machine's where that is every one.
        device: of torch, such as `cpu` or `cuda:0`.
        dtype: of weights and KV cache. float32 keeps the text bit for bit whatever shares a step.
        threads: of torch on the CPU; 0 leaves torch's choice.
        kv_tokens: positions that the KV cache holds in all sessions together.
        page_size: positions a page.
        context_length: positions a session; 0: what the target was made for.
        max_sessions: admitted at once.
        max_drafts: judged in one step, at most.
        max_credit: unverified tokens a session, at most.
        prefill_chunk: prompt tokens in one step while other sessions decode.
        patience: the same for all sessions; None: planned, from each session's own measurements.
        goal: tokens soonest, or the fewest target steps.
        pace_s: a step takes at least so long, which stands for a larger target; 0 but in benchmarks.
        batch_invariant: compute every row in tiles of one shape, so that bytes do not depend on what shares a step,
            in bfloat16 too; slower.
        steering: projections for steered drafters, each a file or a folder with a `projection.safetensors`, where the
            verifier runs; those of embedded drafters for the target come by themselves.
        keep_s: how long an idle session is kept for its next turn, at most, where its edge wants that; it costs KV
            pages only, and gives them up as soon as another session needs them. 0: never.
        drain_grace_s: how long sessions may take to move away when an actor's process is told to end.
        watch_node_s: between two looks of an actor whether Ray drains its node; 0: it does not look.
        stall_s: how long a client may leave its commits unread before it is dropped.
        insecure_listen: listen on an address that is not loopback, without TLS. Whoever can see the network then sees
            prompts and texts.
        tls: certificate and key, and whose certificates edges must show; None: plain text.
        metrics_listen: host:port of figures for Prometheus, in plain text; empty: none.
        insecure_metrics: let that be an address that is not loopback.
        trace_endpoint: of an OpenTelemetry collector (OTLP over gRPC), as http://HOST:PORT or https:; empty: no spans.
        log_level: of an actor's process, which has no command line; empty: Ray's.
        log_format: of the same, `text` or `json`.
    """

    target: str = "reference"
    model: str = ""
    name: str = "verifier"
    listen: str = "127.0.0.1:0"
    advertise: str = ""
    device: str = "cpu"
    dtype: str = "float32"
    threads: int = 0
    kv_tokens: int = 32768
    page_size: int = 16
    context_length: int = 0
    max_sessions: int = 32
    max_drafts: int = 16
    max_credit: int = 64
    prefill_chunk: int = 64
    patience: Patience | None = None
    goal: Goal = Goal.LATENCY
    pace_s: float = 0.0
    batch_invariant: bool = False
    steering: tuple[str, ...] = ()
    keep_s: float = 300.0
    drain_grace_s: float = 10.0
    watch_node_s: float = 1.0
    stall_s: float = 30.0
    insecure_listen: bool = False
    tls: ServerTls | None = None
    metrics_listen: str = ""
    insecure_metrics: bool = False
    trace_endpoint: str = ""
    log_level: str = ""
    log_format: str = "text"

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"{self.dtype!r} is none of {', '.join(DTYPES)}", field="dtype")
        if not self.target:
            raise ConfigError("is empty; name a model, such as `reference`", field="target")
        if isinstance(self.steering, str) or not all(self.steering):
            raise ConfigError("must be a tuple of paths, none of them empty", field="steering")
        if ":" not in self.listen:
            raise ConfigError(f"{self.listen!r} is not host:port", field="listen")
        if not (self.insecure_listen or self.tls is not None or is_local_address(self.listen, "listen")):
            raise ConfigError(
                f"{self.listen!r} is not a loopback address and the stream is not encrypted; "
                "give a certificate (`outrider certs` makes one), or set insecure_listen to accept that",
                field="listen",
            )
        least = {
            "threads": 0,
            "kv_tokens": 16,
            "page_size": 1,
            "context_length": 0,
            "max_sessions": 1,
            "max_drafts": 1,
            "max_credit": 1,
            "prefill_chunk": 1,
        }
        for name, minimum in least.items():
            if getattr(self, name) < minimum:
                raise ConfigError(f"{getattr(self, name)} is below {minimum}", field=name)
        if self.pace_s < 0:
            raise ConfigError("must be 0 seconds or more", field="pace_s")
        if not 0 <= self.keep_s < math.inf:
            raise ConfigError("must be a finite number of seconds, 0 or more", field="keep_s")
        for name in ("drain_grace_s", "watch_node_s"):
            if getattr(self, name) < 0:
                raise ConfigError("must be 0 seconds or more", field=name)
        if self.stall_s <= 0:
            raise ConfigError("must be above 0 seconds", field="stall_s")
        check_tracing(self.trace_endpoint, 1.0)
        check_metrics_listen(self.metrics_listen, insecure=self.insecure_metrics)

    @property
    def host(self) -> str:
        """The host that edges are told."""
        listening = self.listen.rpartition(":")[0]
        if self.advertise or listening not in EVERYWHERE:
            return self.advertise or listening
        return socket.gethostbyname(socket.gethostname())

    @property
    def model_id(self) -> str:
        """The id that edges ask for."""
        return self.model or self.target
