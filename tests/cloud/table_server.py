"""A server that scores tokens by a table, without HTTP; and texts of it, by the rule over whole rows."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch

from outrider.cloud.probes.scoring import ListedRow, Probe, ServerFacts, StreamedToken
from outrider.cloud.target.sampler import Sampler
from outrider.cloud.target.verification import VerificationInput
from outrider.proto.errors import Unavailable
from outrider.proto.types import CommittedToken, Sampling

VOCAB, CONTEXT = 96, 256
FACTS = ServerFacts("table", "m", "", CONTEXT, 8, VOCAB, True, True, True, "rows", False, True)


def logp_after(text: Sequence[int]) -> np.ndarray:
    """Log probabilities [VOCAB] after a text, which depend on its length and its last three tokens."""
    rng = np.random.default_rng([len(text), *text[-3:]])
    logits = rng.normal(0, 2.5, VOCAB).astype(np.float32).astype(np.float64)
    return np.asarray(logits - math.log(np.exp(logits).sum()))


@dataclass
class TableServer:
    """It answers by the table, after `step_s` and `row_s` a row; `failures` are raised first, one a call."""

    facts: ServerFacts = FACTS
    step_s: float = 0.0
    row_s: float = 0.0
    stale: bool = False
    failures: list[Exception] = field(default_factory=list)
    probes: int = 0
    streamed: int = 0
    streams: int = 0
    named: int = 0
    longer: int = 0
    drafts: list[int] = field(default_factory=list)
    closed: bool = False

    def _row(self, text: Sequence[int], width: int, named: Sequence[int] = ()) -> ListedRow:
        assert 0 < width <= self.facts.max_list
        logp = logp_after(text[:-1] if self.stale else text)
        order = np.lexsort((np.arange(VOCAB), -logp))[:width].tolist()
        return ListedRow.of({token: float(logp[token]) for token in order}, VOCAB, {t: float(logp[t]) for t in named})

    def _fail(self) -> None:
        if self.failures:
            raise self.failures.pop(0)

    async def probe(
        self,
        text: Sequence[int],
        drafts: Sequence[int],
        width: int,
        named: Sequence[Sequence[int]] = (),
        salt: str = "",
    ) -> Probe:
        """Rows of the table."""
        await asyncio.sleep(self.step_s + self.row_s * (1 + len(drafts)))
        self._fail()
        assert len(text) + len(drafts) < self.facts.context_length
        self.probes += 1
        self.longer += width > 20
        self.drafts.append(len(drafts))
        wanted = [*named] or [()] * (len(drafts) + 1)
        assert not named or (self.facts.names_in_rows and len(named) == len(drafts) + 1)
        rows = [self._row([*text, *drafts[:j]], width, wanted[j]) for j in range(len(drafts) + 1)]
        return Probe(tuple(rows), (len(text) + len(drafts)) // 8 * 8)

    async def name(self, text: Sequence[int], tokens: Sequence[int], salt: str = "") -> Mapping[int, float]:
        """Log probabilities of the table."""
        assert self.facts.names
        await asyncio.sleep(self.step_s)
        self.named += 1
        logp = logp_after(text)
        return {token: float(logp[token]) for token in tokens}

    async def stream(
        self, text: Sequence[int], max_tokens: int, ends: frozenset[int], width: int, salt: str = ""
    ) -> AsyncGenerator[StreamedToken, None]:
        """The table's greedy text."""
        self.streams += 1
        written = list(text)
        for _ in range(max_tokens):
            await asyncio.sleep(self.step_s)
            self._fail()
            row = self._row(written, max(1, width))
            written.append(int(row.tokens[0]))
            self.streamed += 1
            yield StreamedToken(written[-1], row if width else None)
            if written[-1] in ends:
                return

    async def chat(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """It has no template."""
        return ()

    async def close(self) -> None:
        """Note it."""
        self.closed = True


def text_of(
    prompt: Sequence[int],
    sampling: Sampling,
    eos: frozenset[int],
    allowed: np.ndarray | None = None,
    logp: Callable[[tuple[int, ...]], np.ndarray] = logp_after,
) -> list[CommittedToken]:
    """The text by our rule over whole rows, one token after the other; `allowed` [VOCAB] holds in every row."""
    sampler, written = Sampler(torch.device("cpu")), list[CommittedToken]()
    while len(written) < sampling.max_tokens:
        text = [*prompt, *(token.id for token in written)]
        mask = None if allowed is None else allowed[None]
        at = VerificationInput(sampling, text, len(prompt), (), mask, logprobs=True, top_logprobs=3, eos_tokens=eos)
        logits = torch.from_numpy(logp(tuple(text))).float()[None]
        written += sampler.sample(logits, [at])[0].tokens
        if (written[-1].id in eos and not sampling.ignore_eos) or written[-1].id in sampling.stop_tokens:
            break
    return written


def away() -> Unavailable:
    """The error of a server that does not answer."""
    return Unavailable("the server at http://127.0.0.1:9 does not answer; is it up?", retry_after_s=1.0)
