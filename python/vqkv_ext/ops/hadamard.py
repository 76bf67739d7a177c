"""The randomized Hadamard transform, alone and with scalar quantisation of its result."""

from __future__ import annotations

from typing import Literal

import mlx.core as mx

from .. import _ext, reference
from .native import native

RowScale = Literal["mse", "norm", "unbiased", "matched"]


def hadamard(
    x: mx.array,
    signs: mx.array,
    *,
    inverse: bool = False,
    dtype: mx.Dtype | None = None,
    use_metal_kernels: bool | None = None,
) -> mx.array:
    """Randomized orthonormal Hadamard transform of the last axis, ``(signs * x) H``.

    ``H`` is that of ``mx.hadamard_transform`` with scale ``1 / sqrt(D)``, and is symmetric only
    where D is a power of two. The inverse is ``signs * (x H^T)``: it undoes the transform for signs
    of +-1 and is its transpose for any. Computed in float32.

    Args:
        x: ``[..., D]``, float32, float16 or bfloat16, with ``D = 2^k m`` up to 1024, m in
            {1, 12, 20, 28}.
        signs: ``[D]``, or ``[H, D]`` per head with ``x`` ``[..., H, S, D]``; floating, usually +-1
            but any factor per channel will do.
        inverse: Whether to transform back.
        dtype: Of the result; float32 by default.
        use_metal_kernels: See :func:`native`.

    Returns:
        An array of the shape of ``x``, differentiable in ``x`` and ``signs``. A row with a NaN or
        an infinity becomes one of NaN and infinities.

    Raises:
        ValueError: Wrong dtype or shape, or a D that has no such matrix (``mx.hadamard_transform``
            computes garbage for some of them).

    Source: Ailon and Chazelle, "The fast Johnson-Lindenstrauss transform"; as a rotation before
    quantisation: QuIP#, arXiv 2402.04396.
    """
    if native(use_metal_kernels, "hadamard"):
        return _ext.hadamard(x, signs, inverse, dtype)
    return reference.hadamard(x, signs, inverse=inverse, dtype=dtype)


def hadamard_quantize(
    x: mx.array,
    signs: mx.array,
    centroids: mx.array,
    bits: int,
    *,
    scale: RowScale = "mse",
    block: int | None = None,
    centres: tuple[mx.array, mx.array] | None = None,
    use_metal_kernels: bool | None = None,
) -> tuple[mx.array, ...]:
    """Scalar codes of ``y = hadamard(x, signs)``, minus a centre if asked for, in one launch.

    Every row has one scale: it decodes to ``scale * centroids[index]``, plus its centre. The index
    of a value is the number of midpoints of neighbouring centroids below
    ``u = sqrt(D) y / ||y||``. With ``c`` the centroids chosen the scale is

    ============ ======================== ====================================================
    ``mse``      ``<y, c> / <c, c>``      least squares
    ``norm``     ``||y|| / sqrt(D)``      TurboQuant
    ``unbiased`` ``||y||^2 / <y, c>``     right inner products on average (EDEN)
    ``matched``  ``||y|| / ||c||``        equal norms
    ============ ======================== ====================================================

    Norms and sums are float32 in a fixed order: any split of the rows, between blocks, gives the
    same bits. A row of zeros gets scale 0. A row whose squared norm is not a finite float32 gets
    indices 0 and scale NaN, so that it decodes to NaN; its block, if any, gets a centre of zeros.
    The derivative is zero.

    Args:
        x: ``[..., D]``, or ``[..., S, D]`` with centres; see :func:`hadamard`.
        signs: See :func:`hadamard`.
        centroids: ``[2^bits]``, floating, ascending (else the codes are unspecified), for values of
            variance 1.
        bits: 1, 2, 3, 4 or 8.
        scale: The table above.
        block: Tokens ``[block * i, block * (i + 1))`` share a centre, the mean of their ``y`` per
            channel as int8 in units of ``max |mean| / 127``, rounded to bfloat16. S must be a
            multiple of it.
        centres: Or a centre for all S tokens, ``(int8 [..., 1, D], bfloat16 [..., 1])``.
        use_metal_kernels: See :func:`native`.

    Returns:
        ``(packed, scales)``: uint8 ``[..., ceil(D * bits / 8)]`` as by :func:`pack_bits`, and
        bfloat16 ``[...]``. With a block also ``centres`` int8 ``[..., S / block, D]`` and their
        units, bfloat16 ``[..., S / block]``.

    Raises:
        ValueError: Wrong dtype or shape, bits, scale or block out of range, or a block together
            with centres.

    Source: TurboQuant, arXiv 2504.19874; EDEN, arXiv 2108.08842.
    """
    if native(use_metal_kernels, "hadamard_quantize"):
        steps, units = (None, None) if centres is None else centres
        out = _ext.hadamard_quantize(
            x,
            signs,
            centroids,
            bits,
            scale=scale,
            block=block,
            centres=steps,
            centre_scales=units,
        )
        return tuple(out)
    return reference.hadamard_quantize(
        x, signs, centroids, bits, scale=scale, block=block, centres=centres
    )
