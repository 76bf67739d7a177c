"""Bases of keys fitted to queries: the statistics against NumPy, and the codecs."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

import tiny
import writing
from oracle import f64
from vqkv_ext.adapters import sharding
from vqkv_ext.adapters.attention import enable_attention, layer_modules
from vqkv_ext.adapters.calibrate import calibrate, collect
from vqkv_ext.adapters.mlx_lm import make_prompt_cache
from vqkv_ext.adapters.query_statistics import key_factors
from vqkv_ext.cache import CompressedKVCache
from vqkv_ext.codecs import Calibration, presets
from vqkv_ext.codecs.query_aware import PRESETS, build, factors

TOKENS = 300


@pytest.fixture(scope="module")
def model():
    return writing.llama()


@pytest.fixture(scope="module")
def fitted(model) -> Calibration:
    return calibrate(model, tiny.ids(TOKENS, seed=5), "query-aware-2bit")


def test_factors_are_the_best(rng):
    keys, queries = rng.exponential(size=(2, 3, 16)), rng.exponential(size=(2, 3, 16))
    keys, queries = keys[0], queries[0]
    found = f64(factors(mx.array(keys.astype(np.float32)), mx.array(queries.astype(np.float32))))

    def error(f):
        return (queries * f**2).sum(-1) * (keys / f**2).sum(-1)

    assert np.allclose(np.log(found).mean(-1), 0, atol=1e-6)
    for _ in range(20):
        assert (error(found * np.exp(0.1 * rng.standard_normal(found.shape))) > error(found)).all()


def test_factors_without_weights():
    keys, queries = mx.array([[4.0, 0, 1], [0, 0, 0]]), mx.array([[1.0, 1, 0], [1, 1, 1]])
    found = factors(keys, queries)
    assert found[0, 1] == found[0, 2] and found[0, 0] > found[0, 1]
    assert mx.allclose(found[1], mx.ones(3))


def pair_weights(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """Of each query and key ``[H, G, N, N]``, pair by pair in float64; q is [H, G, N, D]."""
    heads, group, n, width = q.shape
    found = np.zeros((heads, group, n, n))
    for h, g, t in np.ndindex(heads, group, n):
        scores = k[h, : t + 1] @ q[h, g, t] / np.sqrt(width)
        p = np.exp(scores - scores.max())
        p /= p.sum()
        weight = p**2 * np.square(v[h, : t + 1] - p @ v[h, : t + 1]).sum(1)
        weight[:4] = 0
        weight[max(t - 63, 0) :] = 0
        found[h, g, t, : t + 1] = weight
    return found


def expected(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """``key_factors`` of one layer, in float64; q is [H, G, N, D]."""
    n = q.shape[2]
    weights = pair_weights(q, k, v)
    coded = slice(4, 4 + (n - 4) // 64 * 64)
    rest = k[:, coded].reshape(k.shape[0], -1, 64, k.shape[2])
    rest = (rest - rest.mean(2, keepdims=True)).reshape(k[:, coded].shape)
    keys = np.einsum("hgtn,hnd->hd", weights[..., coded], np.square(rest))
    queries = np.einsum("hgtn,hgtd->hd", weights, np.square(q))
    found = (keys / queries) ** 0.25
    return found / np.exp(np.log(found).mean(-1, keepdims=True))


def watched(model, tokens) -> tuple[list[mx.array], list[tuple[mx.array, mx.array]]]:
    """Queries of each layer ``[1, Hq, N, D]``, and its keys and values."""
    seen = []
    enable_attention(model)
    (module,) = layer_modules(model)
    attention = module.scaled_dot_product_attention

    def spy(q, *arrays, **more):
        seen.append(q)
        return attention(q, *arrays, **more)

    module.scaled_dot_product_attention = spy
    try:
        return seen, collect(model, tokens, chunk=len(tokens))
    finally:
        module.scaled_dot_product_attention = attention


def test_statistics(model):
    tokens = tiny.ids(TOKENS, seed=5)
    seen, collected = watched(model, tokens)
    (module,) = layer_modules(model)
    attention = module.scaled_dot_product_attention
    found = key_factors(model, tokens)
    again = key_factors(model, tokens, chunk=37)
    assert module.scaled_dot_product_attention is attention
    for q, (k, v), one, two in zip(seen, collected, found, again, strict=True):
        want = expected(f64(q).reshape(2, 2, TOKENS, 64), f64(k), f64(v))
        assert want.max() > 1.2 * want.min()  # else anything would do
        assert np.allclose(f64(one), want, rtol=2e-3)
        assert mx.allclose(one, two, rtol=1e-3)


def test_scores_get_better(rng):
    """Keys and queries of different channels; against the preset that knows nothing of them."""
    spread = np.exp(rng.uniform(-2, 2, (2, 64)))
    k = mx.array((rng.standard_normal((1, 1, 512, 64)) * spread[0]).astype(np.float32))
    q = mx.array((rng.standard_normal((1, 1, 512, 64)) * spread[1]).astype(np.float32))
    fit = factors(k[0].square().sum(1), q[0].square().sum(1))
    for name, bits in PRESETS.items():
        key, value = build(name, fit, 64, 64)
        plain = presets.codec(f"trellis-{bits}bit", 64, "key")
        assert value.name == f"trellis-{bits}bit" and key.bytes_per_token == plain.bytes_per_token
        errors = [
            mx.square(q @ (c.decode(c.encode(k)) - k).swapaxes(-1, -2)).mean().item()
            for c in (key, plain)
        ]
        assert errors[0] < 0.5 * errors[1]


def test_prefill_is_decode(model, fitted):
    tokens = tiny.ids(220)
    made = [make_prompt_cache(model, fitted) for _ in range(2)]
    one = tiny.run(model, made[0], tokens)
    two = tiny.run(model, made[1], tokens, [1, 99, 120])
    assert mx.allclose(one, two, atol=1e-3)
    for a, b in zip(*made, strict=True):
        assert a.coded_tokens == 128
        for x, y in zip(a._bodies, b._bodies, strict=True):
            assert mx.array_equal(x["codes"][:, :, :128], y["codes"][:, :, :128])


def test_file_and_state(model, fitted, tmp_path):
    path = tmp_path / "q.safetensors"
    fitted.save(path)
    read = Calibration.load(path)
    assert (read.preset, read.tokens) == ("query-aware-2bit", TOKENS)
    for one, two in zip(fitted.layers, read.layers, strict=True):
        assert one.key.fingerprint == two.key.fingerprint
        assert one.value.fingerprint == two.value.fingerprint
    assert fitted.layers[0].key.fingerprint != fitted.layers[1].key.fingerprint
    (cache, _) = make_prompt_cache(model, path)
    keys = mx.random.normal((1, 2, 150, 64))
    cache.update_and_fetch(keys, keys)
    copy = CompressedKVCache.from_state(cache.state)
    assert copy.fingerprint == cache.fingerprint and copy.coded_tokens == 64
    arrays, meta = mx.load(str(path), return_metadata=True)
    arrays["layers.0.key.smooth"] = -arrays["layers.0.key.smooth"]
    mx.save_safetensors(str(path), arrays, meta)
    with pytest.raises(ValueError, match="key.smooth must be positive"):
        Calibration.load(path)


def test_ranks_get_their_heads(fitted):
    whole = fitted.layers[0].key.transform.diagonal
    for rank in (0, 1):
        part = sharding._heads(fitted, rank, 2)
        key = part.layers[0].key
        assert mx.array_equal(key.transform.diagonal, whole[rank : rank + 1])
        assert part.shape.kv_heads == 1 and key.heads is None
        assert part.layers[0].value is fitted.layers[0].value


def test_errors(model):
    with pytest.raises(ValueError, match="query-aware-2bit must be calibrated"):
        make_prompt_cache(model, "query-aware-2bit")
    with pytest.raises(ValueError, match=r"head_dim must be 2\^k .* but got 72"):
        build("query-aware-2bit", mx.ones((1, 72)), 72, 72)
