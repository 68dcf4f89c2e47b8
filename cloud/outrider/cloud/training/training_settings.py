"""The settings of training runs."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from outrider.cloud.verifier_config import DTYPES
from outrider.proto.errors import ConfigError
from outrider.proto.settings import REQUIRED, Settings, above, at_least, between, no_empty_text, option


def _require_drafter(folder: Path, name: str) -> None:
    if not (folder / "config.json").is_file():
        raise ConfigError(f"{folder} holds no config.json; `train drafter` writes one", field=name)


TARGET = "target: known name, folder, GGUF file or hub name"


@dataclass(frozen=True, kw_only=True)
class DrafterShape(Settings):
    """A small Llama: RoPE, grouped query heads, gated MLP, tied embeddings; with a window, a small Mistral."""

    hidden: int = option(192, "width of the drafter", check=at_least(1))
    layers: int = option(3, "depth of the drafter", check=at_least(1))
    heads: int = option(6, "query heads", check=at_least(1))
    kv_heads: int = option(2, "key and value heads, which query heads share", check=at_least(1))
    head_dim: int = option(32, "width of a head; even, for RoPE", check=at_least(1))
    mlp: int = option(512, "width of its gated MLP", check=at_least(1))
    context: int = option(2048, "longest sequence, in tokens", check=at_least(1))
    window: int | None = option(None, "positions that a layer sees, including its own; not set: all", check=at_least(1))

    def check_together(self) -> None:
        """Refuse heads that do not fit together."""
        if self.heads % self.kv_heads:
            raise ConfigError(f"{self.heads} query heads cannot share {self.kv_heads} evenly", field="kv_heads")
        if self.head_dim % 2:
            raise ConfigError(f"RoPE turns pairs: even widths only, not {self.head_dim}", field="head_dim")


@dataclass(frozen=True, kw_only=True)
class Training(Settings):
    """The target that a drafter learns from, what it has said, and for how long.

    `matrix_lr` is Muon's, for the layers' matrices; `other_lr` is AdamW's, for embedding and norms.
    """

    target: str = option(REQUIRED, TARGET, metavar="NAME", check=no_empty_text)
    teacher: Path = option(REQUIRED, "folder of `outrider train teacher` to learn from", metavar="DIR")
    output: Path = option(REQUIRED, "folder for drafter and checkpoints", metavar="DIR")
    block: int = option(512, "tokens in a training sequence", check=at_least(2))
    blocks_per_step: int = option(4, "sequences per optimizer step", check=at_least(1))
    blocks_per_pass: int = option(4, "sequences that go through the models at once", check=at_least(1))
    positions_per_chunk: int = option(256, "full-vocabulary distributions that the loss holds", check=at_least(1))
    steps: int | None = option(None, "budget in steps (give this or --minutes)", check=at_least(1))
    minutes: float | None = option(None, "budget in minutes (give this or --steps)", metavar="M", check=above(0))
    matrix_lr: float = option(0.02, "peak learning rate of the drafter's matrices", check=above(0))
    other_lr: float = option(3e-3, "peak learning rate of everything else", check=above(0))
    warm_up_steps: int = option(40, "steps over which the learning rates grow", check=at_least(0))
    threads: int = option(1, "torch threads on the CPU; 0: one per core", check=at_least(0))
    device: str = option("cpu", "torch device of both models, such as cpu, cuda or cuda:1", metavar="DEVICE")
    seed: int = option(0, "seed of all random numbers", check=at_least(0))
    resume: bool = option(False, "resume from the newest checkpoint in the output")

    def check_together(self) -> None:
        """Refuse settings that do not go together."""
        if not self.teacher.is_dir():
            raise ConfigError(f"{self.teacher} is no folder; `outrider train teacher` writes one", field="teacher")
        if (self.steps is None) == (self.minutes is None):
            raise ConfigError("give a budget by either steps or minutes", field="steps")
        if self.blocks_per_step % self.blocks_per_pass:
            raise ConfigError(f"does not divide blocks_per_step ({self.blocks_per_step})", field="blocks_per_pass")


@dataclass(frozen=True, kw_only=True)
class TeacherWriting(Settings):
    """The writing of a target's texts and probabilities, once for all drafters that learn from them."""

    target: str = option(REQUIRED, TARGET, metavar="NAME", check=no_empty_text)
    texts: tuple[Path, ...] = option(
        (),
        '.jsonl of {"prompt"} or {"messages"}, which the target answers, or of {"text"}, which it continues or reads, '
        "as it does text files; conversations that end with an answer are read; all files are drawn alike often",
        many="words",
    )
    output: Path = option(REQUIRED, "folder to write to; where it has rows, the same command goes on", metavar="DIR")
    tokens: int = option(1_000_000, "tokens of the target to keep, 384 bytes each", check=at_least(1))
    own_questions: float = option(
        0.0, "share of the rows that answer questions which the target thinks up (Magpie)", check=between(0, 1)
    )
    read: float = option(
        0.5, "share of the documents that the target reads; it continues the others", check=between(0, 1)
    )
    greedy: float = option(0.5, "share of the rows written at T = 0, the rest at T = 1", check=between(0, 1))
    rows: int = option(64, "rows written at once; as many as memory holds", check=at_least(1))
    new_tokens: int = option(384, "most tokens that the target writes in a row", check=at_least(1))
    longest: int = option(512, "most tokens of an opening; its last ones are kept", check=at_least(2))
    threads: int = option(0, "torch threads on the CPU; 0: one per core", check=at_least(0))
    device: str = option("cpu", "torch device, such as cpu, cuda or cuda:1", metavar="DEVICE")
    dtype: str = option("bfloat16", "type of the target's weights", choices=DTYPES)
    seed: int = option(0, "seed of all random numbers", check=at_least(0))

    def check_together(self) -> None:
        """Refuse settings that do not go together."""
        if not self.texts and not self.own_questions:
            raise ConfigError("name a file of texts, or give --own-questions 1", field="texts")
        for path in self.texts:
            if not path.is_file():
                raise ConfigError(f"{path} is not a file; give paths of .jsonl or text files", field="texts")

    def facts(self) -> dict[str, Any]:
        """Return the settings that rows depend on, as plain JSON values, and the target's name."""
        names = ("own_questions", "read", "greedy", "rows", "new_tokens", "longest", "dtype", "seed")
        return {"target": Path(self.target).name, **{name: getattr(self, name) for name in names}}


@dataclass(frozen=True, kw_only=True)
class DrafterTraining(Training):
    """The distillation of a drafter from a target; `shape` is that of a new one."""

    start: str | None = option(
        None,
        "drafter to train further: an embedded name, or a folder of `train drafter`; not set: a new drafter",
        metavar="NAME",
    )
    source: str | None = option(
        None,
        "small causal language model with the target's tokenizer to begin with: a folder or hub name; not set: a new "
        "drafter",
        metavar="NAME",
        flag="from",
    )
    keep_layers: tuple[int, ...] = option(
        (),
        "layers of it to keep: their numbers, or one number of how many, which keeps the first ones and the last; not "
        "set: all",
        metavar="A,B",
        many="commas",
        check=at_least(0),
    )
    shape: DrafterShape = DrafterShape()
    vocabulary: int | None = option(
        None,
        "tokens that the drafter knows at all, the most frequent of the text, with one matrix for embedding and head; "
        "it reads others as the nearest that it knows; not set: the whole vocabulary",
        check=at_least(1),
    )

    def check_together(self) -> None:
        """Refuse settings that do not go together."""
        super().check_together()
        if self.source is not None and self.start is not None:
            raise ConfigError("begins with another model than --start; give one of the two", field="source")
        if self.keep_layers and self.source is None:
            raise ConfigError("keeps layers of --from, which is not given", field="keep_layers")
        if self.start is not None:
            from outrider.drafters import embedded_packages  # with numpy, which a command's help does without

            if self.start not in embedded_packages():
                _require_drafter(Path(self.start), "start")
        if self.block > self.shape.context:
            raise ConfigError(f"{self.block} exceeds the context, {self.shape.context}", field="block")


@dataclass(frozen=True, kw_only=True)
class SteerTraining(Training):
    """The training of a drafter that a target steers (SD²); all learning rates fall to zero on a cosine."""

    drafter: Path = option(REQUIRED, "folder written by `outrider train drafter`", metavar="DIR")
    model: str = option("", "the target's id, by which edges ask for it", metavar="NAME")
    rank: int = option(64, "numbers in a steering vector", check=at_least(1))
    layers: tuple[int, ...] = option(
        (),
        "layers of the target whose input is tapped; not set: 3, L/2 and L-3",
        metavar="A,B",
        flag="tap-layers",
        many="commas",
        check=at_least(0),
    )
    max_age: int = option(8, "maximum age of a steering vector, in positions", check=at_least(1))
    unsteered: float = option(0.1, "share of the sequences without steering, so that the drafter stays good without")
    matrix_lr: float = 0.01
    steering_lr: float = option(0.02, "Muon's peak learning rate of projection and steering", check=above(0))
    other_lr: float = 2e-3

    def check_together(self) -> None:
        """Refuse settings that do not go together."""
        super().check_together()
        _require_drafter(self.drafter, "drafter")
        if len(set(self.layers)) < len(self.layers):
            raise ConfigError("names one twice; once is enough", field="layers")
        if not 0 <= self.unsteered < 1:
            raise ConfigError(f"{self.unsteered} is not in [0, 1)", field="unsteered")
        if self.max_age >= self.block:
            raise ConfigError(f"{self.max_age} is not below the block of {self.block}", field="max_age")
