"""Product quantisation in plain mlx."""

from __future__ import annotations

import mlx.core as mx


def _book(codebook: mx.array, groups: int) -> mx.array:
    """A codebook as ``[1 or H, 1 or G, K, d]``."""
    if codebook.ndim == 2:
        return codebook[None, None]
    return codebook[None] if codebook.ndim == 3 else codebook


def _split(x: mx.array, groups: int) -> mx.array:
    """``[..., S, G * d]`` as ``[..., H or 1, S, G, d]`` with at least the axes of a codebook."""
    x = x.reshape(*x.shape[:-1], groups, -1)
    while x.ndim < 4:
        x = x[None]
    return x


def quantize_vq(x: mx.array, codebook: mx.array) -> mx.array:
    """Indices of the nearest rows; see :func:`vqkv_ext.ops.quantize_vq`."""
    book = _book(codebook, 0).astype(mx.float32)
    dims, rows = book.shape[-1], book.shape[-2]
    groups = x.shape[-1] // dims
    dtype = mx.uint8 if rows <= 256 else mx.uint16
    if x.size == 0:  # mx.argmin refuses that
        return mx.zeros((*x.shape[:-1], groups), dtype)
    v = _split(x.astype(mx.float32), groups)  # [..., H, S, G, d]
    diff = v[..., None, :] - mx.expand_dims(book, 1)  # [H, 1, G, K, d]
    distance = diff.square().sum(-1)
    # NaN never wins: it must not look like the smallest distance
    distance = mx.where(mx.isnan(distance), mx.inf, distance)
    codes = mx.argmin(distance, axis=-1).reshape(*x.shape[:-1], groups)
    return codes.astype(dtype)


def dequantize_vq(codes: mx.array, codebook: mx.array, dtype: mx.Dtype | None = None) -> mx.array:
    """Rows by index; see :func:`vqkv_ext.ops.dequantize_vq`."""
    book = _book(codebook, 0).astype(dtype or codebook.dtype)
    heads, book_groups, rows, dims = book.shape
    groups = codes.shape[-1]
    index = codes.astype(mx.int32)
    valid = index < rows
    index = mx.minimum(index, rows - 1)
    if book_groups > 1:
        index = index + mx.arange(groups) * rows
    if heads > 1:
        index = index + mx.arange(heads)[:, None, None] * (rows * book_groups)
    out = mx.take(book.reshape(-1, dims), index, axis=0)
    out = mx.where(valid[..., None], out, mx.array(mx.nan, out.dtype))
    return out.reshape(*codes.shape[:-1], groups * dims)


def fake_quantize_vq(x: mx.array, codebook: mx.array) -> mx.array:
    """Straight-through quantisation; see :func:`vqkv_ext.ops.fake_quantize_vq`."""
    codes = mx.stop_gradient(quantize_vq(x, codebook))
    y = dequantize_vq(codes, codebook, x.dtype)

    @mx.custom_function
    def straight_through(x: mx.array, y: mx.array) -> mx.array:
        return y

    @straight_through.vjp
    def backward(primals, cotangent, output):  # noqa: ANN001, ANN202
        return cotangent, cotangent

    return straight_through(x, y)
