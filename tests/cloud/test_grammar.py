"""Grammar-constrained decoding is exact: the text follows the target's law, renormalised over what the grammar allows.

A tiny vocabulary (`a`, `b`, `ab`, EOS) and a language of six words, whose law needs no grammar but their list. Three
checkers, each of which must also reject wrong implementations (the negative controls):

1. `law_of_texts`: the law of whole texts as fractions, over all drafts and all draws.
2. `follows_the_noise`: for every seed and any drafts, the text that a plain computation of the rule gives.
3. `masks_are_those_of`: what is allowed after any drafts is what a fresh matcher allows, with a real tokenizer.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import resource
import signal
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from fractions import Fraction
from functools import cache, partial
from typing import Any

import numpy as np
import pytest
import torch
from documented_law import documented_law, normalised
from tiny_grammars import EOS, PIECES, PROMPT, VOCAB, matcher_of, tiny_tokenizer

from outrider.cloud.grammar.grammar import Allowed, GrammarMatcher, Grammars
from outrider.cloud.grammar.grammar_compiler import GrammarTrial, TooCostly
from outrider.cloud.target.distribution import processed_logits
from outrider.cloud.target.sampler import Sampler
from outrider.cloud.target.verification import VerificationInput
from outrider.proto import codec
from outrider.proto.errors import FailedPrecondition, InvalidArgument, Unavailable
from outrider.proto.noise import gumbel
from outrider.proto.session.acceptance import accept_drafts
from outrider.proto.session.verifier import Verified, VerifierRules, VerifierSession
from outrider.proto.types import CommittedToken, Draft, DraftToken, Grammar, GrammarKind, Open, Sampling, token_ids
from outrider.proto.v1 import decoding_pb2 as pb

CPU = torch.device("cpu")
HASH = "0" * 64
WORDS = ("a", "b", "ab", "ba", "bab", "aab")
GRAMMAR = Grammar(GrammarKind.REGEX, "|".join(WORDS))
MOST = 4  # tokens that a word and its EOS take

SAMPLINGS = {
    "greedy": Sampling(),
    "greedy, penalised": Sampling(repetition_penalty=1.7, presence_penalty=0.5, frequency_penalty=0.9),
    "temperature 1": Sampling(temperature=1.0),
    "top-k": Sampling(temperature=0.9, top_k=2),
    "top-p": Sampling(temperature=1.0, top_p=0.7),
    "everything": Sampling(
        temperature=1.4, top_k=3, top_p=0.9, min_p=0.05, presence_penalty=-0.4, logit_bias=((EOS, 0.7),)
    ),
}


tiny_matcher = partial(matcher_of, GRAMMAR)


# === the law, computed independently ============================================================================


@cache
def allowed_after(text: tuple[int, ...]) -> frozenset[int]:
    """Return the tokens that may follow, from the list of words alone."""
    if EOS in text:
        return frozenset()
    written = "".join(PIECES[token] for token in text)
    on = {i for i, piece in enumerate(PIECES) if any(word.startswith(written + piece) for word in WORDS)}
    return frozenset(on | ({EOS} if written in WORDS else set()))


@cache
def logits_after(prefix: tuple[int, ...]) -> tuple[float, ...]:
    """[VOCAB] of a target whose every context is different, and which likes best what the grammar forbids."""
    rng = random.Random(f"target {prefix}")
    forbidden = set(range(VOCAB)) - allowed_after(prefix[len(PROMPT) :])
    return tuple(round((rng.gauss(0, 1.5) + 2.5 * (token in forbidden)) * 64) / 64 for token in range(VOCAB))


def law_after(text: tuple[int, ...], sampling: Sampling) -> dict[int, float]:
    """{token: probability}: the grammar first, then all the rest."""
    allowed = {t: s for t, s in enumerate(logits_after(PROMPT + text)) if t in allowed_after(text)}
    return documented_law(allowed, PROMPT, text, sampling)


# === checker 1: fractions over all drafts and draws =============================================================


@cache
def weights_after(text: tuple[int, ...]) -> tuple[Fraction, ...]:
    """[VOCAB] of a target, before the grammar."""
    rng = random.Random(f"weights {text}")
    return tuple(Fraction(rng.randint(1, 7)) for _ in range(VOCAB))


def product_law() -> dict[tuple[int, ...], Fraction]:
    """{text: probability} of drawing token after token from the target renormalised over `allowed_after`."""
    law: dict[tuple[int, ...], Fraction] = {}
    todo = [((), Fraction(1))]
    while todo:
        text, chance = todo.pop()
        if text and text[-1] == EOS:
            law[text] = chance
            continue
        for t, p in normalised({t: weights_after(text)[t] for t in allowed_after(text)}).items():
            todo.append(((*text, t), chance * p))
    return law


def law_of_texts(
    strategy: Callable[[tuple[int, ...], int], tuple[int, ...]], kind: type[GrammarMatcher] = GrammarMatcher
) -> Any:
    """The law of texts where each row of a step is drawn from the target masked by what a matcher says of it."""
    sampling = Sampling(temperature=1, max_tokens=MOST)
    matchers = cache(lambda text: tiny_matcher(kind, text))
    law: Counter[tuple[int, ...]] = Counter()
    todo = [((), Fraction(1), 0)]
    while todo:
        text, chance, step = todo.pop()
        drafts = strategy(text, step)[: MOST - len(text) - 1]
        for decoy in ((0,), (1, 0), (2,)):  # whatever is asked before must not matter
            matchers(text).ask(decoy, lambda: None).result()
        answer = matchers(text).ask(drafts, lambda: None).result()
        rows = []
        for j in range(len(answer.block) + 1):
            weights = weights_after(text + answer.block[:j])
            rows.append(normalised({t: weights[t] for t in range(VOCAB) if answer.tokens[j, t]}))
        for draws in itertools.product(*rows):
            p = math.prod((row[t] for row, t in zip(rows, draws, strict=True)), start=chance)
            by_target = tuple(map(CommittedToken, draws))
            committed, _, finish = accept_drafts(
                tuple(map(DraftToken, answer.block)),
                by_target,
                generated=len(text),
                sampling=sampling,
                eos_tokens=frozenset({EOS}),
            )
            tokens = token_ids(committed)
            if finish is None:
                todo.append((text + tokens, p, step + 1))
            else:
                law[text + tokens] += p
    return dict(law)


BLOCKS = [block for n in range(4) for block in itertools.product(range(VOCAB), repeat=n)]


def test_texts_follow_the_targets_law_renormalised_over_the_grammar_for_every_block():
    exact = product_law()
    assert {"".join(PIECES[t] for t in text[:-1]) for text in exact} == set(WORDS), "and every text is a word"
    for block in BLOCKS:
        assert law_of_texts(lambda text, step, block=block: block if step == 0 else block[::-1]) == exact, block


# === checker 2: the rule with its noise, over every sequence of drafts ==========================================


def plain_text(seed: int, sampling: Sampling) -> tuple[int, ...]:
    """The text by the rule alone: argmax of log p + G of the masked law at every position."""
    text: tuple[int, ...] = ()
    while not text or (text[-1] != EOS and len(text) < MOST):
        law = law_after(text, sampling)
        tokens = sorted(law)
        noise = gumbel(seed, len(PROMPT) + len(text), np.array(tokens))
        best = max(range(len(tokens)), key=lambda i: math.log(law[tokens[i]]) + noise[i])
        text = (*text, tokens[best])
    return text


def decode(seed: int, sampling: Sampling, drafts: Any, matcher: GrammarMatcher, sampler: Sampler) -> tuple[int, ...]:
    """A text by the session machine, the matcher and the sampler, in the engine's order."""
    rules = VerifierRules("v", "m", HASH, VOCAB, 64, frozenset({EOS}), max_drafts=8)
    sampling = replace(sampling, seed=seed, max_tokens=MOST, grammar=GRAMMAR)
    session = VerifierSession(Open("m", HASH, PROMPT, sampling, "s"), rules, 0.0)
    for step in itertools.count():
        proposed = drafts(step, session.transcript)
        if proposed:
            session.on_draft(Draft(step, len(session.transcript), tuple(map(DraftToken, proposed))), float(step))
        block = session.block()
        answer = matcher.ask(token_ids(block), lambda: None).result()
        block = block[: len(answer.block)]
        verified = VerificationInput(
            session.sampling, session.transcript, len(PROMPT), block, answer.tokens, eos_tokens=session.eos_tokens
        )
        rows = [logits_after((*session.transcript, *answer.block[:j])) for j in range(verified.rows)]
        (sampled,) = sampler.sample(torch.tensor(rows, dtype=torch.float32), [verified])
        commit = session.on_verified(Verified(block, sampled.tokens), float(step))
        if commit.finish is not None:
            return tuple(session.transcript[len(PROMPT) :])
        matcher.advance(token_ids(commit.tokens))
    raise AssertionError


def strategies(count: int) -> list[Any]:
    """Some sequences of blocks, one a step: those that begin with each block of up to two drafts among them."""
    rng = random.Random(7)
    firsts = [block for block in BLOCKS if len(block) < 3] + [rng.choice(BLOCKS) for _ in range(count)]
    sequences = [(first, *(rng.choice(BLOCKS[:21]) for _ in range(3))) for first in firsts]
    return [lambda step, transcript, blocks=blocks: blocks[step] if step < 4 else () for blocks in sequences]


def own_law(step: int, transcript: list[int]) -> tuple[int, ...]:
    """Drafts the likeliest tokens, the grammar forgotten: what a drafter at an edge does."""
    prefix = tuple(transcript)
    for _ in range(3):
        row = logits_after(prefix)
        prefix = (*prefix, row.index(max(row)))
    return prefix[len(transcript) :]


def right_but_for(place: int, seed: int, sampling: Sampling) -> Any:
    """Drafts the true text but for one token, which is replaced by another that is allowed, where there is one."""
    wanted = list(plain_text(seed, sampling))
    if place < len(wanted):
        others = allowed_after(tuple(wanted[:place])) - {wanted[place], EOS}
        wanted[place] = min(others, default=wanted[place])
    return lambda step, transcript: tuple(wanted[len(transcript) - len(PROMPT) : MOST - 1])


def follows_the_noise(
    sampling: Sampling, kind: type[GrammarMatcher] = GrammarMatcher, sampler: Sampler | None = None, seeds: int = 3
) -> bool:
    """Whether every seed has the plain computation's text, whatever is drafted; False also where decoding breaks."""
    sampler = sampler or Sampler(CPU)
    for seed in range(seeds):
        wanted = plain_text(seed, sampling)
        nearly = [right_but_for(place, seed, sampling) for place in range(MOST)]
        for drafts in [own_law, *nearly, *strategies(6)]:
            try:
                got = decode(seed, sampling, drafts, tiny_matcher(kind), sampler)
            except InvalidArgument:
                return False
            if got != wanted:
                return False
    return True


@pytest.mark.parametrize("name", SAMPLINGS)
def test_the_text_is_that_of_the_masked_law_and_the_noise_whatever_is_drafted(name):
    assert follows_the_noise(SAMPLINGS[name])


def test_min_tokens_hold_a_word_on_as_far_as_the_grammar_goes_and_no_further():
    complete = {word for word in WORDS if not any(other != word and other.startswith(word) for other in WORDS)}
    for temperature in (0.0, 1.5):
        sampling = Sampling(temperature, min_tokens=MOST, logit_bias=((EOS, 4.0),))
        texts = [decode(seed, sampling, own_law, tiny_matcher(), Sampler(CPU)) for seed in range(12)]
        assert texts == [decode(seed, sampling, lambda *_: (), tiny_matcher(), Sampler(CPU)) for seed in range(12)]
        assert all(text[-1] == EOS or len(text) == MOST for text in texts)
        assert {"".join(PIECES[t] for t in text if t != EOS) for text in texts} <= complete
    early = {decode(seed, Sampling(1.5), own_law, tiny_matcher(), Sampler(CPU)) for seed in range(12)}
    assert not {"".join(PIECES[t] for t in text if t != EOS) for text in early} <= complete


# === negative controls ==========================================================================================


class MaskOfTheCommittedText(GrammarMatcher):
    """Wrong: every row has the mask of the first, as if no draft came before it."""

    def _allowed(self, block):
        right = super()._allowed(block)
        return Allowed(right.block, np.repeat(right.tokens[:1], len(right.tokens), axis=0))


class LetsForbiddenDraftsIn(GrammarMatcher):
    """Wrong: a draft that the grammar forbids is verified like any other, with a mask that has room for it."""

    def _allowed(self, block):
        right = super()._allowed(block)
        at = len(right.block)
        if at == len(block) or block[at] == EOS:
            return right
        rows = np.concatenate([right.tokens, np.ones((1, VOCAB), bool)])
        rows[at, block[at]] = True
        return Allowed(block[: at + 1], rows)


class ForgetsToGoBack(GrammarMatcher):
    """Wrong: after a step the state is that of the drafts, whether they were accepted or not."""

    def _back_to_the_text(self):
        self._drafts = 0


class GoesBackTooFar(GrammarMatcher):
    """Wrong by one: the last committed token is undone too."""

    def _back_to_the_text(self):
        if self._drafts:
            self._matcher.rollback(min(self._drafts + 1, self._consumed + self._drafts))
        self._drafts = 0


class MaskAfterTheCuts(Sampler):
    """Wrong: top-k, top-p and min-p choose among all tokens, and the mask comes after them."""

    def sample(self, logits, sessions):
        results = []
        for session in sessions:
            scores = processed_logits(logits, replace(session, allowed=None))
            allowed = torch.from_numpy(session.allowed)
            scores = torch.where(allowed, scores, -math.inf)
            lost = torch.isinf(scores).all(dim=-1, keepdim=True)
            scores = torch.where(lost & allowed, 0.0, scores)
            results.append(self._by_scores(scores, session))
        return results

    def _by_scores(self, scores, session):
        noise = [
            gumbel(session.sampling.seed, len(session.transcript) + j, np.arange(VOCAB)) for j in range(session.rows)
        ]
        tokens = (scores + torch.from_numpy(np.stack(noise))).argmax(dim=-1).tolist()
        right = Sampler(CPU).sample(torch.zeros(session.rows, VOCAB), [replace(session, allowed=None)])[0]
        return replace(right, tokens=tuple(map(CommittedToken, tokens)))


@pytest.mark.parametrize("wrong", [MaskOfTheCommittedText, LetsForbiddenDraftsIn, ForgetsToGoBack, GoesBackTooFar])
@pytest.mark.parametrize("name", ["greedy", "temperature 1"])
def test_a_wrong_matcher_does_not_give_the_same_text(wrong, name):
    assert not follows_the_noise(SAMPLINGS[name], wrong, seeds=20)


@pytest.mark.parametrize("wrong", [MaskOfTheCommittedText, LetsForbiddenDraftsIn, ForgetsToGoBack])
def test_a_wrong_matcher_does_not_have_the_law(wrong):
    exact = product_law()
    blocks = [(0, 0), (0, 1, 0), (1, 0), (2, 0)]

    def differs(block):
        try:
            return law_of_texts(lambda text, step: block, wrong) != exact
        except (InvalidArgument, AssertionError, ValueError):
            return True

    assert any(differs(block) for block in blocks)


@pytest.mark.parametrize("name", ["top-k", "top-p"])
def test_a_mask_after_the_cuts_is_another_law(name):
    assert not follows_the_noise(SAMPLINGS[name], sampler=MaskAfterTheCuts(CPU), seeds=20)


def test_the_control_of_the_controls_is_right_where_nothing_is_cut():
    assert follows_the_noise(SAMPLINGS["temperature 1"], sampler=MaskAfterTheCuts(CPU))


# === checker 3: a real tokenizer, real grammars =================================================================

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "age": {"type": "integer", "minimum": 0}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
REAL = {
    "object": Grammar(GrammarKind.JSON_OBJECT),
    "schema": Grammar(GrammarKind.JSON_SCHEMA, json.dumps(PERSON)),
    "regex": Grammar(GrammarKind.REGEX, r"(yes|no), ([0-9]{1,3}|é{2,5}ß?)"),
    "lark": Grammar(GrammarKind.LARK, 'start: expr\nexpr: NUMBER | "(" expr ("+" | "*") expr ")"\nNUMBER: /[0-9]+/'),
}
REAL_EOS = frozenset({1, 3})


@pytest.fixture(scope="module")
def real(tokenizer_file):
    grammars = Grammars(tokenizer_file.read_text(encoding="utf-8"), 8192 + 40, REAL_EOS)
    yield grammars
    grammars.close()


def mask_of_a_fresh_matcher(grammars: Grammars, grammar: Grammar, text: list[int]) -> np.ndarray:
    matcher = grammars._compile(grammar)
    assert matcher.consume_tokens(text), matcher.get_error()
    return np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little")[:8232].astype(bool)


@pytest.mark.parametrize("name", REAL)
def test_after_any_drafts_exactly_that_is_allowed_which_a_fresh_matcher_allows(real, name):
    grammar = REAL[name]
    ends = 0
    for walk in range(6):
        rng, text = random.Random(f"{name} {walk}"), []
        matcher = real.begin(grammar).result()
        for _ in range(10):
            block = drafts_of_all_kinds(rng, real, grammar, text)
            answer = matcher.ask(block, lambda: None).result()
            assert answer.block == block[: len(answer.block)]
            for j, row in enumerate(answer.tokens):
                assert (row == mask_of_a_fresh_matcher(real, grammar, [*text, *block[:j]])).all()
            if len(answer.block) < len(block):
                stopped_by = block[len(answer.block)]
                assert stopped_by in REAL_EOS or not answer.tokens[-1, stopped_by]
            followed = rng.randint(0, len(answer.block))
            own = rng.choice(np.flatnonzero(answer.tokens[followed]).tolist())
            if own in REAL_EOS:
                ends += 1
                break
            matcher.advance((*answer.block[:followed], own))
            text += [*answer.block[:followed], own]
    assert ends or name in ("object", "schema"), "some walks come to an end"


def drafts_of_all_kinds(rng: random.Random, grammars: Grammars, grammar: Grammar, text: list[int]) -> tuple[int, ...]:
    """Up to four drafts: mostly allowed ones, sometimes any token, sometimes EOS."""
    block: list[int] = []
    for _ in range(rng.randint(0, 4)):
        kind = rng.random()
        if kind < 0.75 and (may := np.flatnonzero(mask_of_a_fresh_matcher(grammars, grammar, [*text, *block]))).any():
            block.append(rng.choice(may.tolist()))
        else:
            block.append(rng.choice([1, 3, rng.randrange(8192)]))
        if block[-1] in REAL_EOS or not mask_allows(grammars, grammar, [*text, *block]):
            break
    return tuple(block)


def mask_allows(grammars: Grammars, grammar: Grammar, text: list[int]) -> bool:
    matcher = grammars._compile(grammar)
    return bool(matcher.consume_tokens(text))


def test_tokens_that_the_tokenizer_does_not_have_are_never_allowed(real):
    for grammar in REAL.values():
        assert not real.begin(grammar).result().ask((), lambda: None).result().tokens[:, 8192:].any()


# === short lists with masks =====================================================================================

WIDE = 1100
WIDE_SAMPLINGS = [Sampling(temperature=t) for t in (0.0, 0.2, 1.0, 2.0)]
WIDE_SAMPLINGS += [
    Sampling(temperature=1.0, top_k=3),
    Sampling(temperature=1.0, top_p=0.8),
    Sampling(temperature=1.0, min_p=0.1),
    Sampling(temperature=0.8, top_k=40, top_p=0.9, min_p=0.01, repetition_penalty=1.3, logit_bias=((7, 3.0),)),
]


@pytest.mark.parametrize("kept", [1, 2, 9, 300])
def test_short_lists_are_exact_where_all_likely_tokens_are_forbidden(kept):
    sampler = Sampler(CPU)
    generator = torch.Generator().manual_seed(kept)
    for i, sampling in enumerate(WIDE_SAMPLINGS * 3):
        logits = 4 * torch.randn(3, WIDE, generator=generator)
        unlikely = logits.argsort(dim=-1)[:, : max(kept, WIDE // 2)]  # the likelier half is never allowed
        allowed = np.zeros((3, WIDE), bool)
        for row in range(3):
            chosen = unlikely[row, torch.randperm(unlikely.shape[1], generator=generator)[:kept]]
            allowed[row, chosen.numpy()] = True
        session = VerificationInput(replace(sampling, seed=i), [3, 7, 5], 2, tuple(map(DraftToken, (5, 9))), allowed)
        (got,) = sampler.sample(logits, [session])
        scores = processed_logits(logits, session)
        for row in range(3):
            noise = gumbel(i, 3 + row, np.arange(WIDE)) if sampling.temperature else 0.0
            token = got.tokens[row]
            assert token.id == int((scores[row].numpy() + noise).argmax())
            assert allowed[row, token.id]
            logp = scores[row] - torch.logsumexp(scores[row], dim=-1)
            assert token.logp == pytest.approx(float(logp[token.id]), abs=1e-6)


# === what is refused ============================================================================================

BAD = {
    "no JSON": Grammar(GrammarKind.JSON_SCHEMA, '{"type":'),
    "unknown type": Grammar(GrammarKind.JSON_SCHEMA, '{"type": "foo"}'),
    "unknown keyword": Grammar(GrammarKind.JSON_SCHEMA, '{"type": "object", "if": {}}'),
    "allows nothing": Grammar(GrammarKind.JSON_SCHEMA, '{"allOf": [{"type": "string"}, {"type": "integer"}]}'),
    "never ends": Grammar(GrammarKind.JSON_SCHEMA, '{"$ref": "#"}'),
    "an open bracket": Grammar(GrammarKind.REGEX, "("),
    "an unknown rule": Grammar(GrammarKind.LARK, "start: foo"),
    "nested deeply": Grammar(GrammarKind.LARK, "start: " + "(" * 20_000 + '"a"' + ")" * 20_000),
    "a deep schema": Grammar(GrammarKind.JSON_SCHEMA, '{"items":' * 5_000 + "{}" + "}" * 5_000),
    "grows by powers": Grammar(
        GrammarKind.LARK, "start: T0\n" + "\n".join(f"T{i}: T{i + 1} T{i + 1}" for i in range(40)) + '\nT40: "a"'
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_a_bad_grammar_is_refused_with_its_field_and_the_reason_on_one_line(real, name):
    with pytest.raises(InvalidArgument) as refused:
        real.begin(BAD[name]).result()
    assert refused.value.field == "sampling.grammar"
    assert refused.value.message
    assert "\n" not in refused.value.message


def test_a_chain_of_rules_as_long_as_a_grammar_can_be_does_not_overrun_a_stack(real):
    rules = [f"r{i}: r{i + 1}" for i in range(5_000)]
    chain = Grammar(GrammarKind.LARK, "\n".join(["start: r0", *rules, 'r5000: "a"']))
    assert real.begin(chain).result().ask((), lambda: None).result().tokens.any()


def test_a_resume_with_text_that_the_grammar_forbids_is_refused(real):
    with pytest.raises(InvalidArgument) as refused:
        real.begin(REAL["object"], (700, 701)).result()
    assert refused.value.field == "open.committed"


def test_a_grammar_that_becomes_too_costly_ends_in_an_error_not_in_a_cut_text(real):
    matcher = real.begin(Grammar(GrammarKind.REGEX, "abc(a{1000}){1000}")).result()

    def go_on():
        for _ in range(50):
            may = np.flatnonzero(matcher.ask((), lambda: None).result().tokens[0])
            assert not set(may.tolist()) & REAL_EOS, "the text is no word of the language yet"
            matcher.advance((int(may[0]),))

    with pytest.raises(InvalidArgument) as failed:
        go_on()
    assert failed.value.field == "sampling.grammar"


@pytest.mark.parametrize(
    ("make", "field"),
    [
        (lambda: Grammar("json"), "sampling.grammar"),
        (lambda: Grammar(GrammarKind.REGEX, " "), "sampling.grammar"),
        (lambda: Grammar(GrammarKind.JSON_OBJECT, "{}"), "sampling.grammar"),
        (lambda: Grammar(GrammarKind.REGEX, "é" * 40_000), "sampling.grammar"),
        (lambda: Sampling(grammar=GRAMMAR, ignore_eos=True), "sampling.ignore_eos"),
        (lambda: Sampling(grammar=GRAMMAR, allowed_tokens=(1,)), "sampling.allowed_tokens"),
    ],
)
def test_what_makes_no_sense_is_refused_by_name_before_it_travels(make, field):
    with pytest.raises(InvalidArgument) as refused:
        make()
    assert refused.value.field == field


def test_a_kind_of_grammar_that_nobody_knows_is_refused_by_name():
    wire = pb.EdgeFrame.FromString(codec.encode_edge_frame(Open("m", HASH, (1,), Sampling(grammar=GRAMMAR), "s")))
    for kind in (0, 99):
        wire.open.sampling.grammar.kind = kind  # type: ignore[assignment]
        with pytest.raises(InvalidArgument) as refused:
            codec.decode_edge_frame(wire.SerializeToString())
        assert refused.value.field == "sampling.grammar"


def test_a_target_without_eos_and_an_installation_without_the_library_say_so(monkeypatch):
    with pytest.raises(FailedPrecondition, match="EOS"):
        Grammars(tiny_tokenizer(), VOCAB, frozenset()).begin(GRAMMAR).result()
    monkeypatch.setitem(__import__("sys").modules, "llguidance", None)
    with pytest.raises(FailedPrecondition, match=r"the extra \[cloud\]"):
        Grammars(tiny_tokenizer(), VOCAB, frozenset({EOS})).begin(GRAMMAR).result()


def test_the_oldest_compiled_grammars_are_dropped():
    grammars = Grammars(tiny_tokenizer(), VOCAB, frozenset({EOS}))
    for n in range(40):
        grammars._matcher(Grammar(GrammarKind.REGEX, f"a{{{n + 1}}}"))
    assert len(grammars._compiled) < 40
    grammars.close()


# === what compiles is killed where it takes too much ============================================================


def branching_schema(branches: int) -> Grammar:
    """A schema of 2 KB whose 2^branches cases llguidance would write out."""
    cases = [
        {"anyOf": [{"type": "string", "pattern": f"a{i}.*"}, {"type": "integer", "minimum": i}]}
        for i in range(branches)
    ]
    return Grammar(GrammarKind.JSON_SCHEMA, json.dumps({"allOf": cases}))


@pytest.fixture
def trial():
    made = GrammarTrial(tiny_tokenizer(), VOCAB, frozenset({EOS}))
    yield made
    made.close()


def test_a_schema_that_would_take_gigabytes_is_refused_and_takes_none_here():
    killed = threading.Event()
    grammars = Grammars(tiny_tokenizer(), VOCAB, frozenset({EOS}), killed.set)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for is_killed in (True, False):  # the second time it is not even tried
        with pytest.raises(InvalidArgument, match="MiB to compile; simplify it") as refused:
            grammars.begin(branching_schema(30)).result()
        assert refused.value.field == "sampling.grammar"
        assert killed.is_set() == is_killed
        killed.clear()
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10, "KiB"
    assert grammars.begin(GRAMMAR).result().ask((), lambda: None).result().tokens.any()
    grammars.close()


def test_a_grammar_that_takes_too_long_is_killed_and_the_next_gets_a_new_child(trial, monkeypatch):
    trial.check(GRAMMAR)
    child = trial._child
    os.kill(child.pid, signal.SIGSTOP)  # hangs, as far as its parent can tell
    monkeypatch.setattr("outrider.cloud.grammar.grammar_compiler.TIMEOUT_S", 0.2)
    with pytest.raises(TooCostly):
        trial.check(GRAMMAR)
    assert child.returncode == -signal.SIGKILL
    monkeypatch.undo()
    trial.check(GRAMMAR)
    assert trial._child.pid != child.pid


def test_a_grammar_is_not_costly_because_its_child_gets_no_core(trial, monkeypatch):
    trial.check(GRAMMAR)
    monkeypatch.setattr("outrider.cloud.grammar.grammar_compiler.TRIAL_S", 0.2)
    os.kill(trial._child.pid, signal.SIGSTOP)
    waits = threading.Timer(1.0, os.kill, (trial._child.pid, signal.SIGCONT))
    waits.start()
    trial.check(GRAMMAR)
    waits.join()


def test_closing_ends_what_compiles_and_its_child(trial):
    trial.check(GRAMMAR)
    child = trial._child
    os.kill(child.pid, signal.SIGSTOP)
    with ThreadPoolExecutor(1) as pool:
        stuck = pool.submit(trial.check, GRAMMAR)
        trial.close()
        with pytest.raises(Unavailable):
            stuck.result(timeout=60)
    assert child.returncode == -signal.SIGKILL


def test_what_is_wrong_is_refused_in_the_child_and_leaves_it_alive(trial):
    refusals = []
    for grammar in BAD.values():
        try:
            trial.check(grammar)
        except InvalidArgument as error:
            refusals.append(error)
    assert len(refusals) > len(BAD) // 2
    assert TooCostly not in map(type, refusals)
    child = trial._child
    trial.check(GRAMMAR)
    assert trial._child is child
