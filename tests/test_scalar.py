"""pack_bits, unpack_bits, quantize_scalar and dequantize_scalar, bitwise against NumPy."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from oracle import DTYPES, unpack
from vqkv_ext import ops, reference

LENGTHS = [1, 7, 8, 9, 64, 515, 1031]


def pack(indices: np.ndarray, bits: int) -> np.ndarray:
    """A bit stream, bit by bit."""
    stream = (indices[..., None].astype(np.uint32) >> np.arange(bits)) & 1
    stream = stream.reshape(*indices.shape[:-1], -1).astype(np.uint8)
    return np.packbits(stream, axis=-1, bitorder="little")


def nearest_index(x: mx.array, centroids: mx.array) -> np.ndarray:
    """Bounds below each value, in float32 as the op defines it."""
    c = np.array(centroids.astype(mx.float32))
    bounds = np.float32(0.5) * (c[:-1] + c[1:])
    return (np.array(x.astype(mx.float32))[..., None] > bounds).sum(-1)


def random_indices(rng, shape, bits):
    """Indices with garbage above the bits that count."""
    dtype = np.uint8 if bits <= 8 else np.uint16
    return rng.integers(0, 1 << (8 if bits <= 8 else 16), shape).astype(dtype)


def centroids_of(rng, bits, dtype="float32"):
    c = np.sort(rng.standard_normal(1 << bits)).astype(np.float32)
    return mx.array(c).astype(DTYPES[dtype])


@pytest.mark.sim
@pytest.mark.parametrize("bits", range(1, 17))
def test_pack_and_unpack(rng, poison, bits):
    for n in LENGTHS:
        for lead in ((), (3,), (2, 3)):
            indices = random_indices(rng, (*lead, n), bits)
            want = pack(indices, bits)
            poison(want.size)
            packed = ops.pack_bits(mx.array(indices), bits)
            assert packed.dtype == mx.uint8 and packed.shape == want.shape
            assert np.array_equal(np.array(packed), want)
            poison(indices.nbytes)
            back = ops.unpack_bits(packed, bits, n)
            assert back.dtype == (mx.uint8 if bits <= 8 else mx.uint16)
            assert np.array_equal(np.array(back), indices & ((1 << bits) - 1))


@pytest.mark.sim
@pytest.mark.parametrize("bits", [3, 8, 12])
def test_unpack_ignores_the_rest_of_the_last_byte(rng, bits):
    packed = rng.integers(0, 256, (4, (13 * bits + 7) // 8)).astype(np.uint8)
    got = np.array(ops.unpack_bits(mx.array(packed), bits, 13))
    assert np.array_equal(got, unpack(packed, bits, bits, 13))


@pytest.mark.parametrize("bits", [1, 3, 4, 5, 12])
def test_long_rows_and_many_rows(rng, bits):
    """More than one task per row, and more than one row per task, aligned and not."""
    for shape in ((200_003,), (2, 70_001), (9001, 13), (5000, 16), (65536,), (3, 65537)):
        indices = random_indices(rng, shape, bits)
        packed = ops.pack_bits(mx.array(indices), bits)
        assert np.array_equal(np.array(packed), pack(indices, bits))
        back = ops.unpack_bits(packed, bits, shape[-1])
        assert np.array_equal(np.array(back), indices & ((1 << bits) - 1))


@pytest.mark.sim
@pytest.mark.parametrize("bits", range(1, 5))
def test_one_row_of_any_length_that_begins_anywhere(rng, poison, bits):
    """GPU kernels take 16 entries at a time where they lie on a multiple of 16 bytes."""
    for n in (7, 15, 16, 33, 16400):
        for start in (0, 1, 16):
            indices = random_indices(rng, (start + n,), bits)
            want = pack(indices[start:], bits)
            poison(want.size)
            packed = ops.pack_bits(mx.array(indices)[start:], bits)
            assert np.array_equal(np.array(packed), want)
            before = rng.integers(0, 256, start).astype(np.uint8)
            joined = mx.concatenate([mx.array(before), packed])
            poison(n)
            back = ops.unpack_bits(joined[start:], bits, n)
            assert np.array_equal(np.array(back), indices[start:] & ((1 << bits) - 1))


@pytest.mark.sim
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", range(1, 9))
def test_quantize_and_dequantize(rng, poison, bits, dtype):
    c = centroids_of(rng, bits)
    for shape in ((1,), (3, 7), (2, 3, 64), (1031,), (5, 515)):
        x = mx.array(rng.standard_normal(shape).astype(np.float32)).astype(DTYPES[dtype])
        index = nearest_index(x, c)
        want = pack(index, bits)
        poison(want.size)
        packed = ops.quantize_scalar(x, c, bits)
        assert packed.dtype == mx.uint8 and packed.shape == want.shape
        assert np.array_equal(np.array(packed), want)
        poison(x.nbytes)
        y = ops.dequantize_scalar(packed, c, bits, shape[-1], DTYPES[dtype])
        assert y.dtype == DTYPES[dtype] and y.shape == x.shape
        table = np.array(c.astype(DTYPES[dtype]).astype(mx.float32))
        assert np.array_equal(np.array(y.astype(mx.float32)), table[index])


@pytest.mark.parametrize("bits", [2, 3, 8])
def test_nearest_in_float64(rng, bits):
    """The chosen centroid is the nearest one, up to rounding at the bounds."""
    c = centroids_of(rng, bits)
    x = rng.standard_normal((33, 257)).astype(np.float32)
    y = ops.dequantize_scalar(ops.quantize_scalar(mx.array(x), c, bits), c, bits, 257)
    distance = np.abs(x.astype(np.float64)[..., None] - np.array(c).astype(np.float64))
    got = np.abs(x.astype(np.float64) - np.array(y))
    assert (got <= distance.min(-1) + 1e-6).all() and (got == distance.min(-1)).mean() > 0.999


@pytest.mark.sim
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", [1, 2, 4, 5, 8])
def test_bounds_nan_and_infinity(bits, dtype):
    """On a bound: the lower index; NaN: index 0; equal centroids leave one without values."""
    levels = 1 << bits
    c = mx.arange(levels).astype(mx.float32) * 2
    special = [float("nan"), -float("inf"), float("inf")]
    values = special + [1.0, 0.0, -0.0] + [2.0 * i + 1 for i in range(levels - 1)]
    x = mx.array(values, dtype=mx.float32).astype(DTYPES[dtype])
    got = np.array(ops.unpack_bits(ops.quantize_scalar(x, c, bits), bits, len(values)))
    assert got[:6].tolist() == [0, 0, levels - 1, 0, 0, 0]
    if dtype == "float32":
        assert got[6:].tolist() == list(range(levels - 1))
    assert np.array_equal(got, nearest_index(x, c))
    equal = mx.zeros((levels,))
    got = np.array(ops.quantize_scalar(mx.array([-1.0, 0.0, 1.0]), equal, bits))
    assert np.array_equal(got, pack(np.array([0, 0, levels - 1]), bits))


def test_unsorted_centroids_stay_in_range(rng):
    c = mx.array(rng.standard_normal(32).astype(np.float32))
    packed = ops.quantize_scalar(mx.array(rng.standard_normal(777).astype(np.float32)), c, 5)
    assert np.array(ops.unpack_bits(packed, 5, 777)).max() < 32


@pytest.mark.sim
def test_strides_and_empty(rng):
    c = centroids_of(rng, 3)
    x = mx.array(rng.standard_normal((6, 5, 26)).astype(np.float32))
    for y in (x[..., ::2], x.transpose(2, 0, 1), x[::-1], mx.broadcast_to(x[:1], (3, 5, 26))):
        want = pack(nearest_index(y, c), 3)
        assert np.array_equal(np.array(ops.quantize_scalar(y, c, 3)), want)
    indices = mx.array(random_indices(rng, (6, 5, 26), 5))
    for z in (indices[..., ::2], indices.transpose(2, 0, 1)):
        packed = ops.pack_bits(z, 5)
        assert np.array_equal(np.array(packed), pack(np.array(z), 5))
        flat = mx.concatenate([packed, packed], axis=-1)[..., : packed.shape[-1]]
        assert np.array_equal(np.array(ops.unpack_bits(flat, 5, z.shape[-1])), np.array(z) & 31)
    for shape in ((0,), (3, 0), (0, 5), (2, 0, 9)):
        n, size = shape[-1], (3 * shape[-1] + 7) // 8
        empty = mx.zeros((*shape[:-1], size), mx.uint8)
        assert ops.pack_bits(mx.zeros(shape, mx.uint8), 3).shape == empty.shape
        assert ops.quantize_scalar(mx.zeros(shape), c, 3).shape == empty.shape
        assert ops.unpack_bits(empty, 3, n).shape == shape
        assert ops.dequantize_scalar(empty, c, 3, n).shape == shape
        mx.eval(ops.pack_bits(mx.zeros(shape, mx.uint8), 3), ops.unpack_bits(empty, 3, n))
        mx.eval(ops.quantize_scalar(mx.zeros(shape), c, 3), ops.dequantize_scalar(empty, c, 3, n))


@pytest.mark.parametrize("bits", [1, 3, 4, 8, 12, 16])
def test_reference_agrees(rng, bits):
    off = {"use_metal_kernels": False}
    for shape in ((13,), (2, 3, 40), (3, 0), (0, 4)):
        indices = mx.array(random_indices(rng, shape, bits))
        packed = ops.pack_bits(indices, bits)
        assert mx.array_equal(reference.pack_bits(indices, bits), packed)
        assert mx.array_equal(ops.pack_bits(indices, bits, **off), packed)
        back = ops.unpack_bits(packed, bits, shape[-1])
        other = ops.unpack_bits(packed, bits, shape[-1], **off)
        assert mx.array_equal(other, back) and other.dtype == back.dtype
        if bits <= 8:
            c = centroids_of(rng, bits)
            x = mx.array(rng.standard_normal(shape).astype(np.float32))
            packed = ops.quantize_scalar(x, c, bits)
            assert mx.array_equal(ops.quantize_scalar(x, c, bits, **off), packed)
            y = ops.dequantize_scalar(packed, c, bits, shape[-1], mx.float16)
            z = ops.dequantize_scalar(packed, c, bits, shape[-1], mx.float16, **off)
            assert mx.array_equal(y, z) and y.dtype == z.dtype == mx.float16


def test_gradient_of_dequantize_scalar(rng):
    c = centroids_of(rng, 3)
    packed = mx.array(rng.integers(0, 256, (5, 5)).astype(np.uint8))
    weight = mx.array(rng.standard_normal((5, 13)).astype(np.float32))
    f = lambda c, **kw: (ops.dequantize_scalar(packed, c, 3, 13, **kw) * weight).sum()  # noqa: E731
    want = np.zeros(8)
    index = unpack(np.array(packed), 3, 3, 13)
    np.add.at(want, index.reshape(-1), np.array(weight).astype(np.float64).reshape(-1))
    got = mx.grad(f)(c)
    assert got.shape == c.shape and np.allclose(np.array(got), want, atol=1e-5)
    assert mx.allclose(got, mx.grad(lambda c: f(c, use_metal_kernels=False))(c), atol=1e-5)
    half = mx.grad(lambda c: f(c, dtype=mx.float32))(c.astype(mx.float16))
    assert half.dtype == mx.float16 and np.allclose(np.array(half), want, atol=5e-3, rtol=2e-3)
    tangent = mx.array(rng.standard_normal(8).astype(np.float32))
    _, out = mx.jvp(lambda c: ops.dequantize_scalar(packed, c, 3, 13), [c], [tangent])
    assert mx.array_equal(out[0], ops.dequantize_scalar(packed, tangent, 3, 13))


def test_gradients_of_indices_are_zero(rng):
    c = centroids_of(rng, 3)
    x = mx.array(rng.standard_normal((5, 13)).astype(np.float32))
    f = lambda x, c: ops.quantize_scalar(x, c, 3).astype(mx.float32).sum()  # noqa: E731
    gx, gc = mx.grad(f, argnums=(0, 1))(x, c)
    assert gx.shape == x.shape and not mx.any(gx) and gc.shape == c.shape and not mx.any(gc)
    out, tangent = mx.jvp(lambda x: ops.quantize_scalar(x, c, 3), [x], [mx.ones_like(x)])
    assert mx.array_equal(out[0], ops.quantize_scalar(x, c, 3)) and not mx.any(tangent[0])

    def g(x):
        packed = ops.pack_bits(x.astype(mx.uint8), 5)
        return ops.unpack_bits(packed, 5, 13).astype(mx.float32).sum()

    grad = mx.grad(g)(mx.abs(x) * 10)
    assert grad.shape == x.shape and not mx.any(grad)
    out, tangent = mx.jvp(g, [mx.abs(x) * 10], [mx.ones_like(x)])
    assert out[0].item() > 0 and tangent[0].item() == 0


def test_vmap(rng):
    x = mx.array(rng.standard_normal((6, 5, 13)).astype(np.float32))
    cs = mx.stack([centroids_of(rng, 3) for _ in range(6)])
    quantize = lambda x, c: ops.quantize_scalar(x, c, 3)  # noqa: E731
    dequantize = lambda p, c: ops.dequantize_scalar(p, c, 3, 13)  # noqa: E731
    packed = ops.quantize_scalar(x, cs[0], 3)
    for op, a in ((quantize, x), (dequantize, packed)):
        both = mx.vmap(op)(a, cs)
        assert mx.array_equal(both, mx.stack([op(a[i], cs[i]) for i in range(6)]))
        second = mx.vmap(op, in_axes=(1, None))(a, cs[0])
        assert mx.array_equal(second, mx.stack([op(a[:, i], cs[0]) for i in range(5)]))
        only = mx.vmap(op, in_axes=(None, 0))(a[0], cs)
        assert mx.array_equal(only, mx.stack([op(a[0], cs[i]) for i in range(6)]))
    indices = mx.array(random_indices(rng, (6, 5, 13), 3)) & 7
    packed = mx.vmap(lambda i: ops.pack_bits(i, 3), in_axes=1)(indices)
    assert mx.array_equal(packed, ops.pack_bits(indices.transpose(1, 0, 2), 3))
    back = mx.vmap(lambda p: ops.unpack_bits(p, 3, 13), in_axes=1)(packed)
    assert mx.array_equal(back, indices)


@pytest.mark.parametrize("shapeless", [False, True])
def test_compile(rng, shapeless):
    c = centroids_of(rng, 3)

    def f(x):
        packed = ops.quantize_scalar(x, c, 3)
        back = ops.unpack_bits(packed, 3, 13)
        return packed, ops.dequantize_scalar(packed, c, 3, 13) * 2, ops.pack_bits(back, 7)

    g = mx.compile(f, shapeless=shapeless)
    for rows in (5, 5, 9, 1):
        x = mx.array(rng.standard_normal((rows, 13)).astype(np.float32))
        for a, b in zip(f(x), g(x), strict=True):
            assert a.shape == b.shape and mx.array_equal(a, b)
    # any row length where nothing depends on it
    h = mx.compile(lambda x: ops.quantize_scalar(x, c, 3), shapeless=shapeless)
    for n in (13, 40, 3):
        x = mx.array(rng.standard_normal((2, n)).astype(np.float32))
        assert mx.array_equal(h(x), ops.quantize_scalar(x, c, 3))


def test_compile_shares_equal_calls_only(rng):
    i = mx.array(random_indices(rng, (24,), 8))
    f = lambda i: ops.pack_bits(i, 2)[:3] - ops.pack_bits(i, 1)  # noqa: E731
    assert mx.array_equal(mx.compile(f)(i), f(i)) and mx.any(f(i))
    g = lambda p: ops.unpack_bits(p, 1, 24)[:12] - ops.unpack_bits(p, 2, 12)  # noqa: E731
    packed = ops.pack_bits(i, 1)
    assert mx.array_equal(mx.compile(g)(packed), g(packed)) and mx.any(g(packed))


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda: ops.pack_bits(mx.zeros((4,), mx.uint8), 0), "bits must be 1 to 16, but got 0"),
        (lambda: ops.pack_bits(mx.zeros((4,), mx.uint16), 17), "bits must be 1 to 16, but got 17"),
        (lambda: ops.pack_bits(mx.zeros((4,), mx.uint16), 8), "8 bits must be uint8, but got"),
        (lambda: ops.pack_bits(mx.zeros((4,), mx.uint8), 9), "9 bits must be uint16, but got"),
        (lambda: ops.pack_bits(mx.zeros((4,)), 4), "must be uint8, but got float32"),
        (lambda: ops.pack_bits(mx.array(3, mx.uint8), 4), "at least 1 dimension"),
        (lambda: ops.unpack_bits(mx.zeros((4,), mx.uint8), 3, 12), "12 entries of 3 bits must"),
        (lambda: ops.unpack_bits(mx.zeros((4,), mx.uint8), 3, -1), "n must be at least 0"),
        (lambda: ops.unpack_bits(mx.zeros((4,), mx.int8), 8, 4), "packed must be uint8"),
        (lambda: ops.unpack_bits(mx.array(3, mx.uint8), 8, 1), "at least 1 dimension"),
        (lambda: ops.quantize_scalar(mx.zeros((4,)), mx.zeros((512,)), 9), "bits must be 1 to 8"),
        (lambda: ops.quantize_scalar(mx.zeros((4,)), mx.zeros((5,)), 2), r"shape \[2\^bits\]"),
        (lambda: ops.quantize_scalar(mx.zeros((4,)), mx.zeros((1, 4)), 2), r"shape \[2\^bits\]"),
        (lambda: ops.quantize_scalar(mx.zeros((4,), mx.int32), mx.zeros((4,)), 2), "x must be"),
        (lambda: ops.quantize_scalar(mx.zeros((4,)), mx.zeros((4,), mx.int32), 2), "centroids"),
        (lambda: ops.quantize_scalar(mx.array(1.0), mx.zeros((4,)), 2), "at least 1 dimension"),
        (
            lambda: ops.dequantize_scalar(mx.zeros((4,), mx.uint8), mx.zeros((4,)), 2, 20),
            "20 entries of 2 bits must have 5 bytes",
        ),
        (
            lambda: ops.dequantize_scalar(mx.zeros((4,), mx.uint8), mx.zeros((4,)), 2, 16, mx.int8),
            "dtype must be float32",
        ),
    ],
)
def test_errors(call, message):
    op = call.__code__.co_names[1]
    with pytest.raises(ValueError, match=rf"\[{op}\].*{message}"):
        call()


def test_shapeless_compile_refuses_another_row_length():
    g = mx.compile(lambda p: ops.unpack_bits(p, 4, 6), shapeless=True)
    assert g(mx.zeros((2, 3), mx.uint8)).shape == (2, 6)
    with pytest.raises(ValueError, match="6 entries of 4 bits must have 3 bytes"):
        g(mx.zeros((2, 4), mx.uint8))
