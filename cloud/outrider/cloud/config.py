"""What a verifier is told when it starts; checked here, fixed afterwards."""

from __future__ import annotations

import socket
from dataclasses import dataclass

from outrider.proto.errors import ConfigError
from outrider.proto.types import Goal, Patience

ALONE_PREFILL_ROWS = 512  # of a prompt in one step while nobody decodes
DTYPES = ("float32", "bfloat16", "float16")
LOOPBACK = ("127.", "localhost:", "[::1]:")
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
        stall_s: how long a client may leave its commits unread before it is dropped.
        insecure_listen: listen on an address that is not loopback, without TLS.
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
    stall_s: float = 30.0
    insecure_listen: bool = False

    def __post_init__(self) -> None:
        if self.dtype not in DTYPES:
            raise ConfigError(f"{self.dtype!r} is none of {', '.join(DTYPES)}", field="dtype")
        if not self.target:
            raise ConfigError("is empty; name a model, such as `reference`", field="target")
        if ":" not in self.listen:
            raise ConfigError(f"{self.listen!r} is not host:port", field="listen")
        if not self.listen.startswith(LOOPBACK) and not self.insecure_listen:
            raise ConfigError(
                f"{self.listen!r} is not a loopback address and the stream is not encrypted; "
                "set insecure_listen to accept that",
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
        if self.stall_s <= 0:
            raise ConfigError("must be above 0 seconds", field="stall_s")

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
