"""The codecs that need no calibration, through the cache and through a model."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models.cache import make_prompt_cache as stock_cache

import tiny
from test_cache import SMALL, codes, decoded, feed, same, split, tokens
from vqkv_ext import ops
from vqkv_ext.adapters.mlx_lm import disable_attention, make_prompt_cache
from vqkv_ext.cache import CacheConfig, CompressedKVCache
from vqkv_ext.codecs.presets import PRESETS, codec
from vqkv_ext.codecs.rotations import OverlappingHadamards, rotation

ERROR = {1: 0.3615, 2: 0.1160, 3: 0.0340, 4: 0.0093}
"""Largest relative squared error of scalar codes on random vectors of 128."""


def pair(name, width=64):
    return codec(name, width, "key"), codec(name, width, "value")


@pytest.mark.sim
@pytest.mark.parametrize("name", PRESETS)
def test_any_chunking_gives_the_same_codes(rng, name):
    n = 43
    kv = tokens(rng, n)
    q = mx.array(rng.standard_normal((1, 4, n, 64)).astype(np.float32))
    whole = CompressedKVCache(*pair(name), SMALL)
    want = feed(whole, kv, [n], q)
    assert whole.coded_tokens > 0
    for sizes in ([1], [7], [8, 1], [13, 1, 1, 29]):
        cache = CompressedKVCache(*pair(name), SMALL)
        got = feed(cache, kv, split(n, sizes), q)
        assert same(codes(cache), codes(whole)), sizes
        assert mx.abs(got - want).max() < 2e-5, sizes


@pytest.mark.sim
@pytest.mark.parametrize("name", PRESETS)
def test_attention_reads_what_the_codec_decodes(rng, name):
    """Dense attention over decoded tokens, also after a trim that leaves a block partial."""
    cache = CompressedKVCache(*pair(name), SMALL)
    q = mx.array(rng.standard_normal((1, 4, 60, 64)).astype(np.float32))
    kv = tokens(rng, 60)
    feed(cache, kv, [40])
    for n, more in ((0, 3), (29, 12)):
        cache.trim(n)
        at = cache.offset
        got = feed(cache, [x[:, :, at : at + more] for x in kv], [more], q[:, :, at : at + more])
        k, v = decoded(cache)
        last = q[:, :, at + more - 1 : at + more]
        want = mx.fast.scaled_dot_product_attention(last, k, v, scale=0.2)
        assert mx.abs(got[:, :, -1:] - want).max() < 2e-5


@pytest.mark.parametrize("name", PRESETS)
def test_bytes_are_as_advertised(rng, name):
    """The slope between two block-aligned capacities, counted from the arrays."""
    config = CacheConfig()
    cache = CompressedKVCache(*pair(name, 128), config)
    sizes = []
    for _ in range(2):
        n = 1024 + config.window + config.sink_tokens
        feed(cache, tokens(rng, n, width=128, dtype=mx.float16), [n])
        sizes.append((cache._bodies[0]["codes"].shape[2], cache.nbytes))
    slope = (sizes[1][1] - sizes[0][1]) / (sizes[1][0] - sizes[0][0])
    assert slope == pytest.approx(cache.bytes_per_token, rel=1e-6)


def test_sizes_of_the_presets():
    """Bytes per token and head of keys and values, D = 128."""
    size = lambda name: sum(c.bytes_per_token for c in pair(name, 128))  # noqa: E731
    assert size("turboquant-2bit") == 68 and size("turboquant-4bit") == 132
    assert codec("qjl-1bit", 128, "key").bytes_per_token == 18
    assert size("none") == 512
    assert size("centred-4bit") == 132 + 130 / 64
    for bits in (1, 2, 3, 4):  # bits + 24 / D per value, and centres
        assert size(f"trellis-{bits}bit") == 2 * (128 * bits + 24) / 8 + 130 / 64


@pytest.mark.parametrize("bits", ERROR)
@pytest.mark.parametrize("width", [128, 72, 576])
def test_error_on_random_vectors(rng, bits, width):
    """Also where no Hadamard matrix exists: the rotation must still spread every direction."""
    c = codec(f"turboquant-{bits}bit", width, "value")
    x = rng.standard_normal((1, 1, 4000, width)).astype(np.float32)
    x[0, 0, :1000] *= rng.random((1000, width)) < 0.05  # sparse vectors: a rotation has to spread
    x[0, 0, :, 0] += 1e-3
    x = mx.array(x)
    y = c.decode(c.encode(x))
    error = ((y - x).square().sum(-1) / x.square().sum(-1))[0, 0]
    assert error.mean() < ERROR[bits] * (1.02 if width == 128 else 1.1)


@pytest.mark.parametrize("width", [2, 3, 72, 100, 144, 576])
def test_rotation_of_any_width(rng, width):
    r = rotation(width, 5)
    assert isinstance(r, OverlappingHadamards) == (width not in (2,))
    x = mx.array(rng.standard_normal((2, 3, 4, width)).astype(np.float32))
    y = r.forward(x)
    assert mx.allclose(y.square().sum(-1), x.square().sum(-1), rtol=1e-5)
    assert mx.abs(r.inverse(y) - x).max() < 1e-5


def test_centres_pay_for_keys_with_an_offset(rng):
    """A common offset ten times the spread is what the centre of a block takes away."""
    x = mx.array((rng.standard_normal((1, 2, 256, 64)) + 10).astype(np.float32))
    errors = []
    for name in ("turboquant-2bit", "centred-2bit"):
        c = codec(name, 64, "key")
        errors.append((c.decode(c.encode(x)) - x).square().mean().item())
    assert errors[1] < errors[0] / 10


@pytest.mark.sim
@pytest.mark.parametrize(
    "name", ["centred-4bit", "trellis-2bit", "turboquant-prod-3bit", "qjl-2bit", "none"]
)
def test_models_generate_with_presets(name):
    model = tiny.llama()
    cache = make_prompt_cache(model, name, config=SMALL)
    ids = tiny.ids(60)
    whole = tiny.run(model, cache, ids)
    chunked = tiny.run(model, make_prompt_cache(model, name, config=SMALL), ids, [7] * 8 + [4])
    disable_attention(model)
    dense = tiny.run(model, stock_cache(model), ids)
    assert cache[0].coded_tokens > 0 and bool(mx.isfinite(whole).all())
    # a code may flip where keys of another chunk differ in the last digit
    assert mx.abs(whole - chunked).max() < 5e-5 + 0.02 * mx.abs(whole - dense).max()


def test_no_compression_changes_nothing():
    """`none` on both sides is the float16 cache."""
    model = tiny.llama()
    ids = tiny.ids(60)
    got = tiny.run(model, make_prompt_cache(model, "none", config=SMALL), ids)
    disable_attention(model)
    want = tiny.run(model, stock_cache(model), ids)
    assert mx.abs(got - want).max() < 5e-3 * mx.abs(want).max()


def test_refusals():
    for name, width, message in (
        ("turboquant-5bit", 64, "the preset must be one of"),
        ("centred", 64, "the preset must be one of"),
        ("turboquant-04bit", 64, "the preset must be one of"),
        ("turboquant-prod-3bit", 68, "head_dim must be a multiple of 8 up to 288, but got 68"),
        ("turboquant-prod-3bit", 296, "head_dim must be a multiple of 8 up to 288, but got 296"),
        ("qjl-4bit", 256, "multiple of 8 up to 576, but got 1024"),
        ("turboquant-1bit", 1, "head_dim must be 8 to 576, but got 1"),
        ("none", 640, "head_dim must be 8 to 576, but got 640"),
    ):
        with pytest.raises(ValueError, match=message):
            codec(name, width, "key")
    with pytest.raises(ValueError, match="side must be 'key' or 'value'"):
        codec("none", 64, "both")
    value = codec("turboquant-prod-3bit", 64, "value")
    assert "pair_codes" not in value.encode(mx.zeros((1, 1, 1, 64)))
    assert ops.native(None)
