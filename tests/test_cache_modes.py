"""Dense prefill, and appends that are refused or fail."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import tiny
from test_cache import CONFIGS, SMALL, codecs, codes, feed, same, split, tokens
from vqkv_ext import ops
from vqkv_ext.adapters.mlx_lm import disable_attention, make_prompt_cache
from vqkv_ext.batch_cache import BatchCompressedKVCache
from vqkv_ext.cache import CacheConfig, CompressedKVCache
from vqkv_ext.codecs.half import HalfCodec

DENSE = CacheConfig(SMALL.sink_tokens, SMALL.window, SMALL.block, prefill="dense")


def queries(rng, n):
    return mx.array(rng.standard_normal((1, 4, n, 64)).astype(np.float32))


@pytest.mark.sim
def test_dense_prefill_reads_its_own_chunk_uncompressed(rng):
    n = 43
    kv, q = tokens(rng, n), queries(rng, n)
    cache = CompressedKVCache(*codecs(rng), DENSE)
    got = feed(cache, kv, [n], q)
    want = mx.fast.scaled_dot_product_attention(q, *kv, scale=0.2, mask="causal")
    assert cache.coded_tokens > 0 and mx.abs(got - want).max() < 1e-5
    # what comes later reads the codes, the same ones as ever
    coded = CompressedKVCache(*(pair := codecs(rng)), SMALL)
    dense = CompressedKVCache(*pair, DENSE)
    feed(coded, kv, [n])
    feed(dense, kv, [n])
    assert same(codes(coded), codes(dense))
    kv, q = tokens(rng, 1), queries(rng, 1)
    assert mx.array_equal(feed(coded, kv, [1], q), feed(dense, kv, [1], q))


def test_dense_prefill_in_chunks_is_nearer_to_the_truth(rng):
    n = 96
    kv, q, pair = tokens(rng, n), queries(rng, n), codecs(rng)
    want = mx.fast.scaled_dot_product_attention(q, *kv, scale=0.2, mask="causal")
    error = {}
    for config in (SMALL, DENSE):
        out = feed(CompressedKVCache(*pair, config), kv, [32] * 3, q)
        error[config.prefill] = mx.abs(out - want).mean().item()
    assert 0 < error["dense"] < 0.8 * error["coded"]


def test_dense_prefill_is_part_of_the_state(rng):
    cache = CompressedKVCache(*(pair := codecs(rng)), DENSE)
    feed(cache, tokens(rng, 30), [30])
    assert CompressedKVCache.from_state(cache.state, *pair).config.prefill == "dense"
    with pytest.raises(ValueError, match=r"prefill must be 'coded' or 'dense', but got 'fast'"):
        CacheConfig(prefill="fast")


class _Failing(HalfCodec):
    fail = False

    def encode(self, x, **kwargs):
        if self.fail:
            raise RuntimeError("no")
        return super().encode(x, **kwargs)


@pytest.mark.parametrize("which", CONFIGS)
def test_a_failed_append_changes_nothing(rng, which):
    """Whichever side fails: what is held reads as before, and the same tokens can come again."""
    config, factor = CONFIGS[which]
    n = 40 * factor
    kv, q = tokens(rng, n), queries(rng, n)
    want = feed(CompressedKVCache(HalfCodec(64), HalfCodec(64), config), kv, [n], q)
    for side in (0, 1):
        pair = [HalfCodec(64), HalfCodec(64)]
        pair[side] = _Failing(64)
        cache = CompressedKVCache(*pair, config)
        at = 25 * factor
        first = feed(cache, [x[:, :, :at] for x in kv], [at], q[:, :, :at])
        before, offset = codes(cache), cache.offset
        assert cache.coded_tokens > 0
        pair[side].fail = True
        with pytest.raises(RuntimeError, match="no"):
            cache.update_and_fetch(*(x[:, :, at:] for x in kv))
        pair[side].fail = False
        assert cache.offset == offset and same(codes(cache), before)
        rest = feed(cache, [x[:, :, at:] for x in kv], split(n - at, [9]), q[:, :, at:])
        assert mx.abs(mx.concatenate([first, rest], 2) - want).max() < 1e-5


@pytest.mark.parametrize("rows", [None, [3, 0]])
def test_a_failed_first_append_leaves_it_empty(rng, rows):
    pair = HalfCodec(64), _Failing(64)
    cache = CompressedKVCache(*pair, SMALL)
    if rows:
        cache = BatchCompressedKVCache(*pair, SMALL, rows)
    pair[1].fail = True
    with pytest.raises(RuntimeError, match="no"):
        cache.update_and_fetch(*tokens(rng, 25, batch=len(rows or [0])))
    assert cache.empty() and cache.nbytes == 0 and cache.size() == 0


def test_bad_input_changes_nothing(rng):
    pair = codecs(rng)
    cache = CompressedKVCache(*pair, SMALL)
    k, v = tokens(rng, 30)
    feed(cache, (k, v), [30])
    before, n = codes(cache), cache.nbytes
    for args, message in (
        ((k[..., :32], v), "keys must have the codec's head_dim 64, but got 32"),
        ((k, v[:, :, :3]), "keys and values must be"),
        ((k[0], v[0]), "keys and values must be"),
        ((k[:, :1], v[:, :1]), "keys must have the codec's 2 heads, but got 1"),
        ((k.astype(mx.float16), v), "share a floating dtype"),
        ((k.astype(mx.float16), v.astype(mx.float16)), "like those held"),
        ((mx.repeat(k, 2, 0), mx.repeat(v, 2, 0)), "like those held"),
        ((k.astype(mx.int32), v.astype(mx.int32)), "share a floating dtype"),
    ):
        with pytest.raises(ValueError, match=r"\[CompressedKVCache\].*" + message):
            cache.update_and_fetch(*args)
        assert cache.offset == 30 and cache.nbytes == n and same(codes(cache), before)
    with pytest.raises(TypeError, match="must be MLX arrays, but got ndarray and list"):
        cache.update_and_fetch(np.array(k), [v])
    with pytest.raises(TypeError, match="n must be an integer, but got 1.5"):
        cache.trim(1.5)
    for counts in ((1, 2), (30, 29, 10), (300, 16, 10), (30, -8, 2)):
        state = (*cache.state[:2], counts, *cache.state[3:])
        with pytest.raises(ValueError, match=r"the state must .* but got counts \("):
            cache.state = state
    assert cache.offset == 30 and cache.config == SMALL and same(codes(cache), before)


def test_config_errors():
    for kw in ({"sink_tokens": -1}, {"window": 1.5}, {"block": 0}, {"block": True}):
        with pytest.raises(ValueError, match=r"\[CacheConfig\] \w+ must be an integer"):
            CacheConfig(**kw)
    with pytest.raises(ValueError, match="use_metal_kernels must be None, True or False"):
        CacheConfig(use_metal_kernels="yes")
    with pytest.raises(TypeError, match="must be codecs, but got str"):
        CompressedKVCache("centred-4bit", "centred-4bit")
    with pytest.raises(RuntimeError, match="keys must be held to be set"):
        CompressedKVCache(HalfCodec(64), HalfCodec(64)).keys = mx.zeros((1, 2, 3, 64))


def test_refusals(rng):
    cache = CompressedKVCache(*codecs(rng), SMALL)
    for shape in ((1, 2, 0, 64), (0, 2, 3, 64)):
        x = mx.zeros(shape)
        with pytest.raises(ValueError, match="at least one row, head and token, but got"):
            cache.update_and_fetch(x, x)
    assert cache.empty()
    feed(cache, tokens(rng, 30), [30])
    for n in (2.0, "1", None):
        with pytest.raises(TypeError):
            cache.trim(n)
    assert cache.trim(np.int64(3)) == 3 and cache.offset == 27
    with pytest.raises(ValueError, match="head_dim must be at most 576, but got 640 of none"):
        CompressedKVCache(HalfCodec(640), HalfCodec(64))


def test_plain_mlx_checks_its_arguments_like_the_kernel(rng):
    cache = CompressedKVCache(*codecs(rng), SMALL)
    kv, q = tokens(rng, 30), queries(rng, 30)
    keys, values = cache.update_and_fetch(*kv)
    with pytest.raises(TypeError, match="values must be PackedKV, but got CompressedArray"):
        ops.attention(q, keys.packed, values, scale=0.1)
    for kw, message in (
        ({"mask": mx.zeros((2, 4, 30, 30))}, "mask must be broadcastable"),
        ({"mask": mx.zeros((30, 30), mx.int32)}, "mask must be boolean"),
        ({"sinks": mx.zeros((3,))}, r"sinks must be floating of shape \[Hq\]"),
        ({"mask": "full"}, "mask must be None, 'causal' or an array"),
    ):
        for flag in (None, False):
            with pytest.raises(ValueError, match=r"\[attention\] " + message):
                ops.attention(
                    q, keys.packed, values.packed, scale=0.1, use_metal_kernels=flag, **kw
                )
    for bad in (q[:, :3], q.astype(mx.float16), mx.repeat(q, 2, 0)):
        for flag in (None, False):
            with pytest.raises(ValueError, match=r"\[attention\] "):
                ops.attention(bad, keys.packed, values.packed, scale=0.1, use_metal_kernels=flag)


def test_a_mask_needs_a_column_for_every_token():
    model = tiny.llama()
    cache = make_prompt_cache(model, "turboquant-4bit", config=SMALL)
    attention = vars(__import__("mlx_lm.models.llama", fromlist=["x"]))[
        "scaled_dot_product_attention"
    ]
    x = mx.random.normal((1, 2, 12, 64))
    keys, values = cache[0].update_and_fetch(x, x)
    q = mx.random.normal((1, 4, 12, 64))
    good = attention(q, keys, values, cache=cache[0], scale=1.0, mask=mx.ones((12, 12), mx.bool_))
    assert good.shape == q.shape
    with pytest.raises(ValueError, match="a column for each of the 12 tokens, but got shape"):
        attention(q, keys, values, cache=cache[0], scale=1.0, mask=mx.ones((12, 11), mx.bool_))
    disable_attention(model)
