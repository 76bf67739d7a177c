"""The short way of tokens that only append, and layouts of three numbers."""

from __future__ import annotations

from dataclasses import replace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import base

from oracle import random_case
from test_cache import SMALL, codecs, tokens
from vqkv_ext import _ext, ops
from vqkv_ext.adapters.attention import _dispatching
from vqkv_ext.cache import CompressedArray, CompressedKVCache
from vqkv_ext.codecs.presets import codec
from vqkv_ext.packed import Layout

attend = _dispatching(base.scaled_dot_product_attention)


def query(rng, n=1, dtype=mx.float32):
    return mx.array(rng.standard_normal((1, 4, n, 64)).astype(np.float32)).astype(dtype)


@pytest.mark.sim
@pytest.mark.parametrize("strided", [False, True])
@pytest.mark.parametrize("preset", ["vecinfer", "centred-4bit", "trellis-2bit"])
def test_the_short_way_gives_what_the_long_one_gives(rng, preset, strided, monkeypatch):
    """Bitwise, and every step takes it; queries may have any strides."""
    pair = codecs(rng) if preset == "vecinfer" else [codec(preset, 64, s) for s in ("key", "value")]
    caches = [CompressedKVCache(*pair, SMALL) for _ in range(2)]
    kv = tokens(rng, 30)
    for cache in caches:
        cache.update_and_fetch(*kv)
    short = 0
    for _ in range(18):
        kv = tokens(rng, 1)
        q = query(rng, 2)[:, :, 1:] if strided else query(rng)
        out = []
        for cache in caches:
            with monkeypatch.context() as m:
                if cache is caches[1]:
                    m.setattr(CompressedKVCache, "_append_only", lambda *_: None)
                keys, values = cache.update_and_fetch(*kv)
            if cache is caches[0]:
                short += keys.fetched.attend(q, values.fetched, 0.2, None) is not None
                out.append(attend(q, keys, values, cache=cache, scale=0.2, mask=None))
            else:
                out.append(ops.attention(q, keys.packed, values.packed, scale=0.2))
        assert mx.array_equal(*out)
        assert caches[0]._counts() == caches[1]._counts()
    assert short == 18 and caches[0].coded_tokens == SMALL.coded_tokens(48)


def test_handles_keep_what_they_are(rng):
    """Whatever is appended, coded and trimmed later."""
    cache = CompressedKVCache(*codecs(rng), SMALL)
    cache.update_and_fetch(*tokens(rng, 30))
    seen = []
    for n in (1, 1, 3, 1, 9, 1, 1, 20, 1):
        handles = cache.update_and_fetch(*tokens(rng, n))
        q = query(rng)
        read = lambda h=handles, q=q: ops.attention(q, *(x.packed for x in h), scale=0.2)  # noqa: E731
        seen.append((read, np.array(read())))
        if n == 3:
            cache.trim(2)
    for read, before in seen:
        assert np.array_equal(np.array(read()), before)


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda k, v: (k.astype(mx.float16), v.astype(mx.float16)), "must have batch, heads and"),
        (lambda k, v: (k[:, :1], v[:, :1]), "codec's 2 heads"),
        (lambda k, v: (k[..., :32], v), "head_dim 64, but got 32"),
        (lambda k, v: (k[0], v[0]), r"must be \[B, H, L, D\]"),
        (lambda k, v: (k[:, :, :0], v[:, :, :0]), "at least one"),
        (lambda k, v: (mx.concatenate([k, k], 2), v), r"must be \[B, H, L, D\]"),
    ],
)
def test_what_does_not_fit_is_refused_as_ever(rng, change, message):
    cache = CompressedKVCache(*codecs(rng), SMALL)
    cache.update_and_fetch(*tokens(rng, 30))
    cache.update_and_fetch(*tokens(rng, 1))
    counts, held = cache._counts(), [np.array(t) for t in cache._tails]
    with pytest.raises(ValueError, match=message):
        cache.update_and_fetch(*change(*tokens(rng, 1)))
    assert cache._counts() == counts
    assert all(np.array_equal(t, h) for t, h in zip(cache._tails, held, strict=True))


def test_handles_of_another_dtype(rng):
    """A query of another dtype takes the long way, whose result has the wider one."""
    cache = CompressedKVCache(*codecs(rng), SMALL)
    cache.update_and_fetch(*tokens(rng, 30, dtype=mx.float16))
    keys, values = cache.update_and_fetch(*tokens(rng, 1, dtype=mx.float16))
    q = query(rng)
    got = attend(q, keys, values, cache=cache, scale=0.2, mask=None)
    assert got.dtype == mx.float32 and keys.dtype == mx.float16
    wide = [x.astype(mx.float32) for x in (keys, values)]
    assert all(type(x) is CompressedArray and x.dtype == mx.float32 for x in wide)
    assert mx.array_equal(got, ops.attention(q, *(x.packed for x in wide), scale=0.2))


@pytest.mark.parametrize(
    "at, change, message",
    [
        (9, {}, r"slots must be within the 10 of those held, but got 9 to 11"),
        (-1, {}, "slots must be within"),
        (0, {"keys": mx.zeros((2, 3, 2, 5))}, "keys must have the dtype, batch, heads and width"),
        (0, {"values": mx.zeros((2, 3, 1, 8))}, "must differ in width alone"),
        (0, {"held_values": mx.zeros((2, 3, 10, 8), mx.float16)}, "all arrays of one dtype"),
        (0, {"held_keys": mx.zeros((2, 10, 4))}, r"held keys must be floating of shape"),
    ],
)
def test_append_tokens_checks(at, change, message):
    args = {
        "held_keys": mx.zeros((2, 3, 10, 4)), "held_values": mx.zeros((2, 3, 10, 8)),
        "keys": mx.ones((2, 3, 2, 4)), "values": mx.ones((2, 3, 2, 8)),
    }  # fmt: skip
    k, v = _ext.append_tokens(**args, at=8)
    assert k.sum() == 2 * 3 * 2 * 4 == k[:, :, 8:].sum() and v[:, :, 8:].sum() == v.sum() == 96
    with pytest.raises(ValueError, match=r"\[append_tokens\] .*" + message):
        _ext.append_tokens(**args | change, at=at)


@pytest.mark.sim
@pytest.mark.parametrize("causal", [None, "causal"])
@pytest.mark.parametrize("native", [None, False])
def test_three_numbers_stand_for_equal_rows(rng, causal, native):
    """Natively and in plain mlx, with its gradient and vmap."""
    case = random_case(rng, batch=2, heads=4, kv_heads=2, queries=3, coded=48, recent=24,
                       grace=16, window=8, block=16)  # fmt: skip
    counts = tuple(case.keys.layout.rows[0].tolist())
    rows = mx.array([counts, counts], mx.int32)

    def call(q, rows, table=None):
        layout = Layout(rows, *(getattr(case.keys.layout, n) for n in SPANS))
        keys, values = (replace(side, layout=layout) for side in (case.keys, case.values))
        if table is not None:
            body = keys.body
            keys = replace(keys, body=replace(body, code=replace(body.code, table=table)))
        return ops.attention(q, keys, values, scale=0.1, mask=causal, use_metal_kernels=native)

    want = call(case.q, rows)
    assert mx.array_equal(call(case.q, counts), want)
    grad = [mx.grad(lambda q, r=r: call(q, r).sum())(case.q) for r in (rows, counts)]
    assert mx.allclose(*grad, atol=1e-6)
    qs = mx.stack([case.q, case.q + 1], axis=2)
    got = mx.vmap(lambda q: call(q, counts), in_axes=2)(qs)
    assert mx.allclose(got[0], want, atol=1e-5)
    assert mx.allclose(got[1], call(case.q + 1, rows), atol=1e-5)
    # mapped tables go through the reference, with queries mapped over any axis
    tables = mx.stack([case.keys.body.code.table, -case.keys.body.code.table])
    for axis in (0, 2):
        q = mx.moveaxis(qs, 2, axis)
        got = mx.vmap(lambda q, t: call(q, counts, t), in_axes=(axis, 0))(q, tables)
        for i in range(2):
            want = call(qs[:, :, i], rows, tables[i])
            assert mx.allclose(got[i], want, atol=2e-5)


SPANS = ("sink_tokens", "window", "block")
