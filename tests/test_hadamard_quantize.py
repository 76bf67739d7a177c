"""hadamard_quantize bitwise against NumPy in float32 and against the statistics of its codes;
attention over the codes."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from hadamard_oracle import (
    BITS,
    SCALES,
    WIDTHS,
    check_codes,
    decoded,
    levels_of,
    matrix,
    random,
    signs_of,
    transform32,
)
from oracle import DTYPES, Case, attention64, decode64, f64, unpack
from test_attention import check as check_attention
from vqkv_ext import ops, reference
from vqkv_ext.codecs.tables import scalar_table
from vqkv_ext.packed import CodedBody, Layout, PackedKV, TableCode


@pytest.mark.sim
@pytest.mark.parametrize("width", WIDTHS)
def test_codes_of_every_width(rng, poison, width):
    """Bitwise equal to NumPy in float32, on every executor."""
    bits = BITS[WIDTHS.index(width) % 5]
    signs, levels = signs_of(rng, width), levels_of(bits)
    check_codes(random(rng, (19, width)), signs, levels, bits, poison=poison)
    x = random(rng, (2, 18, width)) + random(rng, (width,)) * 2
    check_codes(x, signs, levels, bits, block=9, poison=poison)


@pytest.mark.sim
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
def test_codes(rng, poison, bits, dtype):
    levels = levels_of(bits)
    for width in (64, 80, 128):
        signs = mx.array(rng.uniform(0.5, 2, (3, width)).astype(np.float32))
        for scale in SCALES:
            x = random(rng, (2, 3, 7, width), dtype)
            check_codes(x, signs, levels, bits, scale, poison=poison)
            check_codes(x[0, 0], signs[0], levels, bits, scale)


@pytest.mark.sim
@pytest.mark.parametrize("block", [1, 5, 16, 64])
def test_block_centres(rng, poison, block):
    for width, bits in ((128, 4), (96, 2)):
        signs = signs_of(rng, 2, width)
        x = random(rng, (1, 2, 2 * block, width), "float16") + 3 * random(rng, (2, 1, width))
        check_codes(x, signs, levels_of(bits), bits, "unbiased", block=block, poison=poison)


@pytest.mark.sim
@pytest.mark.parametrize("width", [64, 128, 256, 512])
def test_blocks_larger_than_a_threadgroup_holds(rng, width):
    x = random(rng, (1, 2, 80, width), "float16") + random(rng, (width,))
    check_codes(x, signs_of(rng, width), levels_of(4), 4, "matched", block=80)


@pytest.mark.sim
@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_that_begin_anywhere(rng, dtype):
    """GPU kernels read 16 bytes at a time where rows lie on multiples of them."""
    for width in (32, 64, 128, 256, 512):
        x = random(rng, (9 * width + 1,), dtype)[1:].reshape(1, 9, width)
        signs = mx.array(rng.uniform(0.5, 2, width + 1).astype(np.float32))[1:]
        check_codes(x, signs, levels_of(4), 4)
        steps = mx.array(rng.integers(-127, 128, width + 1).astype(np.int8))[1:]
        centres = steps.reshape(1, 1, width), mx.array([[0.02]]).astype(mx.bfloat16)
        check_codes(x, signs, levels_of(3), 3, centres=centres)


# Levels whose bounds are close, equal or infinite: kernels for GPUs find those of the others by
# cells that have one bound each.
TABLES = {
    "close": [-2, -1, -0.5, -0.1, -0.09, -0.08, 0.2, 0.201, 0.202, 0.6, 0.9, 1, 1.5, 2, 2.5, 3],
    "equal": [-1.5] * 3 + [-0.5] * 5 + [0.25] * 2 + [1.0] * 6,
    "one": [0.125] * 16,
    "infinite": [-np.inf] * 2 + list(np.linspace(-2, 2, 12)) + [np.inf] * 2,
    "wide": [-3e38, -1e38, -1e5, -3, -2, -1, -0.1, 0, 1e-20, 1e-3, 0.5, 1, 2, 30, 1e30, 2e38],
    "tiny": list(np.linspace(-1e-39, 1e-39, 16)),
    "bounds at +-1": [-1.5, -0.5, 0.5, 1.5],
    "pair": [-0.5, 2.5],
    "equal pair": [0.5, 0.5],
    "infinite pair": [-np.inf, 1.0],
    "both infinite": [-np.inf, np.inf],
    "infinite halves": [-np.inf] * 8 + [np.inf] * 8,
}


@pytest.mark.sim
@pytest.mark.parametrize("name", TABLES)
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_levels_of_any_distance(rng, name, dtype):
    levels = np.array(TABLES[name], np.float32)
    bits = len(levels).bit_length() - 1
    for width in (64, 96):
        x = np.array(random(rng, (40, width)))
        x[:8] = 0  # such a row and one that differs in one sign have values of exactly +-1
        x[:8, 0] = 1
        x[4:8, 1] = rng.choice([-1, 1], 4)
        for scale in ("norm", "unbiased"):
            with np.errstate(all="ignore"):
                check_codes(mx.array(x).astype(DTYPES[dtype]), mx.ones(width), levels, bits, scale)


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
@pytest.mark.parametrize("width", [32, 64, 128, 256])
def test_rotations_of_16_bits(rng, poison, width, dtype):
    """Signs +-1, for which CUDA multiplies by matrices. Values that need no rounding before the
    last sums give the same bits; others those of float64 but near bounds."""
    signs, levels = signs_of(rng, 3, width), levels_of(4)
    for heads in (1, 3):
        x = random(rng, (3, heads, 21, width), dtype)
        check_codes(x, signs[:heads], levels, 4, poison=poison)
        check_codes(x, signs[:heads], levels, 4, block=7, poison=poison)
    off = random(rng, (9 * width + 1,), dtype)[1:].reshape(1, 9, width)
    check_codes(off, signs[0], levels, 4)
    x = mx.array(rng.standard_normal((300, width)) * 10.0 ** rng.uniform(-3, 3, (300, width)))
    x = x.astype(DTYPES[dtype])
    codes, scales = ops.hadamard_quantize(x, signs[0], mx.array(levels), 4)
    y = (f64(x) * f64(signs[0])) @ matrix(width)
    u = y / np.sqrt(np.square(y).mean(-1, keepdims=True))
    bounds = 0.5 * (levels[1:].astype(np.float64) + levels[:-1])
    index = unpack(np.array(codes), 4, 4, width)
    sure = np.abs(u[..., None] - bounds).min(-1) > 1e-5
    assert sure.mean() > 0.99
    assert np.array_equal(index[sure], (u[..., None] > bounds).sum(-1)[sure])
    c = levels[index].astype(np.float64)
    assert np.allclose(f64(scales), (y * c).sum(-1) / (c * c).sum(-1), rtol=2**-8)


@pytest.mark.sim
@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_rows_enough_for_several_passes(rng, dtype):
    """A lane of a GPU has several rows of such many, of one head or of several."""
    rows, width = 131_100, 32
    x = random(rng, (rows, width), dtype)
    check_codes(x, signs_of(rng, width), levels_of(2), 2)
    signs = signs_of(rng, 3, width)
    check_codes(x.reshape(3, rows // 3, width), signs, levels_of(4), 4)


@pytest.mark.sim
def test_given_centres(rng, poison):
    width, bits = 128, 4
    signs = signs_of(rng, width)
    x = random(rng, (2, 3, 33, width))
    steps = mx.array(rng.integers(-127, 128, (2, 3, 1, width)).astype(np.int8))
    units = mx.array(rng.uniform(0, 0.02, (2, 3, 1)).astype(np.float32)).astype(mx.bfloat16)
    check_codes(x, signs, levels_of(bits), bits, centres=(steps, units), poison=poison)
    # tokens that join a block later get the codes of the block, whose centre they did not change
    out = ops.hadamard_quantize(x[:, :, :32], signs, mx.array(levels_of(4)), 4, block=32)
    again = ops.hadamard_quantize(
        x[:, :, 5:9], signs, mx.array(levels_of(4)), 4, centres=(out[2], out[3])
    )
    assert mx.array_equal(again[0], out[0][:, :, 5:9]) and mx.array_equal(
        again[1], out[1][:, :, 5:9]
    )


@pytest.mark.sim
def test_special_rows(rng):
    """Zeros, NaN, infinity and a norm that overflows; with blocks they touch no other row's code
    but through the centre."""
    x = np.array(random(rng, (2, 16, 64)))
    x[0, 2] = 0
    clean = x[1].copy()
    x[1, 3, 7], x[1, 4, 0], x[1, 5] = np.nan, -np.inf, 1e20
    signs = mx.ones(64)
    for bits in (2, 8):
        for scale in SCALES:
            out = check_codes(mx.array(x), signs, levels_of(bits), bits, scale)
            row = np.array(out[1].astype(mx.float32))
            assert (
                row[0, 2] == 0
                and np.isnan(row[1, 3:6]).all()
                and not np.array(out[0][1, 3:6]).any()
            )
            assert np.isfinite(row[1, 6:]).all() and (np.delete(row[0], 2) > 0).all()
        out = check_codes(mx.array(x), signs, levels_of(bits), bits, block=16)
        assert not np.array(out[2][1]).any() and np.array(out[2][0]).any()
        alone = ops.hadamard_quantize(mx.array(clean[6:]), signs, mx.array(levels_of(bits)), bits)
        assert mx.array_equal(alone[0], out[0][1, 6:])
    zeros = check_codes(mx.zeros((1, 16, 64)), signs, levels_of(4), 4, block=16)
    assert not any(mx.any(a).item() for a in zeros[1:])


def test_any_split_gives_the_same_bits(rng):
    levels = mx.array(levels_of(3))
    for width in (64, 80, 128):
        signs = signs_of(rng, width)
        x = random(rng, (2, 2, 128, width), "float16")
        whole = ops.hadamard_quantize(x, signs, levels, 3, block=64)
        parts = [
            ops.hadamard_quantize(x[:, :, i : i + 64], signs, levels, 3, block=64) for i in (0, 64)
        ]
        for a, *b in zip(whole, *parts, strict=True):
            assert mx.array_equal(a, mx.concatenate(b, axis=2))
        whole = ops.hadamard_quantize(x, signs, levels, 3)
        single = [ops.hadamard_quantize(x[:, :, i : i + 1], signs, levels, 3) for i in range(20)]
        for a, *b in zip(whole, *single, strict=True):
            assert mx.array_equal(a[:, :, :20], mx.concatenate(b, axis=2))


def test_large_and_parallel(rng):
    """More than one task, with and without heads; a long block."""
    signs = signs_of(rng, 3, 128)
    x = random(rng, (1, 3, 1003, 128), "bfloat16")
    check_codes(x, signs, levels_of(4), 4)
    check_codes(x, signs[0], levels_of(4), 4)
    check_codes(x, signs, levels_of(4), 4, block=1003)
    many = random(rng, (3000, 96))
    y = ops.hadamard(many, mx.ones(96))
    assert np.array_equal(np.array(y), transform32(np.array(many), np.ones(96)))


def test_strides_and_empty(rng):
    signs, levels = signs_of(rng, 64), mx.array(levels_of(3))
    x = random(rng, (2, 8, 3, 128))
    y = x.transpose(0, 2, 1, 3)[..., ::2]
    for kw in ({}, {"block": 4}):
        got = ops.hadamard_quantize(y, signs, levels, 3, **kw)
        want = ops.hadamard_quantize(mx.contiguous(y), signs, levels, 3, **kw)
        assert all(mx.array_equal(a, b) for a, b in zip(got, want, strict=True))
    assert [a.shape for a in ops.hadamard_quantize(mx.zeros((2, 0, 64)), signs, levels, 3)] == [
        (2, 0, 24),
        (2, 0),
    ]
    for native in (None, False):
        kw = {"block": 64, "use_metal_kernels": native}
        out = ops.hadamard_quantize(mx.zeros((2, 3, 0, 64)), signs, levels, 3, **kw)
        assert [a.shape for a in out] == [(2, 3, 0, 24), (2, 3, 0), (2, 3, 0, 64), (2, 3, 0)]
        mx.eval(out)
    scalar = ops.hadamard_quantize(x[0, 0, 0, :64], signs, levels, 3)
    assert scalar[0].shape == (24,) and scalar[1].shape == ()


@pytest.mark.parametrize("scale", SCALES)
def test_reference_agrees(rng, scale):
    """Up to float32 rounding, which may move a value over a bound."""
    off = {"use_metal_kernels": False}
    for width, bits in ((64, 4), (80, 3), (128, 8), (128, 1)):
        signs, levels = signs_of(rng, 2, width), mx.array(levels_of(bits))
        x = random(rng, (2, 2, 64, width)) + 2 * random(rng, (width,))
        given = ops.hadamard_quantize(x, signs, levels, bits, block=64)[2:]
        for kw in ({}, {"block": 32}, {"centres": given}):
            got = ops.hadamard_quantize(x, signs, levels, bits, scale=scale, **kw)
            want = ops.hadamard_quantize(x, signs, levels, bits, scale=scale, **kw, **off)
            assert [a.shape for a in got] == [a.shape for a in want]
            assert [a.dtype for a in got] == [a.dtype for a in want]
            assert (np.array(got[0]) != np.array(want[0])).mean() < 2e-3
            assert np.allclose(f64(got[1]), f64(want[1]), rtol=2**-7)
            if len(got) == 4:
                assert np.abs(np.array(got[2]).astype(int) - np.array(want[2])).max() <= 1
                assert np.allclose(f64(got[3]), f64(want[3]), rtol=2**-7)


# ---- what the codes reach ----


@pytest.mark.parametrize(("bits", "bound"), [(1, 0.3615), (2, 0.1160), (3, 0.0340), (4, 0.0093)])
def test_error_on_random_directions(bits, bound, simulated):
    if simulated:
        pytest.skip("a statistic of codes that are compared bit for bit elsewhere")
    rng = np.random.default_rng(5)
    x = random(rng, (100_000, 128))
    signs, levels = signs_of(rng, 128), levels_of(bits)
    y = f64(ops.hadamard(x, signs))
    square = (y**2).sum(-1)
    for scale in ("mse", "unbiased"):
        z = decoded(
            ops.hadamard_quantize(x, signs, mx.array(levels), bits, scale=scale), levels, bits, 128
        )
        if scale == "mse":
            assert (((z - y) ** 2).sum(-1) / square).mean() <= bound
        else:
            assert abs(((z * y).sum(-1) / square).mean() - 1) <= 0.002


def test_centres_reduce_the_error_of_offset_keys(rng):
    signs, levels = signs_of(rng, 128), levels_of(2)
    x = random(rng, (1, 2, 256, 128)) + 5 * random(rng, (1, 2, 1, 128))
    y = f64(ops.hadamard(x, signs))
    plain = decoded(ops.hadamard_quantize(x, signs, mx.array(levels), 2), levels, 2, 128)
    out = ops.hadamard_quantize(x, signs, mx.array(levels), 2, block=64)
    centre = np.array(out[2]) * f64(out[3])[..., None]
    centred = decoded(out, levels, 2, 128) + np.repeat(centre, 64, axis=2)
    assert np.square(centred - y).sum() < 0.1 * np.square(plain - y).sum()


@pytest.mark.sim
@pytest.mark.parametrize("bits", BITS)
def test_attention_reads_the_codes(rng, bits):
    width, block, tokens, recent = 96, 64, 128, 70
    levels = levels_of(bits)
    table = scalar_table(mx.array(levels), bits)
    code = TableCode(table, stride=6 if bits == 3 else 8)
    assert table.shape == {
        1: (1, 1, 256, 8), 2: (1, 1, 256, 4), 3: (1, 1, 64, 2), 4: (1, 1, 256, 2), 8: (1, 1, 256, 1)
    }[bits]  # fmt: skip
    assert code.bytes_per_token(width) == width * bits // 8
    sides = []
    for _ in range(2):
        signs = signs_of(rng, width)
        x = random(rng, (1, 2, tokens, width)) + random(rng, (1, 2, 1, width))
        codes, scales, centres, units = ops.hadamard_quantize(
            x, signs, mx.array(levels), bits, block=block
        )
        body = CodedBody(codes, code, scales, centres, units)
        y = f64(ops.hadamard(x, signs))
        z = decode64(body, width, block)
        own = decoded((codes, scales), levels, bits, width)
        own = own + np.repeat(np.array(centres) * f64(units)[..., None], block, axis=2)
        assert np.allclose(z, own, rtol=0, atol=1e-12)
        wide = reference.decode(codes, table, code.stride, block, scales, centres, units)
        assert np.allclose(np.array(wide), z, rtol=0, atol=1e-5)
        error = np.square(z - y).sum() / np.square(y).sum()
        assert error < {1: 0.3, 2: 0.1, 3: 0.03, 4: 0.01, 8: 1e-3}[bits]
        sides.append(body)
    layout = Layout(mx.array([[4 + tokens + recent, tokens, 4 + tokens]], mx.int32), 4, 64, block)
    tails = [random(rng, (1, 2, 4 + recent, width)) for _ in sides]
    case = Case(
        random(rng, (1, 4, 3, width)),
        *(PackedKV(b, t, layout) for b, t in zip(sides, tails, strict=True)),
        [4 + tokens + recent],
        [tokens],
        [4 + tokens],
    )
    assert attention64(case, 0.1, True).any()
    check_attention(case)
