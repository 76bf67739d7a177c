"""Product quantisation."""

from __future__ import annotations

import mlx.core as mx

from .. import _ext, reference
from .native import native


def quantize_vq(
    x: mx.array, codebook: mx.array, *, use_metal_kernels: bool | None = None
) -> mx.array:
    """Index of the nearest codebook row (squared Euclidean distance) for every sub-vector.

    Distances are float32; ties go to the lowest index. A sub-vector with a NaN or an infinity is
    nearest to nothing and gets code 0. Memory beyond the result does not grow with ``x``. The
    derivative is zero: to train through it use :func:`fake_quantize_vq`.

    Args:
        x: ``[..., G * d]``, float32, float16 or bfloat16.
        codebook: ``[K, d]`` shared, ``[G, K, d]`` per sub-vector, or ``[H, 1 or G, K, d]`` per head
            with ``x`` ``[..., H, S, G * d]``; K from 1 to 65536.
        use_metal_kernels: See :func:`native`.

    Returns:
        Codes ``[..., G]``, uint8 for K <= 256, else uint16.

    Raises:
        ValueError: Wrong dtype or shape.

    Source: product quantisation, Jegou et al., "Product Quantization for Nearest Neighbor Search".
    """
    if native(use_metal_kernels, "quantize_vq"):
        return _ext.quantize_vq(x, codebook)
    return reference.quantize_vq(x, codebook)


def dequantize_vq(
    codes: mx.array,
    codebook: mx.array,
    dtype: mx.Dtype | None = None,
    *,
    use_metal_kernels: bool | None = None,
) -> mx.array:
    """Codebook rows by index, the inverse of :func:`quantize_vq`.

    Args:
        codes: ``[..., G]`` uint8 or uint16. A code of K or more decodes to NaN.
        codebook: As in :func:`quantize_vq`. Its derivative is a scatter-add over the codes.
        dtype: Of the result; the codebook's by default.
        use_metal_kernels: See :func:`native`.

    Returns:
        Vectors ``[..., G * d]``.

    Raises:
        ValueError: Wrong dtype or shape.
    """
    if native(use_metal_kernels, "dequantize_vq"):
        return _ext.dequantize_vq(codes, codebook, dtype)
    return reference.dequantize_vq(codes, codebook, dtype)


def fake_quantize_vq(
    x: mx.array, codebook: mx.array, *, use_metal_kernels: bool | None = None
) -> mx.array:
    """``dequantize_vq(quantize_vq(x, codebook), codebook)`` for training.

    The straight-through estimator: the cotangent passes to ``x`` unchanged, and is scatter-added to
    the codebook rows that were chosen.

    Args and errors: as for :func:`quantize_vq`. Returns an array like ``x``.

    Source: Bengio et al., arXiv 1308.3432; van den Oord et al., arXiv 1711.00937.
    """
    if native(use_metal_kernels, "fake_quantize_vq"):
        return _ext.fake_quantize_vq(x, codebook)
    return reference.fake_quantize_vq(x, codebook)
