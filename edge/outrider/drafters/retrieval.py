"""Drafting without a model, from text that the edge has: a prediction, the prompt, its documents, earlier answers.

Sources: He et al. 2023, "REST: Retrieval-Based Speculative Decoding"; Oliaro et al. 2024, "SuffixDecoding"; Yang et al.
2023, "Inference with Reference", from which is the copying on. A state walks along one source: while the text goes on
as the source does, a token costs a comparison. Where it does not, the state looks for its position again:

    near    the position where the end of the text matches best around the last one that was sure, so that an edit (a
            substitution, an insertion or a deletion) costs few tokens, and other text with the same words does not lure
            it away
    far     the longest match of the end of the text in any source
    guess   where neither is found, as if tokens had been replaced one by one

A proposal is the source's token at any temperature: with the shared noise the target draws another only where it
departs from the source. Its q grows with the tokens that have matched; the session's calibration does the rest.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from outrider.drafters.ngram import NgramPositions
from outrider.drafters.proposals import ProposalRule
from outrider.drafters.protocol import TokenPrefix, check_scorable, check_truncation
from outrider.drafters.suffix_index import END, LONGEST, SuffixIndex
from outrider.proto.types import DraftToken, Sampling

MIN_FAR = 3  # tokens of a match anywhere; two are met by chance too often
SURE = 4  # tokens that make a position one to come back to
LURE = 4  # tokens by which a far match must be longer than a near one
NEAR_BEHIND, NEAR_AHEAD = 32, 256  # tokens around a sure position in which the text is looked for
NEAR_POSITIONS = 24  # positions of one token there that are compared
MAX_GUESSES = 4  # tokens after a sure position that are guessed to be replaced one by one
FORGET_AFTER = 256  # tokens off every source after which a sure position is given up
PROMPT_WALKED = 64  # last tokens of a prompt along which the walk begins


class _Cursor(NamedTuple):
    """State of the walk after some length of the prefix.

    Attributes:
        source: tokens that are walked along.
        position: position there of the token to propose; -1: none.
        run: tokens before it that the text has in common with the source.
        share: how often the source goes on so after the match that led here.
        sure_source: source of the last sure position; None: there is none.
        sure_position: the token there that was expected when the text left it.
        lost: tokens of text since then.
    """

    source: Sequence[int]
    position: int
    run: int
    share: float
    sure_source: Sequence[int] | None
    sure_position: int
    lost: int


class RetrievalDrafter:
    """Drafter that copies on from sources shared by texts and from the prediction of its own text.

    Args:
        sources: returns the documents of now, the most important first; the text itself comes before them. States ask
            as they open and `follow`, in their threads.
        prediction: one document that the text is expected to equal, before everything else.
        vocab_size: number of tokens that share the probability of what is not proposed; need not be exact.
    """

    name = "retrieval"
    version = "1"
    steering = None

    def __init__(
        self,
        sources: Callable[[], Sequence[SuffixIndex]] = tuple,
        prediction: SuffixIndex | None = None,
        *,
        vocab_size: int = 1 << 16,
    ) -> None:
        self.sources = sources
        self.prediction = prediction
        self.vocab_size = vocab_size

    def open(self, rule: ProposalRule) -> RetrievalState:
        return RetrievalState(self, rule)


class RetrievalState(TokenPrefix):
    """Tokens of one session, and the walk along the sources.

    The walk is a function of prefix and sources, remembered for each length, so that `truncate` takes it back.
    """

    def __init__(self, drafter: RetrievalDrafter, rule: ProposalRule) -> None:
        super().__init__()
        self._drafter = drafter
        self._positions = NgramPositions(MIN_FAR)
        self._cursors: list[_Cursor | None] = []  # [length + 1], or fewer
        self.follow(rule)

    def follow(self, rule: ProposalRule) -> None:
        """Begin another text after the rule's prompt, with the sources of now."""
        self._rule, self._prompt_length = rule, rule.prompt_length
        self._prediction, self._shared = self._drafter.prediction, tuple(self._drafter.sources())
        self._predicted = () if self._prediction is None else (self._prediction,)
        self._numbers = {id(index.walked): index.tokens for index in (*self._predicted, *self._shared)}
        self._log_others = math.log(self._drafter.vocab_size)
        del self._cursors[self._prompt_length :]

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self.tokens.append(int(token))
            self._positions.append(self.tokens)

    def truncate(self, length: int) -> None:
        """Keep the first `length` tokens; the walk becomes what it was then."""
        check_truncation(length, self.length)
        while self.length > length:
            self._positions.pop(self.tokens)
            self.tokens.pop()
        del self._cursors[length + 1 :]

    def propose(self, n: int) -> tuple[DraftToken, ...]:
        """Append and return up to n tokens, for as long as a source goes on and the target may."""
        choices: list[DraftToken] = []
        while len(choices) < n:
            proposal = self._proposal()
            if proposal is None or self._rule.forbids(self.length, proposal.id):
                break
            choices.append(proposal)
            self.extend((proposal.id,))
        return tuple(choices)

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Append tokens and return log q of each [m] float32: q for the proposal, the rest for all others alike."""
        check_scorable(self.length)
        log_q = np.empty(len(tokens), dtype=np.float32)
        for index, token in enumerate(tokens):
            proposal = self._proposal()
            if proposal is None:
                log_q[index] = -self._log_others
            elif proposal.id == token:
                log_q[index] = math.log(proposal.confidence)
            else:
                log_q[index] = math.log(1 - proposal.confidence) - self._log_others
            self.extend((token,))
        return log_q

    def predicts(self, token: int) -> bool:
        """Return whether the prediction, and no other source, has `token` next."""
        cursor, proposal = self._walk(), self._proposal()
        if cursor is None or proposal is None or self._prediction is None:
            return False
        return cursor.source is self._prediction.walked and proposal.id == token

    def close(self) -> None:
        super().close()
        self._cursors, self._prediction, self._predicted, self._shared, self._numbers = [], None, (), (), {}

    # --- the walk ---

    def _proposal(self) -> DraftToken | None:
        cursor = self._walk()
        if cursor is None or not 0 <= cursor.position < len(cursor.source):
            return None
        token = cursor.source[cursor.position]
        if token == END:
            return None
        q = cursor.share * (cursor.run + 1) / (cursor.run + 2)
        return DraftToken(token, q, q)

    def _walk(self) -> _Cursor | None:
        cursors, begin = self._cursors, max(0, self._prompt_length - PROMPT_WALKED)
        cursors += [None] * (min(begin, self.length + 1) - len(cursors))
        for length in range(len(cursors), self.length + 1):
            if length == self._prompt_length and self._prediction is not None:
                source = self._prediction.walked
                cursors.append(_Cursor(source, 0, 0, 1.0, source, 0, 0))
            else:
                cursors.append(self._step(cursors[-1], length) if length > begin else None)
        return cursors[-1]

    def _step(self, before: _Cursor | None, length: int) -> _Cursor | None:
        """Return the cursor after the first `length` tokens; `before` is the one a token earlier."""
        token = self.tokens[length - 1]
        if before is not None and 0 <= before.position < len(before.source) and before.source[before.position] == token:
            source, position, run = before.source, before.position + 1, before.run + 1
            if run >= SURE:
                return _Cursor(source, position, run, 1.0, source, position, 0)
            sure, at = before.sure_source, before.sure_position
            return _Cursor(source, position, run, before.share, sure, at, before.lost + 1)
        sure, position, lost = None, 0, 0
        if before is not None and before.sure_source is not None and before.lost < FORGET_AFTER:
            sure, position, lost = before.sure_source, before.sure_position, before.lost + 1
        near = self._near(sure, position, lost, length) if sure is not None else None
        far = self._far(length)
        if near is not None and (far is None or far.run < near.run + LURE):
            return near
        if far is not None:
            return far._replace(sure_source=sure, sure_position=position, lost=lost)
        if sure is None:
            return None
        guess = position + lost if lost <= MAX_GUESSES else -1
        return _Cursor(sure, guess, 0, 0.5, sure, position, lost)

    def _near(self, source: Sequence[int], position: int, lost: int, length: int) -> _Cursor | None:
        """Return the cursor at the best match around a sure position, the one nearest to where `lost` tokens lead."""
        expected = position + lost
        low, high = max(0, position - NEAR_BEHIND), min(len(source), expected + NEAR_AHEAD)
        if source is self.tokens:
            high = min(high, length - 1)
        numbers = self._numbers.get(id(source))
        window = np.array(source[low:high]) if numbers is None else numbers[low:high]
        positions = np.flatnonzero(window == self.tokens[length - 1]) + low + 1
        if not len(positions):
            return None
        nearest = positions[np.argsort(np.abs(positions - expected), kind="stable")[:NEAR_POSITIONS]].tolist()
        runs = [self._run(source, candidate, length) for candidate in nearest]
        run = max(runs)
        if run == 1 and abs(nearest[0] - expected) > 1 and len(nearest) > 1:
            return None  # a word that is all over the place
        return _Cursor(source, nearest[runs.index(run)], run, 1.0, source, position, lost)

    def _far(self, length: int) -> _Cursor | None:
        """Return the cursor at the longest match in any source; of equal ones the first source's, then the newest."""
        text = self.tokens[max(0, length - LONGEST) : length]
        found = [*self._matches(self._predicted, text), *self._own(length), *self._matches(self._shared, text)]
        return max(found, key=lambda cursor: cursor.run, default=None)

    def _matches(self, indices: Sequence[SuffixIndex], text: Sequence[int]) -> Iterator[_Cursor]:
        for index in indices:
            match = index.longest(text, MIN_FAR)
            if match is not None:
                yield _Cursor(index.walked, match.position, match.length, match.share, None, 0, 0)

    def _own(self, length: int) -> Iterator[_Cursor]:
        for end in self._positions.before(length):
            yield _Cursor(self.tokens, end + 1, self._run(self.tokens, end + 1, length), 1.0, None, 0, 0)

    def _run(self, source: Sequence[int], position: int, length: int) -> int:
        """Return how many tokens before `position` equal the end of the first `length` tokens, `LONGEST` at most."""
        limit = min(LONGEST, position, length)
        text = self.tokens
        return next((i for i in range(limit) if source[position - 1 - i] != text[length - 1 - i]), limit)


class PredictionCount:
    """Count of a text's tokens that copying from its prediction finds; a function of both, whoever drafted the text."""

    def __init__(self, prediction: SuffixIndex) -> None:
        self._prediction = prediction
        self._state = RetrievalDrafter(prediction=prediction).open(ProposalRule(Sampling()))
        self._found = 0

    def take(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._found += self._state.predicts(token)
            self._state.extend((token,))

    @property
    def accepted(self) -> int:
        """Tokens of the prediction that the text has so far."""
        return min(self._found, self._tokens)

    @property
    def rejected(self) -> int:
        """Tokens of the prediction that the text does not have."""
        return self._tokens - self.accepted

    @property
    def _tokens(self) -> int:
        return len(self._prediction) - 1  # without its end
