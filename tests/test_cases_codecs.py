"""Cases T05, T23 and T29: every preset at every width, magnitude and pair of bits."""

from __future__ import annotations

import functools
import math
import re
from types import SimpleNamespace

import mlx.core as mx
import numpy as np
import pytest
from mlx_lm.models import cache as stock

from oracle import DTYPES, f64, unpack
from test_cache import CONFIGS, codes, decoded, feed, same, tokens
from vqkv_ext import ops
from vqkv_ext.cache import CompressedKVCache
from vqkv_ext.codecs.presets import PRESETS, codec
from vqkv_ext.codecs.qjl import QJLCodec
from vqkv_ext.codecs.rotated import RotatedCodec
from vqkv_ext.codecs.scalar import PairCodec
from vqkv_ext.codecs.trellis import TrellisCodec
from vqkv_ext.config import KVCacheConfig, KVCacheFactory

DIMS = (64, 72, 80, 96, 112, 128, 192, 256, 512, 576)
SIDES = ("key", "value")
SCALAR = {1: 0.3615, 2: 0.1160, 3: 0.0340, 4: 0.0093}
MATCHED = {2: 0.119, 3: 0.0345, 4: 0.0095}
TRELLIS = {1: 0.264, 2: 0.0690, 3: 0.0185, 4: 0.0051}  # of 64 values; up to 1.13 times for more
RESIDUAL = {2: 0.1160, 4: 0.0100}
PROD = {2: 0.205, 3: 0.066, 4: 0.019}
QJL = {1: 0.567, 2: 0.283, 4: 0.142}


def parts(name):
    """Method and bits of a preset; 16 bits of none."""
    return (name, 16) if name == "none" else (name[: name.rindex("-")], int(name[-4]))


def expected_error(name, side):
    """Relative squared error on random directions."""
    method, bits = parts(name)
    if method == "none":
        return 2.0**-22
    if side == "key" and method in ("turboquant-prod", "qjl"):
        return {"turboquant-prod": PROD, "qjl": QJL}[method][bits]
    tables = {"turboquant-rvq": RESIDUAL, "centred": MATCHED, "trellis": TRELLIS}
    return tables.get(method, SCALAR)[bits]


def supported(name, side, width):
    """Attention holds 576 channels of a key code: QJL has `bits` per value, a pair has two."""
    method, bits = parts(name)
    channels = {"qjl": bits, "turboquant-prod": 2}.get(method, 1) if side == "key" else 1
    return channels * width <= 576


@functools.cache
def made(name, width, side):
    """Sketches of large widths take a while."""
    return codec(name, width, side)


def normal(rng, *shape):
    return rng.standard_normal(shape).astype(np.float32)


def relative(c, x, block=64):
    """Squared error of decoded vectors, relative to the vectors."""
    return float(np.square(f64(c.decode(c.encode(x, block=block), block)) - f64(x)).sum()) / float(
        np.square(f64(x)).sum()
    )


def check_attention(cache, kv, q, scale, tolerance):
    """One query reads the cache as dense float32 softmax over its own decoded keys and values."""
    keys, values = cache.update_and_fetch(*kv)
    assert cache.coded_tokens > 0
    got = ops.attention(q, keys.packed, values.packed, scale=scale, mask=None)
    assert got.dtype == keys.dtype == values.dtype == q.dtype
    k, v = decoded(cache)
    assert k.shape == kv[0].shape and v.shape == kv[1].shape
    want = mx.fast.scaled_dot_product_attention(q.astype(mx.float32), k, v, scale=scale)
    got = f64(got)
    assert np.isfinite(got).all()
    least = 2.0**-25 if q.dtype == mx.float16 else 0.0  # half a step of its smallest numbers
    assert np.abs(got - f64(want)).max() <= tolerance * np.abs(f64(v)).max() + least
    return got


# ---- T05 ----


@functools.cache
def error_at_64(name, side):
    """The preset's error on many tokens of 64 values, which must be the known one."""
    c = made(name, 64, side)
    x = mx.array(normal(np.random.default_rng(2), 4, 2, 320, 64))
    error = relative(c, x, 5)
    assert error <= expected_error(name, side) * 1.02
    if name != "none":
        assert error >= expected_error(name, side) * 0.7  # a block of 5 is closer to its mean
    return error


@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", PRESETS)
def test_t05_five_tokens_of_every_width(rng, poison, name, side):
    """In 16 sequences of 2 heads, so that 5 tokens are enough to tell the error."""
    widths = []
    for width in DIMS:
        if not supported(name, side, width):
            with pytest.raises(ValueError, match=rf"^\[{name}\] .*head_dim.*\b{width}\b"):
                codec(name, width, side)
            continue
        widths.append(width)
        c = made(name, width, side)
        x = mx.array(normal(rng, 16, 2, 5, width))
        poison(x.nbytes)
        arrays = c.encode(x, block=5)
        y = c.decode(arrays, 5)
        assert y.shape == x.shape and y.dtype == mx.float32
        method, bits = parts(name)
        own = bits - 1 if side == "key" and method == "turboquant-prod" else bits
        more = 1 if method == "trellis" else 0  # a trellis starts with 8 bits
        assert arrays["codes"].shape == (16, 2, 5, own * width // 8 + more)
        assert relative(c, x, 5) <= 1.5 * error_at_64(name, side)
        # as views into larger arrays, and one sequence at a time: what lies beside a vector, or
        # beyond it where a kernel pads, does not matter
        around = np.full((16, 2, 7, width + 24), np.nan, np.float32)
        around[:, :, 1:6, 8 : width + 8] = np.array(x)
        view = mx.array(around)[:, :, 1:6, 8 : width + 8]
        rows = [c.encode(x[i : i + 1], block=5) for i in (0, 15)]
        again = c.encode(view, block=5)
        for n, a in arrays.items():
            assert mx.array_equal(again[n], a), n
            for i, row in zip((0, 15), rows, strict=True):
                assert mx.array_equal(row[n], a[i : i + 1]), n
    most = {"turboquant-prod": 256, "qjl": {1: 576, 2: 256, 4: 128}.get(bits)}.get(method, 576)
    assert widths == [w for w in DIMS if w <= most or side == "value"]


@pytest.mark.parametrize("which", CONFIGS)
@pytest.mark.parametrize("name", PRESETS)
def test_t05_caches_of_every_width(rng, name, which):
    """Kernels hold 128, 256 or 576 channels; those beyond a width take no part."""
    config, factor = CONFIGS[which]
    for width in DIMS:
        if not supported(name, "key", width):
            continue
        cache = CompressedKVCache(*(made(name, width, side) for side in SIDES), config)
        kv = [mx.array(normal(rng, 1, 2, 20 * factor, width)) for _ in SIDES]
        q = mx.array(normal(rng, 1, 4, 1, width))
        check_attention(cache, kv, q, 1 / math.sqrt(width), 1e-5)


@pytest.mark.parametrize("name", PRESETS)
def test_t05_widths_beyond_the_kernels(name):
    for side in SIDES:
        for width in (577, 640, 1024, 7, 0, -64):
            with pytest.raises(ValueError, match=rf"^\[{name}\] head_dim.* {width}\b"):
                codec(name, width, side)


# ---- T23 ----

MAGNITUDES = (1e-6, 1.0, 1e2, 6e3)  # float16 ends at 65504, ten times the last
WIDTH, BIASED = 64, (3, 40)


def arrays_of_case(rng, tokens, width=WIDTH):
    """[1, 2, tokens, width] by name; token 5 of `zeros` is zero, block 1 of `zero block`."""
    base = normal(rng, 1, 2, tokens, width)
    out = {f"{m:g}": base * np.float32(m) for m in MAGNITUDES}
    changes = {
        "zeros": np.s_[..., 5, :],
        "zero block": np.s_[..., 64:128, :],
        "outlier": np.s_[..., 7],
    }
    for name, at in changes.items():
        out[name] = base.copy()
        out[name][at] = 1000 if name == "outlier" else 0
    out["bias"] = base.copy()
    out["bias"][..., BIASED] += 600
    return out


def scale64(x, levels, kind):
    """The factor of each row, in float64."""
    norm, dot, square = np.sqrt((x * x).sum(-1)), (x * levels).sum(-1), (levels * levels).sum(-1)
    if kind == "norm":
        return norm / math.sqrt(x.shape[-1])
    with np.errstate(invalid="ignore", divide="ignore"):
        return np.where(norm > 0, dot / square if kind == "mse" else norm / np.sqrt(square), 0.0)


def stored_and_true(c, arrays, x):
    """Every norm or scale stored, and what it is of the same vectors in float64."""
    if isinstance(c, QJLCodec):
        norm = np.sqrt((f64(x) ** 2).sum(-1))
        return [(arrays["scales"], math.sqrt(math.pi / 2) / c.channels * norm)]
    first = c.first if isinstance(c, PairCodec) else c
    if not isinstance(first, RotatedCodec):
        return []
    y = f64(x) @ f64(first.rotation.forward(mx.eye(c.width)))
    out = []
    if "centres" in arrays:
        mean = y.reshape(*y.shape[:2], -1, 64, c.width).mean(3)
        out.append((arrays["centre_scales"], np.abs(mean).max(-1) / 127))
        centre = np.array(arrays["centres"]) * f64(arrays["centre_scales"])[..., None]
        y = y - np.repeat(centre, 64, axis=2)
    if isinstance(first, TrellisCodec):
        levels = f64(first.table)[unpack(np.array(arrays["codes"]), 8, first.bits, c.width)]
    else:
        index = unpack(np.array(arrays["codes"]), first.bits, first.bits, c.width)
        levels = f64(first.centroids)[index]
    out.append((arrays["scales"], scale64(y, levels, first.scale)))
    if isinstance(c, PairCodec):
        rest = y - levels * f64(arrays["scales"])[..., None]
        unit = math.sqrt(math.pi / 2) / math.sqrt(c.width)
        out.append((arrays["pair_scales"], unit * np.sqrt((rest**2).sum(-1))))
    return out


@pytest.mark.parametrize(("dtype", "width"), [*((d, WIDTH) for d in DTYPES), ("float32", 72)])
@pytest.mark.parametrize("side", SIDES)
@pytest.mark.parametrize("name", PRESETS)
def test_t23_magnitudes_encode_and_decode(rng, name, side, dtype, width):
    """Also at a width that has no Hadamard matrix."""
    c, expected = made(name, width, side), expected_error(name, side)
    cases = arrays_of_case(rng, 192, width)
    cases = {n: mx.array(x).astype(DTYPES[dtype]) for n, x in cases.items()}
    centred = name.startswith(("centred", "trellis")) and side == "key"
    own = {}
    for case, x in cases.items():
        assert bool(mx.isfinite(x).all()), case
        arrays = c.encode(x)
        assert all(bool(mx.isfinite(a.astype(mx.float32)).all()) for a in arrays.values()), case
        y = c.decode(arrays)
        assert bool(mx.isfinite(y).all()), case
        for stored, true in stored_and_true(c, arrays, x):
            assert stored.dtype == mx.bfloat16 and np.abs(true).max() > 0
            assert (np.abs(f64(stored) - true) <= 0.01 * np.abs(true)).all(), case
        own[case] = np.square(f64(y) - f64(x))
        if case == "zeros" and not centred:
            assert not np.array(y[:, :, 5]).any() and np.array(y[:, :, 4]).any()
        elif case == "zeros":  # what its difference to the centre loses
            centre = np.square(f64(x)[:, :, :64].mean(2)).sum(-1)
            assert (own[case][:, :, 5].sum(-1) <= 2 * expected * centre).all()
        if case == "zero block":
            assert not np.array(y[:, :, 64:128]).any() and np.array(y[:, :, :64]).any()

    error = {n: e.sum() / np.square(f64(cases[n])).sum() for n, e in own.items()}
    for m in MAGNITUDES:
        if name == "none" and m == 1e-6:  # half a step of float16 there is 3e-8
            assert own["1e-06"].max() <= 2.0**-50
        else:
            assert error[f"{m:g}"] <= 1.05 * expected
    # A spike becomes a row of signs, for which levels are not made: up to three times the error on
    # random directions, spread over all channels and so bounded by the length of the vector only.
    for case in ("outlier", "bias"):
        assert error[case] <= 3 * expected
    if centred:  # ... unless it is common to the block
        # one Hadamard transform leaves a spike flat; else its peak makes the centre's steps coarser
        most = 1.15 if width == WIDTH else 1.4
        others = [i for i in range(width) if i not in (7, *BIASED)]
        for case in ("outlier", "bias"):
            assert own[case][..., others].mean() <= most * own["1"][..., others].mean()
            assert own[case].mean() <= most * own["1"].mean()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("which", CONFIGS)
@pytest.mark.parametrize("name", PRESETS)
def test_t23_magnitudes_attend(rng, name, which, dtype):
    config, factor = CONFIGS[which]
    tolerance = {"float32": 2e-5, "float16": 2.0**-10, "bfloat16": 2.0**-7}[dtype]
    kind = DTYPES[dtype]
    q = mx.array(normal(rng, 1, 4, 1, WIDTH)).astype(kind)
    pair = [made(name, WIDTH, side) for side in SIDES]
    for case, x in arrays_of_case(rng, 40 * factor).items():
        for scale in (1 / math.sqrt(WIDTH * np.square(x).mean()), 1 / math.sqrt(WIDTH)):
            cache = CompressedKVCache(*pair, config)
            k = mx.array(x).astype(kind)
            v = mx.array(np.roll(x, 1, axis=1)).astype(kind)
            # scores of thousands differ by more than exp tells apart: finite is all there is to say
            sharp = scale * np.abs(x).max() > 100
            got = check_attention(cache, (k, v), q, scale, 2 if sharp else tolerance)
            assert np.abs(got).max() > 0, case


# ---- T29 ----

PAIRS = ((4, 2), (2, 4), (3, 4), (4, 3))


def of_bits(key, value, windows, method="turboquant"):
    return KVCacheFactory.create(
        KVCacheConfig(
            key=f"{method}-{key}bit", value=f"{method}-{value}bit", head_dim=WIDTH,
            sink_tokens=windows.sink_tokens, window=windows.window, block=windows.block,
        )
    )  # fmt: skip


def saved_and_loaded(cache, path, monkeypatch):
    """The state through mlx_lm's file of prompt caches."""
    kept = SimpleNamespace(from_state=lambda state: state)
    monkeypatch.setattr(stock, "CompressedKVCache", kept, raising=False)
    stock.save_prompt_cache(str(path), [cache])
    return stock.load_prompt_cache(str(path))[0]


@pytest.mark.parametrize("which", CONFIGS)
@pytest.mark.parametrize("method", ["turboquant", "centred", "trellis"])
def test_t29_keys_and_values_of_different_bits(rng, tmp_path, monkeypatch, method, which):
    config, factor = CONFIGS[which]
    n = 40 * factor
    kv, more = tokens(rng, n), tokens(rng, n)
    q = mx.array(normal(rng, 1, 4, n, WIDTH))
    outputs, states = {}, {}
    first = 1 if method == "trellis" else 0  # a trellis starts with 8 bits
    for bits in PAIRS:
        cache = of_bits(*bits, config, method)
        feed(cache, kv, [n])
        assert cache.coded_tokens > 0
        for b, body in zip(bits, cache._bodies, strict=True):
            assert body["codes"].shape[-1] == WIDTH * b // 8 + first
            assert body["codes"].dtype == mx.uint8
        extra = 0 if method == "turboquant" else (WIDTH + 2) / config.block
        assert cache.bytes_per_token == 2 * (WIDTH * sum(bits) / 8 + 2 * (2 + first) + extra)
        states[bits] = saved_and_loaded(cache, tmp_path / "c.safetensors", monkeypatch)
        pair = cache.key_codec, cache.value_codec
        again = CompressedKVCache.from_state(states[bits], *pair)
        assert again.config == config and again.offset == n and same(codes(again), codes(cache))
        assert again.nbytes == cache.nbytes
        outputs[bits] = feed(cache, more, [n], q)
        assert mx.array_equal(feed(again, more, [n], q), outputs[bits])
        assert same(codes(again), codes(cache))
        k, v = decoded(cache)
        want = mx.fast.scaled_dot_product_attention(q[:, :, -1:], k, v, scale=0.2)
        assert mx.abs(outputs[bits][:, :, -1:] - want).max() < 1e-5
    for a, b in (PAIRS[:2], PAIRS[2:]):
        assert mx.abs(outputs[a] - outputs[b]).max() > 1e-3
        other = of_bits(*b, config, method)
        with pytest.raises(ValueError, match=rf"state must be of codec '{method}-{b[0]}bit:"):
            CompressedKVCache.from_state(states[a], other.key_codec, other.value_codec)


@pytest.mark.parametrize("which", CONFIGS)
def test_t29_errors_fall_with_bits(rng, which):
    """Of each side alone and of attention, the other side being fixed."""
    config, factor = CONFIGS[which]
    kv = tokens(rng, 40 * factor)
    q = mx.array(normal(rng, 1, 8, 16, WIDTH))
    exact = mx.fast.scaled_dot_product_attention(q, *kv, scale=0.2)
    for side in (0, 1):
        errors, outputs = [], []
        for b in (1, 2, 3, 4):
            bits = (b, 4) if side == 0 else (4, b)
            cache = of_bits(*bits, config)
            keys, values = cache.update_and_fetch(*kv)
            assert cache.coded_tokens > 0
            out = ops.attention(q, keys.packed, values.packed, scale=0.2, mask=None)
            outputs.append((out - exact).square().mean().item())
            errors.append((decoded(cache)[side] - kv[side]).square().mean().item())
        for e, factor_of_a_bit in ((errors, 2), (outputs, 1)):
            assert all(a > factor_of_a_bit * b for a, b in zip(e, e[1:], strict=False)), e


@pytest.mark.parametrize("bits", [0, 1.5, 8, 9, 17, -4, "", None])
def test_t29_bits_that_are_not_offered(bits):
    """Refused before there is a cache, with the name asked for and all that there is."""
    for method in ("turboquant", "turboquant-prod", "turboquant-rvq", "qjl", "centred", "trellis"):
        asked = f"{method}-{bits}bit"
        listed = re.escape(f"must be one of {', '.join(PRESETS)}, but got {asked!r}.")
        for kw in (
            {"key": asked, "value": "turboquant-4bit"},
            {"key": "turboquant-4bit", "value": asked},
            {"method": method, "bits": bits},
        ):
            with pytest.raises(ValueError, match=listed):
                KVCacheFactory.create(KVCacheConfig(head_dim=WIDTH, **kw))
