"""Write what a Llama says on a GPU, by CUDA graphs, to a folder of `outrider train teacher` that drafters learn from.

    PYTHONPATH=cloud:deploy:edge:proto python research/gpu/quick_teacher.py prompts.jsonl --output says --seconds 250

`outrider train teacher` takes any model and starts some thousand kernels a step; this takes one kind, keeps its KV
cache in place and replays steps. Lines of a file are {"prompt"}, which is asked, or {"text"}, which is continued. Every
other round answers questions that the target thinks up (Magpie, arXiv 2406.08464).
"""

from __future__ import annotations

import argparse
import json
import random
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional as F  # noqa: N812 - its usual name
from transformers import PreTrainedModel

from outrider.cloud.models.family_index import eos_tokens, find_target, load_causal_lm, load_tokenizer
from outrider.cloud.training.teacher import BEST, BestTokens, TeacherFolder, TeacherRows, target_mark

PART = 256  # rows of a prefill
WIDTHS = 64  # a graph for each so many positions
ENOUGH = 0.08  # share of rows without an end below which a round ends
PREFIXES = (32, 128)  # tokens of a text that is continued
LOOK = 16  # steps between two looks at that share


@dataclass
class Said:
    """Tokens of one round, with the best ones at each.

    Attributes:
        tokens: int64 [steps, rows].
        best: int32 [steps, rows, BEST].
        logprobs: float16 of the same shape.
        lengths: int64 [rows], tokens of each row with the one that ends it.
        ended: bool [rows], whether it has such a one.
    """

    tokens: torch.Tensor
    best: torch.Tensor
    logprobs: torch.Tensor
    lengths: torch.Tensor
    ended: torch.Tensor


class QuickLlama:
    """A Llama, for rows of one number and one room.

    Args:
        model: its weights.
        rows: texts that it writes at once.
        room: positions of each, its prompt's among them.
        steps: most tokens that it writes.
        ends: tokens that end a text.
    """

    def __init__(self, model: Any, *, rows: int, room: int, steps: int, ends: list[int]) -> None:
        config = model.config
        self.kv, self.heads, self.dim = config.num_key_value_heads, config.num_attention_heads, config.head_dim
        self.group, self.eps, self.room = self.heads // self.kv, config.rms_norm_eps, room
        self.embedding = model.model.embed_tokens.weight
        self.norm, self.head = model.model.norm.weight, model.lm_head.weight
        self.layers = []
        for layer in model.model.layers:
            a, m = layer.self_attn, layer.mlp
            qkv = torch.cat([a.q_proj.weight, a.k_proj.weight, a.v_proj.weight])
            up = torch.cat([m.gate_proj.weight, m.up_proj.weight])
            norms = layer.input_layernorm.weight, layer.post_attention_layernorm.weight
            self.layers.append((norms[0], qkv, a.o_proj.weight, norms[1], up, m.down_proj.weight))
        device, kind = self.embedding.device, self.embedding.dtype
        self.device = device
        self.turns = self._turns(model, config.head_dim)
        shape = (len(self.layers), rows, self.kv, room, self.dim)
        self.keys, self.values = (torch.zeros(shape, dtype=kind, device=device) for _ in range(2))
        self.bias = torch.zeros((rows, 1, 1, room), dtype=kind, device=device)
        self.newest = torch.zeros(rows, dtype=torch.int64, device=device)
        self.positions = torch.zeros(rows, dtype=torch.int64, device=device)
        self.at, self.step = (torch.zeros(1, dtype=torch.int64, device=device) for _ in range(2))
        self.greedy, self.alive = (torch.zeros(rows, dtype=torch.bool, device=device) for _ in range(2))
        self.ends = torch.tensor(ends, device=device)
        self.lengths = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tokens = torch.zeros((steps, rows), dtype=torch.int64, device=device)
        self.best = torch.zeros((steps, rows, BEST), dtype=torch.int32, device=device)
        self.logprobs = torch.zeros((steps, rows, BEST), dtype=torch.float16, device=device)
        self.graphs: dict[int, torch.cuda.CUDAGraph] = {}
        self.pool: Any = None  # memory of all graphs, of which one runs at a time

    def _turns(self, model: Any, dim: int) -> torch.Tensor:
        """Return cosines and sines of all positions, [2, room, dim]."""
        positions = torch.arange(self.room, device=self.device)[None]
        cosines, sines = model.model.rotary_emb(torch.zeros(1, 1, dim, device=self.device), positions)
        return torch.stack([cosines[0], sines[0]]).to(self.embedding.dtype)

    def _rms(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, (x.shape[-1],), weight, self.eps)

    def _turned(self, x: torch.Tensor, turns: torch.Tensor) -> torch.Tensor:
        """Turn [rows, heads, tokens, dim] by [2, rows, 1, tokens, dim]."""
        left, right = x.chunk(2, -1)
        return x * turns[0] + torch.cat([-right, left], -1) * turns[1]

    def _through(self, tokens: torch.Tensor, positions: torch.Tensor, attend: Any) -> torch.Tensor:
        """Return the last layer's states [rows, tokens, hidden]; `attend` is asked for each layer's attention."""
        count, width = tokens.shape
        x = F.embedding(tokens, self.embedding)
        turns = self.turns[:, positions][:, :, None]
        for index, (before, qkv, out, between, up, down) in enumerate(self.layers):
            parts = (self._rms(x, before) @ qkv.T).view(count, width, -1, self.dim).transpose(1, 2)
            q, k, v = parts.split([self.heads, self.kv, self.kv], 1)
            attended = attend(index, self._turned(q, turns), self._turned(k, turns), v)
            x = x + attended.transpose(1, 2).reshape(count, width, -1) @ out.T
            gate, wide = (self._rms(x, between) @ up.T).chunk(2, -1)
            x = x + (F.silu(gate) * wide) @ down.T
        return self._rms(x, self.norm)

    def _read(self, tokens: torch.Tensor, mask: torch.Tensor, first: int) -> torch.Tensor:
        """Read prompts, padded to the left, of the rows from `first` on, and return the last states [rows, hidden]."""
        count, width = tokens.shape
        positions = (mask.cumsum(1) - 1).clamp(min=0)
        causal = torch.ones(width, width, dtype=torch.bool, device=self.device).tril()
        seen = causal & mask[:, None, None, :].bool() | torch.eye(width, dtype=torch.bool, device=self.device)

        def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.keys[index, first : first + count, :, :width] = k
            self.values[index, first : first + count, :, :width] = v
            k, v = (each.repeat_interleave(self.group, 1) for each in (k, v))
            return F.scaled_dot_product_attention(q, k, v, attn_mask=seen)

        return self._through(tokens, positions, attend)[:, -1]

    def _choose(self, states: torch.Tensor) -> None:
        """Choose every row's next token from its states [rows, hidden], and note it with the best ones."""
        logprobs = (states @ self.head.T).float().log_softmax(-1)
        groups = logprobs.view(len(logprobs), -1, 64)
        loudest = groups.amax(-1).topk(BEST).indices  # the best tokens are in the groups with the best ones
        among = groups.gather(1, loudest[:, :, None].expand(-1, -1, 64)).flatten(1)
        values, where = among.topk(BEST)
        best = (loudest[:, :, None] * 64 + torch.arange(64, device=self.device)).flatten(1).gather(1, where)
        noise = torch.empty_like(logprobs).exponential_().log_()
        chosen = torch.where(self.greedy, best[:, 0], (logprobs - noise).argmax(-1))
        self.tokens.index_copy_(0, self.step, chosen[None])
        self.best.index_copy_(0, self.step, best[None].int())
        self.logprobs.index_copy_(0, self.step, values[None].half())
        self.lengths += self.alive
        self.alive &= (chosen[:, None] != self.ends).all(1)
        self.newest.copy_(chosen)
        self.step += 1

    def _write(self, width: int) -> None:
        """Take a step of all rows, whose texts are within the first `width` positions."""
        self.bias.index_fill_(3, self.at, 0.0)

        def attend(index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            self.keys[index].index_copy_(2, self.at, k)
            self.values[index].index_copy_(2, self.at, v)
            keys, values = self.keys[index, :, :, :width], self.values[index, :, :, :width]
            grouped = q.view(len(q), self.kv, self.group, self.dim)
            scores = grouped @ keys.transpose(2, 3) * self.dim**-0.5 + self.bias[..., :width]
            attended: torch.Tensor = scores.float().softmax(-1).to(q.dtype) @ values
            return attended.view(len(q), self.heads, 1, self.dim)

        states = self._through(self.newest[:, None], self.positions[:, None], attend)[:, 0]
        self._choose(states)
        self.positions += 1
        self.at += 1

    def _replay(self, width: int) -> None:
        if self.device.type != "cuda":
            self._write(width)
            return
        if width not in self.graphs:
            graph = torch.cuda.CUDAGraph()
            state = [self.bias, self.newest, self.positions, self.at, self.step, self.alive, self.lengths]
            kept = [each.clone() for each in state]
            side = torch.cuda.Stream()
            side.wait_stream(torch.cuda.current_stream())
            with torch.cuda.stream(side):
                self._write(width)  # kernels are chosen and loaded before they are captured
            torch.cuda.current_stream().wait_stream(side)
            for each, value in zip(state, kept, strict=True):
                each.copy_(value)
            with torch.cuda.graph(graph, pool=self.pool):
                self._write(width)
            self.pool = self.pool or graph.pool()
            self.graphs[width] = graph
        self.graphs[width].replay()

    @torch.inference_mode()
    def say(self, prompts: list[torch.Tensor], greedy: torch.Tensor, most: int) -> Said:
        """Continue as many prompts (int [length] each) as there are rows by at most `most` tokens."""
        longest = max(map(len, prompts))
        tokens = torch.zeros((len(prompts), longest), dtype=torch.int64)
        mask = torch.zeros_like(tokens)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt) :], mask[row, longest - len(prompt) :] = prompt.long(), 1
        tokens, mask = tokens.to(self.device), mask.to(self.device)
        self.bias.fill_(float("-inf"))
        self.bias[:, 0, 0, :longest].masked_fill_(mask.bool(), 0.0)
        self.greedy.copy_(greedy)
        self.alive.fill_(value=True)
        for each in (self.lengths, self.step):
            each.zero_()
        self.at.fill_(longest)
        self.positions.copy_(mask.sum(1))
        states = [
            self._read(tokens[first : first + PART], mask[first : first + PART], first)
            for first in range(0, len(prompts), PART)
        ]
        self._choose(torch.cat(states))
        taken = 1
        while taken < min(most, self.room - longest):
            self._replay(min(self.room, -(-(longest + taken) // WIDTHS) * WIDTHS))
            taken += 1
            if taken % LOOK == 0 and float(self.alive.float().mean()) < ENOUGH:
                break
        tokens, best, logprobs = (each[:taken] for each in (self.tokens, self.best, self.logprobs))
        return Said(tokens, best, logprobs, self.lengths.clamp(max=taken), ~self.alive)


class Prompts:
    """Tokens of prompts, sorted by length, so that those of a round are alike.

    Attributes:
        header: int32, the tokens before a user's first word.
        footer: int32, those after a user's last.
    """

    def __init__(self, tokenizer: Any, files: Sequence[Path], longest: int, seed: int) -> None:
        mark = "OUTRIDER"
        asked = [{"role": "user", "content": mark}]
        rendered = tokenizer.apply_chat_template(asked, tokenize=False, add_generation_prompt=True)
        before, _, after = rendered.partition(mark)

        def encoded(text: str) -> torch.Tensor:
            return torch.tensor(tokenizer.encode(text, add_special_tokens=False), dtype=torch.int32)

        self.header, self.footer = encoded(before), encoded(after)
        self._choose = random.Random(seed)
        openings = []
        for line in (line for file in files for line in file.read_text(encoding="utf-8").splitlines()):
            match json.loads(line):
                case {"prompt": str(text)}:
                    openings.append(torch.cat([self.header, encoded(text), self.footer]))
                case {"text": str(text)}:
                    openings.append(encoded(text)[: self._choose.randint(*PREFIXES)])
        self._openings = sorted((each for each in openings if 0 < len(each) <= longest), key=len)

    def __len__(self) -> int:
        return len(self._openings)

    def rounds(self, rows: int) -> Iterator[list[torch.Tensor]]:
        """Yield `rows` prompts of like length after another, without end."""
        while True:
            first = self._choose.randint(0, len(self._openings) - rows)
            yield self._openings[first : first + rows]


def write(model: PreTrainedModel, arguments: argparse.Namespace) -> None:
    """Write rows for so many seconds, and print how many."""
    ends = sorted(eos_tokens(model.generation_config, model.config))
    tokenizer = load_tokenizer(find_target(arguments.target))
    prompts = Prompts(tokenizer, arguments.prompts, arguments.longest, arguments.seed)
    header, footer = prompts.header, prompts.footer
    rows, room = arguments.rows, arguments.longest + arguments.most
    if len(prompts) < rows:
        raise SystemExit(f"{len(prompts)} prompts are too few for --rows {rows}; give more, or fewer rows")
    steps = max(arguments.most, arguments.question)
    quick = QuickLlama(model, rows=rows, room=room, steps=steps, ends=ends)
    folder = TeacherFolder(arguments.output)
    folder.begin({"target": arguments.target, "mark": target_mark(model), "seed": arguments.seed, "rows": rows})
    torch.manual_seed(arguments.seed)
    given = prompts.rounds(rows)
    began, kept, number = time.monotonic(), 0, 0
    saver, saving = ThreadPoolExecutor(1), Future[None]()
    saving.set_result(None)
    while time.monotonic() - began < arguments.seconds and number < arguments.rounds:
        if number % 2:
            asked = quick.say([header] * rows, torch.zeros(rows, dtype=torch.bool), arguments.question)
            whole = zip(asked.tokens.T.cpu(), asked.lengths.tolist(), asked.ended.tolist(), strict=True)
            questions = [
                torch.cat([header, tokens[: length - 1].int(), footer])
                for tokens, length, ended in whole
                if ended and length > 2
            ]
            openings = [*questions, *next(given)[: rows - len(questions)]]
        else:
            openings = next(given)
        greedy = torch.rand(rows) < arguments.greedy
        said = quick.say(openings, greedy, arguments.most)
        lengths = said.lengths.cpu()
        counted = (torch.arange(len(said.tokens))[None] < lengths[:, None]).to(said.tokens.device)
        answers = said.tokens.T[counted].int().cpu().split(lengths.tolist())
        best = BestTokens(said.best.transpose(0, 1)[counted].cpu(), said.logprobs.transpose(0, 1)[counted].cpu())
        texts = [torch.cat([opening.int(), answer]) for opening, answer in zip(openings, answers, strict=True)]
        written = TeacherRows.of(texts, [*map(len, openings)], greedy)
        saving.result()
        saving = saver.submit(folder.add, number, written, best)
        kept, number = kept + len(best), number + 1
        seconds = time.monotonic() - began
        facts = {"round": number, "tokens": kept, "seconds": round(seconds, 1), "rate": round(kept / seconds)}
        print(json.dumps(facts | {"steps": len(said.tokens), "opening": max(map(len, openings))}), flush=True)
    saving.result()


def main() -> None:
    """Read the arguments, and write."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path, nargs="+")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--target", default="smollm2")
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--rounds", type=int, default=1_000_000)
    parser.add_argument("--rows", type=int, default=2048)
    parser.add_argument("--longest", type=int, default=448, help="tokens of a prompt; longer ones are left out")
    parser.add_argument("--most", type=int, default=256)
    parser.add_argument("--question", type=int, default=128)
    parser.add_argument("--greedy", type=float, default=0.5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--device", default="cuda")
    arguments = parser.parse_args()
    refusal = f"{arguments.target!r} is no causal language model"
    model = load_causal_lm(
        find_target(arguments.target), refusal, field="target", dtype="bfloat16", device=arguments.device
    )
    write(model.eval().requires_grad_(False), arguments)


if __name__ == "__main__":
    main()
