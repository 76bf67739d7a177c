"""Bit streams and scalar quantisation in plain mlx."""

from __future__ import annotations

import mlx.core as mx


def pack_bits(indices: mx.array, bits: int) -> mx.array:
    """Indices as a bit stream per row; see :func:`vqkv_ext.ops.pack_bits`."""
    *lead, n = indices.shape
    size = (n * bits + 7) // 8
    stream = (indices[..., None] >> mx.arange(bits, dtype=indices.dtype)) & 1
    stream = stream.astype(mx.uint8).reshape(*lead, n * bits)
    stream = mx.pad(stream, [(0, 0)] * len(lead) + [(0, 8 * size - n * bits)])
    octets = stream.reshape(*lead, size, 8) << mx.arange(8, dtype=mx.uint8)
    return octets.sum(-1).astype(mx.uint8)


def unpack_bits(packed: mx.array, bits: int, n: int) -> mx.array:
    """The inverse; see :func:`vqkv_ext.ops.unpack_bits`."""
    *lead, size = packed.shape
    dtype = mx.uint8 if bits <= 8 else mx.uint16
    stream = (packed[..., None] >> mx.arange(8, dtype=mx.uint8)) & 1
    stream = stream.reshape(*lead, 8 * size)[..., : n * bits].reshape(*lead, n, bits)
    return (stream.astype(dtype) << mx.arange(bits, dtype=dtype)).sum(-1).astype(dtype)


def quantize_scalar(x: mx.array, centroids: mx.array, bits: int) -> mx.array:
    """Nearest centroids, packed; see :func:`vqkv_ext.ops.quantize_scalar`."""
    c = centroids.astype(mx.float32)
    bounds = 0.5 * (c[:-1] + c[1:])
    index = (x.astype(mx.float32)[..., None] > bounds).sum(-1)  # a NaN is above nothing
    return pack_bits(index.astype(mx.uint8), bits)


def dequantize_scalar(
    packed: mx.array, centroids: mx.array, bits: int, n: int, dtype: mx.Dtype | None = None
) -> mx.array:
    """Centroids by packed index; see :func:`vqkv_ext.ops.dequantize_scalar`."""
    return mx.take(centroids.astype(dtype or centroids.dtype), unpack_bits(packed, bits, n))
