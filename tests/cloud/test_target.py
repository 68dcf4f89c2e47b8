"""Any decoder-only architecture on ragged batches over the paged cache, against transformers' own plain forward."""

from __future__ import annotations

import itertools
import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from random_models import VOCAB, architectures, save_random_model
from transformers import LlamaConfig, MistralConfig, MistralForCausalLM

from outrider.cloud.models.family_index import embedded_targets
from outrider.cloud.target import chunked_attention, kv_size
from outrider.cloud.target.architecture import check_architecture, check_positions
from outrider.cloud.target.attention import RaggedBatch
from outrider.cloud.target.chunked_attention import ChunkedBatch
from outrider.cloud.target.kv_size import CPU_SHARE, available_bytes, bytes_per_token, kv_tokens_by_memory
from outrider.cloud.target.packed_linear import PACKED_ROWS
from outrider.cloud.target.target import FREE, ROUNDED, TILES, TOGETHER, SessionRows, Target
from outrider.cloud.target.target_loading import load_target
from outrider.cloud.testing import save_tiny_target, tiny_llama
from outrider.proto.errors import ModelRefused, NotFound
from outrider.proto.testing import word_tokenizer
from outrider.proto.tokenizer import tokenizer_hash
from outrider.proto.types import Guarantee

ARCHITECTURES = architectures(positions=128)


def save_model(folder, architecture, **changes):
    return save_random_model(folder, architecture, **(ARCHITECTURES[architecture] | changes))


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}

    def folder_of(architecture):
        if architecture not in made:
            folder = tmp_path_factory.mktemp(architecture)
            made[architecture] = folder, save_model(folder, architecture)
        return made[architecture]

    return folder_of


def load(folder, **changes):
    return load_target(str(folder), **({"kv_tokens": 512, "page_size": 4} | changes))


def text(seed, length=40):
    return tuple(torch.randint(3, VOCAB, (length,), generator=torch.Generator().manual_seed(seed)).tolist())


@torch.inference_mode()
def plain(model, tokens):
    """[length, vocab] of the model's own forward."""
    return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_interleaved_sessions_in_uneven_truncated_chunks_equal_the_plain_forward(architecture, folders):
    folder, model = folders(architecture)
    target = load(folder)
    one, two = text(1), text(2)
    a, b = target.pool.allocate(44), target.pool.allocate(44)
    got_one, got_two = [], []
    got_one.append(target.forward([SessionRows(a, one[:13], 13)]))
    first = target.forward([SessionRows(a, (5, 6, 7, 8), 1), SessionRows(b, two[:1], 1)])  # drafts that will be wrong
    got_two.append(first[1:])
    a.truncate(13)
    both = target.forward([SessionRows(b, two[1:18], 17), SessionRows(a, one[13:14], 1)])
    got_two.append(both[:17])
    got_one.append(both[17:])
    target.forward([SessionRows(b, (9,) * 12, 0)])
    b.truncate(18)
    both = target.forward([SessionRows(a, one[14:], 26), SessionRows(b, two[18:], 22)])
    got_one.append(both[:26])
    got_two.append(both[26:])
    scale = 1e-5 * max(1.0, float(plain(model, one).abs().max()))
    assert (torch.cat(got_one) - plain(model, one)).abs().max() < scale
    assert (torch.cat(got_two) - plain(model, two)).abs().max() < scale


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gemma3_text"])
def test_the_sliding_window_matters_to_this_test_at_all(architecture, folders):
    _, model = folders(architecture)
    tokens = text(1)
    other = (tokens[0] % 90 + 4, *tokens[1:])
    changed = (plain(model, tokens) - plain(model, other)).abs().amax(dim=-1)
    assert changed[:8].max() > 1e-3
    assert len(tokens) > 3 * 8, "texts are longer than the window"


# === a row's bits ================================================================================================


def of_one_session(target, tokens, seed, kept):
    """[kept, vocab] of the last tokens: in random pieces, beside random rows of random others, on pages far apart."""
    rng = random.Random(seed)
    cache, others = target.pool.allocate(1), [target.pool.allocate(1) for _ in range(3)]
    got, at = [], 0
    while at < len(tokens):
        piece = tokens[at : at + rng.choice((1, 1, 2, 3, 5, 8, 17, 40, 64))]
        at += len(piece)
        batch = []
        for other in rng.sample(others, rng.randint(0, 3)):
            count = rng.choice((1, 1, 3, 6, 20))
            if other.length + count > 60:
                other.truncate(rng.randint(0, 20))
            target.pool.resize(other, other.length + count)
            batch.append(SessionRows(other, tokens[:count], rng.randint(0, count)))
        target.pool.resize(cache, at)
        mine = rng.randint(0, len(batch))
        batch.insert(mine, SessionRows(cache, piece, min(len(piece), max(0, at - len(tokens) + kept))))
        logits, before = target.forward(batch), sum(each.wanted for each in batch[:mine])
        got.append(logits[before : before + batch[mine].wanted])
        if rng.random() < 0.3:  # drafts that were wrong
            drafts = rng.randint(1, 4)
            target.pool.resize(cache, at + drafts)
            target.forward([SessionRows(cache, (7,) * drafts, drafts)])
            cache.truncate(at)
    for each in (cache, *others):
        target.pool.release(each)
    return torch.cat(got)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", [*ARCHITECTURES, *embedded_targets()])
def test_a_row_has_the_same_bits_in_any_pieces_and_company(architecture, dtype, folders, shared_target):
    embedded = architecture in embedded_targets()
    if embedded:
        target = shared_target(architecture, dtype=dtype, kv_tokens=2048)
    else:
        target = load(folders(architecture)[0], dtype=dtype, kv_tokens=2048)
    assert target.passes.guarantee in (Guarantee.BYTES, Guarantee.BYTES_BY_TILES)  # without instructions for bfloat16
    tokens = text(5, 300 if embedded else 120)
    alone = torch.cat(list(in_pieces(target, tokens, [len(tokens)])))[-60:]
    if not embedded and dtype == "float32":  # of more rows than are folded into their key heads
        expected = plain(folders(architecture)[1], tokens)
        assert (alone - expected[-60:]).abs().max() < 1e-5 * max(1.0, float(expected.abs().max()))
    for seed in range(1 if embedded else 2):
        assert torch.equal(of_one_session(target, tokens, seed, 60), alone)


def in_pieces(target, tokens, sizes):
    cache, at = target.pool.allocate(len(tokens)), 0
    for size in sizes:
        yield target.forward([SessionRows(cache, tokens[at : at + size], size)])
        at += size
    target.pool.release(cache)


OTHER_PROCESS = """
import sys, numpy, torch
from outrider.cloud.target.target import SessionRows
from outrider.cloud.target.target_loading import load_target
for dtype in ("float32", "bfloat16"):
    target = load_target(sys.argv[1], dtype=dtype, kv_tokens=512)
    cache = target.pool.allocate(40)
    for token in range(3, 43):
        logits = target.forward([SessionRows(cache, (token,), 1)])
    print(logits.numpy().tobytes().hex())
"""


def test_another_process_computes_the_same_bits(folders):
    folder = folders("qwen3")[0]
    run = subprocess.run([sys.executable, "-c", OTHER_PROCESS, folder], capture_output=True, text=True, check=True)
    here = []
    for dtype in ("float32", "bfloat16"):
        target = load(folder, dtype=dtype, page_size=16)
        (logits,) = in_pieces(target, tuple(range(3, 43)), [40])
        here.append(logits[-1].numpy().tobytes().hex())
    assert run.stdout.split() == here


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", *embedded_targets()])
def test_rows_in_tiles_have_the_same_bits_in_any_pieces_and_company(architecture, dtype, folders):
    source = architecture if architecture in embedded_targets() else folders(architecture)[0]
    target = load(source, dtype=dtype, exact="tiles")
    assert target.passes == TILES
    tokens = text(5)
    alone = torch.cat(list(in_pieces(target, tokens, [len(tokens)])))
    assert torch.equal(of_one_session(target, tokens, 1, len(tokens)), alone)


def unlike_itself(rows_differ):
    """An embedding whose rows have other bits where `rows_differ` of the number of rows."""
    right = torch.nn.Embedding.forward  # in float32, in which an architecture is judged, all rows are right

    def forward(self, tokens):
        rows = right(self, tokens)
        if rows.dtype == torch.float32:
            return rows
        return rows + (torch.arange(rows.shape[-1]) == 1).to(rows.dtype) * (2**-9 * rows_differ(rows.shape[-2]))

    return forward


def need_products_that_keep_bits(folder, dtype="float32"):
    """Skip where this processor's own products look at the number of rows, beside which nothing planted can be told."""
    if load(folder, dtype=dtype, straight=False).packing.row_multiple != 1:
        pytest.skip("needs a processor whose products give a row the same bits beside any others")


@pytest.mark.parametrize(
    ("rows_differ", "passes"),
    [
        (lambda _: False, TOGETHER[0]),
        (lambda rows: rows < 4, TOGETHER[0]),  # a pass of packed products has four at least
        (lambda rows: rows % 2 > 0, TOGETHER[1]),
        (lambda rows: rows % 4 > 0, TOGETHER[2]),
        (lambda rows: rows % 8 > 0, TOGETHER[3]),
        (lambda rows: rows > 16, TILES),
        (lambda rows: rows >= 60, TILES),
    ],
    ids=["never", "below four", "not in twos", "not in fours", "not in eights", "in more than a tile", "in a crowd"],
)
def test_the_check_finds_passes_that_keep_a_rows_bits(rows_differ, passes, folders, monkeypatch):
    folder, _ = folders("llama")
    need_products_that_keep_bits(folder, "bfloat16")
    monkeypatch.setattr(torch.nn.Embedding, "forward", unlike_itself(rows_differ))
    assert load(folder, dtype="bfloat16", straight=False).passes == passes


def test_rows_that_fill_up_a_pass_attend_to_nothing_and_change_nothing(folders, monkeypatch):
    target = load(folders("llama")[0])
    attended = []
    for kind in (RaggedBatch, ChunkedBatch):
        attend = kind.attend

        def counted(self, layer, query, *others, attend=attend):
            seen = attend(self, layer, query, *others)
            attended.append((query.shape[2], seen.shape[1]))
            return seen

        monkeypatch.setattr(kind, "attend", counted)
    tokens = text(7)
    (whole,) = in_pieces(target, tokens, [len(tokens)])
    attended.clear()
    singly = torch.cat(list(in_pieces(target, tokens, [1] * len(tokens))))
    assert set(attended) == {(PACKED_ROWS, 1)}
    assert torch.equal(singly, whole)


@pytest.mark.parametrize(
    ("dtype", "threads", "expected"), [("float32", 2, TOGETHER), ("bfloat16", 1, TOGETHER), ("bfloat16", 2, ROUNDED)]
)
def test_sessions_share_no_calls_where_attention_looks_at_the_work_of_a_thread(
    dtype, threads, expected, folders, monkeypatch
):
    """In bfloat16 and two threads a text of 1,800 tokens had other bits beside seven others."""
    need_products_that_keep_bits(folders("llama")[0], dtype)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    assert load(folders("llama")[0], dtype=dtype, straight=False).passes in expected


def test_without_passes_that_keep_bits_only_the_distribution_is_promised(folders, monkeypatch, caplog):
    calls = itertools.count()
    monkeypatch.setattr(torch.nn.Embedding, "forward", unlike_itself(lambda _: next(calls) % 2))
    assert load(folders("llama")[0], dtype="bfloat16", straight=False).passes == FREE
    assert "not even in tiles" in caplog.text


@pytest.mark.parametrize("keys_above", [0, 400], ids=["at once", "far into a text"])
def test_attention_that_looks_at_the_number_of_rows_is_found(keys_above, tmp_path, monkeypatch):
    save_model(tmp_path, "llama", max_position_embeddings=512)
    need_products_that_keep_bits(tmp_path)
    right = torch.nn.functional.scaled_dot_product_attention

    def uneven(query, keys, *rest, **options):
        return right(query, keys, *rest, **options) * (1 + 2**-16 * (query.shape[2] > 4 and keys.shape[2] > keys_above))

    target = load(tmp_path, kv_tokens=2048)
    target.passes = ROUNDED[0]
    assert target.keeps_bits()
    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", uneven)
    monkeypatch.setattr(chunked_attention, "_attend", kernel_that_differs(lambda query: query.shape[2] > 4))
    assert not target.keeps_bits()
    assert load(tmp_path, kv_tokens=2048).passes == TILES


def kernel_that_differs(differs):
    """Attention of many sessions whose results have other bits where `differs` of the queries."""
    right = chunked_attention._attend

    def attend(query, *rest):
        results, sums = right(query, *rest)
        return results * (1 + 2**-16 * differs(query)), sums

    return attend


@pytest.mark.parametrize("entries", [1, 7])
def test_attention_that_looks_at_other_sessions_falls_back_to_calls_of_each_session(entries, folders, monkeypatch):
    need_products_that_keep_bits(folders("llama")[0])
    monkeypatch.setattr(chunked_attention, "_attend", kernel_that_differs(lambda query: len(query) > entries))
    assert load(folders("llama")[0], kv_tokens=2048).passes == ROUNDED[0]


def count_masked_keys(monkeypatch):
    """Plant kernels that add otherwise for other numbers of keys, masked ones too, as those of many machines do."""
    of_session, of_chunks = torch.nn.functional.scaled_dot_product_attention, chunked_attention._attend

    def changed(results, keys):
        return results * (1 + 2**-11 * keys.shape[-2])

    def attend(query, keys, *rest, **options):
        return changed(of_session(query, keys, *rest, **options), keys)

    def attend_to_chunks(query, keys, *rest):
        results, sums = of_chunks(query, keys, *rest)
        return changed(results, keys), sums

    monkeypatch.setattr(torch.nn.functional, "scaled_dot_product_attention", attend)
    monkeypatch.setattr(chunked_attention, "_attend", attend_to_chunks)


def test_attention_in_other_blocks_changes_bits(monkeypatch, shared_target):
    """The control of the equalities above, in which a row's number of keys follows from its position."""
    target = shared_target("reference", kv_tokens=2048)
    count_masked_keys(monkeypatch)
    target.passes = replace(target.passes, chunk=0, block=16)
    assert target.keeps_bits()
    target.passes = replace(target.passes, block=512)
    assert not target.keeps_bits()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_more_keys_for_the_company_alone_change_bits(dtype, monkeypatch, shared_target):
    """The control of chunks whose length follows from the position: masked keys are not without effect."""
    target = shared_target("reference", dtype=dtype, kv_tokens=2048)
    count_masked_keys(monkeypatch)
    target.passes = replace(target.passes, block=chunked_attention.ROWS, chunk=chunked_attention.CHUNK)
    assert target.keeps_bits()
    right = chunked_attention._layout

    def padded(blocks, *rest):
        size = max(block.last for block in blocks)
        return right(tuple(block._replace(last=size) for block in blocks), *rest)

    monkeypatch.setattr(chunked_attention, "_layout", padded)
    assert not target.keeps_bits()


def test_what_a_last_owner_left_on_a_page_reaches_no_row(folders):
    target = load(folders("llama")[0], kv_tokens=64, page_size=16)
    tokens = text(3, 20)
    (expected,) = in_pieces(target, tokens, [20])
    whole = target.pool.allocate(64)
    for layer in target.pool.layers:
        rest = torch.full((64, 2, 8), float("nan"))
        with torch.inference_mode():
            target.pool.write(layer, whole.slots, rest, rest)
    target.pool.release(whole)
    (got,) = in_pieces(target, tokens, [20])
    assert torch.equal(got, expected)


def test_a_cache_too_small_for_the_check_is_said_to_be(folders, caplog):
    target = load(folders("llama")[0], kv_tokens=16, page_size=16)
    assert target.passes == FREE
    assert "too small" in caplog.text


def test_what_a_loaded_target_says_of_itself(folders, tmp_path):
    target = load(folders("llama")[0], context_length=100)
    assert (target.vocab_size, target.context_length, target.eos_tokens) == (VOCAB, 100, frozenset({2}))
    assert target.tokenizer_sha256 == tokenizer_hash(word_tokenizer(VOCAB))
    assert load(folders("llama")[0], context_length=999).context_length == 128
    assert load(folders("llama")[0], kv_tokens=64).context_length == 64
    save_model(tmp_path, "llama", eos_token_id=[2, 5])
    assert load(tmp_path).eos_tokens == frozenset({2, 5})


def pickle_weights(folder):
    (folder / "model.safetensors").unlink()
    torch.save({}, folder / "pytorch_model.bin")


def cut_weights(folder):
    weights = folder / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:2000])


def remove_tokenizer(folder):
    (folder / "tokenizer.json").unlink()


def scale_rope_by_length(folder):
    config = json.loads((folder / "config.json").read_text())
    rope = {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}
    (folder / "config.json").write_text(json.dumps(config | {"rope_parameters": rope}))


@pytest.mark.parametrize(
    ("spoil", "kinds", "says"),
    [
        (pickle_weights, ModelRefused, "safetensors"),
        (cut_weights, ModelRefused, "damaged or cut off"),
        (remove_tokenizer, (NotFound, ModelRefused), "tokenizer"),
        (scale_rope_by_length, ModelRefused, "shares a step"),
    ],
)
def test_a_folder_that_is_unsafe_or_not_whole_is_refused(spoil, kinds, says, tmp_path):
    save_model(tmp_path, "llama")
    spoil(tmp_path)
    with pytest.raises(kinds, match=says) as caught:
        load(tmp_path)
    assert caught.value.field == "target"


def test_remote_code_is_refused_and_never_run(tmp_path):
    save_model(tmp_path, "llama")
    config = json.loads((tmp_path / "config.json").read_text())
    config["model_type"] = "nobody-knows-this"
    config["auto_map"] = {"AutoConfig": "evil.Config", "AutoModelForCausalLM": "evil.Model"}
    (tmp_path / "config.json").write_text(json.dumps(config))
    (tmp_path / "evil.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w').close()\n")
    with pytest.raises(ModelRefused) as caught:
        load(tmp_path)
    assert caught.value.field == "target"
    assert not (tmp_path / "ran").exists()


def test_an_architecture_that_ignores_the_cache_is_refused(folders, monkeypatch):
    target = load(folders("llama")[0])
    right = target.model_pass

    def one_position_too_far(tokens, positions, wanted, batch):
        logits, *_ = right(tokens, positions, wanted, batch)
        return (logits + 1.0 * (batch.spans[0].start > 0),)

    monkeypatch.setattr(target, "model_pass", one_position_too_far)
    with pytest.raises(ModelRefused, match="differs"):
        target.check()


# === the KV cache's size by memory ===================================================================================


CONFIG = LlamaConfig(num_hidden_layers=3, num_attention_heads=8, num_key_value_heads=2, hidden_size=64)
CPU = torch.device("cpu")


def machine(folder: Path, available_kib: int, limit: str = "", used: int = 0) -> tuple[Path, Path]:
    (folder / "meminfo").write_text(f"MemTotal: 999999 kB\nMemAvailable:   {available_kib} kB\nBuffers: 1 kB\n")
    if limit:
        (folder / "memory.max").write_text(f"{limit}\n")
        (folder / "memory.current").write_text(f"{used}\n")
    return folder / "meminfo", folder


@pytest.mark.parametrize(
    ("limit", "used", "expected"),
    [("", 0, 1 << 20), ("max", 5, 1 << 20), ("300000", 100000, 200000), ("5000", 6000, 0), ("99999999", 1, 1 << 20)],
)
def test_a_container_takes_no_more_than_its_limit(tmp_path, limit, used, expected) -> None:
    assert available_bytes(*machine(tmp_path, 1024, limit, used)) == expected


def test_a_position_takes_keys_and_values_of_every_layer() -> None:
    assert bytes_per_token(CONFIG, torch.bfloat16) == 2 * 3 * 2 * 8 * 2
    assert bytes_per_token(CONFIG, torch.float32) == 2 * 3 * 2 * 8 * 4


def test_the_cache_takes_a_share_of_memory_and_no_more_than_can_be_of_use(monkeypatch) -> None:
    monkeypatch.setattr(kv_size, "available_bytes", lambda: 384 * 1000)
    assert kv_tokens_by_memory(CONFIG, torch.float32, CPU, 10**9) == int(1000 * CPU_SHARE)
    assert kv_tokens_by_memory(CONFIG, torch.float32, CPU, 100) == 100


def test_too_little_memory_is_refused_with_the_field(monkeypatch) -> None:
    monkeypatch.setattr(kv_size, "available_bytes", lambda: 384)
    with pytest.raises(ModelRefused, match="kv_tokens"):
        kv_tokens_by_memory(CONFIG, torch.float32, CPU, 10**9)


def test_more_positions_than_memory_are_refused_at_load(tmp_path) -> None:
    folder = str(save_tiny_target(tmp_path))
    with pytest.raises(ModelRefused, match="GiB of memory are left") as caught:
        load_target(folder, kv_tokens=1 << 40)
    assert caught.value.field == "kv_tokens"


def test_a_target_gets_what_its_sessions_can_fill(tmp_path) -> None:
    target = load_target(str(save_tiny_target(tmp_path)), max_sessions=3, context_length=64)
    assert target.pool.page_count * target.pool.page_size == 3 * 64


# === targets that are refused before they serve ======================================================================


SMALL = {
    "vocab_size": 97, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "max_position_embeddings": 128, "eos_token_id": 1,
}  # fmt: skip
ROPE: dict[str, dict[str, Any]] = {
    "dynamic": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0},
    "longrope": {
        "rope_type": "longrope",
        "factor": 4.0,
        "rope_theta": 10000.0,
        "short_factor": [1.0] * 4,
        "long_factor": [4.0] * 4,
        "original_max_position_embeddings": 32,
    },
}


def tiny(**config: Any) -> Any:
    return tiny_llama(seed=0, **(SMALL | config))


@pytest.mark.parametrize("kind", ROPE)
def test_rope_that_depends_on_what_shares_a_step_is_refused(kind) -> None:
    with pytest.raises(ModelRefused, match=kind):
        check_positions(tiny(rope_parameters=ROPE[kind]).config)


def test_chunked_attention_is_refused() -> None:
    model = tiny()
    model.config.attention_chunk_size = 64
    with pytest.raises(ModelRefused, match="chunked"):
        check_architecture(model)


def test_a_model_that_returns_rows_that_are_not_wanted_is_refused() -> None:
    model = tiny()
    forward = model.forward
    model.forward = lambda logits_to_keep=0, **given: forward(**given)
    with pytest.raises(ModelRefused, match="differs from the model's own"):
        check_architecture(model)


def test_linear_rope_is_accepted_and_agrees() -> None:
    rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
    Target(tiny(rope_parameters=rope), '{"model": {}}', kv_tokens=256, page_size=4).check()


@pytest.mark.parametrize(("passes", "batch"), [(FREE, RaggedBatch), (TOGETHER[0], ChunkedBatch)])
def test_the_check_goes_beyond_a_sliding_window(passes, batch, monkeypatch) -> None:
    model = MistralForCausalLM(MistralConfig(**SMALL, sliding_window=60))
    target = Target(model.eval(), '{"model": {}}', kv_tokens=256, page_size=4)
    target.passes = passes
    target.check()
    attend = batch.attend
    monkeypatch.setattr(batch, "attend", lambda *args: attend(*args[:5], 0, *args[6:]))
    with pytest.raises(ModelRefused, match="differs from the model's own"):
        target.check()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("passes", "batch", "name"), [(FREE, RaggedBatch, "mask"), (TOGETHER[0], ChunkedBatch, "_mask")]
)
def test_the_check_notices_a_wrong_mask_in_every_precision(passes, batch, name, dtype, monkeypatch) -> None:
    target = load_target("reference", dtype=dtype, kv_tokens=512)
    target.passes = passes
    honest = target.check()
    mask = getattr(batch, name)
    monkeypatch.setattr(batch, name, lambda *arguments: torch.zeros_like(mask(*arguments)))
    with pytest.raises(ModelRefused, match="differs from the model's own"):
        target.check()
    monkeypatch.undo()
    assert target.check() == honest


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_check_notices_keys_in_the_wrong_places(dtype, monkeypatch) -> None:
    target = load_target("reference", dtype=dtype, kv_tokens=512)
    write = target.pool.write
    monkeypatch.setattr(
        target.pool, "write", lambda layer, slots, keys, values: write(layer, slots.flip(0), keys, values)
    )
    with pytest.raises(ModelRefused, match="differs from the model's own"):
        target.check()
