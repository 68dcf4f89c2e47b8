"""Servers that score given tokens, as the engine of probes sees them.

A *probe* is one request: a text and K drafts as token ids, of which the server tells the log probabilities of the
likeliest tokens after the text and after each draft.
"""

from __future__ import annotations

import math
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple, Protocol

import numpy as np

FLOAT32_LOG = -87.0  # natural log of about the least float32 of full precision


@dataclass(frozen=True, slots=True, eq=False)
class ListedRow:
    """The model's word on one position: log probabilities, before any processing, of some tokens.

    Attributes:
        tokens: [n] ids, each once: the likeliest first, of equals the smaller id; then those that were named.
        logp: [n] float64, natural logs.
        bound: no token that is missing is likelier; -inf: none is missing.
    """

    tokens: np.ndarray
    logp: np.ndarray
    bound: float

    @classmethod
    def of(cls, logp: Mapping[int, float], vocab: int, named: Mapping[int, float] | None = None) -> ListedRow:
        """Return the row of the likeliest tokens `logp` and of others that were asked for by name.

        Raises:
            FloatingPointError: there is no likeliest token, or a logarithm is no number.
        """
        tokens = np.fromiter(logp, np.int64, len(logp))
        values = np.fromiter(logp.values(), np.float64, len(logp))
        if not len(values) or np.isnan(values).any() or values.max() == -math.inf or values.max() > 0.01:
            raise FloatingPointError("the server's log probabilities are no numbers")
        order = np.lexsort((tokens, -values))
        bound = float(values.min()) if len(tokens) < vocab else -math.inf
        return cls(tokens[order], values[order], bound).with_named(named or {})

    @classmethod
    def of_float32(cls, logp: Mapping[int, float], vocab: int, named: Mapping[int, float] | None = None) -> ListedRow:
        """Return the row where logarithms come of float32 probabilities, which say little below e^-87, and then 0."""
        kept = {token: value for token, value in logp.items() if not value < FLOAT32_LOG}
        row = cls.of(kept, vocab, named)
        return row if len(kept) == len(logp) else replace(row, bound=FLOAT32_LOG)

    def with_named(self, named: Mapping[int, float]) -> ListedRow:
        """Return the row with tokens that were asked for by name, too."""
        new = [token for token in named if token not in set(self.tokens.tolist())]
        values = np.array([named[token] for token in new], np.float64)
        if np.isnan(values).any():
            raise FloatingPointError("the server's log probabilities are no numbers")
        tokens = np.concatenate([self.tokens, np.array(new, np.int64)])
        return ListedRow(tokens, np.concatenate([self.logp, values]), self.bound)


@dataclass(frozen=True, slots=True)
class Probe:
    """The answer to a probe.

    Attributes:
        rows: [K + 1] after the text, and after each draft.
        cached_tokens: tokens that the server had computed before; None: it does not tell.
        lost: rows that had to be asked for again.
    """

    rows: tuple[ListedRow, ...]
    cached_tokens: int | None = None
    lost: int = 0


class StreamedToken(NamedTuple):
    """One token of the server's own greedy text, and its row; None: it was not asked for."""

    token: int
    row: ListedRow | None


@dataclass(frozen=True, slots=True)
class ServerFacts:
    """The facts of a server that its first answers tell.

    Attributes:
        kind: server and runner, such as `vLLM 0.32.0, V1`.
        model: name by which requests ask for the model.
        root: folder or hub name of its weights, as the server says; empty: it does not.
        context_length: most positions of a text.
        block_size: positions of a block of its prefix cache; 0: unknown.
        max_list: most likeliest tokens in a row; the whole vocabulary where it sets no limit.
        names: whether it tells the log probabilities of tokens that are asked for by name, without harm to others.
        names_in_rows: whether a probe itself takes names, by row.
        tells_cached: whether answers tell how many tokens were cached.
        door: how rows are asked for: `rows`, all in one prompt, or `prompts`, one prompt for each.
        drafts_itself: whether it speculates by itself.
        repeatable: whether its greedy texts come again alike, beside others too, as far as was tried.
        lacking: flags that would help, and what for.
        apart: whether each prompt of a probe reads the text by itself, and keeps it.
    """

    kind: str
    model: str
    root: str
    context_length: int
    block_size: int
    max_list: int
    names: bool
    names_in_rows: bool
    tells_cached: bool
    door: str
    drafts_itself: bool
    repeatable: bool
    lacking: tuple[str, ...] = ()
    apart: bool = False

    @property
    def words(self) -> str:
        """Kind and abilities of the server, and the flags that it lacks, in a sentence."""
        how = "all rows of a probe in one prompt" if self.door == "rows" else "one prompt for each row"
        lists = f"{how}, lists of up to {self.max_list} tokens" + (", and others by name" if self.names else "")
        own = "; it drafts by itself" if self.drafts_itself else ""
        wavers = "" if self.repeatable else "; its greedy texts do not come again alike"
        return f"{self.kind}: {lists}{own}{wavers}" + "".join(f"; it lacks {flag}" for flag in self.lacking)


class ScoringServer(Protocol):
    """One model of one server. Runs in one event loop.

    Raises, from every method:
        Unavailable: nothing answers, or the server has lost the request.
        ModelRefused: behind the address is another model now.
        FloatingPointError: what it answers is no number.
        Internal: it answers what none of its kind should.
    """

    facts: ServerFacts

    async def probe(
        self,
        text: Sequence[int],
        drafts: Sequence[int],
        width: int,
        named: Sequence[Sequence[int]] = (),
        salt: str = "",
    ) -> Probe:
        """Return the rows after `text` [n] and after each of the K `drafts`, of the `width` likeliest tokens each.

        `named` [K + 1] are tokens wanted beside these in each row, only of a server that takes names in rows. Only
        requests of one `salt` share what was computed.
        """

    async def name(self, text: Sequence[int], tokens: Sequence[int], salt: str = "") -> Mapping[int, float]:
        """Return the log probabilities of `tokens` after `text`; only of a server that takes names."""

    def stream(
        self, text: Sequence[int], max_tokens: int, ends: frozenset[int], width: int, salt: str = ""
    ) -> AsyncGenerator[StreamedToken, None]:
        """Yield the server's own greedy tokens after `text`, as they come, until one of `ends` or `max_tokens`.

        With a `width` of 0 rows are not asked for: they cost a server a few hundredths of each token.
        """

    async def chat(self, messages: Sequence[Mapping[str, str]]) -> Sequence[int]:
        """Return the tokens that the server makes of a chat, up to where an answer begins; none: it does not tell."""

    async def close(self) -> None:
        """End what is open; no other call follows."""
