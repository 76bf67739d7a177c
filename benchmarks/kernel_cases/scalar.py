"""Scalar quantisation: the nearest of a few levels."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from vqkv_ext import ops
from vqkv_ext.codecs import lloyd_max

from .bits import mx_pack, np_pack
from .registry import Calls, blocks, compiled, op

BLOCK = 1 << 16  # values


def np_nearest(x: np.ndarray, bounds: np.ndarray) -> np.ndarray:
    """Number of bounds below each value; for few bounds faster than np.searchsorted."""
    index = np.zeros(x.shape, np.uint8)
    for b in bounds:
        index += x > b
    return index


def mx_nearest(x: mx.array, bounds: list[float]) -> mx.array:
    """Like `np_nearest`."""
    index = mx.zeros(x.shape, mx.uint8)
    for b in bounds:
        index = index + (x > b)
    return index


def mx_bisect(x: mx.array, bounds: mx.array, bits: int) -> mx.array:
    """The same by halving."""
    index = mx.zeros(x.shape, mx.uint8)
    for step in (1 << t for t in reversed(range(bits))):
        below = mx.take(bounds, index + mx.array(step - 1, mx.uint8)) < x
        index = index + below * mx.array(step, mx.uint8)
    return index


def level_pairs(levels: np.ndarray) -> np.ndarray:
    """The two levels of 4 bits that each byte stands for, `[256, 2]`."""
    byte = np.arange(256)
    return np.stack([levels[byte & 15], levels[byte >> 4]], axis=-1)


def level_quads(levels: np.ndarray) -> np.ndarray:
    """The four levels that two bytes stand for, as one item of 16 bytes."""
    pairs = level_pairs(levels)
    two = np.arange(1 << 16)
    quads = np.concatenate([pairs[two & 255], pairs[two >> 8]], axis=-1)
    return quads.view(np.complex128)[:, 0].copy()


@op("quantize_scalar, 2 bits", 2)
@op("quantize_scalar, 4 bits", 4)
@op("quantize_scalar, 8 bits", 8)
def quantize_scalar(n: int, bits: int) -> Calls:
    n = -(-n // 32) * 32
    x = np.random.default_rng(0).standard_normal(n, np.float32)
    c = lloyd_max.gaussian(bits).astype(np.float32)
    bounds = np.float32(0.5) * (c[:-1] + c[1:])
    a, book = mx.array(x), mx.array(c)
    mx_bounds = mx.array(bounds)

    def np_search() -> np.ndarray:
        return np_pack(np.searchsorted(bounds, x).astype(np.uint8), bits)

    def np_count() -> np.ndarray:
        return np.concatenate([np_pack(np_nearest(x[s], bounds), bits) for s in blocks(n, BLOCK)])

    def mx_count() -> mx.array:
        return mx_pack(mx_nearest(a, bounds.tolist()), bits)

    def mx_halve() -> mx.array:
        return mx_pack(mx_bisect(a, mx_bounds, bits), bits)

    few = bits <= 4
    return Calls(
        lambda: ops.quantize_scalar(a, book, bits),
        [np_search, *([np_count] if few else [])],
        [mx_halve, *([mx_count, compiled(mx_count)] if few else [])],
        reads=(a, book),
    )


@op("dequantize_scalar, 4 bits")
def dequantize_scalar(n: int) -> Calls:
    n = -(-n // 32) * 32
    p = np.random.default_rng(0).integers(0, 256, n // 2, np.uint8)
    c = lloyd_max.gaussian(4).astype(np.float32)
    a, book = mx.array(p), mx.array(c)
    pairs, quads = level_pairs(c).view(np.uint64)[:, 0].copy(), level_quads(c)
    mx_pairs = mx.array(pairs)

    def np_by_byte() -> np.ndarray:
        return pairs[p].view(np.float32)

    def np_by_two_bytes() -> np.ndarray:
        return quads[p.view(np.uint16)].view(np.float32)

    def mx_by_byte() -> mx.array:
        return mx.take(mx_pairs, a).view(mx.float32)

    return Calls(
        lambda: ops.dequantize_scalar(a, book, 4, n),
        [np_by_byte, np_by_two_bytes],
        [mx_by_byte],
        reads=(a, book),
    )
