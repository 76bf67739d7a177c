"""vjp, jvp, vmap and mx.compile of qjl_encode and qjl_inner_product."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from oracle import f64
from vqkv_ext import ops, reference


def normal(rng, *shape):
    return mx.array(rng.standard_normal(shape).astype(np.float32))


def inner_case(rng):
    sketch, q = normal(rng, 24, 10), normal(rng, 2, 4, 3, 10)
    signs, norms = ops.qjl_encode(normal(rng, 2, 2, 7, 10), sketch)
    return q, sketch, signs, norms.astype(mx.float32), normal(rng, 2, 4, 3, 7)


def test_gradient_of_inner_product(rng):
    q, sketch, signs, norms, weight = inner_case(rng)
    f = lambda q, s, n: (ops.qjl_inner_product(q, s, signs, n).square() * weight).sum()  # noqa: E731
    args = [q, sketch, norms]
    grads = mx.grad(f, argnums=(0, 1, 2))(*args)
    for k in range(3):
        grad = np.array(grads[k]).reshape(-1)
        for i in rng.integers(0, grad.size, 6):
            step = np.zeros(grad.size, np.float32)
            step[i] = 1e-2
            d = mx.array(step.reshape(args[k].shape))
            plus, minus = (f(*args[:k], args[k] + t, *args[k + 1 :]) for t in (d, -d))
            numeric = (plus - minus).item() / 2e-2
            assert abs(numeric - grad[i]) <= 2e-2 * max(1, abs(grad[i]))
    half = mx.grad(lambda n: f(q.astype(mx.float16), sketch, n))(norms.astype(mx.bfloat16))
    assert half.dtype == mx.bfloat16 and mx.allclose(half, grads[2], rtol=0.1, atol=0.1)
    g = mx.grad(lambda c: ops.qjl_inner_product(q, sketch, c, norms).sum())(signs)
    assert g.dtype == mx.uint8 and not mx.any(g)


def test_gradient_of_encode(rng):
    x, sketch, weight = normal(rng, 5, 12), normal(rng, 16, 12), normal(rng, 5)
    x[3] = 0
    f = lambda x, s: (ops.qjl_encode(x, s)[1].astype(mx.float32) * weight).sum()  # noqa: E731
    gx, gs = mx.grad(f, argnums=(0, 1))(x, sketch)
    norm = np.linalg.norm(np.array(x), axis=-1, keepdims=True)
    want = np.array(weight)[:, None] * np.array(x) / np.where(norm == 0, 1, norm)
    assert np.abs(np.array(gx) - want).max() < 1e-2 and not mx.any(gs)  # bfloat16 cotangent
    plain = lambda x: (reference.qjl_encode(x, sketch)[1].astype(mx.float32) * weight).sum()  # noqa: E731
    assert mx.allclose(mx.grad(plain)(x), gx, atol=1e-2)
    codes = lambda x: ops.qjl_encode(x, sketch)[0].astype(mx.float32).sum()  # noqa: E731
    assert not mx.any(mx.grad(codes)(x))
    t = normal(rng, 5, 12)
    _, (signs, norms) = mx.jvp(lambda x: ops.qjl_encode(x, sketch), [x], [t])
    along = (np.array(x) * np.array(t)).sum(-1) / np.where(norm == 0, 1, norm)[:, 0]
    assert not mx.any(signs) and np.abs(f64(norms) - along).max() < 2.0**-8 * np.abs(along).max()


def test_gradient_jvp_of_inner_product(rng):
    q, sketch, signs, norms, _ = inner_case(rng)
    f = lambda q, n: ops.qjl_inner_product(q, sketch, signs, n)  # noqa: E731
    tq, tn = normal(rng, *q.shape), normal(rng, *norms.shape)
    _, (t,) = mx.jvp(f, [q, norms], [tq, tn])
    assert mx.allclose(t, f(tq, norms) + f(q, tn), atol=1e-4) and mx.any(t)


def test_gradient_vmap(rng):
    x, sketch = normal(rng, 3, 5, 4, 10), normal(rng, 3, 24, 10)
    for axes, count in (((0, None), 3), ((2, None), 4), ((0, 0), 3), ((None, 0), 3)):
        fixed = sketch if axes[1] is not None else sketch[0]
        got = mx.vmap(ops.qjl_encode, in_axes=axes)(x, fixed)
        for i in range(count):
            one = mx.take(x, i, axis=axes[0]) if axes[0] is not None else x
            want = ops.qjl_encode(one, fixed[i] if axes[1] is not None else fixed)
            for g, w in zip(got, want, strict=True):
                assert mx.array_equal(g[i], w)

    q, _, signs, norms, _ = inner_case(rng)
    more = lambda a: mx.stack([a, a[::-1], a], axis=1)  # noqa: E731
    full = (q, sketch, signs, norms)
    cases = ((0,), (2, 3), (0, 2, 3), (1,), (0, 1, 2, 3))
    for mapped in cases:
        args = [
            (more(a) if k != 1 else a) if k in mapped else (a if k != 1 else a[0])
            for k, a in enumerate(full)
        ]
        axes = tuple((1 if k != 1 else 0) if k in mapped else None for k in range(4))
        got = mx.vmap(ops.qjl_inner_product, in_axes=axes)(*args)
        for i in range(3):
            at = [
                a if ax is None else mx.take(a, i, axis=ax)
                for a, ax in zip(args, axes, strict=True)
            ]
            assert mx.allclose(got[i], ops.qjl_inner_product(*at), atol=1e-5)


@pytest.mark.parametrize("shapeless", [False, True])
def test_gradient_compile_qjl(rng, shapeless):
    sketch = normal(rng, 24, 10)

    def f(q, k):
        signs, norms = ops.qjl_encode(k, sketch)
        return signs, norms * 2, ops.qjl_inner_product(q, sketch, signs, norms) + 1

    g = mx.compile(f, shapeless=shapeless)
    for n in (5, 5, 9, 1):
        q, k = normal(rng, 1, 4, 2, 10), normal(rng, 1, 2, n, 10)
        for a, b in zip(f(q, k), g(q, k), strict=True):
            assert a.shape == b.shape and mx.array_equal(a, b)
