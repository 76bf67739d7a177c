"""Trellis-coded quantisation."""

from __future__ import annotations

import mlx.core as mx

from .. import _ext, reference
from .hadamard import RowScale
from .native import native


def trellis_encode(
    x: mx.array,
    table: mx.array,
    bits: int,
    *,
    scale: RowScale = "matched",
    use_metal_kernels: bool | None = None,
) -> tuple[mx.array, mx.array]:
    """Bitshift-trellis codes of rows, ``bits`` per value, and a scale per row.

    A row is one stream of bits, least significant bit first. Value ``t`` is
    ``scale * table[state]`` with the 8 bits at bit ``bits * t`` as its state: neighbours share
    ``8 - bits`` bits, and any value can be read by itself
    (``vqkv_ext.packed.TableCode(table[None, None, :, None], stride=bits)``). The stream is the one
    of least ``sum (u - table[state])^2`` for ``u = sqrt(D) x / ||x||``, found by the Viterbi
    algorithm over 256 states; the first state is free.

    Costs are float32, summed from the first value to the last; ties go to the lower state, and
    norms and sums have a fixed order, so every executor gives the same bits. A row of zeros gets
    scale 0. A row whose squared norm is not a finite float32 gets codes 0 and scale NaN. The
    derivative is zero.

    Args:
        x: ``[..., D]``, float32, float16 or bfloat16, D from 1 to 576.
        table: ``[256]``, floating, for values of variance 1; see
            :func:`vqkv_ext.codecs.trellis.trained_table`.
        bits: 1, 2, 3 or 4.
        scale: As in :func:`hadamard_quantize`.
        use_metal_kernels: See :func:`native`.

    Returns:
        ``(codes, scales)``: uint8 ``[..., ceil((bits * (D - 1) + 8) / 8)]``, unused bits zero, and
        bfloat16 ``[...]``.

    Raises:
        ValueError: Wrong dtype or shape, bits or scale out of range.

    Source: Marcellin and Fischer, "Trellis coded quantization of memoryless and Gauss-Markov
    sources" (1990); the bitshift trellis: QTIP, arXiv 2406.11235.
    """
    if native(use_metal_kernels, "trellis_encode"):
        codes, scales = _ext.trellis_encode(x, table, bits, scale=scale)
        return codes, scales
    return reference.trellis_encode(x, table, bits, scale=scale)
