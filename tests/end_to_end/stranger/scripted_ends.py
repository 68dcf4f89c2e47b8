"""Drafters at both ends that know the plain texts, and are right as often as they are told to be."""

from __future__ import annotations

import random
import time
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from plain_texts import PlainText

from outrider.drafters import ProposalRule
from outrider.drafters.protocol import TokenPrefix
from outrider.proto.types import DraftToken


@dataclass
class Known:
    """Knowledge of the drafters of one world.

    Attributes:
        texts: plain text and length of the prompt, by the seed of the text.
        vocab_size: tokens of the target.
    """

    vocab_size: int
    texts: dict[int, tuple[PlainText, int]] = field(default_factory=dict)


@dataclass
class ScriptedDrafter:
    """A drafter that is right with the chance `hits`, and else names what came next in the target's order.

    Attributes:
        name: its name, from which its mistakes are drawn.
        token_s: time that a token takes, in seconds.
        stops: chance, after each draft, that it has no more to say.
    """

    known: Known
    name: str
    hits: float
    token_s: float = 0.0
    stops: float = 0.03
    version: str = "1"
    steering: Any = None

    def open(self, rule: ProposalRule) -> _State:
        return _State(self, rule)


class _State(TokenPrefix):
    def __init__(self, drafter: ScriptedDrafter, rule: ProposalRule) -> None:
        super().__init__()
        self._drafter, self._rule = drafter, rule

    def follow(self, rule: ProposalRule) -> None:
        self._rule = rule

    def propose(self, n: int) -> tuple[DraftToken, ...]:
        drafter, drafts = self._drafter, list[DraftToken]()
        if drafter.token_s:
            time.sleep(drafter.token_s * n)
        for _ in range(n):
            rng = random.Random(f"{drafter.name} {self._rule.sampling.seed} {self.length} {len(drafts)}")
            if rng.random() < drafter.stops:
                break
            drafts.append(self._draft(random.Random(f"{drafter.name} {self._rule.sampling.seed} {self.length}")))
            self.tokens.append(drafts[-1].id)
        return tuple(drafts)

    def _draft(self, rng: random.Random) -> DraftToken:
        drafter, any_token = self._drafter, rng.randrange(self._drafter.known.vocab_size)
        text, start = drafter.known.texts.get(self._rule.sampling.seed, (PlainText(), 0))
        place = self.length - start
        likely = [any_token]
        if 0 <= place < len(text.choices):
            choice = text.choices[place]
            likely = [choice.token, *choice.rivals[:3]] + [any_token] * (rng.random() < 0.2)
        token = likely[0] if rng.random() < drafter.hits or len(likely) == 1 else rng.choice(likely[1:])
        others = [each for each in likely if each != token]
        rng.shuffle(others)
        q, chance = rng.choice((0.05, 0.5, 0.9)), rng.choice((0.1, 0.5, 0.9))
        return DraftToken(token, q, chance, tuple(others[:2]))

    def score(self, tokens: Any) -> np.ndarray:
        self.extend(tokens)
        return np.full(len(tokens), -3.0, np.float32)
