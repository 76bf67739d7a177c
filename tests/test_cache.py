"""The cache fed with keys and values directly: what it codes, keeps, forgets and reports."""

from __future__ import annotations

import copy
import gc

import mlx.core as mx
import numpy as np
import pytest

from vqkv_ext import ops
from vqkv_ext.cache import CacheConfig, CompressedArray, CompressedKVCache
from vqkv_ext.codecs import ProductCodec
from vqkv_ext.codecs.transforms import SmoothedHadamard
from vqkv_ext.packed import coded_tokens

SMALL = CacheConfig(sink_tokens=2, window=8, block=8)
CONFIGS = {"small": (SMALL, 1), "default": (CacheConfig(), 12)}


def codecs(rng, width=64, heads=2, dims=4):
    smooth = mx.array(rng.uniform(0.5, 2, (heads, width)).astype(np.float32))
    book = lambda: mx.array(rng.standard_normal((heads, 1, 256, dims)).astype(np.float32))  # noqa: E731
    key = ProductCodec("vecinfer-test", width, book(), SmoothedHadamard(smooth))
    return key, ProductCodec("vecinfer-test", width, book())


def tokens(rng, n, *, batch=1, heads=2, width=64, dtype=mx.float32):
    x = [mx.array(rng.standard_normal((batch, heads, n, width)).astype(np.float32)) for _ in "kv"]
    return [a.astype(dtype) for a in x]


def feed(cache, kv, sizes, q=None):
    """Append in chunks; with queries, the attention output of every token [B, Hq, n, D]."""
    at, out = 0, []
    for n in sizes:
        keys, values = cache.update_and_fetch(*(x[:, :, at : at + n] for x in kv))
        if q is not None:
            out.append(
                ops.attention(
                    q[:, :, at : at + n], keys.packed, values.packed, scale=0.2, mask="causal"
                )
            )
        at += n
    mx.eval(cache.state, out)
    return mx.concatenate(out, axis=2) if q is not None else None


def codes(cache):
    """Everything coded so far, as bytes per token."""
    n = cache.coded_tokens
    bits = lambda a: a.view(mx.uint16) if a.dtype == mx.bfloat16 else a  # noqa: E731
    return [np.array(bits(a)[:, :, :n]) for b in cache._bodies or () for a in b.values()]


def same(a, b):
    return len(a) == len(b) and all(np.array_equal(x, y) for x, y in zip(a, b, strict=True))


def split(n, sizes):
    """`sizes` repeated until they sum to n."""
    out, i = [], 0
    while sum(out) < n:
        out.append(min(sizes[i % len(sizes)], n - sum(out)))
        i += 1
    return out


@pytest.mark.sim
@pytest.mark.parametrize("which", CONFIGS)
def test_prefill_equals_decode(rng, which):
    """Any chunking: bitwise equal codes, outputs equal to summation order."""
    config, factor = CONFIGS[which]
    pair, n = codecs(rng), 43 * factor
    kv = tokens(rng, n)
    q = mx.array(rng.standard_normal((1, 4, n, 64)).astype(np.float32))
    whole = CompressedKVCache(*pair, config)
    want = feed(whole, kv, [n], q)
    assert whole.coded_tokens == coded_tokens(n, *vars_of(config)) > 0
    for sizes in ([1], [7], [8, 1], [64], [65], [n - 1, 1], [1, n - 1], [13, 1, 1, 29]):
        cache = CompressedKVCache(*pair, config)
        got = feed(cache, kv, split(n, sizes), q)
        assert same(codes(cache), codes(whole)), sizes
        assert mx.abs(got - want).max() < 1e-5, sizes


def vars_of(config):
    return config.sink_tokens, config.window, config.block


@pytest.mark.sim
@pytest.mark.parametrize("width", [64, 80, 96, 128, 256])
def test_codes_do_not_depend_on_the_split(rng, width):
    """Case T04, through the cache: 17 at once, 16 then 1, 17 singles."""
    pair = codecs(rng, width, heads=8)
    for config, n in ((SMALL, 17 + 10), (CacheConfig(), 17 * 12)):
        kv = tokens(rng, n, heads=8, width=width, dtype=mx.float16)
        caches = []
        for sizes in ([n], [n - 1, 1], [1] * n):
            caches.append(CompressedKVCache(*pair, config))
            feed(caches[-1], kv, sizes)
        assert caches[0].coded_tokens > 0
        assert same(codes(caches[0]), codes(caches[1])) and same(codes(caches[0]), codes(caches[2]))


def test_codes_are_those_of_the_original_tokens(rng):
    pair = codecs(rng)
    kv = tokens(rng, 60)
    cache = CompressedKVCache(*pair, SMALL)
    feed(cache, kv, split(60, [5, 11]))
    n = cache.coded_tokens
    for codec, x, body in zip(pair, kv, cache._bodies, strict=True):
        direct = codec.encode(x[:, :, 2 : 2 + n])["codes"]
        assert np.array_equal(np.array(direct), np.array(body["codes"][:, :, :n]))


def test_nothing_coded_is_kept_twice_beyond_the_grace_block(rng):
    """Case T22's last clause: the tail never holds a coded token older than one block."""
    cache = CompressedKVCache(*codecs(rng), SMALL)
    for size in (1, 1, 30, 1, 1, 100, 3, 1):
        feed(cache, tokens(rng, size), [size])
        assert cache._tail_start >= 2 + cache.coded_tokens - SMALL.block
        assert cache._tails[0].shape[2] == cache._tail_capacity


def test_fresh(rng):
    """Case T02."""
    cache = CompressedKVCache(*codecs(rng), SMALL)
    mx.eval(cache.state)
    for c in (cache, copy.deepcopy(cache)):
        assert c.nbytes == 0 and c.size() == 0 and c.empty() and c.offset == 0
        assert c.is_trimmable() and c.trim(5) == 0
        assert c.make_mask(1) is None and c.make_mask(5) == "causal"
        assert not hasattr(c, "bits") and not hasattr(c, "group_size")
    with pytest.raises(RuntimeError, match="must follow tokens"):
        cache.keys_and_values()
    feed(cache, tokens(rng, 5), [5])
    assert cache.size() == cache.offset == 5 and not cache.empty() and cache.nbytes > 0
    assert cache.make_mask(1) is None and cache.make_mask(3) == "causal"
    mask = cache.make_mask(3, return_array=True)
    assert np.array_equal(np.array(mask), np.tri(3, 8, 5, dtype=bool))
    window = np.array(cache.make_mask(3, window_size=2))
    assert np.array_equal(window, np.tri(3, 8, 5, dtype=bool) & ~np.tri(3, 8, 3, dtype=bool))


@pytest.mark.sim
@pytest.mark.parametrize("which", CONFIGS)
def test_trim_within_grace_is_exact(rng, which):
    """Case T16: equals a fresh cache fed the kept prefix, then both fed the same 17."""
    config, factor = CONFIGS[which]
    pair = codecs(rng)
    total, more = 20 * factor + config.block, 17
    kv = tokens(rng, total + more)
    q = mx.array(rng.standard_normal((1, 4, total + more, 64)).astype(np.float32))
    r = config.block
    for n in (0, 1, 7, r - 1, r):
        cache = CompressedKVCache(*pair, config)
        feed(cache, kv, [total])
        assert cache.coded_tokens > 0 and cache.trim(n) == n and cache.offset == total - n
        fresh = CompressedKVCache(*pair, config)
        feed(fresh, kv, [total - n])
        assert same(codes(cache), codes(fresh))
        rest = [x[:, :, total:] for x in kv]
        a = feed(cache, rest, [17], q[:, :, total:])
        b = feed(fresh, rest, [9, 8], q[:, :, total:])
        assert same(codes(cache), codes(fresh)) and mx.abs(a - b).max() < 1e-5


@pytest.mark.sim
@pytest.mark.parametrize("n", [9, 20, 27, 33, 38, 39, 40])
def test_deep_trim_keeps_codes_and_goes_on(rng, n):
    """Beyond the grace block: kept tokens decode bitwise as before, later ones attend to them."""
    pair = codecs(rng)
    kv = tokens(rng, 80)
    q = mx.array(rng.standard_normal((1, 4, 80, 64)).astype(np.float32))
    cache = CompressedKVCache(*pair, SMALL)
    feed(cache, kv, [40])
    before = codes(cache)
    assert cache.trim(n) == n
    kept = cache.coded_tokens
    assert kept <= max(0, 40 - n - 2)
    assert same(codes(cache), [a[:, :, :kept] for a in before])
    rest = [x[:, :, 40 - n :] for x in kv]
    got = feed(cache, rest, [5, 1, 20, 3], q[:, :, 40 - n : 69 - n])
    assert same([a[:, :, :kept] for a in codes(cache)], [a[:, :, :kept] for a in before])
    # dense reference over what the cache itself decodes: it now holds 69 - n tokens
    size = cache.offset
    assert size == 69 - n
    dense = decoded(cache)
    last = q[:, :, size - 1 : size]
    k, v = dense
    want = mx.fast.scaled_dot_product_attention(last, k, v, scale=0.2)
    assert mx.abs(got[:, :, -1:] - want).max() < 1e-5


def decoded(cache):
    """Keys and values of all positions, as a query at the end reads them."""
    out = []
    s, n, start = cache.config.sink_tokens, cache.offset, cache._tail_start
    boundary = s + cache.coded_tokens
    for codec, tail, body in zip(
        (cache.key_codec, cache.value_codec), cache._tails, cache._bodies or ({}, {}), strict=True
    ):
        parts = [tail[:, :, : min(s, n)]]
        if cache.coded_tokens:
            whole = codec.decode(body, cache.config.block)
            parts.append(whole[:, :, : cache.coded_tokens])
        if n > boundary:
            parts.append(tail[:, :, s + boundary - start : s + n - start])
        out.append(mx.concatenate([p.astype(mx.float32) for p in parts], axis=2))
    return out


def test_trim_arguments(rng):
    cache = CompressedKVCache(*codecs(rng), SMALL)
    feed(cache, tokens(rng, 40), [40])
    assert cache.trim(-5) == 0 and cache.offset == 40
    assert cache.trim(99) == 40 and cache.offset == 0 and cache.coded_tokens == 0
    kv = tokens(rng, 40)
    fresh = CompressedKVCache(cache.key_codec, cache.value_codec, SMALL)
    feed(cache, kv, [40])
    feed(fresh, kv, [40])
    assert same(codes(cache), codes(fresh))


def test_state_round_trip_and_deepcopy(rng):
    pair = codecs(rng)
    kv = tokens(rng, 60)
    q = mx.array(rng.standard_normal((1, 4, 60, 64)).astype(np.float32))
    cache = CompressedKVCache(*pair, SMALL)
    feed(cache, kv, [40])
    copies = [copy.deepcopy(cache), CompressedKVCache.from_state(cache.state, *pair)]
    rest = [x[:, :, 40:] for x in kv]
    want = feed(cache, rest, [20], q[:, :, 40:])
    for c in copies:
        assert c.offset == 40 and c.config.block == 8
        assert mx.array_equal(feed(c, rest, [20], q[:, :, 40:]), want)
    other = codecs(np.random.default_rng(1))
    with pytest.raises(ValueError, match="the state must be of codec 'vecinfer-test:"):
        CompressedKVCache.from_state(cache.state, *other)
    empty = CompressedKVCache.from_state(CompressedKVCache(*pair, SMALL).state, *pair)
    assert empty.empty() and empty.config.window == 8


def test_states_and_handles_do_not_follow_the_cache(rng):
    """Two caches from one state, and an old handle, keep what they had when either goes on."""
    pair = codecs(rng)
    kv, q = tokens(rng, 40), mx.array(rng.standard_normal((1, 4, 1, 64)).astype(np.float32))
    read = lambda k, v: ops.attention(q, k.packed, v.packed, scale=0.2)  # noqa: E731
    a = CompressedKVCache(*pair, SMALL)
    handle = a.update_and_fetch(*kv)
    first = np.array(read(*handle))
    state = a.state
    alone, b = copy.deepcopy(a), CompressedKVCache.from_state(state, *pair)
    x, y = tokens(rng, 1), tokens(rng, 1)
    for cache, kv_new in ((a, x), (b, y), (alone, x)):
        cache.update_and_fetch(*kv_new)
    assert mx.array_equal(read(*a.keys_and_values()), read(*alone.keys_and_values()))
    a.trim(8)
    a.update_and_fetch(*tokens(rng, 20))
    assert np.array_equal(np.array(read(*handle)), first)
    again = CompressedKVCache.from_state(state, *pair)
    assert np.allclose(np.array(read(*again.keys_and_values())), first, atol=1e-6)


def test_bytes_are_those_of_the_arrays(rng):
    """The slope between two block-aligned capacities is the advertised size of a token."""
    config = CacheConfig()
    pair = codecs(rng, width=128, heads=4)
    cache = CompressedKVCache(*pair, config)
    sizes = []
    for _ in range(2):
        n = 2048 + config.window + config.sink_tokens
        feed(cache, tokens(rng, n, heads=4, width=128, dtype=mx.float16), [n])
        arrays = [a for b in cache._bodies for a in b.values()] + list(cache._tails)
        assert cache.nbytes == sum(a.nbytes for a in arrays)
        sizes.append((cache._bodies[0]["codes"].shape[2], cache.nbytes))
    slope = (sizes[1][1] - sizes[0][1]) / (sizes[1][0] - sizes[0][0])
    assert slope == cache.bytes_per_token == 4 * 2 * 32
    assert pair[0].nbytes == 4 * 256 * 4 * 4 + 4 * 128 * 4


def test_memory_is_released(rng):
    """No hidden copy: what MLX holds for the cache is what nbytes says."""
    pair = codecs(rng)
    mx.eval([a for c in pair for a in c.arrays()])
    kv = tokens(rng, 4096, dtype=mx.float16)
    mx.eval(kv)
    mx.synchronize()
    mx.clear_cache()
    gc.collect()  # what other tests left
    base = mx.get_active_memory()
    cache = CompressedKVCache(*pair, CacheConfig())
    feed(cache, kv, [512] * 8)
    mx.synchronize()  # a GPU's temporaries live until it is done
    held = mx.get_active_memory() - base
    assert cache.nbytes <= held <= cache.nbytes + 65536
    del cache
    assert mx.get_active_memory() - base < 65536


def test_handles_are_not_arrays(rng):
    cache = CompressedKVCache(*codecs(rng), SMALL)
    keys, values = cache.update_and_fetch(*tokens(rng, 30))
    assert isinstance(keys, CompressedArray)
    assert keys.shape == (1, 2, 30, 64) and keys.dtype == mx.float32 and values.ndim == 4
    for use in (
        lambda: keys[..., 0],
        lambda: keys.swapaxes(-1, -2),
        lambda: keys + 1,
        lambda: np.array(keys),
        lambda: list(keys),
    ):
        with pytest.raises(TypeError, match="must be read by vqkv_ext.ops.attention"):
            use()
    with pytest.raises(TypeError):
        mx.concatenate([keys, keys])
    with pytest.raises(TypeError):
        mx.zeros((1, 2, 1, 64)) @ keys
    with pytest.raises(AttributeError):
        keys.nonsense  # noqa: B018


def test_donors_read_without_appending(rng):
    cache = CompressedKVCache(*codecs(rng), SMALL)
    q = mx.array(rng.standard_normal((1, 4, 30, 64)).astype(np.float32))
    out = feed(cache, tokens(rng, 30), [29, 1], q)
    keys, values = cache.keys_and_values()
    again = ops.attention(q[:, :, 29:], keys.packed, values.packed, scale=0.2)
    assert mx.allclose(again, out[:, :, 29:], atol=1e-6) and cache.offset == 30


@pytest.mark.parametrize("dtype", [mx.float16, mx.bfloat16, mx.float32])
@pytest.mark.parametrize("batch", [1, 3])
def test_dtypes_and_batches(rng, dtype, batch):
    pair = codecs(rng)
    kv = tokens(rng, 50, batch=batch, dtype=dtype)
    q = mx.array(rng.standard_normal((batch, 4, 50, 64)).astype(np.float32)).astype(dtype)
    cache = CompressedKVCache(*pair, SMALL)
    out = feed(cache, kv, [33, 17], q)
    assert out.dtype == dtype
    for b in range(batch):
        one = CompressedKVCache(*pair, SMALL)
        row = feed(one, [x[b : b + 1] for x in kv], [33, 17], q[b : b + 1])
        assert mx.array_equal(row, out[b : b + 1])


def test_metal_flag(rng, simulated):
    config = CacheConfig(use_metal_kernels=True)
    if simulated or mx.default_device() == mx.gpu:
        CompressedKVCache(*codecs(rng), config)
    else:
        with pytest.raises(RuntimeError, match=r"\[CompressedKVCache\] use_metal_kernels=True"):
            CompressedKVCache(*codecs(rng), config)
    plain = CompressedKVCache(*(pair := codecs(rng)), CacheConfig(2, 8, 8, use_metal_kernels=False))
    native = CompressedKVCache(*pair, SMALL)
    kv = tokens(rng, 40)
    feed(plain, kv, [40])
    feed(native, kv, [40])
    assert plain.coded_tokens > 0
    agree = [np.mean(a == b) for a, b in zip(codes(plain), codes(native), strict=True)]
    assert min(agree) > 0.999
