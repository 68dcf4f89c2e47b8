"""A commit's steering vector is the projection of what a plain model has there, however the step came about."""

from __future__ import annotations

import itertools
import logging
import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from collecting_outbox import CollectingOutbox
from random_models import save_random_model
from safetensors.torch import save_file

from outrider.cloud.serving.engine import Engine
from outrider.cloud.serving.slots import Owner
from outrider.cloud.target.projection import FoldedProjection, Projection
from outrider.cloud.target.steering_vectors import load_projections
from outrider.cloud.target.target import SessionRows, Target
from outrider.cloud.target.target_loading import load_target
from outrider.cloud.target.transformers_backend import TransformersBackend
from outrider.cloud.verifier_config import VerifierConfig
from outrider.proto import codec
from outrider.proto.errors import ConfigError, ModelRefused, NotFound
from outrider.proto.session.verifier import VerifierRules
from outrider.proto.steering_vector import decode
from outrider.proto.types import (
    Commit,
    Continue,
    Draft,
    DraftToken,
    Open,
    Opened,
    Patience,
    Report,
    Sampling,
    SteeringPrecision,
    SteeringRequest,
)

pytestmark = pytest.mark.usefixtures("all_drafts_pay")

VOCAB = 61
HIDDEN = 32
LAYERS = (1, 2, 4)  # of five
RANK = 12
K = 4  # drafts in a step
PROMPT = (5, 9, 11, 30, 7, 8, 41)  # read in chunks of 3
FOREVER = Patience(math.inf, 1000)
TEXT = Sampling(max_tokens=30, ignore_eos=True, temperature=1.0, seed=9)
CLOSE = 1e-4  # relative, of a ragged pass and a plain one in float32
SMALL = {
    "vocab_size": VOCAB, "hidden_size": HIDDEN, "intermediate_size": 48, "num_hidden_layers": 5,
    "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256, "bos_token_id": 1,
    "eos_token_id": 2, "pad_token_id": 0,
}  # fmt: skip
ARCHITECTURES = {
    "llama": SMALL,
    "qwen3": SMALL | {"head_dim": 8},
    "gemma2": SMALL | {"head_dim": 8, "sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "gpt2": {"vocab_size": VOCAB, "n_embd": HIDDEN, "n_layer": 5, "n_head": 4, "n_positions": 256, "eos_token_id": 2},
}


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """The folder of a tiny random model of each architecture, and the model as transformers runs it."""
    made: dict[str, tuple[Path, Any]] = {}

    def of(architecture: str) -> tuple[Path, Any]:
        if architecture not in made:
            folder = tmp_path_factory.mktemp(architecture)
            made[architecture] = folder, save_random_model(folder, architecture, **ARCHITECTURES[architecture])
        return made[architecture]

    return of


def text(seed: int, length: int = 40) -> tuple[int, ...]:
    return tuple(torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


@torch.inference_mode()
def plain(model: Any, tokens: tuple[int, ...], layers: tuple[int, ...] = LAYERS) -> torch.Tensor:
    """[length, taps * hidden] of the model's own forward."""
    states = model(input_ids=torch.tensor([tokens]), use_cache=False, output_hidden_states=True).hidden_states
    return torch.cat([states[layer][0] for layer in layers], dim=-1).float()


def off(got: torch.Tensor, wanted: torch.Tensor) -> float:
    return float((got - wanted).norm() / wanted.norm())


# === the target: what is tapped =================================================================================


@pytest.mark.parametrize("exact", ["auto", "tiles", "off"])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_taps_equal_the_plain_models_hidden_states_whatever_shares_the_step(architecture, exact, models):
    folder, model = models(architecture)
    target = load_target(str(folder), kv_tokens=512, page_size=4, exact=exact)
    target.tap(LAYERS)
    one, two, three = (text(seed) for seed in (1, 2, 3))
    a, b, c = (target.pool.allocate(44) for _ in range(3))
    wanted = [plain(model, tokens) for tokens in (one, two, three)]

    target.forward([SessionRows(a, one[:13], 2), SessionRows(b, two[:1], 1)])
    assert off(target.tapped([1, 2, 0]), torch.stack([wanted[0][12], wanted[1][0], wanted[0][11]])) < CLOSE
    target.forward([SessionRows(c, three[:5], 0)])
    target.forward([SessionRows(a, (4,) * 9, 9)])
    a.truncate(13)  # drafts that were wrong
    target.forward([SessionRows(b, two[1:19], 3), SessionRows(c, three[5:18], 0), SessionRows(a, one[13:18], 5)])
    got = target.tapped([2, 3, 7, 0])
    assert off(got, torch.stack([wanted[1][18], wanted[0][13], wanted[0][17], wanted[1][16]])) < CLOSE
    assert off(target.tapped([4]), wanted[0][13:14]) > 100 * CLOSE, "of a neighbour it is another"


def test_tapping_changes_no_logits_and_ends_when_others_are_tapped(models):
    folder, _ = models("llama")
    target, tapped = (load_target(str(folder), kv_tokens=64, page_size=4, packed=False) for _ in range(2))
    tapped.tap((0, 1))
    tapped.tap((3,))
    logits = [each.forward([SessionRows(each.pool.allocate(8), PROMPT, 3)]) for each in (target, tapped)]
    assert torch.equal(*logits)
    assert tapped.tapped([0]).shape == (1, HIDDEN)
    hooks = [len(layer._forward_pre_hooks) for layer in tapped.model.model.layers]
    assert hooks == [0, 0, 0, 1, 0]
    assert not any(len(layer._forward_pre_hooks) for layer in target.model.model.layers)


def test_a_layer_that_the_target_lacks_cannot_be_tapped(models):
    target = load_target(str(models("llama")[0]), kv_tokens=64, page_size=4)
    with pytest.raises(ModelRefused, match="layer 5") as caught:
        target.tap((1, 5))
    assert caught.value.field == "steering"


# === the engine: which state a commit's vector is of ==============================================================


ISOLATIONS = map(str, itertools.count())  # each session reads its own prompt


def trained(layers: tuple[int, ...], seed: int) -> Projection:
    """A projection with random weights."""
    torch.manual_seed(seed)
    projection = Projection(layers, HIDDEN, RANK, "tiny").requires_grad_(False)
    for parameter in projection.parameters():
        torch.nn.init.normal_(parameter)
    return projection


def test_a_folded_projection_gives_the_vectors_of_the_one_it_was_made_of():
    projection = trained(LAYERS, 5)
    taps = torch.randn(7, len(LAYERS) * HIDDEN) * torch.tensor([[1e-3], [1.0], [50.0], [1.0], [1e4], [0.0], [1.0]])
    vectors = FoldedProjection(projection, torch.device("cpu"))(taps)
    assert off(torch.from_numpy(np.stack(vectors)), projection(taps)) < 1e-5
    assert [vector.dtype for vector in vectors] == [np.float32] * 7


@pytest.fixture(scope="module")
def projections(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Projection]:
    """Two projections by id, of one target but of different layers, with random weights."""
    made = {}
    for seed, layers in ((1, LAYERS), (2, (0, 4))):
        projection = trained(layers, seed)
        path = tmp_path_factory.mktemp("projection") / "projection.safetensors"
        identity = projection.save(path)
        made[identity] = Projection.load(path)
    return made


@pytest.fixture(scope="module")
def engine(models: Any, projections: dict[str, Projection]) -> Any:
    target = load_target(str(models("llama")[0]), kv_tokens=2048, page_size=4)
    rules = VerifierRules("v", "tiny", target.tokenizer_sha256, VOCAB, 256, target.eos_tokens)
    engine = Engine(
        TransformersBackend(target), rules, VerifierConfig(threads=1, max_sessions=8, prefill_chunk=3), projections
    )
    engine.start()
    yield engine
    engine.stop()


@pytest.fixture
def asked(projections: dict[str, Projection]) -> SteeringRequest:
    return SteeringRequest(next(iter(projections)))


def opening(engine: Engine, session: str, **changes: Any) -> Open:
    frame = Open("tiny", engine.rules.tokenizer_sha256, PROMPT, TEXT, session, drafting=False)
    return replace(frame, **changes)


def begun(engine: Engine, key: int, frame: Open) -> CollectingOutbox:
    engine.post_open(key, frame, box := CollectingOutbox(), owner=Owner(isolation=next(ISOLATIONS)))
    return box


def whole(engine: Engine, key: int, frame: Open) -> tuple[Opened, list[Commit]]:
    box = begun(engine, key, frame)
    opened, commits = box.opened(), box.rest()
    engine.post_close(key)
    return opened, commits


def tokens_of(commits: list[Commit]) -> tuple[int, ...]:
    return tuple(token.id for commit in commits for token in commit.tokens)


def vectors_off(
    model: Any, projection: Projection, start: tuple[int, ...], commits: list[Commit], shift: int = 0
) -> list[Any]:
    """Return the distance of each commit's vector from that of the plain model's state `shift` positions too late.

    The unit is a step of its rounding beyond what float32 leaves; None: the commit has no vector.
    """
    states = plain(model, (*start, *tokens_of(commits)), projection.layers)
    with torch.inference_mode():
        wanted = projection(states).numpy()
    found: list[float | None] = []
    for commit in commits:
        if commit.steering is None:
            found.append(None)
            continue
        right = wanted[commit.start + len(commit.tokens) - 2 + shift]
        got = decode(commit.steering, RANK)
        if commit.steering.precision is SteeringPrecision.INT8:
            rounding = np.full(RANK, commit.steering.scale / 2)
        else:
            rounding = 2.0**-11 * np.abs(right) + 1e-7
        found.append(float((np.abs(got - right) / (rounding + CLOSE * np.abs(wanted).max())).max()))
    return found


@pytest.mark.parametrize("precision", SteeringPrecision)
def test_the_vector_is_of_the_newest_valid_state_however_many_drafts_are_accepted(
    precision, engine, models, projections, asked
):
    _, expected = whole(engine, 1, opening(engine, "plain"))
    right = tokens_of(expected)
    asks = {"drafting": True, "patience": FOREVER, "steering": replace(asked, precision=precision)}
    box = begun(engine, 2, opening(engine, "drafted", **asks))
    assert box.opened().steered
    commits = [box.commit()]  # the prompt's own step waits for nobody
    for chain, agreed in enumerate((*range(K + 1), 2, 0)):
        done = len(tokens_of(commits))
        ahead = [*right[done : done + agreed], *((token + 1) % VOCAB for token in right[done + agreed : done + K])]
        engine.post_frame(
            2, Draft(chain, len(PROMPT) + done, tuple(map(DraftToken, tuple(ahead))), complete=True), lambda: None
        )
        commits.append(box.commit())
    engine.post_close(2)
    assert [commit.accepted for commit in commits] == [0, *range(K + 1), 2, 0]
    assert all(commit.verified == K for commit in commits[1:])
    assert all(commit.steering.precision is precision for commit in commits)
    model, projection = models("llama")[1], projections[asked.projection]
    assert max(vectors_off(model, projection, PROMPT, commits)) <= 1
    for shift in (-1, 1):
        wrong = vectors_off(model, projection, PROMPT, commits[:-1], shift)
        assert min(wrong) > 2, "of the position beside it would show"


def test_among_sessions_that_share_steps_only_those_that_ask_get_vectors(engine, models, projections):
    one, two = projections
    requests = {
        "one": SteeringRequest(one),
        "none": None,
        "two": SteeringRequest(two, SteeringPrecision.FLOAT16),
        "unknown": SteeringRequest("0" * 12),
        "seldom": SteeringRequest(one, every=3),
        "off": SteeringRequest(two, every=0),
    }
    boxes = {
        name: begun(engine, key, opening(engine, name, prompt=(key + 3, *PROMPT), steering=request))
        for key, (name, request) in enumerate(requests.items())
    }
    steered = {name: box.opened().steered for name, box in boxes.items()}
    commits = {name: box.rest() for name, box in boxes.items()}
    for key in range(len(boxes)):
        engine.post_close(key)
    assert steered == {"one": True, "none": False, "two": True, "unknown": False, "seldom": True, "off": True}
    with_vector = {name: [i for i, c in enumerate(cs) if c.steering is not None] for name, cs in commits.items()}
    last = TEXT.max_tokens - 1
    every = list(range(last))
    assert with_vector == {"one": every, "none": [], "two": every, "unknown": [], "seldom": every[::3], "off": []}
    for key, (name, box_request) in enumerate(requests.items()):
        if with_vector[name]:
            found = vectors_off(
                models("llama")[1], projections[box_request.projection], (key + 3, *PROMPT), commits[name]
            )
            assert max(value for value in found if value is not None) <= 1, name


def without_measurements(commit: Commit) -> bytes:
    """The frame's bytes, without what is measured."""
    return codec.encode_cloud_frame(replace(commit, timing=type(commit.timing)()))


def test_steering_changes_neither_the_text_nor_anything_else_in_a_commit(engine, asked):
    _, plain_commits = whole(engine, 1, opening(engine, "same"))
    opened, steered = whole(engine, 1, opening(engine, "same", steering=asked))
    assert opened.steered
    assert all(commit.steering is not None for commit in steered[:-1])
    stripped = [replace(commit, steering=None) for commit in steered]
    assert [*map(without_measurements, stripped)] == [*map(without_measurements, plain_commits)]


def test_a_request_may_change_by_report_and_stays_in_the_next_turn(engine, models, projections):
    one, two = projections
    few = replace(TEXT, max_tokens=4)
    frame = opening(engine, "turns", sampling=few, drafting=True, patience=FOREVER, keep_s=60.0)
    box = begun(engine, 1, replace(frame, steering=SteeringRequest(one)))
    box.opened()
    commits = [box.commit()]
    engine.post_frame(1, Report(False, steering=SteeringRequest(two, SteeringPrecision.FLOAT16)), lambda: None)
    commits += box.rest()
    engine.post_frame(1, Continue(len(PROMPT) + 4, (3, 4), few, chain=1), lambda: None)
    later = box.rest()
    engine.post_close(1)
    first, second, last = commits[0], commits[1:-1], commits[-1]
    model = models("llama")[1]
    assert vectors_off(model, projections[one], PROMPT, [first]) <= [1]
    states = vectors_off(model, projections[two], PROMPT, commits)[1:-1]
    assert all(commit.steering.precision is SteeringPrecision.FLOAT16 for commit in second)
    assert max(states) <= 1
    assert last.steering is None
    found = vectors_off(model, projections[two], (*PROMPT, *tokens_of(commits), 3, 4), later)
    assert found.pop() is None
    assert max(found) <= 1


def test_a_projection_that_fails_or_gives_no_numbers_costs_its_vectors_and_no_text(engine, asked, monkeypatch, caplog):
    _, expected = whole(engine, 1, opening(engine, "fails"))
    right = FoldedProjection.__call__

    def fails(self: FoldedProjection, taps: torch.Tensor) -> list[np.ndarray]:
        raise RuntimeError("out of memory, say\nand more")

    def overflows(self: FoldedProjection, taps: torch.Tensor) -> list[np.ndarray]:
        return right(self, taps * math.inf)

    for call in (fails, overflows):
        with monkeypatch.context() as patch, caplog.at_level(logging.WARNING):
            patch.setattr(FoldedProjection, "__call__", call)
            opened, commits = whole(engine, 1, opening(engine, "fails", steering=asked))
        assert opened.steered
        assert tokens_of(commits) == tokens_of(expected)
        assert all(commit.steering is None for commit in commits)
    assert "out of memory, say" in caplog.text
    assert "not finite" in caplog.text


def test_a_step_without_requests_projects_nothing(engine, projections, monkeypatch):
    def must_not_run(*_: Any) -> None:
        raise AssertionError("computed for nobody")

    monkeypatch.setattr(FoldedProjection, "__call__", must_not_run)
    monkeypatch.setattr(Target, "tapped", must_not_run)
    _, commits = whole(engine, 1, opening(engine, "nobody", steering=SteeringRequest(next(iter(projections)), every=0)))
    assert len(tokens_of(commits)) == TEXT.max_tokens


def test_sessions_that_ask_for_one_projection_share_one_batch_of_it(engine, asked, monkeypatch):
    sizes: list[int] = []
    right = FoldedProjection.__call__

    def counted(self: FoldedProjection, taps: torch.Tensor) -> list[np.ndarray]:
        sizes.append(len(taps))
        return right(self, taps)

    monkeypatch.setattr(FoldedProjection, "__call__", counted)
    boxes = [begun(engine, key, opening(engine, f"batch{key}", steering=asked)) for key in range(4)]
    for key, box in enumerate(boxes):
        box.opened()
        assert all(commit.steering is not None for commit in box.rest()[:-1])
        engine.post_close(key)
    assert max(sizes) == 4


def test_what_is_sent_is_counted(engine, asked):
    def counted(what: str) -> float:
        whose = {"model_name": engine.rules.model, "verifier": engine.rules.name}
        return engine.metrics.registry.get_sample_value(f"outrider:verifier_steering_{what}_total", whose)

    before = counted("vectors"), counted("bytes")
    whole(engine, 1, opening(engine, "counted", steering=replace(asked, precision=SteeringPrecision.FLOAT16)))
    vectors = TEXT.max_tokens - 1
    assert (counted("vectors") - before[0], counted("bytes") - before[1]) == (vectors, 2 * RANK * vectors)


# === loading ====================================================================================================


@pytest.fixture(scope="module")
def target(models: Any) -> Any:
    return load_target(str(models("llama")[0]), kv_tokens=64, page_size=4)


def saved(folder: Path, *, layers: tuple[int, ...] = LAYERS, hidden: int = HIDDEN, trained_for: str = "tiny") -> str:
    folder.mkdir(parents=True, exist_ok=True)
    return Projection(layers, hidden, RANK, trained_for).save(folder / "projection.safetensors")


def load(target: Any, *paths: Path, embedded: Path, name: str = "a/folder", model: str = "tiny") -> list[str]:
    return list(
        load_projections(
            [*map(str, paths)], TransformersBackend(target).facts, name=name, model=model, embedded=embedded
        )
    )


def test_a_file_and_a_folder_are_taken_and_named_by_what_they_hold(target, tmp_path):
    one, two = saved(tmp_path / "one"), saved(tmp_path / "two", layers=(0, 3))
    paths = (tmp_path / "one", tmp_path / "two" / "projection.safetensors", tmp_path / "one")
    assert load(target, *paths, embedded=tmp_path / "none") == [one, two]


def test_those_of_embedded_drafters_come_by_themselves_for_their_own_target(target, tmp_path):
    mine = saved(tmp_path / "one", trained_for="mine")
    saved(tmp_path / "two", trained_for="another", hidden=48)
    assert load(target, embedded=tmp_path, name="mine") == [mine]
    assert load(target, embedded=tmp_path, name="nobody's") == []


def test_one_trained_for_another_target_is_taken_with_a_warning_if_it_fits(target, tmp_path, caplog):
    saved(tmp_path / "one", trained_for="another")
    with caplog.at_level(logging.WARNING):
        assert len(load(target, tmp_path / "one", embedded=tmp_path / "none")) == 1
    assert "another" in caplog.text
    caplog.clear()
    saved(tmp_path / "two", trained_for="tiny")
    saved(tmp_path / "three", trained_for="a/folder")
    load(target, tmp_path / "two", tmp_path / "three", embedded=tmp_path / "none")
    assert not caplog.records


@pytest.mark.parametrize(
    ("make", "kind", "says"),
    [
        (lambda it: saved(it, hidden=48), ModelRefused, "residual stream of 48, the target's has 32"),
        (lambda it: saved(it, layers=(1, 2, 5)), ModelRefused, "taps layers 1, 2, 5; the target has layers 0 to 4"),
        (lambda it: saved(it, layers=(-1, 2)), ModelRefused, "taps layers -1, 2; the target has layers 0 to 4"),
        (lambda it: save_file({"a": torch.zeros(1)}, it), ModelRefused, ""),
        (Path.mkdir, NotFound, "train steer"),
        (lambda it: None, NotFound, "train steer"),
    ],
    ids=["hidden", "layers", "layer below", "no projection", "empty", "nowhere"],
)
def test_one_that_does_not_fit_the_target_or_is_none_is_refused_in_one_line(make, kind, says, target, tmp_path):
    make(tmp_path / "one")
    with pytest.raises(kind) as caught:
        load(target, tmp_path / "one", embedded=tmp_path / "none")
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)
    assert caught.value.field == "steering"


@pytest.mark.parametrize("paths", ["projection.safetensors", ("",)])
def test_a_config_that_names_no_paths_is_refused(paths):
    with pytest.raises(ConfigError) as caught:
        VerifierConfig(steering=paths)
    assert caught.value.field == "steering"
