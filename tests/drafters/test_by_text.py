"""Drafters with another tokenizer: text through two vocabularies, and proposals that are the target's tokens."""

from __future__ import annotations

import json
import logging
from functools import cache, partial

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers

from outrider.drafters import DrafterCache, NgramDrafter, ProposalRule, find_package
from outrider.drafters.by_text import TextDrafter, Vocabulary
from outrider.drafters.by_text.vocabulary import Reencoding, whole_characters
from outrider.drafters.onnx import OnnxDrafter
from outrider.drafters.protocol import TokenPrefix
from outrider.drafters.search import DrafterSearch
from outrider.proto.errors import ModelRefused, TokenizerMismatch
from outrider.proto.testing import word_tokenizer
from outrider.proto.types import DraftToken, Sampling

BOS, EOS = 0, 1
CORPUS = [
    "The quick brown fox jumps over the lazy dog, and the dog sleeps on. Höhe und Größe, 你好。\n",
    "def add(first, second):\n    if first == 10:\n        return first + second  # the sum of both\n",
    "In the town of the river the people of the town were reading the papers of the town in 1923.\n",
]
PROMPT = "The people of the town were reading the papers. The people of the"


def trained(size: int, *, prefix_space: bool = False, opening: bool = False) -> str:
    """Return a byte-level BPE trained on a few lines; with the alphabet and two special tokens alone it is bytes."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix_space)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    special = ["<s>", "</s>"]
    trainer = trainers.BpeTrainer(
        vocab_size=max(size, 258), special_tokens=special, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS if size > 258 else [], trainer)
    if opening:
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", BOS)])
    return tokenizer.to_str()


@cache
def vocabulary(name: str) -> Vocabulary:
    made = {
        "bytes": partial(trained, 258),
        "small": partial(trained, 330),
        "large": partial(trained, 420),
        "spaced": partial(trained, 400, prefix_space=True),
        "opened": partial(trained, 330, opening=True),
        "reference": lambda: find_package("general").tokenizer_path.read_text(encoding="utf-8"),
    }
    return Vocabulary(made[name]())


@cache
def general() -> OnnxDrafter:
    return OnnxDrafter(find_package("general"))


def by_text(drafter: str, target: str, **more) -> TextDrafter:
    return TextDrafter(NgramDrafter(name="copy"), vocabulary(drafter), vocabulary(target), **more)


def encoded(name: str, text: str) -> list[int]:
    found = vocabulary(name).encode(text.encode())
    assert found is not None
    return found.ids


def ids(drafts) -> list[int]:
    return [draft.id for draft in drafts]


def rule(temperature: float = 0.0, **more) -> ProposalRule:
    return ProposalRule(Sampling(temperature=temperature, seed=3, **more))


WORDS = " ".join(CORPUS).split(" ")
TEXTS = st.one_of(st.text(max_size=30), st.lists(st.sampled_from(WORDS), max_size=8).map(" ".join))
PAIRS = [("bytes", "large"), ("small", "large"), ("large", "small"), ("small", "bytes"), ("opened", "spaced")]


@pytest.mark.parametrize("name", ["bytes", "small", "large", "opened"])
@settings(max_examples=40, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 40), TEXTS), max_size=6))
def test_tokens_renewed_at_the_seam_are_those_of_the_whole_text(name, edits) -> None:
    tokens, text = Reencoding(vocabulary(name)), b""
    for cut, more in edits:
        kept = whole_characters(text[: max(0, len(text) - cut)])
        before = list(tokens.ids)
        text = text[:kept] + more.encode()
        same = tokens.renew(text, kept)
        assert tokens.ids == encoded(name, text.decode())
        assert same is not None
        assert tokens.ids[:same] == before[:same]
        assert not tokens.ends or tokens.ends[-1] == len(text)


def test_tokens_appended_without_looking_back_are_others() -> None:
    seam, whole = b"the peop", b"the people of"
    found = {}
    for look_back in (0, 8):
        tokens = Reencoding(vocabulary("large"), look_back)
        tokens.renew(seam, 0)
        tokens.renew(whole, len(seam))
        found[look_back] = tokens.ids
    assert found[8] == encoded("large", whole.decode())
    assert found[0] != found[8]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_with_the_targets_own_vocabulary_text_gives_what_tokens_give(temperature) -> None:
    reference = vocabulary("reference")
    prompt = encoded("reference", "The history of the town begins in the twelfth century, when a small")
    direct, other = (d.open(rule(temperature)) for d in (general(), TextDrafter(general(), reference, reference)))
    for state in (direct, other):
        state.extend(prompt)
    assert ids(other.propose(24)) == ids(direct.propose(24))


def test_the_targets_noise_is_what_makes_them_agree() -> None:
    reference = vocabulary("reference")
    drafter = TextDrafter(general(), reference, reference)
    prompt = encoded("reference", "The history of the town begins in the twelfth century, when a small")
    proposals = []
    for seed in (3, 4):
        state = drafter.open(ProposalRule(Sampling(temperature=1.0, seed=seed)))
        state.extend(prompt)
        proposals.append(ids(state.propose(12)))
    assert proposals[0] != proposals[1]


@pytest.mark.parametrize(("own", "target"), PAIRS)
def test_proposals_are_the_targets_tokens_of_the_drafted_text(own, target) -> None:
    prompt = encoded(target, PROMPT)
    state = by_text(own, target).open(rule())
    state.extend(prompt)
    proposed = ids(state.propose(12))
    assert len(proposed) > 3
    text = b"".join(map(vocabulary(target).piece, prompt + proposed)).decode()
    assert encoded(target, text.removeprefix(" ")) == prompt + proposed


def test_without_a_look_at_the_seam_proposals_are_not_the_tokens_of_the_text() -> None:
    spaced = vocabulary("spaced")
    known = [*encoded("spaced", "the people of the"), spaced.by_piece[b" p"]]
    followed = {}
    for look_back in (0, 8):
        state = by_text("bytes", "spaced", look_back=look_back).open(rule())
        state.extend(known)
        followed[look_back] = b"".join(map(spaced.piece, known + ids(state.propose(3))))
    assert followed[8].startswith(b" the people of the people")
    assert not followed[0].startswith(b" the people of the people")


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize(("own", "target"), PAIRS[:3])
@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 4), st.integers(0, 6), st.text("aeth.\n 1", max_size=12)), max_size=4))
def test_a_prefix_cut_and_extended_proposes_as_if_it_were_new(own, target, temperature, turns) -> None:
    drafter = by_text(own, target)
    state = drafter.open(rule(temperature))
    state.extend(encoded(target, PROMPT))
    known = encoded(target, PROMPT)
    for drafts, cut, text in turns:
        proposed = ids(state.propose(drafts))
        known = (known + proposed)[: max(1, state.length - cut)]
        state.truncate(len(known))
        more = encoded(target, f" the{text}")
        state.extend(more)
        known += more
        assert state.length == len(known)
        fresh = drafter.open(rule(temperature))
        fresh.extend(known)
        expected = ids(fresh.propose(3))
        assert ids(state.propose(3)) == expected
        state.truncate(len(known))


def test_teacher_forced_proposals_are_what_would_have_been_proposed() -> None:
    tokens = encoded("large", CORPUS[2])
    state = by_text("small", "large").open(rule())
    state.extend(tokens[:4])
    forced = ids(state.propose_forced(tokens[4:]))
    for position, proposed in enumerate(forced, 4):
        fresh = by_text("small", "large").open(rule())
        fresh.extend(tokens[:position])
        assert (ids(fresh.propose(1)) or [-1]) == [proposed]


def test_a_special_token_ends_drafting_until_text_resumes() -> None:
    state = by_text("small", "large").open(rule())
    state.extend(encoded("large", PROMPT))
    state.extend((EOS,))
    assert state.propose(4) == ()
    state.extend(encoded("large", " The people of the"))
    assert state.propose(4)


def test_a_character_in_parts_is_drafted_to_its_end() -> None:
    target = vocabulary("large")
    letter = "你".encode()
    parts = [target.by_piece[letter[i : i + 1]] for i in range(3)]
    state = by_text("bytes", "large").open(rule())
    state.extend(encoded("large", "x: ") + parts + encoded("large", " y: ") + parts[:1])
    proposed = b"".join(map(target.piece, ids(state.propose(3))))
    assert proposed.startswith(letter[1:])


def test_a_drafter_opens_with_its_own_first_token() -> None:
    assert vocabulary("opened").opening == (BOS,)
    assert vocabulary("small").opening == ()
    drafter = by_text("opened", "large")
    state = drafter.open(rule())
    state.extend(encoded("large", PROMPT))
    state.propose(1)
    assert state._inner.tokens[0] == BOS


def test_scores_add_up_to_that_of_the_text_in_own_tokens() -> None:
    drafter = TextDrafter(general(), vocabulary("reference"), vocabulary("large"))
    tokens = encoded("large", "The town has a river. It was founded in 1923 by the people of")
    state = drafter.open(rule())
    state.extend(tokens[:6])
    log_q = state.score(tokens[6:])
    assert log_q.shape == (len(tokens) - 6,)
    start = len(b"".join(map(vocabulary("large").piece, tokens[:6])))
    whole = vocabulary("reference").encode(b"".join(map(vocabulary("large").piece, tokens)))
    known = sum(end <= start for end in whole.ends)
    direct = general().open(rule())
    direct.extend(whole.ids[:known])
    assert float(np.sum(log_q)) == pytest.approx(float(np.sum(direct.score(whole.ids[known:]))), abs=1e-3)
    assert state.length == len(tokens)


def test_allowed_tokens_of_the_target_hold_for_what_is_drafted_by_text() -> None:
    tokens = encoded("large", PROMPT)
    state = by_text("small", "large").open(rule(allowed_tokens=(EOS,)))
    state.extend(tokens)
    assert state.propose(4) == ()


@pytest.mark.parametrize("named", ["stop_tokens", "eos_tokens"])
def test_an_end_is_drafted_by_text_only_where_min_tokens_let_the_target_end(named) -> None:
    prompt = encoded("large", PROMPT)
    drafter = by_text("small", "large")

    def proposed(min_tokens: int, end: tuple[int, ...]) -> list[int]:
        stop, eos = (end, ()) if named == "stop_tokens" else ((), end)
        sampling = Sampling(min_tokens=min_tokens, max_tokens=16, stop_tokens=stop)
        state = drafter.open(ProposalRule(sampling, prompt_length=len(prompt), eos_tokens=eos))
        state.extend(prompt)
        return ids(state.propose(6))

    free = proposed(0, ())
    assert free.index(free[3]) == 3
    assert proposed(4, (free[3],)) == free[:3]
    assert proposed(3, (free[3],)) == proposed(0, (free[3],)) == free


class Ending:
    """Drafter of words of one letter that would rather end the text."""

    name, version, steering = "ending", "1", None

    def __init__(self, own: str) -> None:
        self._words = [vocabulary(own).by_piece[piece] for piece in (b" ", b"a")]

    def open(self, rule: ProposalRule) -> Ending.State:
        return self.State(rule, self._words)

    class State(TokenPrefix):
        def __init__(self, rule: ProposalRule, words: list[int]) -> None:
            super().__init__()
            self._rule, self._words = rule, words

        def follow(self, rule: ProposalRule) -> None:
            self._rule = rule

        def propose(self, n: int) -> tuple[DraftToken, ...]:
            found = []
            while len(found) < n:
                words = self._words
                logits = np.log(np.array([0.9, 0.09, 0.01], dtype=np.float32))
                tokens = np.array([EOS, *(reversed(words) if self.length % 2 else words)])
                chosen = self._rule.choose(self.length, tokens, logits, 0.0, None)
                if chosen.id < 0:
                    break
                self.extend((chosen.id,))
                found.append(chosen)
            return tuple(found)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_drafter_that_would_end_goes_on_for_as_long_as_the_target_must(temperature) -> None:
    prompt = encoded("large", PROMPT + " a")
    counts = []
    for min_tokens in (0, 5):
        sampling = Sampling(temperature=temperature, seed=5, min_tokens=min_tokens, max_tokens=64)
        state = TextDrafter(Ending("small"), vocabulary("small"), vocabulary("large")).open(
            ProposalRule(sampling, prompt_length=len(prompt))
        )
        state.extend(prompt)
        drafts = state.propose(40)
        counts.append(len(drafts))
    assert counts[0] < 5 <= counts[1] < 40


@pytest.mark.parametrize("own", ["bytes", "small"])
def test_a_known_token_that_it_would_never_propose_is_read_and_drafted_after(own) -> None:
    prompt = encoded("large", PROMPT)
    drafter = TextDrafter(Ending(own), vocabulary(own), vocabulary("large"))
    state = drafter.open(ProposalRule(Sampling(min_tokens=64, max_tokens=64), prompt_length=len(prompt)))
    state.extend(prompt)
    drafts = ids(state.propose(3))
    drafted = b"".join(map(vocabulary("large").piece, drafts))
    assert drafted.startswith((b" a", b"a a"))
    assert state._inner.tokens[: len(encoded(own, PROMPT))] == encoded(own, PROMPT)


def test_names_of_special_tokens_in_a_text_are_text() -> None:
    tokens = encoded("large", "a </s> b")
    assert EOS not in tokens
    assert b"".join(map(vocabulary("large").piece, tokens)) == b"a </s> b"


def test_a_tokenizer_that_changes_the_text_is_refused_with_the_reason() -> None:
    words = Vocabulary(word_tokenizer(50))
    with pytest.raises(
        ModelRefused, match="cannot draft by text: of the drafter's tokenizer, its tokens do not add up"
    ):
        TextDrafter(NgramDrafter(), words, vocabulary("large"))
    lower = json.loads(trained(300)) | {"normalizer": {"type": "Lowercase"}}
    assert Vocabulary(json.dumps(lower)).hindrance


def search(tmp_path, tokenizer_json: str) -> DrafterSearch:
    return DrafterSearch((), DrafterCache(tmp_path), lambda *_: iter(()), 1, tokenizer_json=tokenizer_json)


def test_a_named_package_with_another_tokenizer_drafts_by_text_unsteered(tmp_path, caplog) -> None:
    with caplog.at_level(logging.INFO, "outrider.drafters"):
        (found,) = search(tmp_path, trained(420)).named(("swift",), "f" * 64)
    assert "swift has another tokenizer than the target, so it drafts by text" in caplog.text
    assert found.by_text
    assert found.steering is None
    drafter = found.load()
    assert isinstance(drafter, TextDrafter)
    state = drafter.open(rule())
    state.extend(encoded("large", PROMPT))
    assert state.propose(3)


def test_a_package_with_another_tokenizer_is_refused_where_the_target_has_no_text(tmp_path) -> None:
    for tokenizer_json, reason in (("", "is not known here"), (word_tokenizer(50), "do not add up")):
        with pytest.raises(TokenizerMismatch, match=f"made for another tokenizer.*{reason}"):
            search(tmp_path, tokenizer_json).named(("general",), "f" * 64)
