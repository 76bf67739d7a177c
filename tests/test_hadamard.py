"""hadamard against float64 and mx.hadamard_transform; gradients, vmap, compilation and errors of
both ops."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from hadamard_oracle import WIDTHS, levels_of, matrix, random, signs_of
from oracle import DTYPES, EPS, f64
from vqkv_ext import ops, reference
from vqkv_ext.codecs.tables import scalar_table

# ---- the transform ----


@pytest.mark.sim
@pytest.mark.parametrize("width", WIDTHS)
def test_transform(rng, poison, width):
    h = matrix(width)
    assert np.abs(h @ h.T - np.eye(width)).max() < 1e-6
    signs = mx.array(rng.uniform(-2, 2, width).astype(np.float32))
    s = f64(signs)
    for dtype in DTYPES:
        x = random(rng, (19, width), dtype)
        top = np.abs(f64(x)).max() * math.sqrt(width)
        for inverse, want in ((False, (f64(x) * s) @ h), (True, f64(x) @ h.T * s)):
            for out in (None, DTYPES[dtype]):
                poison(4 * x.size)
                y = ops.hadamard(x, signs, inverse=inverse, dtype=out)
                assert y.shape == x.shape and y.dtype == (out or mx.float32)
                eps = EPS[dtype if out else "float32"]
                assert (
                    np.abs(f64(y) - want).max()
                    <= 8 * EPS["float32"] * top + eps * np.abs(want).max()
                )


@pytest.mark.sim
@pytest.mark.parametrize("width", WIDTHS)
def test_inverse_undoes_the_transform(rng, width):
    x, signs = random(rng, (65, width)), signs_of(rng, width)
    back = ops.hadamard(ops.hadamard(x, signs), signs, inverse=True)
    assert np.linalg.norm(f64(back) - f64(x)) < 1e-6 * np.linalg.norm(f64(x))
    assert mx.allclose(
        ops.hadamard(x, mx.ones(width)), mx.hadamard_transform(x, stream=mx.cpu), atol=1e-5
    )


@pytest.mark.sim
@pytest.mark.parametrize("inverse", [False, True])
def test_signs_per_head_shapes_and_strides(rng, inverse):
    x, signs = random(rng, (2, 3, 5, 96)), random(rng, (3, 96))
    y = np.array(ops.hadamard(x, signs, inverse=inverse))
    for h in range(3):
        one = ops.hadamard(x[:, h], signs[h], inverse=inverse)
        assert np.array_equal(y[:, h], np.array(one))
    for shape in ((96,), (1, 96), (17, 96), (2, 1, 2, 3, 96)):
        z = random(rng, shape)
        flat = ops.hadamard(z.reshape(-1, 96), signs[0], inverse=inverse)
        assert mx.array_equal(ops.hadamard(z, signs[0], inverse=inverse), flat.reshape(shape))
    turned = x.transpose(0, 2, 1, 3)
    got = ops.hadamard(turned, signs[0], inverse=inverse)
    assert mx.array_equal(got, ops.hadamard(x, signs[0], inverse=inverse).transpose(0, 2, 1, 3))
    wide = random(rng, (4, 192))[:, ::2]
    got = ops.hadamard(wide, signs[1], inverse=inverse)
    assert mx.array_equal(got, ops.hadamard(mx.contiguous(wide), signs[1], inverse=inverse))


def test_transform_reference_and_empty(rng):
    for width in (1, 8, 80, 96, 112, 128):
        x, signs = random(rng, (2, 3, 4, width)), random(rng, (3, width))
        for inverse in (False, True):
            y = ops.hadamard(x, signs, inverse=inverse)
            z = ops.hadamard(x, signs, inverse=inverse, use_metal_kernels=False)
            assert mx.allclose(y, z, atol=2e-5) and y.dtype == z.dtype
            half = reference.hadamard(x, signs, inverse=inverse, dtype=mx.float16)
            assert half.dtype == mx.float16
    for shape in ((0, 64), (2, 0, 64), (3, 0, 4, 64)):
        for native in (None, False):
            y = ops.hadamard(mx.zeros(shape), mx.ones(64), use_metal_kernels=native)
            mx.eval(y)
            assert y.shape == shape


@pytest.mark.sim
def test_nan_stays_in_its_row(rng):
    x = np.array(random(rng, (40, 112)))
    clean = np.array(ops.hadamard(mx.array(x), mx.ones(112)))
    x[3, 5], x[20, 0] = np.nan, np.inf
    y = np.array(ops.hadamard(mx.array(x), mx.ones(112)))
    assert not np.isfinite(y[[3, 20]]).any()
    others = np.delete(np.arange(40), [3, 20])
    assert np.array_equal(y[others], clean[others])


# ---- transforms of the ops ----


@pytest.mark.parametrize("inverse", [False, True])
@pytest.mark.parametrize("per_head", [False, True])
def test_gradients(rng, inverse, per_head):
    for width in (16, 24, 80):
        x = random(rng, (2, 3, 4, width))
        signs = random(rng, (3, width) if per_head else (width,))
        weight, dx, ds = random(rng, x.shape), random(rng, x.shape), random(rng, signs.shape)

        def loss(x, signs, weight=weight, **kw):
            return (ops.hadamard(x, signs, inverse=inverse, **kw).square() * weight).sum()

        got = mx.grad(loss, argnums=(0, 1))(x, signs)
        want = mx.grad(lambda *a: loss(*a, use_metal_kernels=False), argnums=(0, 1))(x, signs)  # noqa: B023
        for g, w in zip(got, want, strict=True):
            assert g.shape == w.shape and mx.allclose(g, w, atol=1e-3, rtol=1e-4) and mx.any(g)
        f = lambda *a: ops.hadamard(*a, inverse=inverse)  # noqa: E731
        _, t = mx.jvp(f, [x, signs], [dx, ds])
        both = f(dx, signs) + f(x, ds)
        assert mx.allclose(t[0], both, atol=1e-5)
        # the derivative in x, by finite differences of a quadratic
        step = (loss(x + 0.1 * dx, signs) - loss(x - 0.1 * dx, signs)) / 0.2
        assert mx.allclose(step, (got[0] * dx).sum(), rtol=1e-2, atol=1e-1)
    half = mx.grad(lambda x: ops.hadamard(x, signs, dtype=mx.float16).sum())(x.astype(mx.bfloat16))
    assert half.dtype == mx.bfloat16


def test_gradient_of_codes_is_zero(rng):
    x, signs, levels = random(rng, (2, 8, 16)), random(rng, (16,)), mx.array(levels_of(2))
    f = lambda *a: ops.hadamard_quantize(*a, 2, block=4)[1].astype(mx.float32).sum()  # noqa: E731
    for g in mx.grad(f, argnums=(0, 1, 2))(x, signs, levels):
        assert not mx.any(g)
    out, tangents = mx.jvp(
        lambda x: ops.hadamard_quantize(x, signs, levels, 2, block=4), [x], [mx.ones_like(x)]
    )
    assert [a.shape for a in out] == [t.shape for t in tangents]
    assert [a.dtype for a in out] == [t.dtype for t in tangents]
    assert not any(mx.any(t).item() for t in tangents)


@pytest.mark.parametrize("inverse", [False, True])
def test_vmap(rng, inverse):
    x, signs = random(rng, (3, 2, 5, 24)), random(rng, (3, 24))
    f = lambda x, s: ops.hadamard(x, s, inverse=inverse)  # noqa: E731
    got = mx.vmap(f)(x, signs)
    assert mx.allclose(got, mx.stack([f(x[i], signs[i]) for i in range(3)]), atol=1e-5)
    got = mx.vmap(f, in_axes=(1, None))(x, signs[0])
    assert mx.array_equal(got, mx.stack([f(x[:, i], signs[0]) for i in range(2)]))
    got = mx.vmap(f, in_axes=(None, 0))(x[0], signs)
    assert mx.allclose(got, mx.stack([f(x[0], signs[i]) for i in range(3)]), atol=1e-5)
    heads = random(rng, (4, 2, 24))  # [calls, H, D]
    got = mx.vmap(f, in_axes=(None, 0))(x, heads)
    assert mx.allclose(got, mx.stack([f(x, heads[i]) for i in range(4)]), atol=1e-5)
    got = mx.vmap(f, in_axes=(0, None))(x, heads[0])
    assert mx.array_equal(got, mx.stack([f(x[i], heads[0]) for i in range(3)]))


@pytest.mark.parametrize("mode", ["plain", "block", "centres"])
def test_vmap_of_quantize(rng, mode):
    x, signs, levels = random(rng, (3, 2, 8, 24)), random(rng, (3, 24)), mx.array(levels_of(2))
    steps = mx.array(rng.integers(-9, 9, (3, 2, 1, 24)).astype(np.int8))
    units = random(rng, (3, 2, 1), "bfloat16")

    def f(x, s, steps, units):
        kw = {"block": {"block": 4}, "centres": {"centres": (steps, units)}, "plain": {}}[mode]
        return ops.hadamard_quantize(x, s, levels, 2, **kw)

    def compare(got, calls):
        assert all(mx.array_equal(a, mx.stack(b)) for a, *b in zip(got, *calls, strict=True))

    axes = (0, None, 0, 0)
    compare(mx.vmap(f, axes)(x, signs[0], steps, units),
            [f(x[i], signs[0], steps[i], units[i]) for i in range(3)])  # fmt: skip
    compare(mx.vmap(f, (0, 0, None, None))(x, signs, steps[0], units[0]),
            [f(x[i], signs[i], steps[0], units[0]) for i in range(3)])  # fmt: skip
    compare(mx.vmap(f, (0, None, None, None))(x, signs[0], steps[0], units[0]),
            [f(x[i], signs[0], steps[0], units[0]) for i in range(3)])  # fmt: skip
    if mode == "centres":
        compare(mx.vmap(f, (None, None, 0, None))(x[0], signs[0], steps, units[0]),
                [f(x[0], signs[0], steps[i], units[0]) for i in range(3)])  # fmt: skip


@pytest.mark.parametrize("shapeless", [False, True])
def test_compile(rng, shapeless):
    signs, levels = random(rng, (24,)), mx.array(levels_of(2))

    def f(x):
        y = ops.hadamard(x, signs) - ops.hadamard(x, signs, inverse=True)
        half = ops.hadamard(x, signs, dtype=mx.float16)
        a = ops.hadamard_quantize(x, signs, levels, 2)
        b = ops.hadamard_quantize(x, signs, levels, 2, scale="norm")
        c = ops.hadamard_quantize(x, signs, levels, 2, block=4)
        d = ops.hadamard_quantize(x, signs, levels, 2, block=2)
        return [y, half, *a, *b, *c, *d]

    g = mx.compile(f, shapeless=shapeless)
    for n in (4, 4, 12, 8):
        x = random(rng, (2, n, 24))
        for a, b in zip(f(x), g(x), strict=True):
            assert a.shape == b.shape and a.dtype == b.dtype and mx.array_equal(a, b)
    assert mx.any(f(x)[0]) and not mx.array_equal(f(x)[3], f(x)[5])


# ---- errors ----

X = mx.zeros((2, 3, 4, 64))


@pytest.mark.parametrize("width", [0, 3, 7, 18, 36, 72, 100, 144, 576, 2048, 1536])
def test_widths_without_a_matrix_are_refused(width):
    for kw in ({}, {"use_metal_kernels": False}):
        with pytest.raises(ValueError, match=rf"\[hadamard\].*m in {{1, 12, 20, 28}}.*got {width}"):
            ops.hadamard(mx.zeros((2, width)), mx.zeros((width,)), **kw)
        with pytest.raises(ValueError, match=rf"\[hadamard_quantize\].*but got {width}"):
            ops.hadamard_quantize(mx.zeros((2, width)), mx.zeros((width,)), mx.zeros(4), 2, **kw)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        ((X.astype(mx.int32), mx.zeros(64)), "x must be float32"),
        ((X, mx.zeros(64, mx.int8)), "signs must be float32"),
        ((X, mx.zeros(32)), r"signs must have shape \[64\] or \[H, 64\]"),
        ((X, mx.zeros((1, 1, 64))), "signs must have shape"),
        ((X, mx.zeros((2, 64))), "signs of 2 heads"),
        ((X[0, 0], mx.zeros((3, 64))), "signs of 3 heads"),
        ((mx.array(1.0), mx.zeros(1)), "at least 1 dimension"),
    ],
)
def test_transform_errors(args, message):
    with pytest.raises(ValueError, match=rf"\[hadamard\].*{message}"):
        ops.hadamard(*args)
    with pytest.raises(ValueError, match=rf"\[hadamard_quantize\].*{message}"):
        ops.hadamard_quantize(*args, mx.zeros(4), 2)


CENTRES = (mx.zeros((2, 3, 1, 64), mx.int8), mx.zeros((2, 3, 1), mx.bfloat16))


@pytest.mark.parametrize(
    ("bits", "levels", "kw", "message"),
    [
        (5, 32, {}, "bits must be 1, 2, 3, 4 or 8, but got 5"),
        (2, 8, {}, r"centroids must have shape \[2\^bits\] = \[4\]"),
        (2, 4, {"scale": "best"}, "scale must be 'mse'.*'best'"),
        (2, 4, {"block": 0}, "block must be at least 1"),
        (2, 4, {"block": 3}, "a multiple of 3"),
        (2, 4, {"block": 2, "centres": CENTRES}, "exclude each other"),
        (2, 4, {"centres": (CENTRES[0][:1], CENTRES[1])}, "centres must have shape"),
        (2, 4, {"centres": (CENTRES[0], CENTRES[1][:1])}, "scales of centres must have shape"),
        (2, 4, {"centres": (CENTRES[0], CENTRES[1].astype(mx.float16))}, "must be int8 and"),
    ],
)  # fmt: skip
def test_quantize_errors(bits, levels, kw, message):
    with pytest.raises(ValueError, match=rf"\[hadamard_quantize\].*{message}"):
        ops.hadamard_quantize(X, mx.zeros(64), mx.zeros(levels), bits, **kw)


def test_table_errors():
    with pytest.raises(ValueError, match=r"\[scalar_table\] bits must be"):
        scalar_table(mx.zeros(32), 5)
    with pytest.raises(ValueError, match=r"\[scalar_table\] centroids must have shape \(4,\)"):
        scalar_table(mx.zeros(8), 2)
