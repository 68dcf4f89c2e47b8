"""Which texts a selector meets one after the other: those of a domain, of all, or such whose domain changes midway."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from outrider.bench.replay.selection import Text, joined

MIX, MIDWAY = "mix", "midway"


@dataclass(frozen=True, slots=True, eq=False)
class Passage:
    """A text on its way.

    Attributes:
        text: with every drafter's track.
        prompt: domain and id of the prompt at its beginning.
        domains: of its stretches.
    """

    text: Text
    prompt: tuple[str, str]
    domains: tuple[str, ...]


Variants = Mapping[tuple[str, str], Sequence[Text]]  # of each prompt, by domain and id: its texts by seed


def variants_of(texts: Sequence[Text]) -> Variants:
    """Prompts in their order."""
    found: dict[tuple[str, str], list[Text]] = {}
    for text in texts:
        trace = text.tracks[0].trace
        found.setdefault((trace.domain, trace.id), []).append(text)
    return found


def row_names(variants: Variants) -> tuple[str, ...]:
    """The domains; where there are several, their mix and `midway` too."""
    domains = tuple(dict.fromkeys(domain for domain, _ in variants))
    return (*domains, MIX, MIDWAY) if len(domains) > 1 else domains


def passages(row: str, variants: Variants, seed: int) -> list[Passage]:
    """What a selector meets in one run, in an order by chance: a text of each prompt of the row, by turns of the seed.

    `midway` joins each prompt's text with one of another domain, which changes with the seed.
    """
    rng = np.random.default_rng(seed)
    chosen = [
        Passage(texts[seed % len(texts)], prompt, (prompt[0],))
        for prompt, texts in variants.items()
        if row in (MIX, MIDWAY, prompt[0])
    ]
    shuffled = [chosen[i] for i in rng.permutation(len(chosen))]
    return _midway(shuffled, row_names(variants)[:-2], seed) if row == MIDWAY else shuffled


def _midway(passages: Sequence[Passage], domains: Sequence[str], seed: int) -> list[Passage]:
    """Each begins one text, and goes on with one of the domain that is so many places further."""
    further = 1 + seed % (len(domains) - 1)
    after = {domain: domains[(i + further) % len(domains)] for i, domain in enumerate(domains)}
    own = {domain: [passage for passage in passages if passage.domains == (domain,)] for domain in domains}
    met = dict.fromkeys(domains, 0)
    found = []
    for passage in passages:
        (domain,) = passage.domains
        others = own[after[domain]]
        other = others[met[domain] % len(others)]
        met[domain] += 1
        found.append(Passage(joined((passage.text, other.text)), passage.prompt, (domain, after[domain])))
    return found
