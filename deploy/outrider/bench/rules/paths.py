"""Distributions of target and drafter along texts, and chains that the drafter draws by itself."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from outrider.cloud.text_writer import WrittenText
from outrider.proto import noise


@dataclass(frozen=True, slots=True, eq=False)
class Distributions:
    """Distributions for each of the n tokens of a text, at temperature 1.

    Attributes:
        by_target, by_drafter: [n, vocab] float64.
        by_layers: [layers] of [n, vocab], with the target's final norm and head after each of its layers.
    """

    by_target: np.ndarray
    by_drafter: np.ndarray
    by_layers: Sequence[np.ndarray]


@dataclass(frozen=True, slots=True, eq=False)
class Models:
    """Target and drafter as models of transformers, in float32 on the CPU."""

    target: Any
    drafter: Any

    def distributions(self, text: WrittenText) -> Distributions:
        """Return those of the tokens of a text, given all before each."""
        tokens = torch.tensor([text.transcript[:-1]])
        places = slice(text.prompt_length - 1, None)
        looked = self.target(tokens, output_hidden_states=True)
        heads = [
            probabilities(self.target.lm_head(self.target.model.norm(states[0, places])))
            for states in looked.hidden_states[1:-1]  # the last has passed the norm
        ]
        by_target = probabilities(looked.logits[0, places])
        by_drafter = probabilities(self.drafter(tokens).logits[0, places])
        return Distributions(by_target, by_drafter, [*heads, by_target])


def probabilities(logits: torch.Tensor) -> np.ndarray:
    """Return the distributions of logits [n, vocab] in float64."""
    rows: np.ndarray = torch.softmax(logits.double(), dim=-1).numpy()
    return rows


def hits_of(text: WrittenText, by_drafter: np.ndarray) -> list[bool]:
    """Return [n] whether the drafter's argmax of log q + G is the text's token, with the noise of the text."""
    sampling, tokens = text.request.sampling, np.arange(by_drafter.shape[1])
    hits = []
    for i, (token, q) in enumerate(zip(text.tokens, by_drafter, strict=True)):
        race = q / noise.exponentials_for_proposals(sampling.seed, text.prompt_length + i, tokens)
        hits.append(int(race.argmax()) == token)
    return hits


def runs_of(hits: Sequence[bool], length: int) -> list[int]:
    """Return the drafts that are accepted of chains of `length`, from each position that has room for one."""
    places = range(len(hits) - length + 1)
    return [sum(itertools.takewhile(bool, hits[first : first + length])) for first in places]


def judged_paths(
    models: Models, text: WrittenText, starts: Sequence[int], length: int, rng: np.random.Generator
) -> np.ndarray:
    """Draw a chain of `length` tokens from the drafter after each of `starts`, and return p / q [starts, length].

    The chains are the drafter's own, drawn without shared noise, as rules that judge by p / q have them.
    """
    ends = [text.prompt_length + start for start in starts]
    rows = torch.zeros(len(starts), max(ends) + length, dtype=torch.long)  # what follows a row's end is never seen
    for row, end in zip(rows, ends, strict=True):
        row[:end] = torch.tensor(text.transcript[:end])
    each = torch.arange(len(starts))
    drawn = np.empty((len(starts), length))
    for step in range(length):
        last = torch.tensor(ends) + step
        q = probabilities(models.drafter(rows[:, : int(last.max())]).logits[each, last - 1])
        chosen = [int(rng.choice(q.shape[1], p=row / row.sum())) for row in q]
        rows[each, last] = torch.tensor(chosen)
        drawn[:, step] = q[np.arange(len(chosen)), chosen]
    logits = models.target(rows).logits
    for step in range(length):
        last = torch.tensor(ends) + step
        p = probabilities(logits[each, last - 1])
        drawn[:, step] = p[np.arange(len(starts)), rows[each, last].numpy()] / drawn[:, step]
    return drawn
