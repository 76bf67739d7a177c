"""The constructors named after methods."""

from __future__ import annotations

import re

import mlx.core as mx
import numpy as np
import pytest

import tiny
import vqkv_ext
from test_cache import SMALL, decoded, feed, tokens
from vqkv_ext import (
    QJLKVCache,
    TrellisKVCache,
    TurboQuantKVCache,
    TurboQuantProdKVCache,
    TurboQuantRVQKVCache,
    VecInferKVCache,
)
from vqkv_ext.cache import CompressedKVCache

METHODS = {
    TurboQuantKVCache: ("turboquant", (1, 2, 3, 4)),
    TurboQuantProdKVCache: ("turboquant-prod", (2, 3, 4)),
    TurboQuantRVQKVCache: ("turboquant-rvq", (2, 4)),
    QJLKVCache: ("qjl", (1, 2, 4)),
    TrellisKVCache: ("trellis", (1, 2, 3, 4)),
}


def names(cache):
    return cache.key_codec.name, cache.value_codec.name


def check_reads(rng, cache, width, value_width=None):
    """Attention over the cache is dense attention over what its codecs decode."""
    x = tokens(rng, 60, width=width)
    if value_width is not None:
        x[1] = x[1][..., :value_width]
    q = mx.array(rng.standard_normal((1, 4, 60, width)).astype(np.float32))
    got = feed(cache, x, [60], q)
    assert cache.coded_tokens > 0
    want = mx.fast.scaled_dot_product_attention(q[:, :, -1:], *decoded(cache), scale=0.2)
    assert mx.abs(got[:, :, -1:] - want).max() < 2e-5


@pytest.mark.parametrize("make", METHODS, ids=lambda m: m.__name__)
def test_methods(rng, make):
    method, offered = METHODS[make]
    cache = make(64)
    assert isinstance(cache, CompressedKVCache)
    assert names(cache) == (f"{method}-4bit",) * 2 or names(cache)[1] == "turboquant-4bit"
    assert cache.config == vqkv_ext.cache.CacheConfig()
    for bits in offered:
        cache = make(64, bits, value_head_dim=48, config=SMALL)
        assert cache.key_codec.name == f"{method}-{bits}bit"
        assert cache.config is SMALL
        assert (cache.key_codec.width, cache.value_codec.width) == (64, 48)
        check_reads(rng, cache, 64, 48)
    listed = re.escape(f"{', '.join(map(str, offered[:-1]))} or {offered[-1]}")
    for bits in (0, 5, 8, 9, 17, 1.5, 4.0, True, "4", None):
        message = rf"^\[{make.__name__}\] bits must be {listed}, but got {re.escape(repr(bits))}\."
        with pytest.raises(ValueError, match=message):
            make(64, bits)
    with pytest.raises(ValueError, match="but got 4"):
        make(4)


@pytest.mark.parametrize(("make", "width"), [(TurboQuantProdKVCache, 512), (QJLKVCache, 256)])
def test_widths_that_attention_cannot_hold(make, width):
    with pytest.raises(ValueError, match=rf"head_dim.*but got .*{width}"):
        make(width)


def test_vecinfer_of_codebooks(rng):
    book = rng.standard_normal((256, 4)).astype(np.float32)
    factors = rng.uniform(0.5, 2, (2, 64))
    cache = VecInferKVCache(head_dim=64, key_codebook=book, config=SMALL)
    assert names(cache) == ("vecinfer-2bit", "turboquant-2bit") and cache.config is SMALL
    check_reads(rng, cache, 64)
    cache = VecInferKVCache(
        head_dim=64,
        key_codebook=rng.standard_normal((2, 1, 256, 2)),
        value_codebook=mx.array(rng.standard_normal((6, 4096, 8)).astype(np.float32)),
        smooth_factors=factors,
        value_head_dim=48,
        config=SMALL,
    )
    assert names(cache) == ("vecinfer-4bit", "vecinfer-1.5bit")
    assert np.allclose(np.array(cache.key_codec.transform.diagonal), factors)
    check_reads(rng, cache, 64, 48)


def test_vecinfer_of_a_calibration(rng):
    layer = tiny.calibration().layers[0]
    cache = VecInferKVCache(layer, config=SMALL)
    assert cache.key_codec is layer.key and cache.value_codec is layer.value
    check_reads(rng, cache, 64)


def test_vecinfer_refusals(rng):
    layer, book = tiny.calibration().layers[0], rng.standard_normal((256, 4))
    for kw, message in (
        ({}, "must be given, but got no codecs and head_dim"),
        ({"head_dim": 64}, "must be given, but got no codecs and key_codebook"),
        ({"codecs": layer, "head_dim": 64}, "codecs must come without"),
        ({"codecs": layer, "value_codebook": book}, "codecs must come without"),
        ({"head_dim": 64, "key_codebook": book[:100]}, r"key_codebook must be .*\(100, 4\)"),
        (
            {"head_dim": 64, "key_codebook": book, "value_codebook": book[0]},
            r"value_codebook must be .*\(4,\)",
        ),
    ):
        with pytest.raises(ValueError, match=rf"^\[VecInferKVCache\].*{message}"):
            VecInferKVCache(**kw)
    for width in (66, 72):
        with pytest.raises(ValueError, match=f"{width}"):
            VecInferKVCache(head_dim=width, key_codebook=book)


def test_exported():
    for name in ("VecInferKVCache", *(m.__name__ for m in METHODS)):
        assert name in vqkv_ext.__all__ and callable(getattr(vqkv_ext, name))
