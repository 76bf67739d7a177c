"""QJL: keys as the signs of a random sketch."""

from __future__ import annotations

import mlx.core as mx

from .. import _ext, reference
from .native import native


def qjl_encode(
    x: mx.array, sketch: mx.array, *, use_metal_kernels: bool | None = None
) -> tuple[mx.array, mx.array]:
    """Signs of ``sketch @ x`` and norms ``||x||`` of vectors.

    Products and norms are computed in float32. Bit ``i % 8`` (least significant first) of byte
    ``i // 8`` is 1 where product ``i`` is not negative, so zero (of either sign) gives 1; NaN
    counts as negative and gives 0. The norm of a vector with a NaN is NaN; it is infinite where the
    sum of squares exceeds float32. A vector is coded alike in any batch.

    Args:
        x: ``[..., D]``, float32, float16 or bfloat16; D from 1 to 1024.
        sketch: ``[m, D]``, floating, m a multiple of 8 up to 4096; see
            :func:`vqkv_ext.codecs.sketch.make_sketch`.
        use_metal_kernels: See :func:`native`.

    Returns:
        Signs, uint8 ``[..., m / 8]``, whose derivative is zero, and norms, bfloat16 ``[...]``,
        whose derivative is ``x / ||x||`` (zero for a zero vector).

    Raises:
        ValueError: Wrong dtype or shape.

    Source: Zandieh et al., "QJL: 1-Bit Quantized JL Transform for KV Cache Quantization with Zero
    Overhead", arXiv 2406.03482.
    """
    if native(use_metal_kernels, "qjl_encode"):
        signs, norms = _ext.qjl_encode(x, sketch)
        return signs, norms
    return reference.qjl_encode(x, sketch)


def qjl_inner_product(
    q: mx.array,
    sketch: mx.array,
    signs: mx.array,
    norms: mx.array,
    *,
    use_metal_kernels: bool | None = None,
) -> mx.array:
    """Unbiased estimates of ``q . k`` for keys coded by :func:`qjl_encode` with the same sketch.

    The estimate is ``sqrt(pi / 2) / m * ||k|| * <S q, sign(S k)>``, in float32. A NaN in a query or
    in a norm makes its estimates NaN.

    Args:
        q: ``[..., L, D]``, float32, float16 or bfloat16, as ``[B, Hq, L, D]``.
        sketch: ``[m, D]``, floating.
        signs: uint8 ``[..., S, m / 8]`` with the leading dimensions of ``q``, but the last of them
            (key heads) may be a divisor of that of ``q``: query heads
            ``[h * Hq / Hkv, (h + 1) * Hq / Hkv)`` read key head ``h``. The derivative is zero.
        norms: ``[..., S]``, floating.
        use_metal_kernels: See :func:`native`.

    Returns:
        float32 ``[..., L, S]`` with the leading dimensions of ``q``.

    Raises:
        ValueError: Wrong dtype or shape.

    Source: arXiv 2406.03482.
    """
    if native(use_metal_kernels, "qjl_inner_product"):
        return _ext.qjl_inner_product(q, sketch, signs, norms)
    return reference.qjl_inner_product(q, sketch, signs, norms)
