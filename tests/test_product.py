"""Product codes of 8 and 12 bits."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from test_cache import SMALL, codes, decoded, feed, same, split, tokens
from vqkv_ext.cache import CompressedKVCache
from vqkv_ext.codecs import ProductCodec
from vqkv_ext.codecs.vecinfer import PRESETS, fit


def made(rng, rows, dims, width, heads=1, groups=1):
    book = rng.standard_normal((heads, groups, rows, dims)).astype(np.float32)
    return ProductCodec("product-test", width, mx.array(book))


@pytest.mark.parametrize("width", [64, 72, 128, 8])
def test_twelve_bits_are_packed_low_bits_first(rng, width):
    codec = made(rng, 4096, 8, width)
    n = width // 8
    wanted = rng.integers(0, 4096, (1, 2, 5, n))
    table = np.array(codec.code.table)[0, 0]
    coded = codec.encode(mx.array(table[wanted].reshape(1, 2, 5, width)))["codes"]
    assert coded.shape[-1] == codec.code.bytes_per_token(width) == -(-3 * n // 2)
    bits = np.unpackbits(np.array(coded), axis=-1, bitorder="little")
    assert not bits[..., 12 * n :].any()
    numbers = bits[..., : 12 * n].reshape(1, 2, 5, n, 12) @ (1 << np.arange(12))
    assert (numbers == wanted).all()
    # exact rows decode to themselves
    assert (np.array(codec.decode({"codes": coded})) == table[wanted].reshape(1, 2, 5, -1)).all()


@pytest.mark.sim
@pytest.mark.parametrize(("heads", "groups"), [(1, 1), (2, 1), (2, 8), (1, 8)])
def test_cache_of_twelve_bits(rng, heads, groups):
    """A table of 4096 rows, in attention and for any chunking."""
    pair = [made(rng, 4096, 8, 64, heads, groups) for _ in "kv"]
    n = 43
    kv = tokens(rng, n)
    q = mx.array(rng.standard_normal((1, 4, n, 64)).astype(np.float32))
    whole = CompressedKVCache(*pair, SMALL)
    want = feed(whole, kv, [n], q)
    assert whole.coded_tokens > 0
    k, v = decoded(whole)
    last = mx.fast.scaled_dot_product_attention(q[:, :, -1:], k, v, scale=0.2)
    assert mx.abs(want[:, :, -1:] - last).max() < 2e-5
    for sizes in ([1], [13, 1, 1, 29]):
        cache = CompressedKVCache(*pair, SMALL)
        assert mx.abs(feed(cache, kv, split(n, sizes), q) - want).max() < 2e-5
        assert same(codes(cache), codes(whole))


def test_fit_of_twelve_bits(rng):
    """Better than 8 bits for the same values, one codebook for all heads."""
    k, v = (mx.array(rng.standard_normal((2, 600, 64)).astype(np.float32)) for _ in "kv")
    errors = {}
    for preset in ("vecinfer-1bit", "vecinfer-1.5bit", "vecinfer-2bit"):
        key, value = fit(PRESETS[preset], k, v, iterations=4)
        x = mx.array(rng.standard_normal((1, 2, 300, 64)).astype(np.float32))
        errors[preset] = (value.decode(value.encode(x)) - x).square().mean().item()
    assert errors["vecinfer-1bit"] > errors["vecinfer-1.5bit"] > errors["vecinfer-2bit"]
    assert key.heads == 2
    key, value = fit(PRESETS["vecinfer-1.5bit"], k, v, iterations=1)
    assert key.code.table.shape == value.code.table.shape == (1, 1, 4096, 8)
    assert key.bytes_per_token == 12


@pytest.mark.parametrize("shape", [(1, 1, 512, 4), (256, 4), (1, 1, 256, 7), (1, 3, 256, 8)])
def test_refused_codebooks(shape):
    with pytest.raises(ValueError, match=r"\[product-test\] codebook must"):
        ProductCodec("product-test", 64, mx.zeros(shape))
