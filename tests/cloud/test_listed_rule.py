"""Listed rows decide as whole rows do, or say what they lack, and what they lack can be given."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider.cloud.probes import listed_rule
from outrider.cloud.probes.listed_rule import ListedChoice, choose, loudest, refusal
from outrider.cloud.probes.scoring import ListedRow, ServerFacts
from outrider.cloud.target.sampler import Sampler
from outrider.cloud.target.verification import VerificationInput
from outrider.proto.errors import InvalidArgument
from outrider.proto.noise import gumbel
from outrider.proto.token_counts import TokenCounts
from outrider.proto.types import DraftToken, Grammar, GrammarKind, Sampling, token_ids

SAMPLER = Sampler(torch.device("cpu"))
VOCAB = 7
PROMPT, EOS = [1, 2, 0, 1, 2], 5
MAX_WISHES = 4
Rule = Callable[[Sequence[ListedRow], VerificationInput, int], list[ListedChoice]]


def choose_all(rows: Sequence[ListedRow], session: VerificationInput, vocab: int) -> list[ListedChoice]:
    """Return the choices in a block's rows, up to the first that is open or is not the draft of its position."""
    if session.sampling.has_penalties and session.counts is None:
        session = replace(session, counts=TokenCounts(session.prompt_length, session.transcript))
    choices: list[ListedChoice] = []
    drafts: list[int | None] = [*token_ids(session.block), None]
    for j, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
        choices.append(choose(row, session, j, vocab))
        if choices[-1].token is None or choices[-1].token != draft:
            break
    return choices


def log_softmax(logits):
    """The row [vocab] as a server tells it, in float32."""
    return torch.log_softmax(torch.as_tensor(logits, dtype=torch.float32), -1).double().numpy()


def listed(row, length, named=(), larger_ids=False):
    """The list of a row's `length` likeliest tokens; of those that tie at its end, the server keeps which it likes."""
    order = np.lexsort((-np.arange(len(row)) if larger_ids else np.arange(len(row)), -row))[:length]
    likeliest = {int(token): float(row[token]) for token in order}
    return ListedRow.of(likeliest, len(row), {int(token): float(row[token]) for token in named})


@dataclass(frozen=True)
class Case:
    """True rows [k + 1, vocab] of a session, and how the server lists them."""

    rows: np.ndarray
    session: VerificationInput
    length: int
    larger_ids: bool = False
    names: bool = True


def truth(rows, session):
    """The (token, log p) of each row, by the sampler over whole rows."""
    (sampled,) = SAMPLER.sample(torch.from_numpy(rows).float(), [session])
    return [(token.id, token.logp) for token in sampled.tokens]


def answered(rule: Rule, case: Case) -> list[ListedChoice] | None:
    """The choices of a block where every wish is granted; None: there were too many."""
    vocab = case.rows.shape[1]
    lengths, named = [case.length] * len(case.rows), [set() for _ in case.rows]
    for _ in range(len(case.rows) * (MAX_WISHES + math.ceil(math.log2(vocab)) + 1)):
        told = [listed(r, n, known, case.larger_ids) for r, n, known in zip(case.rows, lengths, named, strict=True)]
        choices = rule(told, case.session, vocab)
        if choices[-1].token is not None:
            return choices
        j, wanted = len(choices) - 1, choices[-1].wanted
        if len(wanted) and case.names:
            if named[j] & set(wanted.tolist()) or set(wanted.tolist()) & set(told[j].tokens.tolist()):
                return None  # it knows them
            named[j] |= set(wanted.tolist())
        else:
            if lengths[j] >= vocab:
                return None
            lengths[j] = min(vocab, 2 * lengths[j])
    return None


def is_lossless(rule: Rule, cases: Iterator[Case] | Sequence[Case]) -> bool:
    """Whether blocks are judged as the sampler judges them, row by row up to the first miss."""
    known: tuple[int, list[tuple[int, float]]] = (0, [])
    for case in cases:
        if known[0] != id(case.session):
            known = id(case.session), truth(case.rows, case.session)
        choices = answered(rule, case)
        if choices is None:
            return False
        drafts = [draft.id for draft in case.session.block]
        wanted = [token for token, _ in known[1]]
        hits = sum(itertools.takewhile(bool, (a == b for a, b in zip(drafts, wanted, strict=False))))
        if [choice.token for choice in choices] != wanted[: hits + 1]:
            return False
        for choice, (_, logp) in zip(choices, known[1], strict=False):
            if not math.isnan(choice.logp) and abs(choice.logp - logp) > 3e-5:
                return False
    return True


# === exact enumeration ===============================================================================================

TINY_ROWS = [
    [0.0] * 7,
    [0, 0, 0, 1, 1, 1, 1],
    [3, 1, 1, 1, 0, 1, 1],
    [0, 1, 0, 1, 0, 1, 0],
    [2, 2, 1, 1, 0, 0, -1],
    [0.3, -1.2, 2.1, 0.9, -0.4, 1.3, 0.1],
    [5, 5, -5, -5, -5, -5, 4],
    [-9, 1.5, 9, 1.5, 1.5, 1.5, -9],
    [0, -math.inf, 1, 1, -math.inf, 1, 0],
]
CUTS = [
    {"top_k": k, "top_p": p, "min_p": m} for k, p, m in itertools.product((0, 1, 2, 4, 7), (1.0, 0.5, 0.8), (0.0, 0.3))
] + [{"top_p": 1e-9}, {"top_p": 0.999}, {"min_p": 1.0}, {"top_k": 3, "min_p": 1.0}]
LAWS = [{"temperature": 0.0}] + [{"temperature": 0.7, **cut} for cut in CUTS]
LAWS += [{"temperature": t, **CUTS[(5 * i + n) % len(CUTS)]} for n, t in enumerate((1e-4, 1.0, 2.5)) for i in range(5)]
LAWS += [{"temperature": 1.0}, {"temperature": 1.0, "top_p": 0.8}, {"temperature": 1.0, "min_p": 0.3}]
ADJUSTED = [
    {},
    {"logit_bias": ((0, 1.0), (6, -2.0))},
    {"logit_bias": ((2, 0.1), (3, 100.0))},
    {"presence_penalty": 1.0, "frequency_penalty": 0.5},
    {"presence_penalty": -1.5, "frequency_penalty": 0.25},
    {"min_tokens": 3, "stop_tokens": (3,)},
    {"allowed_tokens": (0, 4, 5)},
    {"allowed_tokens": (5, 1), "min_tokens": 6},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 1, "logit_bias": ((4, 1.0),)},
]
MASKS = [None, [0, 0, 1, 1, 0, 1, 0], [0, 1, 0, 0, 1, 0, 0]]


def session_of(sampling, block=(), text=(2, 3), vocab=VOCAB, mask=None):
    allowed = None if mask is None else np.repeat(np.array([mask], bool), len(block) + 1, axis=0)
    transcript, drafts = [*PROMPT, *text], tuple(map(DraftToken, block))
    return VerificationInput(sampling, transcript, len(PROMPT), drafts, allowed, eos_tokens=frozenset({EOS, vocab + 9}))


def tiny_cases(laws=LAWS, adjusted=ADJUSTED, masks=MASKS, rows=TINY_ROWS, seeds=1) -> Iterator[Case]:
    number = itertools.count()
    for law, single, mask, logits, _ in itertools.product(laws, adjusted, masks, rows, range(seeds)):
        seed = next(number)
        if mask is not None and ("allowed_tokens" in single or (single and seed % 5)):
            continue
        session = session_of(Sampling(seed=seed, **law, **single), mask=mask)
        row = log_softmax(logits)[None]
        try:
            truth(row, session)
        except FloatingPointError:
            continue  # settings that leave nothing of such a row
        for length in range(1, VOCAB + 1):
            yield Case(row, session, length, bool(length % 2))


def test_every_list_of_a_tiny_vocabulary_decides_as_the_whole_row():
    assert is_lossless(choose_all, tiny_cases())


def test_lists_decide_without_names_too():
    cases = (replace(case, names=False) for case in tiny_cases(rows=TINY_ROWS[3:6], masks=MASKS[:1]))
    assert is_lossless(choose_all, cases)


def drafts_of(rows, session, hits):
    """`session` with `hits` drafts that hold, and then one that does not."""
    for _ in range(hits + 1):  # each draft may change what the next rows are drawn from
        block = [token for token, _ in truth(rows, session)][: len(session.block)]
        wrong = [*block[:hits], *((token + 1) % rows.shape[1] for token in block[hits : hits + 1]), *block[hits + 1 :]]
        session = replace(session, block=tuple(map(DraftToken, wrong)))
    return session


def block_cases(seeds=6) -> Iterator[Case]:
    laws = [{"temperature": 0.0}, {"temperature": 1.0}, {"temperature": 0.7, "top_k": 4, "top_p": 0.8}]
    for number, (law, single, seed) in enumerate(itertools.product(laws, ADJUSTED, range(seeds))):
        generator = np.random.default_rng(number)
        rows = np.stack([log_softmax(generator.choice([0.0, 0.5, 1.0, 1.25], VOCAB)) for _ in range(4)])
        session = session_of(Sampling(seed=seed, **law, **single), block=(0, 0, 0))
        session = drafts_of(rows, session, seed % 4)
        for length in (2, 4, 6):
            yield Case(rows, session, length)


def test_rows_of_a_block_count_the_drafts_before_them():
    assert is_lossless(choose_all, block_cases())
    lengths = {len(answered(choose_all, case)) for case in block_cases()}
    assert lengths == {1, 2, 3, 4}, "blocks end at their first miss"


# === rules that are subtly wrong =====================================================================================


def of_rows(change: Callable[[ListedRow], ListedRow]) -> Rule:
    return lambda rows, session, vocab: choose_all([change(row) for row in rows], session, vocab)


def as_if_no_tie_went_on(row):
    return replace(row, bound=row.bound - 1e-9)


def of_the_row_before(rows, session, vocab):
    return choose_all([rows[0], *rows[:-1]], session, vocab)


def at_the_position_before(rows, session, vocab):
    drafts = [*(draft.id for draft in session.block), None]
    choices = []
    for j, (row, draft) in enumerate(zip(rows, drafts, strict=True)):
        choices.append(choose(row, session, max(0, j - 1), vocab))
        if choices[-1].token is None or choices[-1].token != draft:
            break
    return choices


def patched(name, wrong):
    """A rule with another function in place of one of its own."""

    def rule(rows, session, vocab):
        with pytest.MonkeyPatch.context() as patch:
            owner = listed_rule._Known if hasattr(listed_rule._Known, name) else listed_rule
            right = getattr(owner, name)
            patch.setattr(owner, name, lambda *args: wrong(right, *args))
            return choose_all(rows, session, vocab)

    return rule


def without_boosts(right, row, session, j, vocab):
    known = right(row, session, j, vocab)
    if known.rest is None:
        return known
    rest = np.minimum(known.rest, row.bound)
    return replace(known, rest=rest, ceiling=float(rest.max()))


def without_loud_tokens(right, known, *args):
    return right(known, *args)[:0]


def smaller_ids_first(right, row, session, j, vocab):
    known = right(row, session, j, vocab)
    order = np.lexsort((known.tokens, -known.scores))
    return replace(known, tokens=known.tokens[order], scores=known.scores[order])


WRONG = {
    "a bound without the boosts of missing tokens": patched("_known", without_boosts),
    "a list's end that no tie crosses": of_rows(as_if_no_tie_went_on),
    "a nucleus of the list alone": patched("rest_of_sum", lambda right, known, temperature: (0.0, 0.0)),
    "a nucleus of probabilities before temperature": patched("rest_of_sum", lambda right, known, _: right(known, 1.0)),
    "loud tokens that are missing": patched("reaching", without_loud_tokens),
    "the smaller ids of a tie at top-p": patched("_known", smaller_ids_first),
    "the last token of a list left out": of_rows(lambda row: replace(row, tokens=row.tokens[:-1], logp=row.logp[:-1])),
    "the likeliest token of an open row": patched("wish", lambda right, known, _: ListedChoice(int(known.tokens[0]))),
    "an exclusion that nothing else stands for": patched("_without", lambda right, scores, tokens: scores),
}
WRONG_IN_BLOCKS = {
    "a stale row": of_the_row_before,
    "the settings and noise of another row": at_the_position_before,
}


def nuclei_that_end_in_a_rounding_error() -> Iterator[Case]:
    """Rows of which two tokens have half of the mass, but for what rounding adds."""
    for seed in range(40):
        row = np.random.default_rng(seed).standard_normal(300)
        row[:2] = np.logaddexp.reduce(row[2:]) - math.log(2)
        session = session_of(Sampling(temperature=1.0, top_p=0.5, seed=seed), vocab=300)
        yield Case(log_softmax(row)[None], session, 12)


def test_a_nucleus_that_ends_in_a_rounding_error_stays_open():
    assert is_lossless(choose_all, nuclei_that_end_in_a_rounding_error())


def test_a_nucleus_that_trusts_roundings_is_noticed(monkeypatch):
    monkeypatch.setattr(listed_rule, "_NEAR_CUT", 0.0)
    assert not is_lossless(choose_all, nuclei_that_end_in_a_rounding_error())


def rows_that_tie_at_rank_20() -> Iterator[Case]:
    for seed in range(60):
        logits = torch.from_numpy(np.random.default_rng(seed).standard_normal(300)).bfloat16()
        logits[torch.argsort(logits, descending=True)[18:24]] = logits.sort(descending=True).values[20]
        session = session_of(Sampling(temperature=3.0, top_k=20, seed=seed), vocab=300)
        for larger_ids in (False, True):
            yield Case(log_softmax(logits.float())[None], session, 20, larger_ids)


def test_a_tie_at_the_end_of_a_list_of_20_stays_open_where_it_may_win():
    assert is_lossless(choose_all, rows_that_tie_at_rank_20())
    first = [len(choose_all([listed(c.rows[0], 20)], c.session, 300)[0].wanted) for c in rows_that_tie_at_rank_20()]
    assert 0 < sum(count > 0 for count in first) < len(first), "some are certain, since the noise of others is low"


def test_a_list_of_20_that_is_taken_for_all_is_noticed():
    assert not is_lossless(of_rows(as_if_no_tie_went_on), rows_that_tie_at_rank_20())


def control_cases() -> Iterator[Case]:
    yield from tiny_cases(laws=LAWS[:40], masks=MASKS[:2], rows=TINY_ROWS[:6])


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_rule_is_noticed(wrong):
    assert not is_lossless(WRONG[wrong], control_cases())


@pytest.mark.parametrize("wrong", WRONG_IN_BLOCKS)
def test_a_rule_that_takes_another_row_is_noticed(wrong):
    assert not is_lossless(WRONG_IN_BLOCKS[wrong], block_cases())


# === larger vocabularies =============================================================================================


def large_row(kind, seed, vocab):
    generator = np.random.default_rng(seed)
    noise = generator.standard_normal(vocab)
    match kind:
        case "sharp":
            return log_softmax(noise + 12 * (np.arange(vocab) == seed % vocab))
        case "flat":
            return log_softmax(0.1 * noise)
        case "zipf":
            return log_softmax(noise - 2 * np.log1p(generator.permutation(vocab)))
        case "bfloat16":
            return log_softmax(torch.from_numpy(4 * noise).bfloat16().float())
        case "two":
            return log_softmax(np.where(generator.random(vocab) < 0.1, 3.0, 0.0))
    raise AssertionError(kind)


some_tokens = st.integers(0, 8)
samplings = st.builds(
    Sampling,
    temperature=st.sampled_from([0.0, 0.3, 0.7, 1.0, 1.0, 2.0, 1e-4]),
    seed=st.integers(0, 1 << 63),
    top_k=st.sampled_from([0, 0, 1, 3, 20, 40, 500]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.5, 0.95, 1e-9]),
    min_p=st.sampled_from([0.0, 0.0, 0.01, 0.3, 1.0]),
    presence_penalty=st.sampled_from([0.0, 0.6, -0.4]),
    frequency_penalty=st.sampled_from([0.0, 0.3, -0.2]),
    logit_bias=st.dictionaries(some_tokens, st.sampled_from([-2.0, 0.1, 6.0]), max_size=3).map(
        lambda d: tuple(d.items())
    ),
    allowed_tokens=st.one_of(st.just([]), st.lists(some_tokens, unique=True, min_size=1, max_size=6)).map(tuple),
    min_tokens=st.sampled_from([0, 0, 4]),
    no_repeat_ngram_size=st.sampled_from([0, 0, 0, 1, 2]),
)
KINDS = ["sharp", "flat", "zipf", "bfloat16", "two"]


@settings(max_examples=100, deadline=None, derandomize=True)
@given(
    sampling=samplings,
    vocab=st.sampled_from([9, 40, 1100, 1100, 5000, 50_000]),
    kinds=st.lists(st.sampled_from(KINDS), min_size=1, max_size=3),
    seed=st.integers(0, 10_000),
    hits=st.integers(0, 2),
    length=st.sampled_from([2, 5, 20, 64]),
    larger_ids=st.booleans(),
    names=st.booleans(),
    masked=st.sampled_from([None, None, 0.02, 0.5]),
)
def test_lists_of_large_vocabularies_decide_as_the_whole_row(
    sampling, vocab, kinds, seed, hits, length, larger_ids, names, masked
):
    rows = np.stack([large_row(kind, seed + i, vocab) for i, kind in enumerate(kinds)])
    mask = None
    if masked and not sampling.allowed_tokens:
        mask = np.random.default_rng(seed).random(vocab) < masked
        mask[seed % vocab] = True
    text = np.random.default_rng(seed).integers(0, 9, 5).tolist()
    session = drafts_of(rows, session_of(sampling, [0] * (len(rows) - 1), text, vocab, mask), hits)
    assert is_lossless(choose_all, [Case(rows, session, min(length, vocab), larger_ids, names)])


def test_texts_by_lists_have_the_law_of_the_model():
    row, count = log_softmax([0.3, -1.2, 2.1, 0.9, -0.4, 1.3, 0.1]), 4000
    drawn = []
    for seed in range(count):
        sampling = Sampling(temperature=1.0, seed=seed, logit_bias=((1, 1.5),))
        case = Case(row[None], session_of(sampling), 2)
        drawn.append(answered(choose_all, case)[0].token)
    expected = np.exp(row + 1.5 * (np.arange(VOCAB) == 1))
    expected *= count / expected.sum()
    statistic = ((np.bincount(drawn, minlength=VOCAB) - expected) ** 2 / expected).sum()
    assert statistic < 24.1, "chi-square with 6 degrees of freedom at 5e-4"


# === what servers can be asked =======================================================================================


def test_a_sharp_row_needs_neither_names_nor_a_long_list():
    row = large_row("sharp", 3, 50_000)
    for sampling in (Sampling(), Sampling(temperature=0.5), Sampling(temperature=0.5, top_p=0.9)):
        choice = choose(listed(row, 3), session_of(sampling, vocab=50_000), 0, 50_000)
        assert choice.token == 3
    assert choose(listed(row, 3), session_of(Sampling()), 0, 50_000).logp == pytest.approx(row[3], abs=1e-5)


def test_settings_that_leave_nothing_are_no_text():
    row = ListedRow.of({0: -0.1, 1: -math.inf}, 2)
    with pytest.raises(FloatingPointError):
        choose(row, session_of(Sampling(allowed_tokens=(1,)), vocab=2), 0, 2)


def test_the_loudest_tokens_are_those_of_all_the_noise():
    sampling = Sampling(temperature=1.0, seed=9)
    for vocab, count in ((7, 3), (7, 9), (5000, 1), (5000, 20), (50_000, 300)):
        noise = gumbel(9, 4, np.arange(vocab))
        assert loudest(sampling, 4, count, vocab).tolist() == np.argsort(-noise)[:count].tolist()
    assert not len(loudest(Sampling(), 4, 20, 5000))


def server(max_list=20, names=False, names_in_rows=False):
    return ServerFacts("vLLM", "m", "", 4096, 16, max_list, names, names_in_rows, True, "rows", False, True)


JSON = Grammar(GrammarKind.JSON_OBJECT)


@pytest.mark.parametrize(
    ("sampling", "facts", "field"),
    [
        (Sampling(), server(), None),
        (Sampling(top_k=50, top_p=0.5), server(), None),  # no cuts at temperature 0
        (Sampling(repetition_penalty=1.1), server(5000), "repetition_penalty"),
        (Sampling(temperature=0.7, top_k=19, top_p=0.9, min_p=0.1), server(), None),
        (Sampling(temperature=0.7, top_k=20), server(), "top_k"),
        (Sampling(temperature=0.7, top_k=20), server(names=True), "top_k"),
        (Sampling(temperature=0.7, top_p=0.9), server(names=True), "top_p"),
        (Sampling(temperature=0.7, top_p=0.9), server(5000), None),
        (Sampling(temperature=0.7, min_p=0.1), server(), "min_p"),
        (Sampling(temperature=0.7, min_p=0.1), server(names_in_rows=True), None),
        (Sampling(temperature=0.7), server(), "temperature"),
        (Sampling(temperature=0.7), server(names=True), None),
        (Sampling(grammar=JSON), server(), "grammar"),
        (Sampling(grammar=JSON), server(names=True), None),
        (Sampling(temperature=0.7, top_k=5, grammar=JSON), server(names=True), "grammar"),
        (Sampling(allowed_tokens=(1,)), server(), "allowed_tokens"),
        (Sampling(temperature=1.0, top_k=3, allowed_tokens=(1, 2)), server(names=True), None),
        (Sampling(logit_bias=((1, 2.0),)), server(), "logit_bias"),
        (Sampling(logit_bias=((1, -2.0),)), server(), None),
        (Sampling(logit_bias=tuple((t, -2.0) for t in range(20))), server(), "logit_bias"),
        (Sampling(presence_penalty=1.0), server(), "presence_penalty"),
        (Sampling(presence_penalty=1.0), server(200), None),
        (Sampling(presence_penalty=1.0, temperature=1.0), server(names=True), None),
        (Sampling(frequency_penalty=-1.0), server(200), "frequency_penalty"),
        (Sampling(min_tokens=3), server(), None),
        (Sampling(min_tokens=3, temperature=1.0, top_k=18), server(), "min_tokens"),
        (Sampling(no_repeat_ngram_size=3), server(), "no_repeat_ngram_size"),
        (Sampling(no_repeat_ngram_size=3), server(names=True), None),
    ],
)
def test_settings_that_a_server_cannot_serve_are_refused_by_name(sampling, facts, field):
    error = refusal(sampling, facts, 5000, frozenset({EOS, 6}))
    assert (error.field if error else None) == (f"sampling.{field}" if field else None)
    assert error is None or (isinstance(error, InvalidArgument) and ("--max-logprobs" in str(error) or field[0] == "r"))


@settings(max_examples=400, deadline=None, derandomize=True)
@given(sampling=samplings, seed=st.integers(0, 10_000), kind=st.sampled_from(["flat", "zipf"]), names=st.booleans())
def test_settings_that_are_not_refused_are_settled_by_what_the_server_tells(sampling, seed, kind, names):
    vocab, longest = 400, 45
    sampling = replace(sampling, max_tokens=8, no_repeat_ngram_size=0 if seed % 2 else sampling.no_repeat_ngram_size)
    row = large_row(kind, seed, vocab)
    session = session_of(sampling, text=[seed % 9, 3, 4], vocab=vocab)
    if refusal(sampling, server(longest, names), vocab, session.eos_tokens) is not None:
        return
    named: set[int] = set()
    for _ in range(MAX_WISHES):
        choice = choose(listed(row, longest, named), session, 0, vocab)
        if choice.token is not None:
            break
        assert names, "nothing else can be asked for"
        assert len(choice.wanted)
        named |= set(choice.wanted.tolist())
    assert choice.token == truth(row[None], session)[0][0]
