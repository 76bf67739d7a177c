"""The randomized Hadamard transform, and scalar quantisation after it, in plain mlx."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import mlx.core as mx

from .scalar import pack_bits


def _check(op: str, width: int) -> None:
    # mx.hadamard_transform computes garbage on the CPU for other widths instead of refusing them
    orders = (m for m in (1, 12, 20, 28) if width % m == 0 and width >= m)
    if width > 1024 or not any((width // m) & (width // m - 1) == 0 for m in orders):
        raise ValueError(
            f"[{op}] the last dimension of x must be 2^k * m with m in {{1, 12, 20, 28}}, at most "
            f"1024, but got {width}."
        )


def _over_rows(signs: mx.array) -> mx.array:
    signs = signs.astype(mx.float32)
    return signs[:, None] if signs.ndim == 2 else signs


def hadamard(
    x: mx.array, signs: mx.array, *, inverse: bool = False, dtype: mx.Dtype | None = None
) -> mx.array:
    """``(signs * x) H`` or its transpose; see :func:`vqkv_ext.ops.hadamard`."""
    width = x.shape[-1]
    _check("hadamard", width)
    if x.size == 0:  # which mx.hadamard_transform refuses
        return mx.zeros(x.shape, dtype or mx.float32)
    signs, x, scale = _over_rows(signs), x.astype(mx.float32), 1 / math.sqrt(width)
    if width & (width - 1) == 0:
        turn = lambda v: mx.hadamard_transform(v, scale=scale)  # noqa: E731
    else:
        # not symmetric, which mx.hadamard_transform's own gradient takes it to be
        matrix = mx.hadamard_transform(mx.eye(width), scale=scale)
        matrix = matrix.T if inverse else matrix
        turn = lambda v: v @ matrix  # noqa: E731
    y = signs * turn(x) if inverse else turn(x * signs)
    return y.astype(dtype or mx.float32)


def over_heads(
    transform: Callable[..., mx.array], x: mx.array, diagonal: mx.array, **kwargs: Any
) -> mx.array:
    """``transform`` (:func:`hadamard`, or its native counterpart) of ``[B, Hq, L, D]`` with a
    ``[1 or H, D]`` diagonal: of several heads, each serves Hq / H neighbours."""
    heads = diagonal.shape[0]
    if heads == 1:
        return transform(x, diagonal[0], **kwargs)
    if heads == x.shape[1]:
        return transform(x, diagonal, **kwargs)
    group = x.shape[1] // heads
    grouped = mx.flatten(mx.unflatten(x, 1, (heads, group)), 2, 3)
    return mx.flatten(mx.unflatten(transform(grouped, diagonal, **kwargs), 2, (group, -1)), 1, 2)


def _block_centres(y: mx.array, block: int) -> tuple[mx.array, mx.array]:
    """Mean of every block of rows as int8 steps ``[..., S / block, D]`` of a bfloat16 unit."""
    *lead, rows, width = y.shape
    mean = y.reshape(*lead, rows // block, block, width).mean(axis=-2)
    mean = mx.where(mx.isfinite(mean), mean, 0.0)
    unit = (mx.abs(mean).max(axis=-1) / 127).astype(mx.bfloat16)
    wide = unit.astype(mx.float32)[..., None]
    steps = mx.where(wide > 0, mx.round(mean / mx.where(wide > 0, wide, 1.0)), 0.0)
    return mx.clip(steps, -127, 127).astype(mx.int8), unit


def row_scale(
    kind: str, root: float, norm: mx.array, norm2: mx.array, dot: mx.array, square: mx.array
) -> mx.array:
    """Scales of coded rows, 0 for rows of zeros.

    Args:
        kind: As :func:`vqkv_ext.ops.hadamard_quantize` has it.
        root: Square root of the width.
        norm, norm2: Of the row, and its square.
        dot: Product of the row and its levels.
        square: Sum of the squares of its levels.
    """
    over, under = {
        "mse": (dot, square),
        "norm": (norm, mx.full(norm.shape, root)),
        "unbiased": (norm2, dot),
        "matched": (norm, mx.sqrt(square)),
    }[kind]
    useful = (norm2 > 0) & (under > 0)
    return mx.where(useful, over / mx.where(useful, under, 1.0), 0.0)


def hadamard_quantize(
    x: mx.array,
    signs: mx.array,
    centroids: mx.array,
    bits: int,
    *,
    scale: str = "mse",
    block: int | None = None,
    centres: tuple[mx.array, mx.array] | None = None,
) -> tuple[mx.array, ...]:
    """Codes, scales and centres; see :func:`vqkv_ext.ops.hadamard_quantize`."""
    _check("hadamard_quantize", x.shape[-1])
    y = hadamard(x, signs)
    found: tuple[mx.array, ...] = ()
    if block is not None:
        found = centres = _block_centres(y, block)
    if centres is not None:
        steps, unit = centres
        centre = steps.astype(mx.float32) * unit.astype(mx.float32)[..., None]
        y = y - (centre if block is None else mx.repeat(centre, block, axis=-2))

    norm2 = y.square().sum(-1)
    finite = mx.isfinite(norm2)
    norm = mx.sqrt(norm2)
    root = math.sqrt(y.shape[-1])
    factor = mx.where(norm2 > 0, root / mx.where(norm2 > 0, norm, 1.0), 0.0)
    u = y * mx.where(finite, factor, mx.nan)[..., None]
    levels = centroids.astype(mx.float32)
    bounds = 0.5 * (levels[:-1] + levels[1:])
    index = (u[..., None] > bounds).sum(-1)  # a NaN is above nothing
    c = mx.take(levels, index)
    dot, square = (y * c).sum(-1), c.square().sum(-1)
    row = row_scale(scale, root, norm, norm2, dot, square)
    row = mx.where(finite, row, mx.nan).astype(mx.bfloat16)
    return pack_bits(index.astype(mx.uint8), bits), row, *found
