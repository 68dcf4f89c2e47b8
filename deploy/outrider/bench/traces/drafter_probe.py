"""What a drafter's token takes, by trying: it reads a prompt, and drafts in blocks, as at an edge."""

from __future__ import annotations

import time
from statistics import median

from outrider.bench.comparison.texts import Text
from outrider.bench.replay.costs import Costs
from outrider.bench.traces.costs import DrafterCosts
from outrider.edge.drafters.proposals import ProposalRule
from outrider.edge.drafters.protocol import Drafter, DraftState
from outrider.proto.types import Sampling

BLOCK = 8  # tokens a job
BLOCKS = 4  # after a prompt


class DrafterProbe:
    """Times one drafter, text by text. Processor time: the drafters compute in this thread alone."""

    def __init__(self, drafter: Drafter, sampling: Sampling) -> None:
        self._drafter = drafter
        self._sampling = sampling
        self._token_s: list[float] = []
        self._reading: list[tuple[int, float]] = []  # tokens of a prompt, seconds with the one that was drafted

    def after(self, text: Text) -> None:
        """One prompt, and a few blocks after it."""
        state = self._drafter.open(ProposalRule(self._sampling, prompt_length=text.prompt_length))
        try:
            began = time.thread_time()
            state.extend(text.transcript[: text.prompt_length])
            state.propose(1)
            self._reading.append((text.prompt_length, time.thread_time() - began))
            self._blocks(state)
        finally:
            state.close()

    def costs(self) -> DrafterCosts:
        """Of what was tried; a drafter that never said anything counts as a usual one."""
        token_s = median(self._token_s) if self._token_s else Costs().drafting_s
        read = [max(0.0, seconds - token_s) / (tokens - 1) for tokens, seconds in self._reading if tokens > 1]
        return DrafterCosts(token_s, median(read) if read else 0.0)

    def _blocks(self, state: DraftState) -> None:
        for _ in range(BLOCKS):
            began = time.thread_time()
            drafted = len(state.propose(BLOCK))
            if drafted < 2:
                return
            self._token_s.append((time.thread_time() - began) / drafted)
