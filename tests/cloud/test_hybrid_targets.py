"""Targets with a state that cannot be cut back, and those that run one session a pass, conform as all others do."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from branch_conformance import BRANCH_CHECKS
from conformance import CHECKS, Text
from conformance_oracle import Oracle
from conformance_suites import EVERY_CHECK, suite_of

from outrider.cloud.target import recurrence, target_loading
from outrider.cloud.target.own_cache import OwnCache, OwnCacheTarget
from outrider.cloud.target.session_states import BORDER, SessionStates, Tail
from outrider.cloud.target.target_loading import load_target
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.testing import VOCAB
from outrider.proto.types import Guarantee, Sampling
from research.architectures.__main__ import save
from research.architectures.drafted_texts import DraftedText, write
from research.architectures.small_models import small_model

FAMILY = "qwen3_5_text"
# Checks that meet a cut, a fork, a shared beginning or a failure; those of the rule alone are not the target's.
STATE_CHECKS = ("rollback", "prompts_in_any_pieces", "what_is_shared", "taps", "a_failed_step")


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    """Return the folder and the oracle of a family, which is made once."""
    made: dict[str, tuple[Path, Oracle]] = {}

    def of(name: str) -> tuple[Path, Oracle]:
        if name not in made:
            folder = tmp_path_factory.mktemp(name)
            save(small_model(name), folder)
            made[name] = folder, Oracle(folder)
        return made[name]

    return of


@pytest.mark.parametrize("check", EVERY_CHECK)
def test_linear_attention_conforms(check, folders) -> None:
    (CHECKS | BRANCH_CHECKS)[check](suite_of(*folders(FAMILY), page_size=4))


@pytest.mark.parametrize("check", ["every_tree_of_drafts", "what_is_shared", "rollback"])
def test_linear_attention_conforms_in_tiles(check, folders) -> None:
    (CHECKS | BRANCH_CHECKS)[check](suite_of(*folders(FAMILY), exact="tiles"))


# The hidden states by which the oracle judges taps begin after the first layer in Mamba's models.
@pytest.mark.parametrize(
    ("name", "check"),
    [
        (name, check)
        for name in ("lfm2", "mamba2", "mamba", "falcon_h1")
        for check in (*STATE_CHECKS, "every_tree_of_drafts")
        if check != "taps" or not name.startswith("mamba")
    ],
)
def test_other_states_conform(name, check, folders) -> None:
    (CHECKS | BRANCH_CHECKS)[check](suite_of(*folders(name)))


@pytest.mark.parametrize("name", [FAMILY, "lfm2", "mamba2", "mamba", "falcon_h1"])
def test_rows_keep_their_bits_beside_other_texts(name, folders) -> None:
    assert suite_of(*folders(name)).backend.facts.guarantee is Guarantee.BYTES


@pytest.fixture(scope="module")
def wide(tmp_path_factory):
    """Return a folder whose linear layers are whole vectors wide, so that texts share their calls, and its oracle."""
    folder = tmp_path_factory.mktemp("wide")
    heads = dict.fromkeys(("linear_num_value_heads", "linear_num_key_heads"), 16)
    save(small_model(FAMILY, **heads, linear_key_head_dim=16, linear_value_head_dim=16), folder)
    return folder, Oracle(folder)


@pytest.mark.parametrize("check", [*STATE_CHECKS, "ragged_company", "every_tree_of_drafts", "trees_in_ragged_company"])
def test_texts_that_share_calls_conform(check, wide) -> None:
    (CHECKS | BRANCH_CHECKS)[check](suite_of(*wide))


def test_texts_share_calls_and_rows_keep_their_bits(wide, monkeypatch) -> None:
    suite, texts = suite_of(*wide), set()
    chunk = recurrence._Chunked.chunk

    def counting(function: Any, known: Any, given: Any, state: Any) -> Any:
        texts.add(len(given["g"]))
        return chunk(function, known, given, state)

    monkeypatch.setattr(recurrence._Chunked, "chunk", counting)
    CHECKS["ragged_company"](suite)
    assert max(texts) > 2
    assert suite.backend.facts.guarantee is Guarantee.BYTES


@pytest.mark.parametrize("check", [*STATE_CHECKS, "ragged_company", "pages"])
def test_any_architecture_conforms_one_session_a_pass(check, folders) -> None:
    suite = suite_of(*folders("falcon"))
    assert not suite.backend.facts.verifies_branches
    CHECKS[check](suite)


def test_both_ways_write_the_same_texts(folders, monkeypatch) -> None:
    folder, oracle = folders(FAMILY)
    quick = suite_of(folder, oracle)
    monkeypatch.setattr(target_loading, "_kind", lambda _: OwnCacheTarget)
    slow = load_target(str(folder), kv_tokens=2048)
    assert isinstance(slow, OwnCacheTarget)
    for seed in range(4):
        sampling = Sampling(temperature=float(seed % 2), seed=seed, max_tokens=40)
        expected = Text(quick, quick.prompt(20), sampling)
        tokens = expected.write(40)
        drafted = DraftedText(expected.prompt, [*expected.prompt, *tokens], 0.6, sampling)
        write(TransformersBackend(slow), [drafted], at_once=1, vocab=VOCAB, seed=seed)
        assert drafted.equal


@pytest.mark.parametrize("calls", range(2, 7))
def test_nobody_finds_the_states_of_a_pass_that_failed_between_layers(calls, folders, monkeypatch) -> None:
    """Drafts have taken the text past a border, and the next pass moves some layers to it."""
    suite = suite_of(*folders(FAMILY))
    text = Text(suite, suite.prompt(2 * BORDER - 6), Sampling())
    text.advance(suite.drafts(text, 8, good=1.0))
    of_session, left = recurrence._of_session, calls

    def failing(*given: Any) -> Any:
        nonlocal left
        left -= 1
        if not left:
            raise RuntimeError("it happens once")
        return of_session(*given)

    monkeypatch.setattr(recurrence, "_of_session", failing)
    with pytest.raises(RuntimeError, match="once"):
        suite.backend.step([text.row()])
    assert text.sequence.length > 2 * BORDER, "it goes on from where it was"
    text.close()
    again = text.again()
    again.write(20)
    again.close()


# --- defects ---


def texts_of(folder: Path, oracle: Oracle, count: int = 6) -> list[DraftedText]:
    """Return greedy texts of a family, with prompts that begin alike."""
    suite = suite_of(folder, oracle)
    shared, texts = suite.prompt(2 * BORDER + 3), []
    for number in range(count):
        text = Text(suite, (*shared, *suite.prompt(1 + 9 * number)), Sampling())
        tokens = text.write(30)
        texts.append(DraftedText(text.prompt, [*text.prompt, *tokens], 0.6))
        text.close()
    return texts


def written_right(folder: Path, texts: list[DraftedText]) -> bool:
    """Return whether a target in `folder` writes `texts` under drafts, sent away and resumed, in company."""
    target = load_target(str(folder), kv_tokens=2048, exact="off")
    trying = copy.deepcopy(texts)
    write(TransformersBackend(target), trying, at_once=3, vocab=VOCAB, seed=5)
    return all(text.equal for text in trying)


def one_row_too_long(patch) -> None:
    """Keep the first draft that was not accepted."""
    patch.setattr(Tail, "before", lambda tail, end: tail.rows.part(0, min(len(tail.rows), end - tail.border + 1)))


def one_step_too_old(patch) -> None:
    """Go on from a border with the state of the one before it."""

    def move(tail: Tail, border: int, state: torch.Tensor) -> None:
        tail.border, tail.state = border, tail.state if tail.border else state

    patch.setattr(Tail, "move", move)


def shared_between_sessions(patch) -> None:
    """Have the state of a layer be that of whatever session came last."""
    newest: dict[int, torch.Tensor | None] = {}

    def move(tail: Tail, border: int, state: torch.Tensor) -> None:
        tail.border, tail.state = border, newest.get(border, state)
        newest[border] = state

    patch.setattr(Tail, "move", move)


def forgotten_at_a_fork(patch) -> None:
    """Begin with no state where others have read the text before."""
    patch.setattr(SessionStates, "at", classmethod(lambda states, start, _: states(start=start)))


def not_followed(patch) -> None:
    """Go on from the block where a branch was followed."""
    patch.setattr(SessionStates, "follow", lambda *_: None)


def copied_too_late(patch) -> None:
    """Copy a cache of transformers once drafts are in it."""
    keep = OwnCache.keep

    def late(own: OwnCache) -> None:
        keep(own)
        own.copy = own.held  # which grows in place

    patch.setattr(OwnCache, "keep", late)


@pytest.fixture(scope="module")
def expected(folders):
    """Return texts of families by name, written without drafts, sharing or a defect."""
    made: dict[str, list[DraftedText]] = {}
    return lambda name: made.get(name) or made.setdefault(name, texts_of(*folders(name)))


@pytest.mark.parametrize("name", [FAMILY, "lfm2", "falcon"])
def test_texts_are_right_under_drafts_in_company(name, folders, expected) -> None:
    assert written_right(folders(name)[0], expected(name))


@pytest.mark.parametrize(
    ("defect", "name"),
    [
        (one_row_too_long, FAMILY),
        (one_row_too_long, "lfm2"),
        (one_step_too_old, FAMILY),
        (shared_between_sessions, FAMILY),
        (forgotten_at_a_fork, FAMILY),
        (copied_too_late, "falcon"),
    ],
)
def test_a_planted_defect_changes_a_text(defect, name, folders, expected, monkeypatch) -> None:
    target = load_target(str(folders(name)[0]), kv_tokens=2048, exact="off")
    texts = copy.deepcopy(expected(name))
    defect(monkeypatch)
    try:
        write(TransformersBackend(target), texts, at_once=3, vocab=VOCAB, seed=5)
    except RuntimeError:
        return  # the arguments no longer fit
    assert not all(text.equal for text in texts)


def test_a_branch_that_is_not_followed_is_found(folders, monkeypatch) -> None:
    suite = suite_of(*folders(FAMILY))
    not_followed(monkeypatch)
    with pytest.raises((AssertionError, RuntimeError), match=r"scores|dimension"):
        BRANCH_CHECKS["every_tree_of_drafts"](suite)
