"""The worked example of CONTRIBUTING.md: a codec from outside the package, in the cache, in
attention and in mlx_lm."""

from __future__ import annotations

import copy
from pathlib import Path
from types import SimpleNamespace

import mlx.core as mx
import mlx_lm
import numpy as np
import pytest

import tiny
from markdown import blocks
from test_cli import save_model
from vqkv_ext import ops
from vqkv_ext.cache import CompressedKVCache

CONTRIBUTING = Path(__file__).resolve().parents[1] / "CONTRIBUTING.md"
D = 64


@pytest.fixture(scope="module")
def example() -> SimpleNamespace:
    """What the two blocks of the example define, with a model of head_dim 64."""
    model = tiny.llama(D, tied=False)
    names = {"model": model}
    python = [b for b in blocks(CONTRIBUTING) if b.language == "python"]
    assert len(python) == 2
    for block in python:
        exec(compile(block.code, f"{block.path}:{block.line}", "exec"), names)
    return SimpleNamespace(**names)


def plain_numpy(x: np.ndarray) -> np.ndarray:
    """Encoded and decoded by the definition, in float64."""
    pairs = x.reshape(*x.shape[:-1], -1, 2)
    y = np.stack([pairs.sum(-1), pairs[..., 0] - pairs[..., 1]], -1).reshape(x.shape) / np.sqrt(2)
    largest = np.abs(y).max(-1, keepdims=True)
    unit = np.array(mx.array(largest.astype(np.float32)).astype(mx.bfloat16).astype(mx.float32))
    y = np.clip(np.round((y / unit * 15 + 15) / 2), 0, 15) * 2 - 15
    y = (y / 15 * unit).reshape(*x.shape[:-1], -1, 2)
    return np.stack([y.sum(-1), y[..., 0] - y[..., 1]], -1).reshape(x.shape) / np.sqrt(2)


def test_codes_are_those_of_the_definition(example, rng):
    x = rng.standard_normal((2, 3, 40, D)).astype(np.float32)
    coded = example.codec.encode(mx.array(x))
    assert coded["codes"].shape == (2, 3, 40, D // 2)
    decoded = np.array(example.codec.decode(coded))
    np.testing.assert_allclose(decoded, plain_numpy(x.astype(np.float64)), atol=2e-5)
    assert 0 < np.square(decoded - x).mean() < 0.02


@pytest.mark.parametrize("use_metal_kernels", [None, False])
def test_cache_and_attention(example, rng, use_metal_kernels):
    """Attention over codes is softmax over the decoded keys and values."""
    cache = CompressedKVCache(example.codec, example.codec, tiny.SMALL)
    k, v = (rng.standard_normal((1, 2, 50, D)).astype(np.float32) for _ in "kv")
    q = rng.standard_normal((1, 4, 1, D)).astype(np.float32)
    keys, values = cache.update_and_fetch(mx.array(k), mx.array(v))
    first, coded = tiny.SMALL.sink_tokens, cache.coded_tokens
    assert coded == 40
    for x in (k, v):
        x[:, :, first : first + coded] = plain_numpy(x[:, :, first : first + coded])
    got = ops.attention(
        mx.array(q), keys.packed, values.packed, scale=0.1, use_metal_kernels=use_metal_kernels
    )
    k, v = (np.repeat(x, 2, axis=1).astype(np.float64) for x in (k, v))
    weights = np.exp(0.1 * q @ k.swapaxes(-1, -2))
    expected = weights @ v / weights.sum(-1, keepdims=True)
    np.testing.assert_allclose(np.array(got), expected, atol=1e-4)


def test_cache_contract(example, rng):
    """Chunks, bytes, copies and states, as for the package's own codecs."""
    k, v = (mx.array(rng.standard_normal((1, 2, 50, D)).astype(np.float32)) for _ in "kv")
    caches = []
    for chunks in ([50], [1] * 50, [7, 20, 23]):
        caches.append(CompressedKVCache(example.codec, example.codec, tiny.SMALL))
        at = 0
        for n in chunks:
            caches[-1].update_and_fetch(k[:, :, at : at + n], v[:, :, at : at + n])
            at += n
    whole, *others = caches
    for other in (*others, copy.deepcopy(whole)):
        for name in ("codes", "scales"):
            mine, theirs = (c._bodies[0][name][:, :, :40] for c in (whole, other))
            assert mx.array_equal(mine, theirs)
    assert whole.bytes_per_token == 2 * 2 * (D / 2 + 2)
    loaded = CompressedKVCache.from_state(whole.state, example.codec, example.codec)
    assert loaded.nbytes == whole.nbytes and loaded.offset == 50
    with pytest.raises(ValueError, match="give key_codec and value_codec"):
        CompressedKVCache.from_state(whole.state)


def test_model(example, tmp_path):
    """mlx_lm generates with it; the logits are near those of the stock cache."""
    model, tokenizer = mlx_lm.load(str(save_model(tmp_path / "tiny", example.model)))[:2]
    prompt = tiny.ids(200)
    cache = example.KVCacheBuilder.for_model(
        model, example.KVCacheConfig(key=example.codec, value=example.codec)
    )
    text = mlx_lm.generate(model, tokenizer, prompt, max_tokens=5, prompt_cache=cache)
    assert text and all(c.coded_tokens == 128 for c in cache)
    fresh = example.KVCacheBuilder.for_model(
        model, example.KVCacheConfig(key=example.codec, value=example.codec)
    )
    compressed = tiny.run(model, fresh, prompt)
    stock = model(mx.array(prompt)[None])[0]
    assert 0 < mx.abs(compressed - stock).max() < 0.2 * mx.abs(stock).max()
