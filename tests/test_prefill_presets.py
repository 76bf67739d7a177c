"""Prefill equals decode for every preset, at the default windows."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np
import pytest

from test_cache import codes, feed, same, split, tokens
from vqkv_ext.cache import CacheConfig, CompressedKVCache
from vqkv_ext.codecs import presets, vecinfer
from vqkv_ext.packed import coded_tokens

FITTED = tuple(vecinfer.PRESETS)
CHUNKS = (1, 7, 64, 65, 512)


@functools.cache
def pair(name: str):
    if name not in FITTED:
        return tuple(presets.codec(name, 64, side) for side in ("key", "value"))
    rng = np.random.default_rng(1)
    kv = [mx.array(rng.standard_normal((2, 2600, 64)).astype(np.float32)) for _ in "kv"]
    return vecinfer.fit(vecinfer.PRESETS[name], *kv, iterations=1)


@pytest.mark.sim
@pytest.mark.parametrize("name", [*presets.PRESETS, *FITTED])
def test_any_chunks_at_the_default_windows(rng, name, simulated):
    """The same keys, values and queries in chunks of 1, 7, 64, 65, 512 tokens and at once: the
    same codes bit for bit, and the same outputs but for the order of sums."""
    config, n = CacheConfig(), 210 if simulated else 701
    kv = tokens(rng, n)
    q = mx.array(rng.standard_normal((1, 4, n, 64)).astype(np.float32))
    whole = CompressedKVCache(*pair(name), config)
    want = feed(whole, kv, [n], q)
    assert whole.coded_tokens == coded_tokens(n, 4, 64, 64) > 0
    for size in CHUNKS:
        if simulated and size not in (7, 65):
            continue
        cache = CompressedKVCache(*pair(name), config)
        got = feed(cache, kv, split(n, [size]), q)
        assert cache.coded_tokens == whole.coded_tokens
        assert same(codes(cache), codes(whole)), size
        assert mx.abs(got - want).max() < 1e-5, size
