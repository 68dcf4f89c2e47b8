"""Choice of a drafter's tokens under the target's noise.

The target takes, at position i, the token t with the largest log p(t) + G(seed, i, t). Grouped by how they begin, its
tokens are drawn in two steps with the same result: the greatest value within a group of probability p(g) is

    log p(g) + G(g),    G(g) = max over t in g of (log p(t | g) + G(seed, i, t))

and G(g) is Gumbel noise again. A drafter's token d stands for the group of the target's tokens whose drafter tokens
begin with d, so it gets G of that group. p(t | g), which the drafter does not know, is taken from how common tokens
are: a vocabulary made by merges has the common ones first. A token that both vocabularies have, with no other in its
group, gets the target's own noise (TLI's intersection); one that covers several target tokens gets that of the first.
"""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from outrider.drafters.by_text.vocabulary import Vocabulary
from outrider.drafters.proposals import NO_PROPOSAL, ProposalRule
from outrider.proto.noise import exponentials_for_proposals
from outrider.proto.token_counts import TokenCounts
from outrider.proto.types import DraftToken, Sampling

COMMON = 10.0  # tokens at the front of a vocabulary are about equally common
MEAN_GUMBEL = 0.5772156649015329

Path = tuple[int, ...]  # drafter tokens
Range = tuple[int, int]  # indices of target tokens, from the first on, without the last


class TokenGroups:
    """The target's tokens in the order of their drafter tokens, so that those that begin alike stand together."""

    def __init__(self, target: Vocabulary, drafter: Vocabulary) -> None:
        """Encode every token of the target by the drafter's tokenizer."""
        self._target, self._drafter = target, drafter
        found = ((_path(piece, drafter), token) for piece, token in target.by_piece.items())
        paths = sorted((path, token) for path, token in found if path)
        self._paths = [path for path, _ in paths]
        self._tokens = np.array([token for _, token in paths], dtype=np.int64)
        self._log_common = -np.log(self._tokens + COMMON)
        self._children: dict[Path, tuple[Range, dict[int, Range]]] = {}
        self._first_pieces: dict[int, int] = {}

    def children(self, path: Path) -> tuple[Range, dict[int, Range]]:
        """Return the range of the tokens that are `path`, and of those that go on with each drafter token."""
        if path not in self._children:
            low = bisect.bisect_left(self._paths, path)
            depth, at = len(path), low
            while at < len(self._paths) and self._paths[at] == path:
                at += 1
            itself, after = (low, at), dict[int, Range]()
            while at < len(self._paths) and self._paths[at][:depth] == path:
                token = self._paths[at][depth]
                end = bisect.bisect_left(self._paths, (*path, token + 1), lo=at)
                after[token] = at, end
                at = end
            self._children[path] = itself, after
        return self._children[path]

    def members(self, indices: Range) -> tuple[np.ndarray, np.ndarray]:
        """Return the target's tokens at `indices` [n] int64, and logarithms of how common they are [n] float64."""
        low, high = indices
        return self._tokens[low:high], self._log_common[low:high]

    def first_piece(self, token: int) -> int:
        """Return the target's token that a drafter's `token` begins with; -1: there is none."""
        if token not in self._first_pieces:
            self._first_pieces[token] = self._target.first_piece(self._drafter.piece(token))
        return self._first_pieces[token]

    def first_piece_of(self, text: bytes) -> int:
        """Return the target's token that a text begins with; -1: there is none, or no text."""
        return self._target.first_piece(text)


def _path(piece: bytes, drafter: Vocabulary) -> Path | None:
    encoded = drafter.encode(piece)
    if encoded is not None:
        ids = encoded.ids
        return tuple(ids) if encoded.ends and drafter.piece(ids[0])[:1] == piece[:1] else None
    single = [drafter.by_piece.get(piece[at : at + 1], -1) for at in range(len(piece))]  # a part of a character
    return None if -1 in single else tuple(single)


class TextRule(ProposalRule):
    """Rule of one session for a drafter's own tokens; `aim` says before each where it will stand.

    What the sampling says of single target tokens (bias, penalties, allowed ones) is nothing to a drafter's tokens.
    """

    def __init__(self, rule: ProposalRule, groups: TokenGroups, drafter: Vocabulary) -> None:
        """Make the rule from the session's, which is for the target's tokens."""
        s = rule.sampling
        plain = Sampling(temperature=s.temperature, seed=s.seed, top_k=s.top_k, top_p=s.top_p, min_p=s.min_p)
        super().__init__(plain, prompt_length=0)
        self._text_until = rule.prompt_length + s.min_tokens if s.min_tokens else 0  # position of the target
        self._groups = groups
        self._drafter = drafter
        self._position = 0
        self._held: Path | None = ()
        self._pending = b""

    def aim(self, position: int, held: Path | None, pending: bytes) -> None:
        """Say what the next token is: at the target's `position`, after `held` drafter tokens of that target token.

        Args:
            position: the target's position of the token that is not complete.
            held: drafter tokens since its beginning; None: it begins within one.
            pending: text that is known already, with which the next token must agree.
        """
        self._position, self._held, self._pending = position, held, pending

    def candidates_wanted(self, useful: int) -> int:
        """Return all that are useful, since not every candidate agrees with what is known."""
        return useful

    def choose(
        self, position: int, tokens: np.ndarray, logits: np.ndarray, log_normalizer: float, counts: TokenCounts | None
    ) -> DraftToken:
        """Return the drafter's token to take; `NO_PROPOSAL` where none agrees, or where it is no text."""
        del position, counts  # the drafter's own
        if self._pending or self._position < self._text_until:
            fits = [i for i, token in enumerate(tokens.tolist()) if self._agrees(self._drafter.piece(token))]
            if not fits:
                return NO_PROPOSAL
            if self._pending or len(fits) < len(tokens):
                tokens, logits = tokens[fits], logits[fits]
                log_normalizer = float(np.logaddexp.reduce(logits.astype(np.float64)))
        log_q = (logits.astype(np.float64) - log_normalizer) * self._inverse_temperature
        if self.sampling.temperature and self._truncates:
            kept = self._keep(tokens, log_q, float(np.logaddexp.reduce(log_q)))
            tokens, log_q = tokens[kept], log_q[kept]
        if self.sampling.temperature != 1 or self._truncates:
            log_q = log_q - np.logaddexp.reduce(log_q)
        if self.sampling.temperature == 0:
            index, perturbed = 0, float(np.exp(log_q[0]))
        else:
            index, perturbed = self._draw_by_text(tokens, log_q)
        token, q = int(tokens[index]), min(1.0, float(np.exp(log_q[index])))
        if not self._drafter.piece(token):
            return NO_PROPOSAL
        return DraftToken(token, q, min(1.0, perturbed))

    @property
    def _first(self) -> dict[int, Range]:
        """Indices of the target's tokens by the first of their drafter tokens."""
        return self._groups.children(())[1]

    def _agrees(self, piece: bytes) -> bool:
        """Return whether a token's bytes, `piece`, agree with the known text that is still to be drafted."""
        return bool(piece) and (piece.startswith(self._pending) or self._pending.startswith(piece))

    def _draw_by_text(self, tokens: np.ndarray, log_q: np.ndarray) -> tuple[int, float]:
        """Return the index of the token to take among those of log_q [K], and its perturbed probability."""
        if self._pending:
            return _winner(log_q + self._noise_after_pending(tokens))
        if self._held is None:
            return 0, float(np.exp(log_q[0]))
        if not self._held:
            return _winner(log_q + self._noise_at(self._position, self._first, tokens))
        return self._draw_within(self._held, tokens, log_q)

    def _draw_within(self, held: Path, tokens: np.ndarray, log_q: np.ndarray) -> tuple[int, float]:
        """Draw the next token, and by it whether the target's token that begins with `held` goes on or has ended."""
        itself, after = self._groups.children(held)
        goes_on = np.array([token in after for token in tokens.tolist()], dtype=bool)
        if not goes_on.any():
            return _winner(log_q + self._noise_at(self._position + 1, self._first, tokens))
        value = np.full(len(tokens), -np.inf)
        value[goes_on] = log_q[goes_on] + self._noise_at(self._position, after, tokens[goes_on])
        ends = ~goes_on
        if not ends.any() or itself[0] == itself[1]:
            return _winner(value)
        next_value = log_q[ends] + self._noise_at(self._position + 1, self._first, tokens[ends])
        end_noise = float(self._group_noise(self._position, [itself])[0])
        ending = float(np.logaddexp.reduce(log_q[ends])) + end_noise
        best, perturbed = _winner(np.append(value[goes_on], ending))
        if best < goes_on.sum():
            return int(np.flatnonzero(goes_on)[best]), perturbed
        chosen, share = _winner(next_value)
        return int(np.flatnonzero(ends)[chosen]), perturbed * share

    def _noise_at(self, position: int, after: dict[int, Range], tokens: np.ndarray) -> np.ndarray:
        """Return the noise [K] of drafter tokens that begin a target token, or go on with one, at `position`."""
        listed = tokens.tolist()
        grouped = [index for index, token in enumerate(listed) if token in after]
        pieces = [-1 if token in after else self._groups.first_piece(token) for token in listed]
        noise = self._noise_of_pieces(position, pieces)
        if grouped:
            noise[grouped] = self._group_noise(position, [after[listed[index]] for index in grouped])
        return noise

    def _noise_after_pending(self, tokens: np.ndarray) -> np.ndarray:
        """Return the noise [K] of drafter tokens that begin with known text: that of the first piece after it."""
        rests = (self._drafter.piece(token)[len(self._pending) :] for token in tokens.tolist())
        return self._noise_of_pieces(self._position, [self._groups.first_piece_of(rest) for rest in rests])

    def _noise_of_pieces(self, position: int, pieces: Sequence[int]) -> np.ndarray:
        """Return the noise [K] of the target's tokens `pieces` [K], and its mean where there is no such token (-1)."""
        noise = np.full(len(pieces), MEAN_GUMBEL)
        known = [index for index, piece in enumerate(pieces) if piece >= 0]
        if known:
            noise[known] = self._gumbel(position, np.array([pieces[index] for index in known], dtype=np.int64))
        return noise

    def _group_noise(self, position: int, ranges: Sequence[Range]) -> np.ndarray:
        """Return the noise of groups of target tokens at `position`, one for each of `ranges` [n]."""
        members = [self._groups.members(each) for each in ranges]
        firsts = np.cumsum([0, *(len(ids) for ids, _ in members[:-1])])
        log_common = np.concatenate([each for _, each in members])
        values = log_common + self._gumbel(position, np.concatenate([ids for ids, _ in members]))
        noise: np.ndarray = np.maximum.reduceat(values, firsts) - np.logaddexp.reduceat(log_common, firsts)
        return noise

    def _gumbel(self, position: int, tokens: np.ndarray) -> np.ndarray:
        """Return the target's noise G of its `tokens` [n] at `position`."""
        noise: np.ndarray = -np.log(exponentials_for_proposals(self.sampling.seed, position, tokens))
        return noise


def _winner(value: np.ndarray) -> tuple[int, float]:
    """Return the index of the greatest of `value` [K], and its softmax."""
    index = int(value.argmax())
    return index, 1.0 / float(np.exp(value - value[index]).sum())
