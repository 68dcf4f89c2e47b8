"""A drafter with another tokenizer, as one of the target's: its text, in the target's tokens."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider.drafters.by_text.text_noise import TextRule, TokenGroups
from outrider.drafters.by_text.vocabulary import LOOK_BACK, Reencoding, Vocabulary, begins_character, whole_characters
from outrider.drafters.proposals import ProposalRule
from outrider.drafters.protocol import Drafter, DraftState, TokenPrefix, check_scorable
from outrider.proto.errors import ModelRefused
from outrider.proto.types import DraftToken

MAX_HELD = 6  # target tokens that may wait for the end of a word: some writing has none
MAX_AHEAD = 64  # drafter tokens that may be waiting for one target token: a loop of blanks would have no end
BREAK = b"\n"  # the drafter's view of a special token within a text


class TextDrafter:
    """Drafter of any tokenizer for a target of another; it cannot be steered.

    Args:
        inner: drafter of the tokens of `own`.
        look_back: tokens before a seam that are encoded again; 0 for comparison.

    Raises:
        ModelRefused: text does not pass one of the tokenizers unchanged.
    """

    steering = None

    def __init__(self, inner: Drafter, own: Vocabulary, target: Vocabulary, *, look_back: int = LOOK_BACK) -> None:
        for whose, vocabulary in (("the drafter's", own), ("the target's", target)):
            if vocabulary.hindrance:
                message = f"{inner.name!r} cannot draft by text: of {whose} tokenizer, {vocabulary.hindrance}"
                raise ModelRefused(message, code="OUT-407")
        self.inner = inner
        self.name = inner.name
        self.version = inner.version
        self.own = own
        self.target = target
        self.look_back = look_back
        self.groups = TokenGroups(target, own)

    def open(self, rule: ProposalRule) -> TextState:
        return TextState(self, rule)


class TextState(TokenPrefix):
    """One session's target tokens, their text, and the drafter's own tokens of that text and of what it drafted.

    The drafter reads its own tokens of the known text without the last one, and begins by drafting that again, held to
    what is known of it: in the middle of a word its last token may become another. What it drafts beyond the known text
    becomes target tokens by encoding it with some known ones before it. The last word waits for its end, since its
    tokens may change with it. What was drafted beyond the proposals stays for the next ones.
    """

    def __init__(self, drafter: TextDrafter, rule: ProposalRule) -> None:
        super().__init__()
        self._own, self._target, self._groups = drafter.own, drafter.target, drafter.groups
        self._look_back = drafter.look_back
        self._rule, self._text_rule = rule, TextRule(rule, drafter.groups, drafter.own)
        self._inner: DraftState = drafter.inner.open(self._text_rule)
        self._inner.extend(self._own.opening)
        self._ends: list[int] = []  # bytes of text up to the end of each target token
        self._text = bytearray()  # of the target tokens
        self._context = Reencoding(self._own, self._look_back)  # the drafter's tokens of the text
        self._agreed = 0  # bytes for which `_context` was made and that did not change since
        self._drafted: list[tuple[int, DraftToken]] = []  # after the context that is read: end of text, and choice
        self._read = 0  # tokens of the context that `_drafted` begins after
        self._ahead = bytearray()  # text up to the end of the drafted tokens, from `_ahead_from` on
        self._ahead_from = 0
        self._stale = True  # tokens were appended or cut that are not our own proposals

    def extend(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            self._append(int(token))
        self._stale = self._stale or bool(len(tokens))

    def truncate(self, length: int) -> None:
        if length < self.length:
            self._stale = True
        super().truncate(length)
        del self._ends[length:]
        del self._text[self._ends[-1] if self._ends else 0 :]
        self._agreed = min(self._agreed, len(self._text))

    def follow(self, rule: ProposalRule) -> None:
        """Propose by `rule` from now on, without what was drafted by another."""
        self._rule, self._text_rule = rule, TextRule(rule, self._groups, self._own)
        self._inner.follow(self._text_rule)
        self._forget_drafts()

    def close(self) -> None:
        super().close()
        self._inner.close()

    def propose(self, n: int) -> tuple[DraftToken, ...]:
        """Append and return up to n tokens; none after a special token, or where the drafter proposes one."""
        proposed: list[DraftToken] = []
        if len(self._drafted) > 2 * MAX_AHEAD:
            self._stale = True  # much of it is known by now
        if n <= 0 or not self.tokens or not self._target.piece(self.tokens[-1]) or not self._synchronise():
            return ()
        allowed = self._rule.sampling.allowed_tokens
        while len(proposed) < n:
            ahead, settled = self._tokens_ahead()
            if not settled and self._draft(ahead):
                continue
            if not ahead:
                break
            token, end = ahead[0]
            if (allowed and token not in allowed) or self._rule.forbids(self.length, token):
                break
            proposed.append(self._choice(token, end))
            self._append(token)
        return tuple(proposed)

    def score(self, tokens: Sequence[int]) -> np.ndarray:
        """Append `tokens` [m] and return log q of their text: each drafter token counts where its text begins.

        The sum is log q of the text of all of them; a token in which no drafter token begins adds nothing to it.
        """
        check_scorable(self.length)
        first, start = self.length, len(self._text)
        self.extend(tokens)
        log_q = np.zeros(len(tokens), dtype=np.float32)
        if not self._renew_context():
            return np.full(len(tokens), -np.log(self._target.size), dtype=np.float32)
        context, known = self._context, 0
        while known < len(context.ids) and context.ends[known] <= start:
            known += 1
        known = max(known, 0 if self._own.opening else 1)
        self._inner.truncate(min(self._inner.length, len(self._own.opening) + min(known, self._read)))
        self._inner.extend(context.ids[self._inner.length - len(self._own.opening) : known])
        at = 0
        for token, scored in enumerate(self._inner.score(context.ids[known:]).tolist(), known):
            begins = context.ends[token - 1] if token else 0
            while at < len(tokens) - 1 and self._ends[first + at] <= begins:
                at += 1
            log_q[at] += scored
        self._read = len(context.ids)
        self._forget_drafts()
        return log_q

    def _append(self, token: int) -> None:
        self.tokens.append(token)
        piece = self._target.piece(token)
        self._text += piece or (BREAK if self._text else b"")
        self._ends.append(len(self._text))

    def _forget_drafts(self) -> None:
        self._drafted.clear()
        self._ahead.clear()
        self._stale = True

    def _renew_context(self) -> bool:
        """Make the drafter's tokens those of the known text; return whether there are any."""
        whole = whole_characters(self._text)
        same = self._context.renew(self._text[:whole], min(self._agreed, whole))
        if same is None:
            return False
        self._agreed = whole
        if same < self._read:
            self._read = same
            self._drafted.clear()
        return bool(self._context.ids)

    def _synchronise(self) -> bool:
        """Let the drafter stand behind the known text, or ahead of it with what it drafted and is confirmed."""
        if not self._stale:
            return True
        if not self._renew_context():
            return False
        context, opening = self._context, len(self._own.opening)
        wanted = len(context.ids) - 1
        if wanted + opening == 0:
            return False
        if self._confirmed(wanted):
            self._stale = False
            return True
        self._inner.truncate(opening + min(self._read, wanted))
        self._inner.extend(context.ids[min(self._read, wanted) : wanted])
        self._read = wanted
        self._drafted.clear()
        self._ahead.clear()
        self._ahead_from = context.ends[wanted - 1] if wanted else context.base
        self._stale = False
        return True

    def _confirmed(self, wanted: int) -> bool:
        """Keep the drafted tokens if the text that became known is theirs; return whether it is.

        Never at a temperature above 0: they were drawn with the noise of other positions than they would be now.
        """
        context, count = self._context, wanted - self._read
        if not self._drafted or count < 0 or self._rule.sampling.temperature:
            return False
        drafted = [draft.id for _, draft in self._drafted[:count]]
        if drafted != context.ids[self._read : wanted] or not self._ahead.startswith(self._text[self._ahead_from :]):
            return False
        if count:
            passed = context.ends[wanted - 1]
            del self._ahead[: passed - self._ahead_from]
            del self._drafted[:count]
            self._ahead_from, self._read = passed, wanted
        return True

    def _draft(self, ahead: list[tuple[int, int]]) -> bool:
        """Let the drafter append one token; return whether it did."""
        if len(self._drafted) - self._first_ahead() >= MAX_AHEAD:
            return False
        drafted_to = self._ahead_from + len(self._ahead)
        pending = bytes(self._text[drafted_to:])
        position, begins = self.length, len(self._text)
        if len(ahead) > 1:
            position, begins = position + len(ahead) - 1, ahead[-2][1]
        self._text_rule.aim(position, self._held(begins, drafted_to), pending)
        chosen = self._inner.propose(1)
        if not (chosen and self._own.piece(chosen[0].id).startswith(pending)):
            chosen = self._known_token(pending, len(chosen)) or chosen
        if not chosen:
            return False
        self._ahead += self._own.piece(chosen[0].id)
        self._drafted.append((self._ahead_from + len(self._ahead), chosen[0]))
        return True

    def _known_token(self, pending: bytes, proposed: int) -> tuple[DraftToken, ...]:
        """Let the drafter read the token that known text begins with, in the place of what it `proposed`; none: ().

        That may be none of its candidates, or be none but in parts of which nobody writes it.
        """
        known = self._context.ids[self._read :]
        if self._drafted:
            encoded = self._own.encode(pending[: whole_characters(pending)])
            known = encoded.ids if encoded is not None else []
        token = known[0] if pending and known else -1
        if not self._own.piece(token) or not pending.startswith(self._own.piece(token)):
            return ()
        self._inner.truncate(self._inner.length - proposed)
        self._inner.extend((token,))
        return (DraftToken(token, 1.0, 1.0),)

    def _first_ahead(self) -> int:
        """Return the number of drafted tokens whose text is known."""
        known = len(self._text)
        return next((index for index, (end, _) in enumerate(self._drafted) if end > known), len(self._drafted))

    def _held(self, begins: int, drafted_to: int) -> tuple[int, ...] | None:
        """Return the drafter's tokens of the drafted text from byte `begins` on; None: there are no such."""
        encoded = self._own.encode(bytes(self._ahead[begins - self._ahead_from :])) if drafted_to > begins else None
        return tuple(encoded.ids) if encoded is not None else None if drafted_to > begins else ()

    def _tokens_ahead(self) -> tuple[list[tuple[int, int]], int]:
        """Return the target's tokens of the drafted text, where each ends, and how many no further text will change."""
        known = len(self._text)
        whole = whole_characters(self._ahead)
        drafted = self._ahead[:whole]
        if self._ahead_from + whole <= known:
            return [], 0
        first = self.length
        while first and first > self.length - self._look_back and self._target.piece(self.tokens[first - 1]):
            first -= 1
        start = self._ends[first - 1] if first else 0
        while start < known and not begins_character(self._text, start):
            first += 1
            start = self._ends[first - 1]
        encoded = self._target.encode(bytes(self._text[start:] + drafted[known - self._ahead_from :]))
        if encoded is None:
            return [], 0
        tokens = [(token, start + end) for token, end in zip(encoded.ids, encoded.ends, strict=True)]
        after = next(index for index, (_, end) in enumerate(tokens) if end > known)
        begins = tokens[after - 1][1] if after else start
        if begins == known:
            ahead = tokens[after:]
            return ahead, max(encoded.settled - after, len(ahead) - MAX_HELD)
        # The target has divided its text otherwise: pieces fill what is left of the token across the seam.
        rest = drafted[known - self._ahead_from : tokens[after][1] - self._ahead_from]
        pieces, more = self._pieces(rest, known), tokens[after + 1 :]
        return [*pieces, *more], len(pieces) if encoded.settled > after else 0

    def _pieces(self, text: bytes | bytearray, at: int) -> list[tuple[int, int]]:
        """Return the target's longest tokens that make up `text`, and where each ends, the first after byte `at`."""
        found: list[tuple[int, int]] = []
        while text and (token := self._target.first_piece(bytes(text))) >= 0:
            size = len(self._target.piece(token))
            at += size
            found.append((token, at))
            text = text[size:]
        return found

    def _choice(self, token: int, end: int) -> DraftToken:
        """Return a proposal with the chances of the drafter tokens that begin in it."""
        begins, confidence, perturbed = len(self._text), 1.0, 1.0
        start = self._ahead_from
        for stop, draft in self._drafted:
            if (start >= begins or stop > begins >= start) and start < end:
                confidence *= draft.confidence
                perturbed *= draft.perturbed_probability
            start = stop
        return DraftToken(token, confidence, perturbed)
