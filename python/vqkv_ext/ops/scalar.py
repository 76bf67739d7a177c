"""Bit streams of fixed-width entries, and scalar quantisation into them."""

from __future__ import annotations

import mlx.core as mx

from .. import _ext, reference
from .native import native


def pack_bits(indices: mx.array, bits: int, *, use_metal_kernels: bool | None = None) -> mx.array:
    """Indices as a little-endian bit stream per row.

    Entry ``t`` of a row is bits ``[bits * t, bits * (t + 1))`` of it, least significant bit first,
    bit ``i`` being bit ``i % 8`` of byte ``i // 8``. The last byte's unused bits are zero. The
    derivative is zero.

    Args:
        indices: ``[..., n]``, uint8 for up to 8 bits, else uint16. Only their low ``bits`` count.
        bits: 1 to 16.
        use_metal_kernels: See :func:`native`.

    Returns:
        uint8 ``[..., ceil(n * bits / 8)]``.

    Raises:
        ValueError: Wrong dtype, or bits out of range.
    """
    if native(use_metal_kernels, "pack_bits"):
        return _ext.pack_bits(indices, bits)
    return reference.pack_bits(indices, bits)


def unpack_bits(
    packed: mx.array, bits: int, n: int, *, use_metal_kernels: bool | None = None
) -> mx.array:
    """The inverse of :func:`pack_bits`.

    Args:
        packed: uint8 ``[..., ceil(n * bits / 8)]``.
        bits: 1 to 16.
        n: Entries per row.
        use_metal_kernels: See :func:`native`.

    Returns:
        ``[..., n]``, uint8 for up to 8 bits, else uint16. The derivative is zero.

    Raises:
        ValueError: Wrong dtype, bits out of range, or rows that are not of n entries.
    """
    if native(use_metal_kernels, "unpack_bits"):
        return _ext.unpack_bits(packed, bits, n)
    return reference.unpack_bits(packed, bits, n)


def quantize_scalar(
    x: mx.array, centroids: mx.array, bits: int, *, use_metal_kernels: bool | None = None
) -> mx.array:
    """Index of the nearest centroid of every value, packed as by :func:`pack_bits`.

    The index is the number of bounds below the value, a bound being the midpoint
    ``0.5 * (c[i] + c[i + 1])`` of neighbouring centroids in float32; a value on a bound goes to the
    lower one. NaN gives index 0. The derivative is zero.

    Args:
        x: ``[..., n]``, float32, float16 or bfloat16.
        centroids: ``[2^bits]``, floating, in ascending order (else the indices are unspecified, but
            still below ``2^bits``); the codec's tables come from
            :mod:`vqkv_ext.codecs.lloyd_max`.
        bits: 1 to 8.
        use_metal_kernels: See :func:`native`.

    Returns:
        uint8 ``[..., ceil(n * bits / 8)]``.

    Raises:
        ValueError: Wrong dtype or shape, or bits out of range.

    Source: Lloyd, "Least squares quantization in PCM"; on rotated vectors: TurboQuant,
    arXiv 2504.19874.
    """
    if native(use_metal_kernels, "quantize_scalar"):
        return _ext.quantize_scalar(x, centroids, bits)
    return reference.quantize_scalar(x, centroids, bits)


def dequantize_scalar(
    packed: mx.array,
    centroids: mx.array,
    bits: int,
    n: int,
    dtype: mx.Dtype | None = None,
    *,
    use_metal_kernels: bool | None = None,
) -> mx.array:
    """Centroids by packed index, the inverse of :func:`quantize_scalar`.

    Args:
        packed: uint8 ``[..., ceil(n * bits / 8)]``.
        centroids: ``[2^bits]``, floating, in any order. Its derivative is a scatter-add over the
            indices.
        bits: 1 to 8.
        n: Values per row.
        dtype: Of the result; the centroids' by default.
        use_metal_kernels: See :func:`native`.

    Returns:
        ``[..., n]``.

    Raises:
        ValueError: Wrong dtype or shape, bits out of range, or rows that are not of n entries.
    """
    if native(use_metal_kernels, "dequantize_scalar"):
        return _ext.dequantize_scalar(packed, centroids, bits, n, dtype)
    return reference.dequantize_scalar(packed, centroids, bits, n, dtype)
