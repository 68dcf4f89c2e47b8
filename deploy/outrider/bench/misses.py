"""Misses of drafters by their causes, at every token of the same texts: `python -m outrider.bench.misses PACKAGE ...`.

A drafter that drafts by text can miss though its text is the target's, where the target has divided that otherwise into
tokens. A cache of such divisions (OmniDraft's) could bring no more than these misses.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import closing
from enum import StrEnum
from itertools import pairwise

import torch
from tokenizers import Tokenizer

from outrider.bench.drafters import find_packages, load_drafters
from outrider.cloud.config import VerifierConfig
from outrider.cloud.target import load_target
from outrider.cloud.text_writer import TextRequest, TextWriter, WrittenText
from outrider.deploy.prompts import held_out
from outrider.drafters.by_text import Vocabulary
from outrider.drafters.proposals import ProposalRule
from outrider.drafters.protocol import Drafter
from outrider.proto.types import Sampling, token_ids

AHEAD = 8  # tokens that are drafted from each position on, to see how the text of the first goes on


class Cause(StrEnum):
    """Standing of a draft beside the target's token, by its text."""

    HIT = "hit"
    TEXT = "another text"
    DIVISION = "the same text, divided otherwise"
    SHORT = "no draft, or one that ends within the token"
    SPECIAL = "a special token"


def cause_of(drafts: Sequence[int], text: Sequence[int], piece: Callable[[int], bytes]) -> Cause:
    """Return why the first of `drafts` [m] is not the first token of `text` [n], given the bytes of each token."""
    if drafts[:1] == text[:1]:
        return Cause.HIT
    if not piece(text[0]):
        return Cause.SPECIAL
    if not drafts:
        return Cause.SHORT
    drafted, right = (b"".join(map(piece, tokens)) for tokens in (drafts, text))
    size = max(len(piece(drafts[0])), len(piece(text[0])))
    known = min(size, len(drafted), len(right))
    if drafted[:known] != right[:known]:
        return Cause.TEXT
    return Cause.DIVISION if known == size else Cause.SHORT


def causes(drafter: Drafter, text: WrittenText, piece: Callable[[int], bytes]) -> Counter[Cause]:
    """Count the causes at every token of a text, each drafted after the text before it."""
    found: Counter[Cause] = Counter()
    rule = ProposalRule(text.request.sampling, prompt_length=text.prompt_length)
    with closing(drafter.open(rule)) as state:
        for known, now in pairwise((0, *range(text.prompt_length, len(text.transcript)))):
            state.truncate(known)
            state.extend(text.transcript[known:now])
            drafts = token_ids(state.propose(AHEAD))
            found[cause_of(drafts, text.transcript[now : now + AHEAD], piece)] += 1
    return found


def main() -> None:
    """Write the texts, and print a table for each temperature."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("package", nargs="+", help="embedded drafters, package folders, or NAME=FOLDER")
    parser.add_argument("--per-domain", type=int, default=3, help="built-in prompts of each domain (3)")
    parser.add_argument("--max-tokens", type=int, default=96, help="length of a text (96)")
    parser.add_argument("--seed", type=int, default=0, help="seed of the shared noise (0)")
    given = parser.parse_args()
    torch.set_num_threads(1)
    target = load_target(VerifierConfig().target, dtype=VerifierConfig().dtype)
    drafters = load_drafters(find_packages(given.package, "package"), target.tokenizer_json, "package")
    vocabulary, tokenizer = Vocabulary(target.tokenizer_json), Tokenizer.from_str(target.tokenizer_json)
    for temperature in (0.0, 1.0):
        sampling = Sampling(temperature=temperature, seed=given.seed, max_tokens=given.max_tokens)
        requests = [
            TextRequest(tuple(tokenizer.encode(each.text).ids), sampling) for each in held_out(given.per_domain)
        ]
        texts = TextWriter(target).write(requests)
        print(f"T = {temperature:g}: {len(texts)} texts of {sum(map(len, texts))} tokens")
        for label, drafter in drafters.items():
            found = sum((causes(drafter, text, vocabulary.piece) for text in texts), Counter[Cause]())
            shares = (f"{cause} {found[cause] / found.total():.1%}" for cause in Cause)
            print(f"  {label}: {'; '.join(shares)}", flush=True)


if __name__ == "__main__":
    main()
