"""What a training run is told: frozen, validated records."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from outrider.proto.errors import InvalidArgument

DTYPES = ("float32", "bfloat16", "float16")


def _require_positive(name: str, value: float) -> None:
    if isinstance(value, bool) or not (math.isfinite(value) and value > 0):
        raise InvalidArgument(f"{value} is not a positive number", field=name)


@dataclass(frozen=True)
class DrafterShape:
    """A small Llama: RoPE, grouped query heads, gated MLP, tied embeddings; with a window, a small Mistral.

    Attributes:
        hidden: width of the residual stream.
        layers: decoder layers.
        heads, kv_heads: query heads, and the key/value heads they share.
        head_dim: width of a head; even, for RoPE.
        mlp: width of the gated MLP.
        context: longest sequence, in tokens.
        window: positions that a layer sees, the own one counted; None: all.
    """

    hidden: int = 192
    layers: int = 3
    heads: int = 6
    kv_heads: int = 2
    head_dim: int = 32
    mlp: int = 512
    context: int = 2048
    window: int | None = None

    def __post_init__(self) -> None:
        for name in ("hidden", "layers", "heads", "kv_heads", "head_dim", "mlp", "context"):
            _require_positive(f"shape.{name}", getattr(self, name))
        if self.window is not None:
            _require_positive("shape.window", self.window)
        if self.heads % self.kv_heads:
            raise InvalidArgument(
                f"{self.heads} query heads cannot share {self.kv_heads} key heads evenly", field="shape.kv_heads"
            )
        if self.head_dim % 2:
            raise InvalidArgument(f"RoPE turns pairs: even widths only, not {self.head_dim}", field="shape.head_dim")


@dataclass(frozen=True, kw_only=True)
class Training:
    """What every training run is told: whose words it learns, from which text, for how long.

    Attributes:
        target: folder or hub name of a transformers causal language model with safetensors weights.
        corpus: `.jsonl` files (`{"id", "text"}` a line) or plain text files; each file is a domain.
        output: folder for what is trained, its checkpoints and the token cache.
        domain_weights: share of each domain in what is read; equal for all if empty.
        self_text_tokens: how many tokens the target writes itself before training, all domains together.
        self_text_fraction: share of blocks taken from that text instead of the corpus.
        self_text_greedy: share of that text's rows written at T = 0; the others at T = 1.
        self_text_rows, self_text_new_tokens: rows written at once, and the most tokens written a row.
        block: tokens in a training sequence.
        blocks_per_step, blocks_per_pass: sequences an optimizer step, and how many go through the models at once.
        positions_per_chunk: positions whose full-vocabulary distributions the loss holds at once.
        steps, minutes: the budget, exactly one of the two. The learning rate follows it.
        warm_up_steps: of linear growth of the learning rates.
        clip: largest norm of the whole gradient.
        held_out_tokens: tokens a domain kept from training to measure acceptance on.
        measure_every_minutes: between measurements of acceptance; the end is always measured.
        patience: a run ends early after so many measurements without a better one, and publishes its best; 0: never.
        checkpoint_every_steps, checkpoint_every_minutes: whichever comes first.
        threads: of torch on the CPU.
        device, dtype: where both models run; dtype is the target's, the drafter trains in float32.
        seed: of everything random.
        resume: go on from the newest checkpoint in `output`, if there is one.
    """

    target: str
    corpus: tuple[Path, ...]
    output: Path
    domain_weights: Mapping[str, float] = field(default_factory=dict)
    self_text_tokens: int = 0
    self_text_fraction: float = 0.0
    self_text_greedy: float = 0.5
    self_text_rows: int = 192
    self_text_new_tokens: int = 256
    block: int = 512
    blocks_per_step: int = 4
    blocks_per_pass: int = 4
    positions_per_chunk: int = 256
    steps: int | None = None
    minutes: float | None = None
    warm_up_steps: int = 40
    clip: float = 1.0
    held_out_tokens: int = 8192
    measure_every_minutes: float = 10.0
    patience: int = 0
    checkpoint_every_steps: int = 1_000_000
    checkpoint_every_minutes: float = 5.0
    threads: int = 1
    device: str = "cpu"
    dtype: str = "float32"
    seed: int = 0
    resume: bool = False

    def __post_init__(self) -> None:
        object.__setattr__(self, "corpus", tuple(Path(path) for path in self.corpus))
        object.__setattr__(self, "output", Path(self.output))
        if not self.target:
            raise InvalidArgument("name a folder or a hub model", field="target")
        if not self.corpus:
            raise InvalidArgument("name at least one .jsonl or text file", field="corpus")
        for path in self.corpus:
            if not path.is_file():
                raise InvalidArgument(f"{path} is not a file; give paths of .jsonl or text files", field="corpus")
        if len({path.name for path in self.corpus}) < len(self.corpus):
            raise InvalidArgument("two files share a name; a domain is named after its file", field="corpus")
        for name in (
            "self_text_rows",
            "self_text_new_tokens",
            "block",
            "blocks_per_step",
            "blocks_per_pass",
            "positions_per_chunk",
            "clip",
            "held_out_tokens",
            "measure_every_minutes",
            "checkpoint_every_steps",
            "checkpoint_every_minutes",
            "threads",
        ):
            _require_positive(name, getattr(self, name))
        if (self.steps is None) == (self.minutes is None):
            raise InvalidArgument("give a budget by either steps or minutes", field="steps")
        _require_positive("steps" if self.minutes is None else "minutes", self.steps or self.minutes or 0)
        if self.block < 2:
            raise InvalidArgument(f"{self.block} is below 2", field="block")
        if self.blocks_per_step % self.blocks_per_pass:
            raise InvalidArgument(f"does not divide blocks_per_step ({self.blocks_per_step})", field="blocks_per_pass")
        if not 0 <= self.self_text_fraction <= 1:
            raise InvalidArgument(f"{self.self_text_fraction} is not in [0, 1]", field="self_text_fraction")
        if not 0 <= self.self_text_greedy <= 1:
            raise InvalidArgument(f"{self.self_text_greedy} is not in [0, 1]", field="self_text_greedy")
        if (self.self_text_fraction > 0) != (self.self_text_tokens > 0):
            raise InvalidArgument("give self_text_tokens and self_text_fraction, or neither", field="self_text_tokens")
        for name in ("warm_up_steps", "patience"):
            if getattr(self, name) < 0:
                raise InvalidArgument(f"{getattr(self, name)} is negative", field=name)
        if self.dtype not in DTYPES:
            raise InvalidArgument(f"{self.dtype!r} is none of {', '.join(DTYPES)}", field="dtype")
        for name, weight in self.domain_weights.items():
            if not (math.isfinite(weight) and weight >= 0):
                raise InvalidArgument(
                    f"the weight of {name!r} is {weight}; weights are finite and not negative", field="domain_weights"
                )


@dataclass(frozen=True, kw_only=True)
class DrafterTraining(Training):
    """How to distil a drafter from a target, beside what every training is told.

    Attributes:
        shape: of a new drafter.
        start: folder of a drafter to go on from, as `train drafter` writes it, instead of a new one; None: a new one.
        matrix_lr, other_lr: of Muon for the layers' matrices, of AdamW for embedding and norms.
        decay_fraction: last share of the budget, over which both fall linearly to zero.
        warm_start: start a new drafter from the target's embedding (see `drafter.start_embedding`).
    """

    start: Path | None = None
    shape: DrafterShape = DrafterShape()
    matrix_lr: float = 0.02
    other_lr: float = 3e-3
    decay_fraction: float = 0.4
    warm_start: bool = True

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_positive("matrix_lr", self.matrix_lr)
        _require_positive("other_lr", self.other_lr)
        if self.start is not None:
            object.__setattr__(self, "start", Path(self.start))
            if not (self.start / "config.json").is_file():
                raise InvalidArgument(f"{self.start} holds no config.json; `train drafter` writes one", field="start")
        if self.block > self.shape.context:
            raise InvalidArgument(f"{self.block} exceeds the context, {self.shape.context}", field="block")
        if not 0 <= self.decay_fraction <= 1:
            raise InvalidArgument(f"{self.decay_fraction} is not in [0, 1]", field="decay_fraction")
        if self.self_text_fraction == 1:
            raise InvalidArgument("leaves nothing of the corpus; give less than 1", field="self_text_fraction")


@dataclass(frozen=True)
class Arm:
    """One way to train the drafter; all arms of a run learn from the same sequences.

    Attributes:
        steered: with codes.
        frozen: the drafter's own weights stay; only projection and steering learn.
        place: where U c is added: "inside" the MLP, to the up projection; or "after" it, to what it adds to the stream.
        offset: how old the code is that a position gets: "likely" (1 to `oldest`, for every position anew, each age as
            often as drafts of that age are judged), "random" (each as often as the others, as in the paper), "block"
            (rising from 1 to `oldest` in blocks) or "fresh" (always 1).
    """

    steered: bool = True
    frozen: bool = False
    place: str = "inside"
    offset: str = "likely"


STEERED = "steered"
ARMS: Mapping[str, Arm] = {
    STEERED: Arm(),
    "distilled": Arm(steered=False),
    "frozen": Arm(frozen=True),
    "after": Arm(place="after"),
    "random": Arm(offset="random"),
    "block": Arm(offset="block"),
    "fresh": Arm(offset="fresh"),
}


@dataclass(frozen=True, kw_only=True)
class SteerTraining(Training):
    """How to train a drafter that a target steers (SD²), beside what every training is told.

    Attributes:
        drafter: folder of the drafter to begin with, as `train drafter` writes it.
        model: the target's id, by which edges ask for it; written into the projection.
        arms: which of `ARMS` to train side by side on the same sequences: "steered" is the method, "distilled" what it
            is held against, "random" the paper's ages of codes, the others its ablations. Each is written to a folder
            of its name in `output`.
        rank: numbers in a code.
        layers: of the target whose input is tapped; empty: 3, L/2 and L - 3.
        oldest: the most positions that a code may be old.
        unsteered: share of the sequences that are left without codes, so that the drafter stays good without.
        matrix_lr, steering_lr: peaks of Muon, of the drafter's matrices and of those of projection and steering.
        other_lr: peak of AdamW, of embedding, norms and whatever else is no matrix. All fall to zero on a cosine.
    """

    drafter: Path
    model: str = ""
    arms: tuple[str, ...] = (STEERED,)
    rank: int = 64
    layers: tuple[int, ...] = ()
    oldest: int = 8
    unsteered: float = 0.1
    matrix_lr: float = 0.01
    steering_lr: float = 0.02
    other_lr: float = 2e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        object.__setattr__(self, "drafter", Path(self.drafter))
        if not (self.drafter / "config.json").is_file():
            raise InvalidArgument(f"{self.drafter} holds no config.json; `train drafter` writes one", field="drafter")
        if unknown := set(self.arms) - set(ARMS):
            raise InvalidArgument(f"no such arm: {sorted(unknown)}; there are {', '.join(ARMS)}", field="arms")
        if not self.arms or len(set(self.arms)) < len(self.arms):
            raise InvalidArgument("name at least one arm, and none twice", field="arms")
        for name in ("rank", "oldest", "matrix_lr", "steering_lr", "other_lr"):
            _require_positive(name, getattr(self, name))
        if not 0 <= self.unsteered < 1:
            raise InvalidArgument(f"{self.unsteered} is not in [0, 1)", field="unsteered")
        if self.oldest >= self.block:
            raise InvalidArgument(f"{self.oldest} is not below the block of {self.block}", field="oldest")
        if any(layer < 0 for layer in self.layers) or len(set(self.layers)) < len(self.layers):
            raise InvalidArgument(f"{self.layers} are not different layers, 0 or more", field="layers")
