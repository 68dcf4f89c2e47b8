"""Attention of many sessions in shared calls, against attention of each session in its own, and the models' own."""

from __future__ import annotations

import itertools
import random

import pytest
import torch
from random_models import SMALL, save_random_model
from torch.utils._python_dispatch import TorchDispatchMode

from outrider.cloud.target import chunked_attention
from outrider.cloud.target.attention import RaggedBatch, RowSpan
from outrider.cloud.target.chunked_attention import CHUNK, ROWS, ChunkedBatch
from outrider.cloud.target.kv_cache import PagedKVCache
from outrider.cloud.target.target import ROUNDED, TOGETHER, SessionRows
from outrider.cloud.target.target_loading import load_target

KV_HEADS, SIZE = 2, 16
LONG = SMALL | {"max_position_embeddings": 1024}
HEADS = LONG | {"head_dim": 8, "query_pre_attn_scalar": 8}
WINDOWED = {
    "mistral": LONG | {"sliding_window": 300},
    "gemma2": HEADS | {"sliding_window": 40, "attn_logit_softcapping": 5.0},
    "gemma3_text": HEADS | {"sliding_window": 40, "sliding_window_pattern": 2},
}


def filled(texts, *, page_size=16, dtype=torch.float32):
    """A pool, and a session for each (start, count) of `texts` whose first positions hold random keys and values."""
    pool = PagedKVCache(8192, page_size, dtype, torch.device("cpu"))
    caches = [pool.allocate(start + count) for start, count in texts]
    for cache, (start, _) in zip(caches, texts, strict=True):
        held = torch.randn(2, start, KV_HEADS, SIZE).to(dtype)
        pool.write(0, cache.slots[:start], held[0], held[1])
    return pool, caches


def spans_of(texts, caches):
    firsts = itertools.accumulate((count for _, count in texts), initial=0)
    return [RowSpan(cache, first, *text[::-1]) for cache, first, text in zip(caches, firsts, texts, strict=False)]


@torch.inference_mode()
def attended(kind, texts, *, group=3, page_size=16, dtype=torch.float32, window=0, softcap=None, sinks=False):
    """[rows, heads, SIZE] of new rows of all sessions, by batches of `kind`."""
    torch.manual_seed(0)
    pool, caches = filled(texts, page_size=page_size, dtype=dtype)
    spans, rows = spans_of(texts, caches), sum(count for _, count in texts)
    slots = torch.cat([span.cache.slots[span.start : span.context] for span in spans])
    query = torch.randn(1, rows, KV_HEADS * group, SIZE).to(dtype).transpose(1, 2)
    new = torch.randn(2, rows, KV_HEADS, SIZE).to(dtype)
    batch = kind(pool, spans, slots, ROWS)
    batch.write(0, new[0], new[1])
    of_heads = torch.randn(KV_HEADS * group) if sinks else None
    return batch.attend(0, query, KV_HEADS, None, window, softcap, of_heads)[0]


def ragged(seed):
    """Texts and rows of every kind: short and long ones, single rows, drafts, prompts."""
    rng = random.Random(seed)
    counts = (1, 1, 1, 2, 5, 6, 11, 40, 300)
    starts = (0, 1, 15, 63, 64, 200, CHUNK - 1, CHUNK, 500, 3 * CHUNK - 4)
    return [(rng.choice(starts), rng.choice(counts)) for _ in range(rng.randint(1, 9))]


@pytest.mark.parametrize("seed", range(12))
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
def test_shared_calls_compute_what_calls_of_each_session_do(seed, dtype):
    rng = random.Random(seed)
    options = {
        "group": rng.choice((1, 3, 4)),
        "page_size": rng.choice((1, 4, 16, 24, 64, 100)),
        "window": rng.choice((0, 0, 7, 100, CHUNK, 300)),
        "softcap": rng.choice((None, None, 3.0)),
        "dtype": dtype,
        "sinks": seed % 3 == 0,
    }
    texts = ragged(seed)
    together, apart = (attended(kind, texts, **options).float() for kind in (ChunkedBatch, RaggedBatch))
    assert together.shape == apart.shape
    assert (together - apart).abs().max() < (1e-5 if dtype == torch.float32 else 4e-2)


def test_a_sink_takes_its_share_of_a_row_that_sees_itself_alone():
    for kind in (ChunkedBatch, RaggedBatch):
        (with_sink,), (without,) = (attended(kind, [(0, 1)], group=1, sinks=sinks) for sinks in (True, False))
        shares = with_sink / without
        assert torch.allclose(shares, shares[:, :1].expand_as(shares))
        assert ((shares > 0) & (shares < 1)).all()


def test_bands_of_few_keys_compute_the_same(monkeypatch):
    texts = ragged(3)
    at_once = attended(ChunkedBatch, texts)
    monkeypatch.setattr(chunked_attention, "_BAND_BYTES", 1)
    monkeypatch.setattr(chunked_attention, "_CALL_BYTES", 1)
    chunked_attention._layout.cache_clear()
    assert torch.equal(attended(ChunkedBatch, texts), at_once)


@pytest.mark.parametrize("architecture", WINDOWED)
def test_windows_over_several_chunks_equal_the_plain_forward_and_keep_bits(architecture, tmp_path):
    model = save_random_model(tmp_path, architecture, **WINDOWED[architecture])
    target = load_target(str(tmp_path), kv_tokens=4096)
    if not target.packing.row_multiple:
        pytest.skip("needs a processor whose products keep a row's bits at some number of rows")
    assert target.passes in TOGETHER
    tokens = tuple(torch.randint(3, 90, (600,), generator=torch.Generator().manual_seed(1)).tolist())
    with torch.inference_mode():
        plain = model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    got = []
    for sizes in ((600,), (1, 255, 1, 63, 80, 100, 100)):
        cache, other, at = target.pool.allocate(600), target.pool.allocate(700), 0
        target.forward([SessionRows(other, tokens[:500], 0)])
        logits = []
        for size in sizes:
            piece = SessionRows(cache, tokens[at : at + size], size)
            logits.append(target.forward([SessionRows(other, tokens[:5], 1), piece])[1:])
            at += size
        got.append(torch.cat(logits))
    assert torch.equal(got[0], got[1][:600])
    assert (got[0] - plain).abs().max() < 1e-4 * max(1.0, float(plain.abs().max()))


class Calls(TorchDispatchMode):
    """The number of operator calls made inside."""

    def __init__(self):
        super().__init__()
        self.number = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.number += 1
        return function(*args, **(kwargs or {}))


def test_sixteen_sessions_take_few_more_calls_than_one(shared_target):
    target = shared_target()
    caches = [target.pool.allocate(64) for _ in range(16)]
    for i, cache in enumerate(caches):
        target.forward([SessionRows(cache, tuple(range(3, 20 + i)), 0)])
    calls = {}
    for passes in (TOGETHER[0], ROUNDED[0]):
        target.passes = passes
        for count in (1, 16):
            with Calls() as counted:
                target.forward([SessionRows(cache, (5,), 1) for cache in caches[:count]])
            calls[passes, count] = counted.number
    assert calls[TOGETHER[0], 16] < 1.5 * calls[TOGETHER[0], 1]
    assert calls[ROUNDED[0], 16] > 3 * calls[TOGETHER[0], 16]


def test_the_blank_page_stays_blank():
    texts = [(250, 30), (1, 1), (64, 64)]
    torch.manual_seed(0)
    pool, caches = filled(texts)
    full = [pool.allocate(16) for _ in range(pool.free_pages)]
    everything = torch.cat([cache.slots for cache in (*caches, *full)])
    with torch.inference_mode():
        nothing = torch.full((len(everything), KV_HEADS, SIZE), float("nan"))
        pool.write(0, everything, nothing, nothing)
        out = pool.buffers(0, 1, 16)
        pool.gather(0, torch.tensor([pool.blank_page]), out)
    assert not any(each.any() for each in out)
