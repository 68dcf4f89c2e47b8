"""The target's answers, continuations and readings, with its best log probabilities, in batches as large as fit."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from jinja2 import TemplateError
from transformers import DynamicCache, PreTrainedModel

from outrider.cloud.models.family_index import load_causal_lm, load_tokenizer
from outrider.cloud.training.teacher import BestTokens, TeacherFolder, TeacherRows, passes, target_mark
from outrider.cloud.training.training_report import Reporter, duration
from outrider.cloud.training.training_settings import TeacherWriting
from outrider.proto.errors import Cancelled, InvalidArgument
from outrider.proto.plumbing.cores import available_cores
from outrider.proto.plumbing.files import sha256_of

LONGEST_QUESTION = 192  # tokens of a question that the target thinks up
PREFIXES = (32, 128)  # tokens of a document that the target continues
PIECE = 20_000  # characters of a document that are tokenised for a row
COMPACT_BELOW = 0.9  # share of unfinished rows of a batch below which the finished ones leave the cache
TOKENS_A_PASS = 4096  # that are read at once


@dataclass(frozen=True)
class Opening:
    """Tokens that a row begins with, or a document that is still to be cut.

    Attributes:
        first: place of the first token that the target writes or reads; 0 for a document, which has no first token yet.
        reads: whether the target reads the tokens from `first` on, and writes nothing.
    """

    tokens: list[int]
    first: int
    reads: bool = False

    def __len__(self) -> int:
        return len(self.tokens)


def write_teacher(
    config: TeacherWriting,
    *,
    on_step: Callable[[int], None] = lambda _: None,
    stopping: Callable[[], bool] = lambda: False,
) -> int:
    """Write rows to `config.output` until they hold `config.tokens` tokens of the target's; return how many they hold.

    Args:
        config: what to write.
        on_step: called with the tokens that are kept, before the first batch and after each.
        stopping: asked after each token of a batch.

    Raises:
        InvalidArgument: the target or the texts do not serve, or the folder holds rows of other settings.
        Cancelled: `stopping` returned true; the batches before are kept, and the same command goes on.
    """
    transformers.utils.logging.disable_progress_bar()
    torch.set_num_threads(config.threads or available_cores())
    refusal = f"{config.target!r} is no causal language model with safetensors weights"
    target = load_causal_lm(config.target, refusal, field="target", dtype=config.dtype, device=config.device)
    reporter = Reporter()
    writer = _Writer(config, target.eval().requires_grad_(False), reporter, stopping)
    folder = TeacherFolder(config.output)
    texts = [f"{path.name} {sha256_of(path)[:16]}" for path in config.texts]
    folder.begin({**config.facts(), "texts": texts, "mark": target_mark(target)})
    counts = folder.counts()
    on_step(sum(counts))
    reporter.stage("teacher")
    while (kept := sum(counts)) < config.tokens:
        rows, best = writer.batch(len(counts), kept)
        folder.add(len(counts), rows, best)
        counts.append(len(best))
        on_step(sum(counts))
    return kept


class _Writer:
    """The target, its texts and its progress."""

    def __init__(
        self, config: TeacherWriting, target: PreTrainedModel, reporter: Reporter, stopping: Callable[[], bool]
    ) -> None:
        self.config = config
        self.target = target
        self.reporter = reporter
        self.stopping = stopping
        self.tokenizer = load_tokenizer(config.target)
        ends = target.generation_config.eos_token_id if target.generation_config is not None else None
        found = ends if isinstance(ends, list) else [ends, self.tokenizer.eos_token_id]
        self.ends = sorted({token for token in found if token is not None})
        self.bos = [] if self.tokenizer.bos_token_id is None else [self.tokenizer.bos_token_id]
        self.kinds = [_entries(path) for path in config.texts]
        self.shares = np.array([1 - config.own_questions] * len(self.kinds)) / max(1, len(self.kinds))
        if config.own_questions:
            self.question = self._before_a_question()
            self.shares = np.append(self.shares, config.own_questions)
        self.shares /= self.shares.sum()
        self.began, self.done = time.monotonic(), 0

    def batch(self, number: int, kept: int) -> tuple[TeacherRows, BestTokens]:
        """Return the rows of batch `number`, a pure function of the settings and that number.

        `kept` tokens were kept before, for the progress that is shown.
        """
        config = self.config
        choose = np.random.default_rng([config.seed, number])
        generator = torch.Generator(self.target.device).manual_seed(int(choose.integers(2**62)))
        kinds = choose.choice(len(self.shares), size=config.rows, p=self.shares)
        files = [self.kinds[kind] for kind in kinds if kind < len(self.kinds)]
        openings = [self._opening(entries[choose.integers(len(entries))]) for entries in files]
        in_batch = 0

        def report(tokens: int, *, kept_share: float = 1.0) -> None:
            nonlocal in_batch
            if self.stopping():
                raise Cancelled(f"stopped; {kept:,} tokens are kept, and the same command goes on")
            self.done += tokens
            in_batch += int(kept_share * tokens)
            there = kept + in_batch
            speed = self.done / max(time.monotonic() - self.began, 1e-9)
            left = duration((config.tokens - there) / speed)
            self.reporter.advance(there / config.tokens, f"{there:,} tokens {speed:,.0f} tokens/s {left} left")

        write = partial(write_rows, self.target, ends=self.ends, generator=generator)
        if asked := int((kinds == len(self.kinds)).sum()):
            sampled = torch.zeros(asked, dtype=torch.bool)
            thinking = partial(report, kept_share=0.0)
            rows, _ = write([self.question] * asked, sampled, new_tokens=LONGEST_QUESTION, report=thinking)
            openings += self._openings_of_answers(rows)
        openings = [self._cut(opening, choose) for opening in openings]
        read = [opening for opening in openings if opening.reads]
        answered = sorted((opening for opening in openings if not opening.reads), key=len)
        greedy = torch.from_numpy(choose.random(len(answered)) < config.greedy)

        parts = []
        if answered:
            parts.append(write([o.tokens for o in answered], greedy, new_tokens=config.new_tokens, report=report))
        if read:
            parts.append(read_rows(self.target, read, report=report))
        if not parts:
            raise InvalidArgument(f"none of {asked} has an end; give more rows, or 0", field="own_questions")
        return TeacherRows.joined([rows for rows, _ in parts]), BestTokens.joined([best for _, best in parts])

    def _openings_of_answers(self, questions: TeacherRows) -> list[Opening]:
        """Return what opens the target's answers to questions that it has written (Magpie, arXiv 2406.08464).

        An instructed model that sees the beginning of a user's turn writes one; no data is needed. A question without
        an end is none.
        """
        openings = []
        for index in range(len(questions)):
            asked = questions[index][len(self.question) :].tolist()
            if asked[-1] in self.ends and (text := self.tokenizer.decode(asked[:-1]).strip()):
                openings.append(self._opening({"prompt": text}))
        return openings

    def _before_a_question(self) -> list[int]:
        mark = "OUTRIDER"
        if not self.tokenizer.chat_template:
            raise InvalidArgument("its tokenizer has no chat template, so it asks none; give 0", field="own_questions")
        return self._encode(self._render([{"role": "user", "content": mark}]).partition(mark)[0])

    def _opening(self, entry: Mapping[str, Any]) -> Opening:
        """Return the opening of an entry that `_entries` let pass."""
        messages = entry.get("messages") or [{"role": "user", "content": entry.get("prompt")}]
        if "text" in entry or not self.tokenizer.chat_template:
            return Opening(self._encode(entry.get("text") or "\n\n".join(str(each["content"]) for each in messages)), 0)
        if messages[-1]["role"] != "assistant":
            asked = self._encode(self._render(messages, add_generation_prompt=True))
            return Opening(asked, len(asked))
        asked = self._encode(self._render(messages[:-1], add_generation_prompt=True))
        whole = self._encode(self._render(messages))
        return Opening(whole, min(len(asked), len(whole) - 1), reads=True)

    def _render(self, messages: Sequence[Mapping[str, str]], *, add_generation_prompt: bool = False) -> str:
        try:
            text: str = self.tokenizer.apply_chat_template(
                messages, tokenize=False, add_generation_prompt=add_generation_prompt
            )
        except TemplateError as error:
            raise InvalidArgument(f"the target's chat template refuses {messages}: {error}", field="texts") from error
        return text

    def _encode(self, text: str) -> list[int]:
        tokens: list[int] = self.tokenizer.encode(text, add_special_tokens=False)
        return tokens

    def _cut(self, opening: Opening, choose: np.random.Generator) -> Opening:
        """Return an opening that fits; a document is cut at random, and either read or continued."""
        room, tokens = self.config.longest, opening.tokens
        readable = room + self.config.new_tokens
        if opening.reads:
            kept = tokens[:readable]
            return Opening(kept, min(opening.first, len(kept) - 1), reads=True)
        if opening.first:
            return Opening(tokens[-room:], min(opening.first, room))
        reads = bool(choose.random() < self.config.read)
        length = readable if reads else min(room, int(choose.integers(PREFIXES[0], PREFIXES[1] + 1)))
        begin = int(choose.integers(max(1, len(tokens) - length + 1)))
        window = [*self.bos, *tokens[begin : begin + length]]
        return Opening(window, 1 if reads else len(window), reads=reads)


def _entries(path: Path) -> list[Mapping[str, Any]]:
    """Return what a file holds; documents are in pieces of at most `PIECE` characters."""
    text = path.read_text(encoding="utf-8")
    lines = text.split("\n") if path.suffix == ".jsonl" else [json.dumps({"text": text})]
    entries: list[Mapping[str, Any]] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            match json.loads(line):
                case {"text": str() as text} if text.strip():
                    entries += [{"text": text[first : first + PIECE]} for first in range(0, len(text), PIECE)]
                case {"prompt": str() as text} as entry if text.strip():
                    entries.append(entry)
                case {"messages": [*_, {"role": str(), "content": str()}]} as entry:
                    entries.append(entry)
                case _:
                    raise ValueError('give {"prompt"}, {"messages"} or {"text"}')
        except ValueError as error:
            raise InvalidArgument(f"{path} line {number}: {error}", field="texts") from error
    if not entries:
        raise InvalidArgument(f"{path} holds no text", field="texts")
    return entries


@torch.inference_mode()
def write_rows(
    model: PreTrainedModel,
    openings: Sequence[Sequence[int]],
    greedy: torch.Tensor,
    *,
    new_tokens: int,
    ends: Sequence[int],
    generator: torch.Generator,
    report: Callable[[int], None] = lambda _: None,
) -> tuple[TeacherRows, BestTokens]:
    """Continue every opening until one of `ends` or `new_tokens` tokens.

    Args:
        model: model that writes.
        openings: tokens of each row.
        greedy: bool [rows]; True: at T = 0, False: at T = 1.
        new_tokens: limit of a row.
        ends: tokens that end a row.
        generator: on the model's device, draws the tokens at T = 1.
        report: called with the tokens written after every step.
    """
    device, longest = model.device, max(map(len, openings))
    rows = torch.arange(len(openings), device=device)
    tokens = torch.tensor([[0] * (longest - len(o)) + list(o) for o in openings], device=device)
    mask = torch.tensor([[0] * (longest - len(o)) + [1] * len(o) for o in openings], device=device)
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    stop = torch.tensor(list(ends), dtype=torch.int64, device=device)
    at_once, alive = greedy.to(device), torch.ones(len(openings), dtype=torch.bool, device=device)
    cache = DynamicCache(config=model.config)
    written: list[tuple[torch.Tensor, ...]] = []
    for _ in range(new_tokens):
        logits = model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            past_key_values=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits[:, -1]
        logprobs = logits.float().log_softmax(-1)
        best = BestTokens.of(logprobs)
        noise = torch.empty_like(logprobs).exponential_(generator=generator).log_()
        chosen = torch.where(at_once, best.tokens[:, 0], (logprobs - noise).argmax(-1).int())
        written.append(tuple(each[alive].cpu() for each in (rows, chosen, best.tokens, best.logprobs)))
        report(len(written[-1][0]))
        alive &= ~torch.isin(chosen, stop)
        live = int(alive.sum())
        if not live:
            break
        tokens, positions = chosen[:, None].long(), positions[:, -1:] + 1
        mask = torch.cat([mask, torch.ones_like(mask[:, :1])], dim=1)
        if live < COMPACT_BELOW * len(alive):
            kept = alive.nonzero()[:, 0]
            cache.batch_select_indices(kept)
            rows, tokens, positions, mask, at_once, alive = (
                each[kept] for each in (rows, tokens, positions, mask, at_once, alive)
            )
    whose, tokens, *best_of = (torch.cat(each) for each in zip(*written, strict=True))
    order = whose.argsort(stable=True)
    answers = tokens[order].split(whose.bincount(minlength=len(openings)).tolist())
    texts = [torch.cat([torch.tensor(list(o), dtype=torch.int32), a]) for o, a in zip(openings, answers, strict=True)]
    return TeacherRows.of(texts, [*map(len, openings)], greedy.cpu()), BestTokens(*(each[order] for each in best_of))


@torch.inference_mode()
def read_rows(
    model: PreTrainedModel, openings: Sequence[Opening], *, report: Callable[[int], None] = lambda _: None
) -> tuple[TeacherRows, BestTokens]:
    """Return texts that the target did not write, shortest first, and its probabilities along them.

    `report` is called with the tokens read after every pass.
    """
    ordered = sorted(openings, key=len)
    best: list[BestTokens] = []
    for group in passes(ordered, TOKENS_A_PASS):
        longest = len(group[-1])
        batch = torch.tensor([o.tokens + [0] * (longest - len(o)) for o in group], device=model.device)
        logits = model(input_ids=batch, use_cache=False).logits
        for row, opening in zip(logits, group, strict=True):
            best.append(BestTokens.of(row[opening.first - 1 : len(opening) - 1].float().log_softmax(-1)))
        report(sum(map(len, best[-len(group) :])))
    texts = [torch.tensor(o.tokens, dtype=torch.int32) for o in ordered]
    rows = TeacherRows.of(texts, [o.first for o in ordered], torch.zeros(len(ordered), dtype=torch.bool))
    return rows, BestTokens.joined(best)
