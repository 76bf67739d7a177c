"""Attention through the cache: GQA, batches, every mask, hidden rows, sinks, repeated runs. Each
case at lengths of a few tokens, and at the default windows with longer ones."""

from __future__ import annotations

import logging
from dataclasses import dataclass

import mlx.core as mx
import numpy as np
import pytest

from oracle import DTYPES, f64
from test_cache import codecs, decoded, feed, tokens
from vqkv_ext import _ext, ops
from vqkv_ext.cache import CacheConfig, CompressedKVCache
from vqkv_ext.codecs import presets
from vqkv_ext.packed import coded_tokens

SCALE = 0.125
pytestmark = pytest.mark.usefixtures("one_blas_thread")


def normal(rng, *shape, dtype=mx.float32):
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(dtype)


@dataclass
class Filled:
    """A cache of S tokens and what a query at its end reads, as plain arrays."""

    cache: CompressedKVCache
    q: mx.array
    keys: mx.array
    values: mx.array

    def attend(self, mask="causal", sinks=None, q=None):
        k, v = self.cache.keys_and_values()
        q = self.q if q is None else q
        return ops.attention(q, k.packed, v.packed, scale=SCALE, mask=mask, sinks=sinks)

    def want(self, mask="causal", sinks=None) -> np.ndarray:
        """In float64: scores, one more column for the sinks, softmax."""
        q, k, v = f64(self.q), f64(self.keys), f64(self.values)
        batch, heads, queries, _ = q.shape
        k, v = (np.repeat(x, heads // k.shape[1], 1) for x in (k, v))
        scores = SCALE * q @ k.swapaxes(-1, -2)
        n = k.shape[2]
        if isinstance(mask, str):
            visible = np.arange(n) <= np.arange(n - queries, n)[:, None]
        elif mask is None or mask.dtype != mx.bool_:
            scores = scores + (0 if mask is None else f64(mask))
            visible = scores > -1e30
        else:
            visible = np.array(mask)
        scores = np.where(visible, scores, -np.inf)
        logit = np.full(heads, -np.inf) if sinks is None else f64(sinks)
        column = np.broadcast_to(logit[:, None, None], (*scores.shape[:3], 1))
        scores = np.concatenate([scores, column], -1)
        top = scores.max(-1, keepdims=True)
        e = np.exp(scores - np.where(np.isinf(top), 0, top))
        total = e.sum(-1, keepdims=True)
        return (e / np.where(total == 0, 1, total))[..., :-1] @ v


def filled(rng, config, n, *, batch, heads, queries, dtype=mx.float32, pair=None) -> Filled:
    """S = n tokens, appended in two parts so that the last chunk is that of the queries; all the
    queries of the last chunk read the same tokens as codes."""
    pair = pair or codecs(rng, heads=heads[1])
    kv = tokens(rng, n, batch=batch, heads=heads[1], dtype=dtype)
    cache = CompressedKVCache(*pair, config)
    feed(cache, kv, [n - queries, queries] if n > queries else [n])
    assert cache.coded_tokens == coded_tokens(n, config.sink_tokens, config.window, config.block)
    assert cache.coded_tokens > 0
    q = normal(rng, batch, heads[0], queries, 64, dtype=dtype)
    return Filled(cache, q, *decoded(cache))


def near(got, want, dtype="float32") -> None:
    limit = {"float32": 1e-4, "float16": 5e-3, "bfloat16": 4e-2}[dtype]
    assert bool(mx.isfinite(got).all())
    assert np.abs(f64(got) - want).max() < limit


AS_WRITTEN, DEFAULT = "as written", "default"
GQA = [(1, 1), (4, 1), (4, 2), (14, 2), (28, 4), (8, 1), (16, 2), (40, 8)]


@pytest.mark.sim
@pytest.mark.parametrize("heads", GQA)
@pytest.mark.parametrize("which", [AS_WRITTEN, DEFAULT])
def test_t07_heads_batches_and_lengths(rng, which, heads, simulated):
    """Case T07. As written all tokens are codes; at the default 12 times as many, and 132 where
    that would not fill a block."""
    pair = codecs(rng, heads=heads[1])
    for i, s in enumerate((1, 2, 31, 257)):
        config, n = CacheConfig(0, 0, 1), s
        if which == DEFAULT:
            config, n = CacheConfig(), 12 * s if s > 2 else 132 + 12 * s
        if simulated and (n > 400 or heads[0] > 16):
            continue
        batch = 1 + i % 3
        f = filled(rng, config, n, batch=batch, heads=heads, queries=1, pair=pair)
        for queries in (1, 2, 3, 8):
            q = normal(rng, batch, heads[0], queries, 64)
            g = Filled(f.cache, q, f.keys, f.values)
            got = g.attend(None)
            near(got, g.want(None))
            if queries <= n and config.block == 1:  # every query its own boundary
                last = g.attend("causal")[:, :, -1:]
                assert mx.allclose(last, got[:, :, -1:], atol=1e-6)
            elif queries <= n:
                near(g.attend("causal"), _causal(g, config))
        if batch > 1:  # row 0 does not depend on the others
            k, v = f.cache.keys_and_values()
            before = np.array(f.attend())
            k.packed.tail[1:] = mx.nan
            after = np.array(f.attend())
            assert np.array_equal(before[0], after[0])


def _causal(f: Filled, config: CacheConfig) -> np.ndarray:
    """Per query, of what the cache decodes; queries whose last token leaves a block would read
    other tokens as codes, and the lengths here avoid that."""
    n, queries = f.keys.shape[2], f.q.shape[2]
    spans = config.sink_tokens, config.window, config.block
    assert coded_tokens(n - queries + 1, *spans) == coded_tokens(n, *spans)
    return f.want("causal")


def t08_masks(rng, batch, heads, queries, n, pad, dtype):
    """name -> mask; queries at the end of n tokens, the second row padded at the left."""
    causal = np.arange(n) <= np.arange(n - queries, n)[:, None]
    padded = np.stack([causal, causal & (np.arange(n) >= pad)])[:, None]
    never = -np.inf
    add = lambda keep, *s: np.where(keep, rng.standard_normal((*s, queries, n)), never)  # noqa: E731
    own = lambda m: mx.array(m.astype(np.float32)).astype(dtype)  # noqa: E731
    return {
        "none": None,
        "causal": "causal",
        "bool-LS": mx.array(causal),
        "bool-B1LS": mx.array(padded),
        "own-LS": own(add(causal)),
        "f32-LS": own(add(causal)).astype(mx.float32),
        "own-BHLS": own(add(padded, batch, heads)),
        "own-1HLS": own(add(causal, 1, heads)),
        "f32-BHLS": own(add(padded, batch, heads)).astype(mx.float32),
        "bool-1HLS": mx.array(causal & (rng.random((1, heads, queries, n)) < 0.7)),
        "bool-S": mx.array(rng.random(n) < 0.7),
    }


T08 = {AS_WRITTEN: (CacheConfig(1, 2, 2), 9, 4), DEFAULT: (CacheConfig(), 144, 48)}


@pytest.mark.sim
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", T08)
def test_t08_masks(rng, which, dtype):
    """Case T08: each mask equals the dense reference, in the dtype of the queries."""
    config, n, pad = T08[which]
    f = filled(rng, config, n, batch=2, heads=(14, 2), queries=3, dtype=DTYPES[dtype])
    for name, mask in t08_masks(rng, 2, 14, 3, n, pad, DTYPES[dtype]).items():
        got = f.attend(mask)
        assert got.dtype == DTYPES[dtype], name  # also for a float32 mask: never silently float32
        rows = slice(2, 3) if which == AS_WRITTEN else slice(None)
        # as written the queries differ in what they read as codes; the last one reads it all
        near(got[:, :, rows], f.want(mask)[:, :, rows], dtype)


@pytest.mark.sim
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", T08)
def test_t09_a_row_that_sees_nothing(rng, which, dtype):
    """Case T09: finite, zeros, and the other rows unchanged bit for bit."""
    config, n, pad = T08[which]
    f = filled(rng, config, n, batch=2, heads=(14, 2), queries=3, dtype=DTYPES[dtype])
    masks = t08_masks(rng, 2, 14, 3, n, pad, DTYPES[dtype])
    for name in ("bool-B1LS", "own-BHLS", "f32-BHLS"):
        for sinks in (None, normal(rng, 14)):
            mask = masks[name]
            before = np.array(f.attend(mask, sinks).astype(mx.float32))
            hidden = mx.array(mask)
            hidden[0, :, 1] = False if mask.dtype == mx.bool_ else -mx.inf
            after = np.array(f.attend(hidden, sinks).astype(mx.float32))
            assert np.isfinite(after).all() and not after[0, :, 1].any() and before[0, :, 1].any()
            before[0, :, 1] = 0
            assert np.array_equal(before, after)


T10 = {AS_WRITTEN: (CacheConfig(1, 4, 2), 12), DEFAULT: (CacheConfig(), 144)}


@pytest.mark.sim
@pytest.mark.parametrize("queries", [1, 4])
@pytest.mark.parametrize("which", T10)
@pytest.mark.parametrize("native", [True, False])
def test_t10_sinks(rng, which, queries, native):
    """Case T10: one more score column without a value."""
    config, n = T10[which]
    f = filled(rng, config, n, batch=1, heads=(8, 2), queries=queries)
    k, v = f.cache.keys_and_values()
    last = slice(queries - 1, None) if which == AS_WRITTEN else slice(None)
    outs = []
    for logit in (-5.0, 0.0, 5.0, None):
        sinks = mx.full((8,), logit) if logit is not None else mx.linspace(-5, 5, 8)
        got = ops.attention(
            f.q, k.packed, v.packed, scale=SCALE, mask="causal", sinks=sinks,
            use_metal_kernels=None if native else False,
        )  # fmt: skip
        near(got[:, :, last], f.want("causal", sinks)[:, :, last])
        outs.append(got)
    assert mx.abs(outs[0]).max() > mx.abs(outs[1]).max() > mx.abs(outs[2]).max()


# ---- T30 ----


def _ops(rng) -> dict:
    """name -> a call of each op at the sizes of case T30."""
    x = normal(rng, 2, 2, 257, 128)
    book, signs = normal(rng, 256, 4), mx.array(rng.choice([-1.0, 1.0], 128).astype(np.float32))
    levels, sketch = mx.linspace(-2, 2, 4), normal(rng, 128, 128)
    codes = ops.quantize_vq(x, book)
    packed = ops.quantize_scalar(x, levels, 2)
    bits, norms = ops.qjl_encode(x, sketch)
    calls = {
        "quantize_vq": lambda: ops.quantize_vq(x, book),
        "dequantize_vq": lambda: ops.dequantize_vq(codes, book),
        "fake_quantize_vq": lambda: ops.fake_quantize_vq(x, book),
        "quantize_scalar": lambda: ops.quantize_scalar(x, levels, 2),
        "dequantize_scalar": lambda: ops.dequantize_scalar(packed, levels, 2, 128, mx.float16),
        "hadamard": lambda: ops.hadamard(x, signs),
        "hadamard_quantize": lambda: ops.hadamard_quantize(x, signs, levels, 2)[0],
        "trellis_encode": lambda: ops.trellis_encode(x, book[:, 0], 2)[0],
        "qjl_encode": lambda: mx.concatenate([a.astype(mx.float32).reshape(-1) for a in
                                              ops.qjl_encode(x, sketch)]),
    }  # fmt: skip
    config, q = CacheConfig(), normal(rng, 2, 4, 3, 128)
    n = 257
    mask = mx.array(np.arange(n) <= np.arange(n - 3, n)[:, None])
    for name in (
        "turboquant-2bit",
        "centred-4bit",
        "trellis-2bit",
        "qjl-4bit",
        "turboquant-prod-3bit",
    ):
        pair = [presets.codec(name, 128, side) for side in ("key", "value")]
        cache = CompressedKVCache(*pair, config)
        k, v = cache.update_and_fetch(x, x)
        assert cache.coded_tokens > 0
        for what, m, sinks in (("causal", "causal", None), ("array", mask, mx.ones((4,)))):
            calls[f"attention {name} {what}"] = lambda k=k, v=v, m=m, sinks=sinks: ops.attention(
                q, k.packed, v.packed, scale=0.1, mask=m, sinks=sinks
            )
    return calls


@pytest.mark.sim
def test_t30_repeated_runs_are_bitwise_equal(rng, simulated):
    """Case T30: 20 times each, with NaN in the memory that outputs are written to."""
    for name, call in _ops(rng).items():
        first = call()
        want = np.array(first.view(mx.uint8))
        assert first.dtype == mx.uint8 or bool(mx.isfinite(first).all()), name
        for _ in range(3 if simulated else 20):
            for _ in range(3):
                mx.eval(mx.full((first.nbytes // 4,), mx.nan))
            again = call()
            assert np.array_equal(np.array(again.view(mx.uint8)), want), name


@pytest.mark.sim
def test_t30_the_path_is_named(rng, caplog, simulated):
    """Case T30: the logger "vqkv_ext" says what computed a call."""
    gpu = mx.default_device().type == mx.DeviceType.gpu
    where = _ext.gpu_executor() if gpu else "sim" if simulated else "cpu"
    x, q = normal(rng, 1, 2, 200, 64), normal(rng, 1, 4, 1, 64)
    for name, fused in (("turboquant-2bit", "q and output"), ("qjl-2bit", "output")):
        pair = [presets.codec(name, 64, side) for side in ("key", "value")]
        k, v = CompressedKVCache(*pair).update_and_fetch(x, x)
        with caplog.at_level(logging.DEBUG, "vqkv_ext"):
            ops.attention(q, k.packed, v.packed, scale=0.1)
        said = [r.getMessage() for r in caplog.records if r.name == "vqkv_ext"]
        assert said == [f"attention: native, {where} kernels, basis of {fused} fused"]
        caplog.clear()
        ops.attention(q, k.packed, v.packed, scale=0.1)  # not asked for
        assert not caplog.records


def test_t30_plain_mlx_is_named(rng, caplog):
    x, q = normal(rng, 1, 2, 200, 64), normal(rng, 1, 4, 1, 64)
    pair = [presets.codec("turboquant-2bit", 64, side) for side in ("key", "value")]
    k, v = CompressedKVCache(*pair).update_and_fetch(x, x)
    with caplog.at_level(logging.DEBUG, "vqkv_ext"):
        ops.attention(q, k.packed, v.packed, scale=0.1, use_metal_kernels=False)
    assert [r.getMessage() for r in caplog.records] == ["attention: plain mlx"]
