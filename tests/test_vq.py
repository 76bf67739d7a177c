"""quantize_vq, dequantize_vq and fake_quantize_vq against float64, on every executor."""

from __future__ import annotations

import itertools

import mlx.core as mx
import numpy as np
import pytest

from oracle import DTYPES, f64, nearest
from vqkv_ext import ops, reference

SHAPES = [(1,), (5,), (3, 7), (2, 3, 5), (2, 2, 3, 4)]


def random(rng, shape, dtype="float32", scale=1.0):
    return mx.array((rng.standard_normal(shape) * scale).astype(np.float32)).astype(DTYPES[dtype])


def check_codes(x: mx.array, book: mx.array, codes: mx.array) -> None:
    """The chosen row is as near as the nearest up to float32 rounding, and is it almost always."""
    distance, best = nearest(f64(x), f64(book))
    got = np.array(codes).astype(np.int64)
    chosen = np.take_along_axis(distance, got[..., None], -1)[..., 0]
    least = distance.min(-1)
    assert (chosen <= least * (1 + 1e-6) + 1e-12).all()
    assert (got != best).mean() < 1e-3


@pytest.mark.sim
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dims", [1, 2, 3, 4, 8, 16])
def test_shared_codebook(rng, poison, dtype, dims):
    for rows, n in ((1, 5), (2, 31), (200, 257), (256, 1031)):
        x, book = random(rng, (n, 3 * dims), dtype), random(rng, (rows, dims), dtype)
        poison(n * 3)
        codes = ops.quantize_vq(x, book)
        assert codes.dtype == mx.uint8 and codes.shape == (n, 3)
        check_codes(x, book, codes)


@pytest.mark.sim
@pytest.mark.parametrize("rows", [257, 4096])
@pytest.mark.parametrize("dims", [2, 8])
@pytest.mark.parametrize("dtype", DTYPES)
def test_wide_codes(rng, rows, dims, dtype):
    x, book = random(rng, (67, 2 * dims), dtype), random(rng, (rows, dims), dtype)
    codes = ops.quantize_vq(x, book)
    assert codes.dtype == mx.uint16
    check_codes(x, book, codes)
    rows_of = f64(book)[np.array(codes).astype(int)].reshape(67, -1)
    assert np.array_equal(f64(ops.dequantize_vq(codes, book)), rows_of)


@pytest.mark.sim
@pytest.mark.parametrize("tokens", [9, 130])
@pytest.mark.parametrize("per_group", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_codebooks_per_head_and_group(rng, dtype, per_group, tokens):
    heads, groups, dims = 3, 5, 4
    x = random(rng, (2, heads, tokens, groups * dims), dtype)
    book = random(rng, (heads, groups if per_group else 1, 64, dims))
    codes = ops.quantize_vq(x, book)
    check_codes(x, book, codes)
    y = ops.dequantize_vq(codes, book, x.dtype)
    assert y.shape == x.shape and y.dtype == x.dtype
    index = np.array(codes).astype(int)
    table = f64(book.astype(x.dtype))
    h, g = np.arange(heads)[:, None, None], np.arange(groups) if per_group else 0
    assert np.array_equal(f64(y), table[h, g, index].reshape(x.shape))
    if per_group:
        flat = ops.quantize_vq(x[:, 0], book[0])
        assert np.array_equal(np.array(flat), np.array(codes[:, 0]))


@pytest.mark.parametrize("shape", SHAPES)
def test_leading_shapes_and_strides(rng, shape):
    x, book = random(rng, (*shape, 8)), random(rng, (32, 4))
    check_codes(x, book, ops.quantize_vq(x, book))
    y = random(rng, (*shape, 16))[..., ::2]  # not contiguous
    assert np.array_equal(
        np.array(ops.quantize_vq(y, book)), np.array(ops.quantize_vq(mx.contiguous(y), book))
    )


@pytest.mark.sim
def test_ties_go_to_the_lowest_index():
    book = mx.array([[1.0, 1], [0, 0], [1, 1], [0, 0]])
    codes = ops.quantize_vq(mx.array([[0.0, 0], [1, 1], [0.5, 0.5]]), book)
    assert codes.tolist() == [[1], [0], [0]]


@pytest.mark.sim
def test_offset_data_keeps_its_precision(rng):
    """Around 600, the expanded form |c|^2/2 - x.c has lost the differences that decide."""
    book = random(rng, (256, 4), scale=0.05) + 600
    x = random(rng, (500, 4), scale=0.05) + 600
    check_codes(x, book, ops.quantize_vq(x, book))


@pytest.mark.sim
@pytest.mark.parametrize("count", [200, 500])
@pytest.mark.parametrize("dims", [2, 4, 8])
def test_every_search_finds_the_same_rows(rng, dims, count):
    """The kernels for these dims search by groups of rows, of many vectors by matrices of 16 bits
    where a GPU has them; the one for wide codes row by row."""

    def normal(*shape):
        return rng.standard_normal((*shape, dims)).astype(np.float32)

    for rows in (1, 12, 40, 256):
        x, book = normal(count), normal(rows)
        near = np.tile(normal(rows // 4 + 1), (4, 1))[:rows]
        broken = book.copy()
        broken[rows // 2], broken[rows // 3, 0] = np.nan, np.inf
        for data, centroids in (
            (x + 100, book + 100),
            (np.round(2 * x) / 2, np.round(2 * book) / 2),  # ties
            (x, near + np.float32(1e-7) * book),
            (x * 1e-20, book * 1e-20),
            (x * 1e18, book * 1e18),
            (x * 1e4, book),  # vectors that 16 bits do not hold in units of the codebook
            (x * rng.choice([1e-6, 1, 300], (count, 1)).astype(np.float32), book),
            (x, np.zeros_like(book)),
            (x, broken),
        ):
            data[3, 0], data[7, 1] = np.nan, np.inf
            far = np.full((257, dims), np.inf, np.float32)
            far[:rows] = centroids
            codes = ops.quantize_vq(mx.array(data), mx.array(centroids))
            wide = ops.quantize_vq(mx.array(data), mx.array(far))
            assert codes.dtype == mx.uint8 and wide.dtype == mx.uint16
            assert np.array_equal(np.array(codes), np.array(wide))


@pytest.mark.sim
@pytest.mark.parametrize("count", [200, 700])
@pytest.mark.parametrize("dims", [2, 4, 8])
def test_rows_that_scores_cannot_tell_apart(rng, dims, count):
    """|c|^2 / 2 - <x, c> rounds away what distances show, and far rows have equal ones."""
    book = rng.standard_normal((256, dims)).astype(np.float32)
    book[100:200] = book[:100]
    book[200:250] = np.nextafter(book[:50], np.float32(9))
    x = book[rng.integers(0, 256, count)] + 0.01 * rng.standard_normal((count, dims))
    x = x.astype(np.float32)
    x[:50] = book[:50]
    for scale, offset in ((1, 0), (1, 300), (1e-15, 0), (1e17, 0)):
        s, o = np.float32(scale), np.float32(offset)
        a, b = mx.array(x * s + o), mx.array(book * s + o)
        codes = ops.quantize_vq(a, b)
        distance, _ = nearest(f64(a) / scale, f64(b) / scale)
        got = np.array(codes).astype(np.int64)
        chosen = np.take_along_axis(distance, got[..., None], -1)[..., 0]
        assert (chosen <= distance.min(-1) * (1 + 1e-6) + 1e-12).all()
        assert not ((got >= 100) & (got < 200)).any()


@pytest.mark.sim
@pytest.mark.parametrize("dims", [3, 4])
def test_nan_and_inf_never_win(rng, dims):
    book = random(rng, (16, dims))
    x = np.array(random(rng, (6, 2 * dims)))
    clean = np.array(ops.quantize_vq(mx.array(x), book))
    x[1, 0], x[2, dims], x[3, 1] = np.nan, np.inf, -np.inf
    codes = np.array(ops.quantize_vq(mx.array(x), book))
    assert codes[1, 0] == codes[2, 1] == codes[3, 0] == 0
    clean[1, 0] = clean[2, 1] = clean[3, 0] = 0
    assert np.array_equal(codes, clean)
    # a NaN row in the codebook is never chosen
    bad = np.array(book)
    bad[5] = np.nan
    assert 5 not in np.array(ops.quantize_vq(random(rng, (300, dims)), mx.array(bad)))


@pytest.mark.sim
@pytest.mark.parametrize("rows", [1, 31, 100, 224, 256])
@pytest.mark.parametrize("dims", [2, 4, 8])
def test_rows_that_all_have_a_nan(rng, dims, rows):
    """No score is finite, and none of the rows that kernels pad a codebook with may win."""
    x = random(rng, (300, dims))
    mx.eval(ops.quantize_vq(x, random(rng, (256, dims))))  # left in the memory of threadgroups
    book = np.array(random(rng, (rows, dims)))
    book[:, 0] = np.nan
    assert not np.array(ops.quantize_vq(x, mx.array(book))).any()
    book[rows // 2] = 0  # the one row, of no length
    codes = ops.quantize_vq(x, mx.array(book))
    assert np.array_equal(np.array(codes), np.full((300, 1), rows // 2))


@pytest.mark.sim
@pytest.mark.parametrize("dtype", DTYPES)
def test_code_without_a_row_decodes_to_nan(dtype):
    book = mx.ones((3, 2), DTYPES[dtype])
    y = f64(ops.dequantize_vq(mx.array([[0, 3], [255, 2]], mx.uint8), book))
    assert np.array_equal(y, [[1, 1, np.nan, np.nan], [np.nan, np.nan, 1, 1]], equal_nan=True)


def test_empty(rng):
    book = random(rng, (4, 2))
    for native in (None, False):
        kw = {"use_metal_kernels": native}
        assert ops.quantize_vq(mx.zeros((0, 6)), book, **kw).shape == (0, 3)
        assert ops.quantize_vq(mx.zeros((2, 0)), book, **kw).shape == (2, 0)
        assert ops.dequantize_vq(mx.zeros((3, 0, 5), mx.uint8), book, **kw).shape == (3, 0, 10)
        assert ops.fake_quantize_vq(mx.zeros((0, 6)), book, **kw).shape == (0, 6)


def test_same_split_anywhere(rng):
    """Case T04 for the op: tokens coded together, apart, or one by one are the same bits."""
    for width in (64, 80, 96, 128, 256):
        x = random(rng, (1, 8, 17, width), "float16")
        book = random(rng, (8, 1, 256, 4), "float16")
        whole = np.array(ops.quantize_vq(x, book))
        two = [ops.quantize_vq(x[:, :, a:b], book) for a, b in ((0, 16), (16, 17))]
        single = [ops.quantize_vq(x[:, :, i : i + 1], book) for i in range(17)]
        assert np.array_equal(whole, np.array(mx.concatenate(two, axis=2)))
        assert np.array_equal(whole, np.array(mx.concatenate(single, axis=2)))


def test_repeated_runs_are_bitwise_equal(rng, poison):
    x, book = random(rng, (2, 4, 257, 128)), random(rng, (256, 4))
    first = np.array(ops.quantize_vq(x, book))
    for _ in range(20):
        poison(first.size)
        codes = ops.quantize_vq(x, book)
        assert np.array_equal(np.array(codes), first)
        assert np.isfinite(np.array(ops.dequantize_vq(codes, book))).all()


def test_reference_agrees(rng):
    for shape, book_shape in itertools.product([(7, 12)], [(16, 4), (3, 16, 4)]):
        x, book = random(rng, shape), random(rng, book_shape)
        codes = reference.quantize_vq(x, book)
        check_codes(x, book, codes)
        assert codes.dtype == ops.quantize_vq(x, book).dtype
        assert np.array_equal(
            np.array(reference.dequantize_vq(codes, book)), np.array(ops.dequantize_vq(codes, book))
        )
    off = ops.quantize_vq(x, book, use_metal_kernels=False)
    assert np.array_equal(np.array(off), np.array(codes))


@pytest.mark.parametrize(
    ("x", "book", "message"),
    [
        (mx.zeros((2, 4), mx.int32), mx.zeros((3, 2)), "x must be float32, float16 or bfloat16"),
        (mx.zeros((2, 4)), mx.zeros((3, 2), mx.int32), "codebook must be float32"),
        (mx.zeros((2, 5)), mx.zeros((3, 2)), "must be a multiple of 2"),
        (mx.zeros((2, 4)), mx.zeros((2,)), r"codebook must have shape \[K, d\]"),
        (mx.zeros((2, 4)), mx.zeros((1, 1, 1, 3, 2)), "codebook must have shape"),
        (mx.zeros((2, 4)), mx.zeros((0, 2)), "1 to 65536 rows, but got 0"),
        (mx.zeros((2, 4)), mx.zeros((65537, 2)), "1 to 65536 rows, but got 65537"),
        (mx.zeros((2, 4)), mx.zeros((3, 0)), "at least 1 value"),
        (mx.zeros((2, 4)), mx.zeros((3, 5, 2)), "each of the 2 sub-vectors"),
        (mx.zeros((2, 4)), mx.zeros((2, 1, 5, 2)), r"codebook of 2 heads"),
        (mx.zeros((3, 2, 4)), mx.zeros((2, 1, 5, 2)), r"codebook of 2 heads"),
        (mx.array(1.0), mx.zeros((3, 1)), "at least 1 dimension"),
    ],
)
def test_quantize_errors(x, book, message):
    with pytest.raises(ValueError, match=rf"\[quantize_vq\].*{message}"):
        ops.quantize_vq(x, book)


@pytest.mark.parametrize(
    ("codes", "book", "dtype", "message"),
    [
        (mx.zeros((2, 4), mx.int32), mx.zeros((3, 2)), None, "codes must be uint8 or uint16"),
        (mx.zeros((2, 4), mx.uint8), mx.zeros((3, 3, 2)), None, "each of the 4 sub-vectors"),
        (mx.zeros((2, 4), mx.uint8), mx.zeros((3, 2)), mx.int8, "dtype must be float32"),
    ],
)
def test_dequantize_errors(codes, book, dtype, message):
    with pytest.raises(ValueError, match=rf"\[dequantize_vq\].*{message}"):
        ops.dequantize_vq(codes, book, dtype)
