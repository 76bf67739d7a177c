"""Trellis codes in plain mlx: the Viterbi algorithm, step by step."""

from __future__ import annotations

import math

import mlx.core as mx

from .hadamard import row_scale

STATES = 256


def _sum(x: mx.array) -> mx.array:
    """Sums of the last axis in the order of the kernels: the values of equal index modulo 32 one
    after the other, then halves."""
    width = -(-x.shape[-1] // 32) * 32
    x = mx.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, width - x.shape[-1])])
    sums = x[..., :32]
    for at in range(32, width, 32):
        sums = sums + x[..., at : at + 32]
    while sums.shape[-1] > 1:
        half = sums.shape[-1] // 2
        sums = sums[..., :half] + sums[..., half:]
    return sums[..., 0]


def _path(u: mx.array, table: mx.array, bits: int) -> mx.array:
    """States ``[N, D]`` of the cheapest paths for rows ``[N, D]``."""
    rows, width = u.shape
    groups = STATES >> bits
    cost = (u[:, :1] - table).square()
    choices = []
    for t in range(1, width):
        # the predecessors of a state differ in their lowest bits, its successors in the highest
        before = cost.reshape(rows, groups, 1 << bits)
        choices.append(mx.argmin(before, axis=-1).astype(mx.int32))
        least = mx.tile(before.min(axis=-1), (1, 1 << bits))
        cost = least + (u[:, t, None] - table).square()
    state = mx.argmin(cost, axis=-1, keepdims=True).astype(mx.int32)
    states = [state]
    for choice in reversed(choices):
        group = state & (groups - 1)
        state = (group << bits) | mx.take_along_axis(choice, group, axis=-1)
        states.append(state)
    return mx.concatenate(states[::-1], axis=-1)


def _stream(states: mx.array, bits: int) -> mx.array:
    """The bytes of paths ``[N, D]``: byte k starts in state ``t = 8 k // bits``."""
    width = states.shape[-1]
    first = mx.arange(((width - 1) * bits + 15) // 8) * 8
    t = mx.minimum(first // bits, width - 1)
    more = mx.pad(states >> (8 - bits), [(0, 0), (0, 1)])[:, 1:]
    wide = states[:, t] | (more[:, t] << 8)
    return ((wide >> (first - bits * t)) & 255).astype(mx.uint8)


def trellis_encode(
    x: mx.array, table: mx.array, bits: int, *, scale: str = "matched"
) -> tuple[mx.array, mx.array]:
    """Codes and scales; see :func:`vqkv_ext.ops.trellis_encode`."""
    lead, width = x.shape[:-1], x.shape[-1]
    if x.size == 0:  # mx.argmin refuses that
        codes = mx.zeros((*lead, ((width - 1) * bits + 15) // 8), mx.uint8)
        return codes, mx.zeros(lead, mx.bfloat16)
    y, table = x.astype(mx.float32).reshape(-1, width), table.astype(mx.float32)
    norm2 = _sum(y * y)
    finite, root = mx.isfinite(norm2), math.sqrt(width)
    norm = mx.sqrt(norm2)
    factor = mx.where(norm2 > 0, root / mx.where(norm2 > 0, norm, 1.0), 0.0)
    states = _path(y * mx.where(finite, factor, mx.nan)[:, None], table, bits)
    levels = mx.take(table, states)
    dot, square = _sum(y * levels), _sum(levels * levels)
    row = row_scale(scale, root, norm, norm2, dot, square)
    row = mx.where(finite, row, mx.nan).astype(mx.bfloat16)
    codes = _stream(states, bits)
    return codes.reshape(*lead, codes.shape[-1]), row.reshape(lead)
