"""vLLM's workers and block pool as far as the port's rules meet them, on the plain model of the conformance suite.

A worker keeps tokens and blocks of a request by itself, computes from those, and overwrites what lies in the blocks.
Each position of a block holds all tokens up to it, as keys and values stand for them, and a pass fails where one that
it reads holds others. Blocks that are given back keep what they hold until they are taken again.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from conformance_oracle import VOCAB, Oracle

from outrider.cloud.target.backend import TargetFacts
from outrider.cloud.target.sampler import Sampler
from outrider.cloud.vllm.vllm_backend import VllmBackend
from outrider.cloud.vllm.worker_messages import ForwardPass, PassResult, PassRow, committed_tokens

FACTS = TargetFacts("", "", VOCAB, 256, frozenset(), 64, 4, torch.device("cpu"))


@dataclass(eq=False)
class EmulatedBlock:
    block_id: int
    holders: int = 0
    key: bytes | None = None


class EmulatedStore:
    def __init__(self, size: int, count: int) -> None:
        self.size, self.count = size, count
        self.blocks = [EmulatedBlock(i) for i in range(count)]
        self._idle = list(self.blocks)
        self._found: dict[bytes, EmulatedBlock] = {}

    @property
    def free(self) -> int:
        return len(self._idle)

    def take(self, count: int) -> list[EmulatedBlock]:
        assert count <= self.free, "nobody asked whether there are so many"
        taken = [self._idle.pop(0) for _ in range(count)]
        for block in taken:
            self.forget(block)
            block.holders = 1
        return taken

    def share(self, blocks: Iterable[EmulatedBlock]) -> None:
        for block in blocks:
            if not block.holders:
                self._idle.remove(block)
            block.holders += 1

    def give_back(self, blocks: Iterable[EmulatedBlock]) -> None:
        for block in blocks:
            assert block.holders > 0, "given back twice"
            block.holders -= 1
            if not block.holders:
                self._idle.append(block) if block.key else self._idle.insert(0, block)

    def is_shared(self, block: EmulatedBlock) -> bool:
        return block.holders > 1

    def key(self, before: bytes | None, tokens: Sequence[int], isolation: str) -> bytes:
        assert len(tokens) == self.size
        return (before or isolation.encode() + b":") + bytes(tokens)

    def find(self, key: bytes) -> EmulatedBlock | None:
        return self._found.get(key)

    def keep(self, block: EmulatedBlock, key: bytes) -> None:
        if block.key is None and key not in self._found:
            block.key = key
            self._found[key] = block

    def forget(self, block: EmulatedBlock) -> None:
        if block.key is not None:
            del self._found[block.key]
            block.key = None


@dataclass
class EmulatedRequest:
    tokens: list[int]
    prompt_length: int
    blocks: list[int] = field(default_factory=list)


class EmulatedCore:
    """One worker, which computes by the plain model."""

    remote = True

    def __init__(self, oracle: Oracle, *, size: int = 16, count: int = 128) -> None:
        self.store: Any = EmulatedStore(size, count)
        self.fails_next = False
        self.spoils_next: float | None = None
        self.num_new_requests = 0
        self._oracle = oracle
        self._held: dict[int, tuple[int, ...]] = {}  # by slot, all tokens up to its position
        self._requests: dict[str, EmulatedRequest] = {}
        self._sampler = Sampler(torch.device("cpu"))
        self._layers: Sequence[int] = ()

    def run(self, work: ForwardPass) -> PassResult:
        for name in work.departed:
            self._requests.pop(name, None)
        size = self.store.size
        copied = {
            to * size + i: self._held.get(source * size + i, ()) for source, to in work.copies for i in range(size)
        }
        self._held |= copied
        result = PassResult(forwarded=time.monotonic())
        for row in work.rows:
            self._compute(row, result)
            if self.fails_next:  # amid the pass, so that some of it is done
                self.fails_next = False
                raise RuntimeError("it happens once")
        return result

    def _compute(self, row: PassRow, result: PassResult) -> None:
        request = self._request(row)
        end = row.start + len(row.tokens)
        assert tuple(request.tokens[row.start : end]) == row.tokens, "the worker would compute other tokens"
        text = (*request.tokens[:end], *row.drafts)
        slots = [block * self.store.size + i for block in request.blocks for i in range(self.store.size)]
        for position in range(row.start):
            assert self._held.get(slots[position]) == text[: position + 1], f"position {position} holds another text"
        for position in range(row.start, len(text)):
            self._held[slots[position]] = text[: position + 1]
        newest = len(text) if row.verification is None else end
        if row.verification is not None:
            assert len(request.tokens) == end, "vLLM's runner gives no token amid a request"
            logits = torch.cat([self._oracle.logits(text[: end + j]) for j in range(len(row.drafts) + 1)])
            if self.spoils_next is not None:
                logits[-1, logits.shape[1] // 2], self.spoils_next = self.spoils_next, None
            [sampled], finite = self._sampler.sample_numbers(logits, [row.verification])
            result.finite &= finite
            result.sampled[row.name] = sampled
            committed = committed_tokens(row.verification, sampled)
            request.tokens += committed
            newest += len(committed) - 1
        if row.tapped and self._layers:
            result.taps[row.name] = self._oracle.entering(text[:newest], self._layers)

    def _request(self, row: PassRow) -> EmulatedRequest:
        if row.new_tokens is not None:
            assert row.name not in self._requests, "a name is used once"
            self.num_new_requests += 1
            self._requests[row.name] = EmulatedRequest(list(row.new_tokens), len(row.new_tokens))
        request = self._requests[row.name]
        request.blocks += row.new_blocks
        del request.tokens[request.prompt_length + row.num_output_tokens :]
        return request

    def forget_pass(self) -> None:
        pass

    def tap(self, layers: Sequence[int]) -> None:
        self._layers = layers

    def close(self) -> None:
        self._requests.clear()


def emulated_backend(core: EmulatedCore, *, max_rows: int = 600, max_requests: int = 17) -> VllmBackend:
    return VllmBackend(core, FACTS, max_rows=max_rows, max_requests=max_requests)
