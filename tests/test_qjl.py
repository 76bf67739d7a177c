"""qjl_encode and qjl_inner_product against NumPy on every executor, gradients, and the sketch."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np
import pytest

from oracle import DTYPES, f64
from vqkv_ext import _ext, ops, reference
from vqkv_ext.codecs.sketch import make_sketch, sign_table

# (m, D): one byte, several panels and tiles with a rest, several stages of the score kernel
SIZES = [(8, 1), (8, 5), (40, 33), (64, 64), (128, 128), (136, 80), (264, 100), (520, 7)]


def normal(rng, *shape, dtype="float32"):
    return mx.array(rng.standard_normal(shape).astype(np.float32)).astype(DTYPES[dtype])


def integers(rng, *shape):
    """Small integers: all products are exact in any order, and many of them are zero."""
    return mx.array(rng.integers(-2, 3, shape).astype(np.float32))


def pack(positive: np.ndarray) -> np.ndarray:
    return np.packbits(positive, axis=-1, bitorder="little")


def unpacked(signs: mx.array) -> np.ndarray:
    return np.unpackbits(np.array(signs), axis=-1, bitorder="little").astype(bool)


def check_signs(x: mx.array, sketch: mx.array, signs: mx.array) -> None:
    """Every bit is that of float64 where the product is further from zero than float32 rounds."""
    y = f64(x) @ f64(sketch).T
    error = 2.0**-23 * x.shape[-1] * (np.abs(f64(x)) @ np.abs(f64(sketch)).T)
    clear = np.abs(y) > error
    assert clear.mean() > 0.99
    assert np.array_equal(unpacked(signs)[clear], (y >= 0)[clear])


def check_norms(x: mx.array, norms: mx.array) -> None:
    """bfloat16 rounds by at most 2^-8 of the value, after float32."""
    want = np.sqrt((f64(x) ** 2).sum(-1))
    assert norms.dtype == mx.bfloat16 and norms.shape == want.shape
    assert (np.abs(f64(norms) - want) <= want * (2.0**-8 + 1e-5)).all()


def estimates(q, sketch, signs, norms) -> np.ndarray:
    """The definition, in float64, head by head."""
    m, group = sketch.shape[0], q.shape[1] // signs.shape[1]
    sq, bits = f64(q) @ f64(sketch).T, unpacked(signs)
    out = np.zeros((*q.shape[:3], signs.shape[2]))
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            codes = np.where(bits[b, h // group], 1.0, -1.0)
            out[b, h] = math.sqrt(math.pi / 2) / m * sq[b, h] @ codes.T * f64(norms)[b, h // group]
    return out


@pytest.mark.sim
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("m", "width"), SIZES)
def test_encode(rng, poison, dtype, m, width):
    sketch = normal(rng, m, width)
    for n in (1, 3, 50, 107):
        x = normal(rng, n, width, dtype=dtype)
        poison(n * m // 8)
        signs, norms = ops.qjl_encode(x, sketch)
        assert signs.dtype == mx.uint8 and signs.shape == (n, m // 8)
        check_signs(x, sketch, signs)
        check_norms(x, norms)


@pytest.mark.sim
@pytest.mark.parametrize(("m", "width"), SIZES)
def test_exact_products_give_the_bits_of_numpy(rng, m, width):
    """Zeros included: they count as non-negative."""
    x, sketch = integers(rng, 55, width), integers(rng, m, width)
    x[7] = 0
    y = np.array(x) @ np.array(sketch).T
    assert (y == 0).any()
    signs, norms = ops.qjl_encode(x, sketch)
    assert np.array_equal(np.array(signs), pack(y >= 0))
    want = mx.array(np.sqrt((np.array(x) ** 2).sum(-1))).astype(mx.bfloat16)
    assert mx.array_equal(norms, want) and norms[7].item() == 0


@pytest.mark.parametrize(("m", "width"), [(4096, 3), (16, 1024), (4096, 1024)])
def test_largest_sizes(rng, m, width, simulated):
    x, sketch = normal(rng, 2 if simulated else 61, width), normal(rng, m, width)
    signs, norms = ops.qjl_encode(x, sketch)
    check_signs(x, sketch, signs)
    check_norms(x, norms)
    q = normal(rng, 1, 1, 3, width)
    got = ops.qjl_inner_product(q, sketch, signs[None, None], norms[None, None])
    want = estimates(q, sketch, signs[None, None], norms[None, None])
    assert np.abs(f64(got) - want).max() <= 1e-5 * np.abs(want).max()


@pytest.mark.sim
def test_not_a_number_and_infinity(rng):
    x, sketch = np.array(normal(rng, 6, 20)), np.array(normal(rng, 16, 20))
    clean = np.array(ops.qjl_encode(mx.array(x), mx.array(sketch))[0])
    x[1, 3], x[2, 19], x[4, 0] = np.nan, np.inf, -np.inf
    signs, norms = ops.qjl_encode(mx.array(x), mx.array(sketch))
    assert np.array_equal(np.array(signs)[[0, 3, 5]], clean[[0, 3, 5]])
    assert not np.array(signs)[1].any()  # NaN is negative
    assert np.array_equal(np.array(signs)[2:3], pack(sketch[None, :, 19] >= 0))
    assert np.array_equal(np.array(signs)[4:5], pack(sketch[None, :, 0] < 0))
    n = f64(norms)
    assert np.isnan(n[1]) and n[2] == n[4] == np.inf and np.isfinite(n[[0, 3, 5]]).all()
    assert f64(ops.qjl_encode(mx.full((1, 20), 1e20), mx.array(sketch))[1])[0] == np.inf
    # a NaN stays with its key and its query
    q = np.array(normal(rng, 4, 20))
    q[2, 5] = np.nan
    norms[2] = norms[4] = 1
    out = f64(ops.qjl_inner_product(mx.array(q), mx.array(sketch), signs, norms))
    want = np.zeros((4, 6), bool)
    want[:, 1] = want[2] = True
    assert np.array_equal(np.isnan(out), want)
    # and a NaN in a row of the sketch is a negative sign of that row
    sketch[9, 0] = np.nan
    assert not unpacked(ops.qjl_encode(mx.array(x), mx.array(sketch))[0])[:, 9].any()


@pytest.mark.sim
def test_negative_zero_is_not_negative():
    x, sketch = mx.array([[-0.0], [0.0]]), mx.ones((8, 1))
    assert ops.qjl_encode(x, sketch)[0].tolist() == [[255], [255]]


@pytest.mark.parametrize("shape", [(), (5,), (3, 7), (2, 3, 5), (2, 2, 3, 4)])
def test_leading_shapes_and_strides(rng, shape):
    sketch = normal(rng, 24, 10)
    wide = normal(rng, *shape, 20)
    signs, norms = ops.qjl_encode(wide[..., ::2], sketch)
    flat, flat_norms = ops.qjl_encode(mx.contiguous(wide[..., ::2]).reshape(-1, 10), sketch)
    assert signs.shape == (*shape, 3) and norms.shape == shape
    assert mx.array_equal(signs.reshape(-1, 3), flat)
    assert mx.array_equal(norms.reshape(-1), flat_norms)
    half = sketch.astype(mx.bfloat16).T
    assert mx.array_equal(
        ops.qjl_encode(wide[..., ::2], half.T)[0],
        ops.qjl_encode(wide[..., ::2], mx.contiguous(half.T).astype(mx.float32))[0],
    )


@pytest.mark.sim
@pytest.mark.parametrize(("m", "width"), [(136, 80), (128, 128)])
@pytest.mark.parametrize("dtype", DTYPES)
def test_same_split_anywhere(rng, m, width, dtype):
    """Case T04 for the op: tokens coded together, apart, or one by one are the same bits."""
    x, sketch = normal(rng, 2, 53, width, dtype=dtype), normal(rng, m, width)
    whole = ops.qjl_encode(x, sketch)
    for parts in ([0, 52, 53], [0, 1, 20, 53], list(range(54)) if m == 136 else [0, 5, 53]):
        pairs = [ops.qjl_encode(x[:, a:b], sketch) for a, b in zip(parts, parts[1:], strict=False)]
        for i in range(2):
            assert mx.array_equal(mx.concatenate([p[i] for p in pairs], axis=1), whole[i])


@pytest.mark.sim
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (3, 1)])
def test_inner_product(rng, poison, dtype, heads, kv_heads):
    for (m, width), queries, tokens in (((40, 33), 1, 131), ((264, 100), 3, 33), ((128, 64), 5, 1)):
        sketch = normal(rng, m, width)
        q = normal(rng, 2, heads, queries, width, dtype=dtype)
        signs, norms = ops.qjl_encode(normal(rng, 2, kv_heads, tokens, width), sketch)
        norms = norms.astype(DTYPES[dtype])
        poison(q.size // width * tokens * 4)
        got = ops.qjl_inner_product(q, sketch, signs, norms)
        assert got.dtype == mx.float32 and got.shape == (2, heads, queries, tokens)
        want = estimates(q, sketch, signs, norms)
        assert np.abs(f64(got) - want).max() <= 2e-6 * np.abs(want).max()


@pytest.mark.parametrize("many", [(1, 300), (40, 3), (7, 1000)])
def test_inner_product_of_many(rng, many):
    """More than one task and tile, with rests."""
    queries, tokens = many
    sketch, q = normal(rng, 72, 24), normal(rng, 1, 2, queries, 24)
    signs, norms = ops.qjl_encode(normal(rng, 1, 1, tokens, 24), sketch)
    want = estimates(q, sketch, signs, norms)
    got = ops.qjl_inner_product(q, sketch, signs, norms)
    assert np.abs(f64(got) - want).max() <= 2e-6 * np.abs(want).max()


def test_inner_product_leading_shapes_and_strides(rng):
    sketch = normal(rng, 16, 6)
    q, x = normal(rng, 3, 2, 4, 5, 12)[..., ::2], normal(rng, 3, 2, 2, 9, 6)
    signs, norms = ops.qjl_encode(x, sketch)
    got = ops.qjl_inner_product(q, sketch, signs, norms)
    assert got.shape == (3, 2, 4, 5, 9)
    for i in range(3):
        want = estimates(q[i], sketch, signs[i], norms[i])
        assert np.abs(f64(got[i]) - want).max() <= 2e-6 * np.abs(want).max()
    turned = ops.qjl_inner_product(
        q, sketch, mx.contiguous(signs.swapaxes(0, 3)).swapaxes(0, 3), norms
    )
    assert mx.array_equal(turned, got)
    flat = ops.qjl_inner_product(q[0, 0, 3], sketch, signs[0, 0, 1], norms[0, 0, 1])
    assert mx.array_equal(flat, got[0, 0, 3])


def test_empty(rng):
    sketch = normal(rng, 16, 6)
    for shape in ((0, 6), (2, 0, 3, 6)):
        signs, norms = ops.qjl_encode(mx.zeros(shape), sketch)
        assert signs.shape == (*shape[:-1], 2) and norms.shape == shape[:-1]
        mx.eval(signs, norms)
    for queries, tokens in ((0, 3), (3, 0)):
        out = ops.qjl_inner_product(
            mx.zeros((1, 2, queries, 6)),
            sketch,
            mx.zeros((1, 1, tokens, 2), mx.uint8),
            mx.zeros((1, 1, tokens)),
        )
        mx.eval(out)
        assert out.shape == (1, 2, queries, tokens)
    for native in (None, False):
        heads = ops.qjl_inner_product(
            mx.zeros((0, 3, 6)),
            sketch,
            mx.zeros((0, 4, 2), mx.uint8),
            mx.zeros((0, 4)),
            use_metal_kernels=native,
        )
        assert heads.shape == (0, 3, 4)


@pytest.mark.skipif(not _ext.has_simulator(), reason="needs the simulator")
def test_cpu_and_metal_kernels_agree_to_the_bit(rng, monkeypatch):
    """Fused multiply-adds in one order; the baseline CPU has none, and exact products instead."""
    draw = normal if _ext.cpu_isa() != "baseline" else integers
    for m, width in SIZES:
        x, sketch, q = draw(rng, 75, width), draw(rng, m, width), draw(rng, 4, width)
        found = []
        for executor in ("cpu", "sim"):
            monkeypatch.setenv("VQKV_EXECUTOR", executor)
            signs, norms = ops.qjl_encode(x, sketch)
            out = ops.qjl_inner_product(q, sketch, signs, norms)
            mx.eval(signs, norms, out)
            found.append((signs, norms, out))
        for a, b in zip(*found, strict=True):
            assert mx.array_equal(a, b)


def test_reference_agrees(rng):
    sketch, x, q = integers(rng, 24, 12), integers(rng, 2, 1, 9, 12), normal(rng, 2, 3, 4, 12)
    signs, norms = ops.qjl_encode(x, sketch)
    plain = ops.qjl_encode(x, sketch, use_metal_kernels=False)
    assert mx.array_equal(plain[0], signs) and mx.array_equal(plain[1], norms)
    assert plain[0].dtype == mx.uint8 and plain[1].dtype == mx.bfloat16
    a = ops.qjl_inner_product(q, sketch, signs, norms)
    b = ops.qjl_inner_product(q, sketch, signs, norms, use_metal_kernels=False)
    assert a.dtype == b.dtype and mx.allclose(a, b, atol=1e-5)


# ---- the estimator ----


def test_sketch_is_orthogonal_and_its_own_for_each_seed():
    for m, width in ((40, 16), (7, 16), (128, 128)):
        s = f64(make_sketch(m, width, 3))
        assert s.shape == (m, width)
        for i in range(0, m, width):
            block = s[i : i + width]
            gram = block @ block.T / width
            assert np.abs(gram - np.eye(len(block))).max() < 1e-3
    same, other = make_sketch(40, 16, 3), make_sketch(40, 16, 4)
    assert mx.array_equal(make_sketch(40, 16, 3), same) and mx.abs(same - other).max() > 1
    assert not mx.array_equal(same[:16], same[16:32])
    for m, width in ((0, 4), (8, 0)):
        with pytest.raises(ValueError, match=r"\[make_sketch\].*at least 1, but got"):
            make_sketch(m, width)


@pytest.mark.parametrize(
    ("kind", "m", "variance"),
    [
        ("orthogonal", 128, 0.567),
        ("orthogonal", 256, 0.283),
        ("orthogonal", 512, 0.142),
        ("Gaussian", 128, 1.578),
    ],
)
def test_estimates_are_unbiased_with_the_known_variance(rng, simulated, kind, m, variance):
    """D times the variance of the error for random unit vectors, D = 128."""
    if simulated:
        pytest.skip("a property of the method; the executors agree on codes and estimates")
    width, pairs, errors, estimated, exact = 128, 1500, [], [], []
    for seed in range(24):
        sketch = make_sketch(m, width, seed) if kind == "orthogonal" else normal(rng, m, width)
        v = rng.standard_normal((2, pairs, width))
        q, k = v / np.linalg.norm(v, axis=-1, keepdims=True)
        q[: pairs // 2] = (q + 2 * k)[: pairs // 2] / np.linalg.norm(q + 2 * k, axis=-1)[
            : pairs // 2, None
        ]  # half of the pairs have an inner product of about 0.9
        qs, ks = (mx.array(a.astype(np.float32))[:, None] for a in (q, k))
        got = f64(ops.qjl_inner_product(qs, sketch, *ops.qjl_encode(ks, sketch)))[:, 0, 0]
        estimated.append(got)
        exact.append((q * k).sum(-1))
        errors.append((got - exact[-1])[pairs // 2 :])
    error = np.concatenate(errors)
    assert abs(width * error.var() / variance - 1) < 0.05
    assert abs(error.mean()) < 4 * error.std() / math.sqrt(error.size)
    aligned = np.stack(estimated)[:, : pairs // 2].mean() / np.stack(exact)[:, : pairs // 2].mean()
    assert abs(aligned - 1) < 0.004


def test_signs_are_a_table_code(rng):
    """reference.decode of the codes, times S q, is qjl_inner_product."""
    m, width = 40, 24
    sketch = make_sketch(m, width, 5)
    q, k = normal(rng, 2, 4, 3, width), normal(rng, 2, 2, 17, width)
    signs, norms = ops.qjl_encode(k, sketch)
    want = f64(ops.qjl_inner_product(q, sketch, signs, norms))
    table = sign_table()
    assert table.shape == (1, 1, 256, 8) and table.dtype == mx.float32
    scale = math.sqrt(math.pi / 2) / m * norms.astype(mx.float32)
    queries = (q.astype(mx.float32) @ sketch.T).reshape(2, 2, 6, m)
    for dtype, most in ((mx.float32, 1e-6), (mx.bfloat16, 2.0**-8)):
        keys = reference.decode(signs, table, 8, 64, scale.astype(dtype))
        got = f64(queries @ keys.swapaxes(-1, -2)).reshape(want.shape)
        assert np.abs(got - want).max() <= most * np.abs(want).max()


# ---- errors ----

SKETCH = mx.zeros((16, 6))


@pytest.mark.parametrize(
    ("x", "sketch", "message"),
    [
        (mx.zeros((2, 6), mx.int32), SKETCH, "x must be float32, float16 or bfloat16"),
        (mx.array(1.0), SKETCH, "at least 1 dimension"),
        (mx.zeros((2, 6)), mx.zeros((16, 6), mx.int32), "sketch must be float32"),
        (mx.zeros((2, 6)), mx.zeros((2, 8, 6)), r"sketch must have shape \[m, D\]"),
        (mx.zeros((2, 6)), mx.zeros((12, 6)), "multiple of 8 rows, 8 to 4096, but got 12"),
        (mx.zeros((2, 6)), mx.zeros((0, 6)), "8 to 4096, but got 0"),
        (mx.zeros((2, 6)), mx.zeros((4104, 6)), "8 to 4096, but got 4104"),
        (mx.zeros((2, 1025)), mx.zeros((8, 1025)), "1 to 1024 values, but got 1025"),
        (mx.zeros((2, 0)), mx.zeros((8, 0)), "1 to 1024 values, but got 0"),
        (mx.zeros((2, 5)), SKETCH, r"last dimension of x must be 6 .*\(2,5\)"),
    ],
)
def test_encode_errors(x, sketch, message):
    with pytest.raises(ValueError, match=rf"\[qjl_encode\].*{message}"):
        ops.qjl_encode(x, sketch)


@pytest.mark.parametrize(
    ("q", "signs", "norms", "message"),
    [
        ((2, 6), mx.zeros((3, 2), mx.int32), (3,), "signs must be uint8"),
        ((6,), mx.zeros((2,), mx.uint8), (), r"q must have shape \[..., L, D\]"),
        ((2, 5), mx.zeros((3, 2), mx.uint8), (3,), "last dimension of q must be 6"),
        ((2, 6), mx.zeros((3, 3), mx.uint8), (3,), "the last being 2"),
        ((4, 2, 6), mx.zeros((3, 2), mx.uint8), (3,), "the 3 dimensions of q"),
        ((4, 2, 6), mx.zeros((3, 5, 2), mx.uint8), (3, 5), "or a divisor"),
        ((4, 2, 6), mx.zeros((0, 5, 2), mx.uint8), (0, 5), "or a divisor"),
        ((2, 4, 1, 6), mx.zeros((1, 2, 5, 2), mx.uint8), (1, 2, 5), "or a divisor"),
        ((4, 2, 6), mx.zeros((2, 5, 2), mx.uint8), (2, 4), r"norms must have shape \(2,5\)"),
    ],
)
def test_inner_product_errors(q, signs, norms, message):
    with pytest.raises(ValueError, match=rf"\[qjl_inner_product\].*{message}"):
        ops.qjl_inner_product(mx.zeros(q), SKETCH, signs, mx.zeros(norms))


def test_inner_product_dtype_errors():
    signs = mx.zeros((3, 2), mx.uint8)
    with pytest.raises(ValueError, match="q must be float32"):
        ops.qjl_inner_product(mx.zeros((2, 6), mx.int8), SKETCH, signs, mx.zeros(3))
    with pytest.raises(ValueError, match="norms must be float32"):
        ops.qjl_inner_product(mx.zeros((2, 6)), SKETCH, signs, mx.zeros(3, mx.int32))
