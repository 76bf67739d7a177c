"""vjp, jvp, vmap and mx.compile of every op, against the reference and finite differences."""

from __future__ import annotations

import mlx.core as mx
import numpy as np
import pytest

from oracle import random_case
from vqkv_ext import ops, reference
from vqkv_ext.packed import Layout, PackedKV


def normal(rng, *shape):
    return mx.array(rng.standard_normal(shape).astype(np.float32))


BOOKS = {"shared": (16, 4), "group": (3, 16, 4), "head": (2, 1, 16, 4), "both": (2, 3, 16, 4)}


@pytest.mark.parametrize("kind", BOOKS)
def test_gradient_of_dequantize_is_a_scatter_add(rng, kind):
    book = normal(rng, *BOOKS[kind])
    codes = mx.array(rng.integers(0, 18, (3, 2, 5, 3)).astype(np.uint8))  # two codes have no row
    weight = normal(rng, 3, 2, 5, 12)

    def loss(op):
        return lambda c: (mx.where(mx.isnan(y := op(codes, c)), 0, y) * weight).sum()

    got = mx.grad(loss(ops.dequantize_vq))(book)
    want = mx.grad(loss(reference.dequantize_vq))(book)
    assert mx.allclose(got, want, atol=1e-5)


@pytest.mark.parametrize("kind", BOOKS)
def test_gradient_of_dequantize_by_finite_differences(rng, kind):
    book = normal(rng, *BOOKS[kind])
    codes = mx.array(rng.integers(0, 16, (2, 2, 5, 3)).astype(np.uint8))
    weight = normal(rng, 2, 2, 5, 12)
    f = lambda c: (ops.dequantize_vq(codes, c).square() * weight).sum()  # noqa: E731
    grad = np.array(mx.grad(f)(book)).reshape(-1)
    for i in rng.integers(0, grad.size, 6):
        step = np.zeros(grad.size, np.float32)
        step[i] = 1e-2
        d = mx.array(step.reshape(book.shape))
        numeric = (f(book + d) - f(book - d)).item() / 2e-2
        assert abs(numeric - grad[i]) <= 2e-2 * max(1, abs(grad[i]))


def test_gradient_of_quantize_is_zero(rng):
    x, book = normal(rng, 5, 8), normal(rng, 16, 4)
    f = lambda x, c: ops.quantize_vq(x, c).astype(mx.float32).sum()  # noqa: E731
    gx, gc = mx.grad(f, argnums=(0, 1))(x, book)
    assert not mx.any(gx) and not mx.any(gc)
    out, tangent = mx.jvp(lambda x: ops.quantize_vq(x, book), [x], [mx.ones_like(x)])
    assert mx.array_equal(out[0], ops.quantize_vq(x, book)) and not mx.any(tangent[0])


@pytest.mark.parametrize("kind", BOOKS)
def test_gradient_straight_through(rng, kind):
    x, book = normal(rng, 3, 2, 5, 12), normal(rng, *BOOKS[kind])
    weight = normal(rng, *x.shape)
    f = lambda op: lambda x, c: (op(x, c) * weight).sum()  # noqa: E731
    gx, gc = mx.grad(f(ops.fake_quantize_vq), argnums=(0, 1))(x, book)
    rx, rc = mx.grad(f(reference.fake_quantize_vq), argnums=(0, 1))(x, book)
    assert mx.array_equal(gx, weight) and mx.array_equal(rx, weight)
    assert mx.allclose(gc, rc, atol=1e-5)
    y = ops.fake_quantize_vq(x, book)
    assert mx.array_equal(y, ops.dequantize_vq(ops.quantize_vq(x, book), book))
    _, t = mx.jvp(ops.fake_quantize_vq, [x, book], [weight, mx.zeros_like(book)])
    assert mx.array_equal(t[0], weight)
    _, t = mx.jvp(ops.fake_quantize_vq, [x, book], [mx.zeros_like(x), book])
    assert mx.allclose(t[0], y)


def test_gradient_training_lowers_the_error(rng):
    x, book = normal(rng, 400, 8), normal(rng, 16, 4)
    f = lambda c: (ops.fake_quantize_vq(mx.stop_gradient(x), c) - x).square().mean()  # noqa: E731
    first = f(book).item()
    for _ in range(20):
        book = book - 30.0 * mx.grad(f)(book)
    assert f(book).item() < 0.8 * first


def test_gradient_vmap_quantize_and_dequantize(rng):
    x, book = normal(rng, 6, 5, 8), normal(rng, 6, 16, 4)
    for op in (ops.quantize_vq, ops.fake_quantize_vq):
        both = mx.vmap(op)(x, book)
        want = mx.stack([op(x[i], book[i]) for i in range(6)])
        assert mx.array_equal(both, want)
        axis1 = mx.vmap(op, in_axes=(1, None))(x, book[0])
        assert mx.array_equal(axis1, mx.stack([op(x[:, i], book[0]) for i in range(5)]))
        only_book = mx.vmap(op, in_axes=(None, 0))(x[0], book)
        assert mx.array_equal(only_book, mx.stack([op(x[0], book[i]) for i in range(6)]))
    codes = ops.quantize_vq(x, book[0])
    got = mx.vmap(ops.dequantize_vq)(codes, book)
    want = mx.stack([ops.dequantize_vq(codes[i], book[i]) for i in range(6)])
    assert mx.array_equal(got, want)


@pytest.mark.parametrize("shapeless", [False, True])
def test_gradient_compile_vq(rng, shapeless):
    book = normal(rng, 16, 4)

    def f(x, c):
        codes = ops.quantize_vq(x, c)
        return codes, ops.dequantize_vq(codes, c) * 2, ops.fake_quantize_vq(x, c) + x

    g = mx.compile(f, shapeless=shapeless)
    for n in (5, 5, 9, 1):
        x = normal(rng, n, 8)
        for a, b in zip(f(x, book), g(x, book), strict=True):
            assert a.shape == b.shape and mx.array_equal(a, b)


def test_gradient_compile_shares_equal_calls_only(rng):
    x, a, b = normal(rng, 9, 8), normal(rng, 16, 4), normal(rng, 16, 4)
    f = lambda: ops.fake_quantize_vq(x, a) - ops.fake_quantize_vq(x, b)  # noqa: E731
    assert mx.array_equal(mx.compile(f)(), f()) and mx.any(f())
    g = lambda c: ops.dequantize_vq(c, a, mx.float16).astype(mx.float32) - ops.dequantize_vq(c, a)  # noqa: E731
    codes = ops.quantize_vq(x, a)
    assert mx.array_equal(mx.compile(g)(codes), g(codes)) and mx.any(g(codes))


# ---- attention ----


def attention_of(case, **kw):
    """The op as a function of the query and both tails."""

    def f(q, k_tail, v_tail):
        keys = PackedKV(case.keys.body, k_tail, case.keys.layout)
        values = PackedKV(case.values.body, v_tail, case.keys.layout)
        return ops.attention(q, keys, values, **kw)

    return f


def clean_case(rng, **kw):
    return random_case(rng, spare=0, **kw)


@pytest.mark.parametrize("mask", [None, "causal"])
def test_gradient_attention(rng, mask):
    case = clean_case(rng, queries=3, coded=128, recent=70, grace=64)
    weight = normal(rng, *case.q.shape)
    args = [case.q, case.keys.tail, case.values.tail]
    loss = lambda **kw: (  # noqa: E731
        lambda *a: (attention_of(case, scale=0.3, mask=mask, **kw)(*a) * weight).sum()
    )
    got = mx.grad(loss(), argnums=(0, 1, 2))(*args)
    want = mx.grad(loss(use_metal_kernels=False), argnums=(0, 1, 2))(*args)
    for g, w in zip(got, want, strict=True):
        assert mx.allclose(g, w, atol=1e-5) and mx.any(g)
    f = loss()
    grad = np.array(got[0]).reshape(-1)
    for i in rng.integers(0, grad.size, 6):
        step = np.zeros(grad.size, np.float32)
        step[i] = 1e-2
        d = mx.array(step.reshape(case.q.shape))
        numeric = (f(case.q + d, *args[1:]) - f(case.q - d, *args[1:])).item() / 2e-2
        assert abs(numeric - grad[i]) <= 1e-2 * max(1, abs(grad[i]))


def test_gradient_attention_ignores_garbage_in_unused_slots(rng):
    case = random_case(rng, queries=2)  # NaN behind the last token
    f = lambda q: attention_of(case, scale=0.3)(q, case.keys.tail, case.values.tail).sum()  # noqa: E731
    grad = mx.grad(f)(case.q)
    assert bool(mx.isfinite(grad).all()) and mx.any(grad)


def test_gradient_attention_jvp(rng):
    case = clean_case(rng, queries=2)
    t = normal(rng, *case.q.shape)
    tangents = []
    for kw in ({}, {"use_metal_kernels": False}):
        f = attention_of(case, scale=0.3, mask="causal", **kw)
        _, out = mx.jvp(lambda q, f=f: f(q, case.keys.tail, case.values.tail), [case.q], [t])
        tangents.append(out[0])
    first = tangents[0]
    assert mx.allclose(first, tangents[1], atol=1e-5)
    step = 1e-2
    plus, minus = (f(case.q + s * t, case.keys.tail, case.values.tail) for s in (step, -step))
    assert mx.allclose((plus - minus) / (2 * step), first, atol=2e-3)


def test_gradient_attention_vmap(rng):
    case = clean_case(rng, batch=2, queries=2)
    f = attention_of(case, scale=0.3, mask="causal")
    q = normal(rng, 4, *case.q.shape)
    got = mx.vmap(f, in_axes=(0, None, None))(q, case.keys.tail, case.values.tail)
    want = mx.stack([f(q[i], case.keys.tail, case.values.tail) for i in range(4)])
    assert mx.allclose(got, want, atol=1e-6)
    tails = normal(rng, 4, *case.keys.tail.shape)
    got = mx.vmap(f)(q, tails, tails)
    want = mx.stack([f(q[i], tails[i], tails[i]) for i in range(4)])
    assert mx.allclose(got, want, atol=1e-6)


def test_gradient_attention_vmap_over_a_table(rng):
    case = clean_case(rng)
    tables = normal(rng, 3, *case.keys.body.code.table.shape)

    def f(table):
        body = case.keys.body
        code = type(body.code)(table, body.code.stride)
        keys = PackedKV(type(body)(body.codes, code), case.keys.tail, case.keys.layout)
        return ops.attention(case.q, keys, case.values, scale=0.3)

    assert mx.allclose(mx.vmap(f)(tables), mx.stack([f(t) for t in tables]), atol=1e-5)


@pytest.mark.parametrize("shapeless", [False, True])
def test_gradient_compile_attention(rng, shapeless):
    """Case T26: lengths are arrays, so one trace serves them all."""
    case = clean_case(rng, queries=1, coded=128, recent=140, grace=64, window=8, block=8)
    traces = []

    def f(q, rows):
        traces.append(1)
        layout = Layout(rows, case.keys.layout.sink_tokens, 8, 8)
        keys = PackedKV(case.keys.body, case.keys.tail, layout)
        values = PackedKV(case.values.body, case.values.tail, layout)
        return ops.attention(q, keys, values, scale=0.3, mask="causal")

    g = mx.compile(f, shapeless=shapeless)
    results = []
    for length in range(1, 41):
        coded = min(128, 8 * max(0, (length - 12) // 8))
        rows = mx.array([[length, coded, 4 + max(0, coded - 8)]], mx.int32)
        out = g(case.q, rows)
        compiled = len(traces)
        assert mx.array_equal(out, f(case.q, rows))
        results.append(np.array(out))
        traces = traces[:compiled]
    assert compiled == 1
    assert len({r.tobytes() for r in results}) == 40
