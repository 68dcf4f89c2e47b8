"""Distilling a drafter: the run from corpus and target to a model folder."""

from __future__ import annotations

import json
import os
import platform
import shutil
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
import torch
import transformers
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig, LlamaForCausalLM, PreTrainedModel

from outrider.cloud.training.acceptance import Acceptance, Row, measure_acceptance
from outrider.cloud.training.blocks import BlockSampler, Source
from outrider.cloud.training.checkpoint import Progress, checkpoints, load_checkpoint, save_checkpoint
from outrider.cloud.training.corpus import Documents, load_domain, split_held_out
from outrider.cloud.training.loss import forward_kl
from outrider.cloud.training.muon import Muon
from outrider.cloud.training.report import Reporter, acceptance_table, duration, reporter_for_stdout
from outrider.cloud.training.schedule import Budget
from outrider.cloud.training.self_text import SelfText, SelfTextPlan, embedding_weight, stored_self_text
from outrider.cloud.training.settings import DrafterShape, DrafterTraining
from outrider.proto.errors import Cancelled, InvalidArgument

TRAINING_FILE = "training.json"
# Settings that may differ between a run and its resumption: they change where and how often, not what.
FREE_ON_RESUME = ("output", "resume", "measure_every_minutes", "checkpoint_every_steps", "checkpoint_every_minutes")
HELD_OUT_ROWS, HELD_OUT_NEW_TOKENS = 32, 128


@dataclass(frozen=True)
class DrafterTrainingResult:
    """What a finished run leaves.

    Attributes:
        folder: the drafter, an ordinary transformers folder with `training.json`.
        steps: optimizer steps.
        tokens_seen: tokens trained on.
        parameters: of the drafter, tied ones counted once.
        losses: (step, mean KL in nats a token since the entry before).
        acceptance: of held-out text; keys `corpus/<domain>` and `self/<domain>`.
        elapsed_s: seconds of training, over all resumes.
    """

    folder: Path
    steps: int
    tokens_seen: int
    parameters: int
    losses: list[tuple[int, float]]
    acceptance: Mapping[str, Acceptance]
    elapsed_s: float


def train_drafter(
    config: DrafterTraining,
    *,
    on_step: Callable[[int], None] | None = None,
    stopping: Callable[[], bool] | None = None,
    reporter: Reporter | None = None,
) -> DrafterTrainingResult:
    """Distil a drafter and write it to `config.output`.

    Args:
        config: what to do.
        on_step: called with the number of steps done after each; an exception from it ends the run as a crash
            would, to be resumed from the newest checkpoint.
        stopping: asked after each step; true ends the run there, with a checkpoint of it.
        reporter: where progress goes; the terminal by default.

    Raises:
        InvalidArgument: the settings, target or corpus do not serve.
        Cancelled: `stopping` said so.
    """
    folder = config.output / "checkpoints"
    if checkpoints(folder) and not config.resume:
        raise InvalidArgument(
            f"{config.output} holds checkpoints; resume that run or choose another folder", field="output"
        )
    transformers.utils.logging.disable_progress_bar()  # one bar is enough
    torch.set_num_threads(config.threads)
    torch.manual_seed(config.seed)
    with reporter or reporter_for_stdout() as told:
        target = load_target(config)
        texts = gather_texts(config, target, told)
        drafter = build_drafter(target, config.shape, warm_start=config.warm_start)
        drafter.to(torch.device(config.device))  # type: ignore[arg-type]
        run = _Run(config, target, drafter, texts, told)
        if newest := checkpoints(folder)[-1:]:
            run.resume(newest[0])
        return run.to_the_end(on_step or (lambda _: None), stopping or (lambda: False))


def load_target(config: DrafterTraining) -> PreTrainedModel:
    """The target, frozen: weights from safetensors only, no remote code."""
    try:
        target: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            config.target, dtype=getattr(torch, config.dtype), use_safetensors=True, trust_remote_code=False
        )
    except (OSError, ValueError) as error:
        raise InvalidArgument(
            f"{config.target!r} is no causal language model with safetensors weights: {error}", field="target"
        ) from error
    target = target.eval().requires_grad_(False)
    target.to(torch.device(config.device))  # type: ignore[arg-type]
    return target


def build_drafter(target: PreTrainedModel, shape: DrafterShape, *, warm_start: bool) -> LlamaForCausalLM:
    """A fresh drafter with the target's vocabulary and special tokens."""
    config = target.config
    drafter = LlamaForCausalLM(
        LlamaConfig(
            vocab_size=config.vocab_size,
            hidden_size=shape.hidden,
            num_hidden_layers=shape.layers,
            num_attention_heads=shape.heads,
            num_key_value_heads=shape.kv_heads,
            head_dim=shape.head_dim,
            intermediate_size=shape.mlp,
            max_position_embeddings=shape.context,
            tie_word_embeddings=True,
            rms_norm_eps=1e-6,
            bos_token_id=config.bos_token_id,
            eos_token_id=config.eos_token_id,
            pad_token_id=config.pad_token_id,
        )
    )
    if warm_start:
        embedding = embedding_weight(drafter)
        embedding.copy_(start_embedding(embedding_weight(target), embedding))
    return drafter.float()


def start_embedding(embedding_by_target: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """The target's embedding on its first principal directions (from the SVD, not centred).

    Tokens that are near for the target are then near for the drafter from the first step on. On the reference
    target, forty steps from here came to a KL of 2.67 nats a token, and to 3.53 from a random embedding.

    Args:
        embedding_by_target: [vocab, target hidden].
        random: [vocab, hidden]; its last columns stay where the drafter is wider than the target.

    Returns:
        [vocab, hidden], float32.
    """
    embedding = embedding_by_target.detach().float().cpu()
    _, directions = torch.linalg.eigh(embedding.T @ embedding)  # ascending: the right singular vectors
    kept = min(random.shape[1], embedding.shape[1])
    start = random.clone()
    start[:, :kept] = embedding @ directions.flip(1)[:, :kept]
    return start


@dataclass(frozen=True)
class Texts:
    """Everything a run reads: sources to train on and rows to measure on, by name."""

    sources: list[Source]
    greedy_rows: Mapping[str, list[Row]]
    sampled_rows: Mapping[str, list[Row]]


def gather_texts(config: DrafterTraining, target: PreTrainedModel, told: Reporter) -> Texts:
    """Tokenise the corpus, let the target write its own text, and set some of both aside."""
    tokenizer = AutoTokenizer.from_pretrained(config.target, trust_remote_code=False)
    if not tokenizer.is_fast:
        raise InvalidArgument("its tokenizer has no tokenizer.json", field="target")
    bos, eos = _frame(tokenizer, target)
    cache = config.output / "cache"
    domains = [load_domain(path, tokenizer.backend_tokenizer, bos=bos, eos=eos, cache=cache) for path in config.corpus]
    names = {domain.name for domain in domains}
    if unknown := set(config.domain_weights) - names:
        raise InvalidArgument(f"no such domain: {sorted(unknown)}; there are {sorted(names)}", field="domain_weights")
    sources: list[Source] = []
    greedy_rows: dict[str, list[Row]] = {}
    sampled_rows: dict[str, list[Row]] = {}
    for domain in domains:
        weight = config.domain_weights.get(domain.name, 1.0 if not config.domain_weights else 0.0)
        training, held_out = split_held_out(domain, config.held_out_tokens, config.seed)
        sources.append(Source(f"corpus/{domain.name}", training.tokens, weight * (1 - config.self_text_fraction)))
        rows = held_out_rows(held_out, config.block, config.held_out_tokens)
        greedy_rows[f"corpus/{domain.name}"] = sampled_rows[f"corpus/{domain.name}"] = rows
        if not (config.self_text_tokens and weight):
            continue
        written, kept = _self_text(config, target, training, held_out, len(domains), (bos, eos), told)
        sources.append(Source(f"self/{domain.name}", written.tokens, weight * config.self_text_fraction))
        greedy_rows[f"self/{domain.name}"] = self_text_rows(kept, greedy=True)
        sampled_rows[f"self/{domain.name}"] = self_text_rows(kept, greedy=False)
    return Texts(sources, greedy_rows, sampled_rows)


def _frame(tokenizer: Any, target: PreTrainedModel) -> tuple[int, int]:
    """Ids of the tokens that open and close a document; one that is missing is stood in for by the other."""
    bos = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    eos = tokenizer.eos_token_id if tokenizer.eos_token_id is not None else bos
    if bos is None:
        raise InvalidArgument("its tokenizer names neither a first nor a last token of a document", field="target")
    if max(bos, eos, len(tokenizer) - 1) >= target.config.vocab_size:
        raise InvalidArgument("its tokenizer has more tokens than the model", field="target")
    return bos, eos


def _self_text(
    config: DrafterTraining,
    target: PreTrainedModel,
    training: Documents,
    held_out: Documents,
    domains: int,
    frame: tuple[int, int],
    told: Reporter,
) -> tuple[SelfText, SelfText]:
    """(text to train on, text to measure on), the latter continuing held-out documents."""
    longest = min(128, config.block // 2)
    shortest = min(32, longest)
    plan = SelfTextPlan(
        config.self_text_tokens // domains, config.self_text_rows, config.self_text_new_tokens, shortest, longest
    )
    few_rows = min(HELD_OUT_ROWS, config.self_text_rows)
    short = min(HELD_OUT_NEW_TOKENS, config.self_text_new_tokens)
    small = SelfTextPlan(1, few_rows, short, shortest, longest)
    cache = config.output / "cache"
    parts = [
        stored_self_text(target, documents, part, cache=cache, frame=frame, seed=config.seed + offset, told=told)
        for offset, (documents, part) in enumerate([(training, plan), (held_out, small)])
    ]
    return parts[0], parts[1]


def held_out_rows(held_out: Documents, block: int, tokens: int) -> list[Row]:
    """Blocks of the held-out documents, `tokens` at most (but at least one row)."""
    pieces = [
        document[first : first + block]
        for document in map(held_out.__getitem__, range(len(held_out)))
        for first in range(0, len(document), block)
    ]
    pieces = [piece for piece in pieces if len(piece) > 1]
    return [Row(piece) for piece in pieces[: max(1, tokens // block)]]


def self_text_rows(text: SelfText, *, greedy: bool) -> list[Row]:
    """What the target wrote at T = 0, or at T = 1, with the prefix before it."""
    return [
        Row(text.row(index), first=int(text.prefix_lengths[index]))
        for index in range(len(text))
        if bool(text.greedy[index]) is greedy
    ]


class _Run:
    """One training run: models, optimizers, text and where it stands."""

    def __init__(
        self, config: DrafterTraining, target: PreTrainedModel, drafter: LlamaForCausalLM, texts: Texts, told: Reporter
    ):
        self.config = config
        self.target = target
        self.drafter = drafter
        self.texts = texts
        self.told = told
        self.sampler = BlockSampler(texts.sources, config.block, config.seed)
        self.budget = Budget(config.steps, config.minutes, config.warm_up_steps, config.decay_fraction)
        matrices = [p for p in drafter.model.layers.parameters() if p.ndim == 2]
        others = [p for p in drafter.parameters() if not any(p is matrix for matrix in matrices)]
        self.optimizers: list[torch.optim.Optimizer] = [
            Muon(matrices, lr=config.matrix_lr),
            torch.optim.AdamW(others, lr=config.other_lr, betas=(0.9, 0.95), weight_decay=0.0),
        ]
        self.peaks = [config.matrix_lr, config.other_lr]
        self.progress = Progress(0, 0.0, 0, self.sampler.taken, 0, [], [], settings_of_run(config))

    def resume(self, checkpoint: Path) -> None:
        progress = load_checkpoint(checkpoint, self.drafter, self.optimizers)
        for name, value in self.progress.run.items():
            if progress.run.get(name) != value:
                raise InvalidArgument(f"the run to resume had {progress.run.get(name)!r}, not {value!r}", field=name)
        self.progress = progress
        self.sampler.taken, self.sampler.drawn = list(progress.taken), progress.drawn
        self.told.say(f"resumed after step {progress.step}")

    def to_the_end(self, on_step: Callable[[int], None], stopping: Callable[[], bool]) -> DrafterTrainingResult:
        config, progress = self.config, self.progress
        parameters = sum(p.numel() for p in self.drafter.parameters())
        self.told.stage("training")
        self.told.say(f"drafter of {parameters:,} parameters; {', '.join(s.name for s in self.texts.sources)}")
        saved = (progress.step, progress.elapsed_s)
        measured = progress.elapsed_s
        while self.budget.spent(progress.step, progress.elapsed_s) < 1:
            began = time.monotonic()
            self.progress.recent.append(self.step())
            progress.elapsed_s += time.monotonic() - began
            self._tell()
            on_step(progress.step)
            if stopping():
                self._save()
                raise Cancelled(f"stopped after step {progress.step}; its checkpoint is kept, go on with --resume")
            if (
                progress.step - saved[0] >= config.checkpoint_every_steps
                or progress.elapsed_s - saved[1] >= 60 * config.checkpoint_every_minutes
            ):
                self._save()
                saved = (progress.step, progress.elapsed_s)
            if progress.elapsed_s - measured >= 60 * config.measure_every_minutes:
                self.told.say(f"step {progress.step}\n{acceptance_table(self.measure())}")
                measured = progress.elapsed_s
        self._save()
        acceptance = self.measure()
        self.told.say(f"finished after {progress.step} steps\n{acceptance_table(acceptance)}")
        self._publish(parameters, acceptance)
        return DrafterTrainingResult(
            config.output,
            progress.step,
            progress.tokens_seen,
            parameters,
            progress.losses,
            acceptance,
            progress.elapsed_s,
        )

    def step(self) -> float:
        """One optimizer step; returns its loss, nats a token."""
        config, progress = self.config, self.progress
        rate = self.budget.rate(progress.step, progress.elapsed_s)
        for optimizer, peak in zip(self.optimizers, self.peaks, strict=True):
            optimizer.param_groups[0]["lr"] = peak * rate
        blocks = torch.from_numpy(self.sampler.draw(config.blocks_per_step)).to(config.device)
        passes = blocks.split(config.blocks_per_pass)
        loss = 0.0
        for tokens in passes:
            loss += self._backward(tokens, share=1 / len(passes))
        torch.nn.utils.clip_grad_norm_(self.drafter.parameters(), config.clip)
        for optimizer in self.optimizers:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        progress.step += 1
        progress.tokens_seen += blocks.numel()
        return loss

    def _backward(self, tokens: torch.Tensor, *, share: float) -> float:
        """Add the gradient of `share` times the loss on `tokens` (int64 [rows, block])."""
        with torch.no_grad():
            logits_by_target = self.target(input_ids=tokens, use_cache=False).logits
        hidden_by_drafter = self.drafter.model(input_ids=tokens, use_cache=False).last_hidden_state
        loss = share * forward_kl(
            hidden_by_drafter.flatten(0, 1),
            self.drafter.lm_head.weight,
            logits_by_target.flatten(0, 1),
            positions_per_chunk=self.config.positions_per_chunk,
        )
        loss.backward()
        return float(loss.detach())

    def measure(self) -> dict[str, Acceptance]:
        """Acceptance on held-out text.

        On the target's own text, T = 0 figures come from what it wrote at T = 0, all others from T = 1.
        """
        self.drafter.eval()
        figures: dict[str, Acceptance] = {}
        for name, rows in self.texts.sampled_rows.items():
            sampled = measure_acceptance(self.target, self.drafter, rows, seed=self.config.seed)
            greedy_rows = self.texts.greedy_rows[name]
            greedy = sampled
            if greedy_rows is not rows:
                greedy = measure_acceptance(self.target, self.drafter, greedy_rows, seed=self.config.seed)
            figures[name] = Acceptance(greedy.greedy, sampled.sampled, sampled.overlap, sampled.kl, sampled.positions)
        for kind in ("corpus", "self"):
            if of_kind := [a for name, a in figures.items() if name.startswith(f"{kind}/")]:
                figures[f"{kind}/mean"] = _mean(of_kind)
        self.drafter.train()
        return figures

    def _tell(self) -> None:
        progress = self.progress
        share = self.budget.spent(progress.step, progress.elapsed_s)
        rate = progress.tokens_seen / max(progress.elapsed_s, 1e-9)
        left = progress.elapsed_s / max(share, 1e-9) * (1 - share)
        loss = float(np.mean(progress.recent[-20:]))
        self.told.advance(share, f"step {progress.step} loss {loss:.3f} {rate:,.0f} tokens/s {duration(left)} left")
        if len(self.progress.recent) >= 20:
            progress.losses.append((progress.step, float(np.mean(self.progress.recent))))
            self.progress.recent.clear()

    def _save(self) -> Path:
        progress = self.progress
        progress.taken, progress.drawn = self.sampler.taken, self.sampler.drawn
        saved = save_checkpoint(self.config.output / "checkpoints", self.drafter, self.optimizers, progress)
        AutoTokenizer.from_pretrained(self.config.target, trust_remote_code=False).save_pretrained(saved)
        return saved

    def _publish(self, parameters: int, acceptance: Mapping[str, Acceptance]) -> None:
        """Copy the last checkpoint's model files to the output folder, `training.json` last."""
        config, progress = self.config, self.progress
        newest = checkpoints(config.output / "checkpoints")[-1]
        record = {
            "config": settings_of_run(config),
            "parameters": parameters,
            "steps": progress.step,
            "tokens_seen": progress.tokens_seen,
            "elapsed_s": round(progress.elapsed_s, 1),
            "loss": "KL(target || drafter), nats a token",
            "losses": [[step, round(loss, 4)] for step, loss in progress.losses],
            "held_out_acceptance": {
                name: {key: round(value, 4) for key, value in asdict(figure).items()}
                for name, figure in acceptance.items()
            },
            "versions": {
                "python": platform.python_version(),
                "torch": torch.__version__,
                "transformers": transformers.__version__,
                "tokenizers": tokenizers.__version__,
            },
        }
        (newest / TRAINING_FILE).write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
        names = [path.name for path in newest.iterdir() if path.name != "state.pt"]
        for name in sorted(names, key=lambda name: name == TRAINING_FILE):
            shutil.copyfile(newest / name, config.output / f"{name}.unfinished")
            os.replace(config.output / f"{name}.unfinished", config.output / name)


def settings_of_run(config: DrafterTraining) -> dict[str, Any]:
    """The settings that decide a run's result, as plain JSON values."""
    settings = asdict(config)
    for name in FREE_ON_RESUME:
        del settings[name]
    settings["corpus"] = [path.name for path in config.corpus]
    settings["target"] = Path(config.target).name if Path(config.target).is_dir() else config.target
    settings["domain_weights"] = dict(config.domain_weights)
    return settings


def _mean(figures: list[Acceptance]) -> Acceptance:
    def mean(name: str) -> float:
        return float(np.mean([getattr(figure, name) for figure in figures]))

    return Acceptance(
        greedy=mean("greedy"),
        sampled=mean("sampled"),
        overlap=mean("overlap"),
        kl=mean("kl"),
        positions=sum(figure.positions for figure in figures),
    )
