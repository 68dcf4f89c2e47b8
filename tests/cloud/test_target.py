"""Any decoder-only architecture on ragged batches over the paged cache, against transformers' own plain forward."""

from __future__ import annotations

import json

import pytest
import torch
from random_models import save_random_model

from outrider.cloud.family_index import embedded_targets
from outrider.cloud.kv_cache import PagedKVCache
from outrider.cloud.target import SessionRows, load_target
from outrider.proto.errors import ModelRefused, NotFound, ResourceExhausted
from outrider.proto.testing import word_tokenizer
from outrider.proto.tokenizer import tokenizer_hash

torch.set_num_threads(1)

VOCAB = 97
SMALL = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
HEADS = {"head_dim": 8}

ARCHITECTURES = {
    "llama": SMALL,
    "qwen2": SMALL,
    "qwen3": SMALL | HEADS,
    "mistral": SMALL | {"sliding_window": 8},
    "gemma2": SMALL | HEADS | {"sliding_window": 8, "query_pre_attn_scalar": 8, "attn_logit_softcapping": 5.0},
    "gemma3_text": SMALL | HEADS | {"sliding_window": 8, "query_pre_attn_scalar": 8, "sliding_window_pattern": 2},
    "phi3": SMALL,
    "gpt_neox": {k: v for k, v in SMALL.items() if k != "num_key_value_heads"},
    "gpt2": {"vocab_size": VOCAB, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 128, "eos_token_id": 2},
}


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


@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_more_rows_than_are_folded_into_their_key_heads_equal_the_plain_forward(architecture, folders):
    folder, model = folders(architecture)
    target = load(folder)
    tokens = text(8, 75)
    a, b = target.pool.allocate(80), target.pool.allocate(80)
    first = target.forward([SessionRows(a, tokens[:40], 40), SessionRows(b, tokens[:5], 1)])
    rest = target.forward([SessionRows(b, tokens[5:6], 1), SessionRows(a, tokens[40:], 35)])
    got = torch.cat([first[:40], rest[1:]])
    assert (got - plain(model, tokens)).abs().max() < 1e-5 * max(1.0, float(plain(model, tokens).abs().max()))


@pytest.mark.parametrize("architecture", ["mistral", "gemma2", "gemma3_text"])
def test_the_sliding_window_matters_to_this_test_at_all(architecture, folders):
    _, model = folders(architecture)
    tokens = text(1)
    other = (tokens[0] % 90 + 4, *tokens[1:])
    changed = (plain(model, tokens) - plain(model, other)).abs().amax(dim=-1)
    assert changed[:8].max() > 1e-3
    assert len(tokens) > 3 * 8, "texts are longer than the window"


def test_truncating_and_extending_equals_never_having_drafted_bit_for_bit(folders):
    folder, _ = folders("qwen3")
    target = load(folder)
    tokens = text(3)
    never, drafted = target.pool.allocate(44), target.pool.allocate(44)
    for cache in (never, drafted):
        target.forward([SessionRows(cache, tokens[:20], 1)])
    target.forward([SessionRows(drafted, (4,) * 9, 9)])
    drafted.truncate(20)
    rest = [target.forward([SessionRows(cache, tokens[20:], 20)]) for cache in (never, drafted)]
    assert torch.equal(*rest)


def test_a_position_cannot_be_truncated_forward_or_below_zero(folders):
    target = load(folders("llama")[0])
    cache = target.pool.allocate(8)
    target.forward([SessionRows(cache, (3, 4, 5), 1)])
    for length in (4, -1):
        with pytest.raises(ValueError, match="cannot truncate"):
            cache.truncate(length)
    assert cache.length == 3


@pytest.mark.parametrize("architecture", ["gemma2", "gpt2"])
def test_scattered_pages_equal_pages_side_by_side(architecture, folders):
    target = load(folders(architecture)[0], kv_tokens=128)
    tokens = text(4)
    together = target.pool.allocate(40)
    holders = [target.pool.allocate(4) for _ in range(22)]
    assert target.pool.free_pages == 0
    for holder in holders[::2]:
        target.pool.release(holder)
    scattered = target.pool.allocate(40)
    assert together.contiguous
    assert not scattered.contiguous
    got = [
        torch.cat([target.forward([SessionRows(cache, part, len(part))]) for part in (tokens[:17], tokens[17:])])
        for cache in (together, scattered)
    ]
    assert torch.equal(*got)


def test_a_session_that_is_moved_to_grow_goes_on_as_before(folders):
    folder, model = folders("llama")
    target, tokens = load(folder, kv_tokens=256), text(3)
    cache = target.pool.allocate(20)
    first = target.forward([SessionRows(cache, tokens[:20], 20)])
    beside = [target.pool.allocate(4) for _ in range(target.pool.free_pages)]
    before = list(cache.pages)
    far = [holder for holder in beside if not before[0] - 5 < holder.pages[0] < before[-1] + 5]
    for holder in far:
        target.pool.release(holder)
    target.pool.resize(cache, len(tokens))
    assert cache.contiguous
    assert not {*before} & {*cache.pages}
    second = target.forward([SessionRows(cache, tokens[20:], len(tokens) - 20)])
    assert torch.allclose(torch.cat([first, second]), plain(model, tokens), atol=1e-3)


def rows_in_company(target, tokens):
    """The same 12 rows: alone, in pieces, and among others' rows."""
    alone, pieces, crowd, other, third = (target.pool.allocate(32) for _ in range(5))
    yield target.forward([SessionRows(alone, tokens[:12], 12)])
    yield torch.cat([target.forward([SessionRows(pieces, tokens[a:b], b - a)]) for a, b in ((0, 1), (1, 8), (8, 12))])
    target.forward([SessionRows(other, tokens[5:20], 1)])
    first = target.forward([SessionRows(other, tokens[3:6], 2), SessionRows(crowd, tokens[:5], 5)])[2:]
    second = target.forward([SessionRows(crowd, tokens[5:12], 7), SessionRows(third, tokens[:23], 3)])[:7]
    yield torch.cat([first, second])
    for cache in (alone, pieces, crowd, other, third):
        target.pool.release(cache)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("architecture", ["llama", "gemma2", *embedded_targets()])
def test_batch_invariant_rows_have_the_same_bits_whatever_shares_their_step(architecture, dtype, folders):
    source = architecture if architecture in embedded_targets() else folders(architecture)[0]
    target = load(source, dtype=dtype, batch_invariant=True)
    alone, pieces, crowd = rows_in_company(target, text(5))
    assert torch.equal(alone, pieces)
    assert torch.equal(alone, crowd)


def test_batch_invariant_mode_computes_the_same_function(folders):
    folder, model = folders("mistral")
    target = load(folder, batch_invariant=True)
    tokens = text(6)
    got = target.forward([SessionRows(target.pool.allocate(44), tokens, 40)])
    assert (got - plain(model, tokens)).abs().max() < 1e-4 * plain(model, tokens).abs().max()


def test_what_a_loaded_target_says_of_itself(folders):
    target = load(folders("llama")[0], context_length=100)
    assert (target.vocab_size, target.context_length, target.eos_tokens) == (VOCAB, 100, frozenset({2}))
    assert target.tokenizer_sha256 == tokenizer_hash(word_tokenizer(VOCAB))
    assert load(folders("llama")[0], context_length=999).context_length == 128
    assert load(folders("llama")[0], kv_tokens=64).context_length == 64


def test_several_eos_tokens_are_all_known(tmp_path):
    save_model(tmp_path, "llama", eos_token_id=[2, 5])
    assert load(tmp_path).eos_tokens == frozenset({2, 5})


def test_pickled_weights_are_refused(tmp_path):
    model = save_model(tmp_path, "llama")
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")
    with pytest.raises(ModelRefused, match="safetensors") as caught:
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


@pytest.mark.parametrize("target", ["/nowhere/at/all", "./not-here", "~/no such folder"])
def test_a_folder_that_does_not_exist_is_not_found(target):
    with pytest.raises(NotFound) as caught:
        load(target)
    assert caught.value.field == "target"


def test_a_hub_name_that_cannot_be_reached_is_not_found(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(NotFound) as caught:
        load("outrider-nobody/no-such-model")
    assert caught.value.field == "target"


def test_a_folder_without_a_tokenizer_is_refused(tmp_path):
    save_model(tmp_path, "llama")
    (tmp_path / "tokenizer.json").unlink()
    with pytest.raises((NotFound, ModelRefused)) as caught:
        load(tmp_path)
    assert caught.value.field == "target"


@pytest.mark.parametrize("rope", [{"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10_000.0}])
def test_positions_that_depend_on_what_shares_a_step_are_refused(rope, tmp_path):
    save_model(tmp_path, "llama", rope_parameters=rope)
    with pytest.raises(ModelRefused, match="shares a step"):
        load(tmp_path)


def test_an_architecture_that_ignores_the_cache_is_refused(folders, monkeypatch):
    target = load(folders("llama")[0])
    right = target._run

    def one_position_too_far(tokens, spans, wanted):
        return right(tokens, spans, wanted) + 1.0 * (spans[0].start > 0)

    monkeypatch.setattr(target, "_run", one_position_too_far)
    with pytest.raises(ModelRefused, match="differs"):
        target.check()


def test_checking_a_target_leaves_its_cache_free(folders):
    target = load(folders("llama")[0])
    assert target.pool.free_pages == target.pool.page_count
    assert target.check() < 1e-5


# === the cache by itself ========================================================================================


def pool(tokens=64, page_size=4):
    return PagedKVCache(tokens, page_size, torch.float32, torch.device("cpu"))


def test_a_full_cache_refuses_with_a_time_to_retry_and_serves_again_after_a_release():
    cache = pool()
    first = cache.allocate(60)
    with pytest.raises(ResourceExhausted) as caught:
        cache.allocate(5)
    assert caught.value.retry_after_s > 0
    cache.release(first)
    assert cache.allocate(64).contiguous


def test_what_can_never_fit_is_refused_without_a_time_to_retry():
    with pytest.raises(ResourceExhausted) as caught:
        pool().allocate(65)
    assert caught.value.retry_after_s == 0


def test_pages_are_never_shared_and_all_come_back():
    cache = pool()
    taken = [cache.allocate(n) for n in (1, 4, 5, 9)]
    slots = torch.cat([share.slots for share in taken])
    assert len(set(slots.tolist())) == len(slots)
    assert [len(share.pages) for share in taken] == [1, 1, 2, 3]
    for share in taken:
        cache.release(share)
        cache.release(share)
    assert cache.free_pages == 16


def test_what_is_written_is_read_back_through_scattered_pages():
    cache = pool()
    holders = [cache.allocate(4) for _ in range(16)]
    for holder in holders[::2]:
        cache.release(holder)
    share = cache.allocate(20)
    values = torch.arange(20.0)[:, None, None].expand(20, 2, 3)
    cache.write(0, share.slots[:20], values, -values)
    keys, read = cache.read(0, share, 17)
    assert not share.contiguous
    assert torch.equal(keys, values[:17])
    assert torch.equal(read, -values[:17])
