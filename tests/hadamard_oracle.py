"""Inputs and NumPy twins for the tests of the Hadamard ops: float32 in the order of the kernels.

Kernels for GPUs fuse the products of sums, those of the CPU do not: a twin does what the executor
does.
"""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from oracle import DTYPES, f64, unpack
from vqkv_ext import _ext, ops

WIDTHS = sorted(m * 2**k for m in (1, 12, 20, 28) for k in range(11) if m * 2**k <= 1024)
SCALES = ["mse", "norm", "unbiased", "matched"]
BITS = [1, 2, 3, 4, 8]
GAUSSIAN = {
    1: [0.797885],
    2: [0.452780, 1.510418],
    3: [0.245094, 0.756005, 1.343909, 2.151946],
    4: [0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590],
}


def levels_of(bits: int) -> np.ndarray:
    if bits == 8:
        return np.linspace(-4, 4, 256).astype(np.float32)
    half = np.array(GAUSSIAN[bits], np.float32)
    return np.concatenate([-half[::-1], half])


def order_of(width: int) -> int:
    return next(m for m in (1, 12, 20, 28) if width % m == 0 and (width // m).bit_count() == 1)


def matrix(width: int) -> np.ndarray:
    """H with y = x H, in float64: rows are the images of the unit vectors."""
    eye = mx.eye(width, stream=mx.cpu)
    return f64(mx.hadamard_transform(eye, scale=1.0, stream=mx.cpu)) / math.sqrt(width)


def random(rng, shape, dtype="float32", scale=1.0):
    return mx.array((rng.standard_normal(shape) * scale).astype(np.float32)).astype(DTYPES[dtype])


def signs_of(rng, *shape):
    return mx.array(rng.choice([-1.0, 1.0], shape).astype(np.float32))


# ---- NumPy in float32, in the kernels' order ----


def transform32(x: np.ndarray, signs: np.ndarray, scale: float | None = None) -> np.ndarray:
    width = x.shape[-1]
    scale = 1 / math.sqrt(width) if scale is None else scale
    m = order_of(width)
    n = width // m
    y = (x.astype(np.float32) * signs.astype(np.float32)).reshape(-1, m, n)
    h = 1
    while h < n:
        v = y.reshape(-1, m, n // (2 * h), 2, h)
        y = np.stack([v[..., 0, :] + v[..., 1, :], v[..., 0, :] - v[..., 1, :]], -2)
        y = y.reshape(-1, m, n)
        h *= 2
    if m > 1:
        sign = np.sign(matrix(m)).astype(np.float32)  # y_i = sum_j x_j sign[j, i]
        out = y[:, :1] * sign[0][:, None]
        for j in range(1, m):
            out = out + y[:, j : j + 1] * sign[j][:, None]
        y = out
    return y.reshape(x.shape) * np.float32(scale)


def fold(parts: np.ndarray) -> np.ndarray:
    while parts.shape[-1] > 1:
        half = parts.shape[-1] // 2
        parts = parts[..., :half] + parts[..., half:]
    return parts[..., 0]


def fused() -> bool:
    return _ext.simulated() or mx.default_device() == mx.gpu


def dot32(a: np.ndarray, b: np.ndarray) -> np.ndarray:
    """<a, b>: 32 sums over r of channels 32 r + i, then those of neighbours, and so on."""
    width = a.shape[-1]
    padded = np.zeros((2, *a.shape[:-1], -(-width // 32) * 32), np.float32)
    padded[..., :width] = a, b
    a, b = padded.reshape(2, *a.shape[:-1], -1, 32)
    total = a[..., 0, :] * b[..., 0, :]
    for r in range(1, a.shape[-2]):
        if fused():  # a product is exact in float64
            wide = a[..., r, :].astype(np.float64) * b[..., r, :] + total
            total = wide.astype(np.float32)
        else:
            total = total + a[..., r, :] * b[..., r, :]
    while total.shape[-1] > 1:
        total = total[..., ::2] + total[..., 1::2]
    return total[..., 0]


def bf16(x: np.ndarray) -> np.ndarray:
    u = np.asarray(x, np.float32).view(np.uint32).astype(np.uint64)
    rounded = ((u + 0x7FFF + ((u >> 16) & 1)) >> 16 << 16).astype(np.uint32).view(np.float32)
    return np.where(np.isnan(x), x, rounded).astype(np.float32)


def mean32(y: np.ndarray, block: int) -> np.ndarray:
    """Of blocks of rows: 16 sums of every 16th row, then by halves."""
    v = y.reshape(*y.shape[:-2], -1, block, y.shape[-1])
    sums = np.zeros((*v.shape[:-2], 16, v.shape[-1]), np.float32)
    for t in range(block):
        sums[..., t % 16, :] += v[..., t, :]
    return fold(sums.swapaxes(-1, -2)) * np.float32(1 / block)


def quantize32(x, signs, levels, bits, scale, block=None, centres=None):
    """(indices, scales, centres, units), all float32 but the indices."""
    with np.errstate(all="ignore"):
        width = x.shape[-1]
        # without centres the scale of a row is multiplied, not the row
        unit_of_rows = np.float32(1 if block or centres else 1 / math.sqrt(width))
        y = transform32(x, signs, None if block or centres else 1.0)
        steps = units = None
        if block:
            mean = mean32(y, block)
            mean = np.where(np.isfinite(mean), mean, np.float32(0))
            units = bf16(np.abs(mean).max(-1) / np.float32(127))
            unit = np.where(units > 0, units, np.float32(1))[..., None]
            steps = np.where(units[..., None] > 0, np.rint(mean / unit), np.float32(0))
            steps = np.clip(steps, -127, 127)
            y = y - np.repeat(steps * units[..., None], block, axis=-2)
        elif centres:
            y = y - (centres[0].astype(np.float32) * centres[1][..., None]).astype(np.float32)
        norm2 = dot32(y, y)
        root = np.float32(math.sqrt(width))
        safe = np.where(norm2 > 0, norm2, np.float32(1))
        factor = np.where(norm2 > 0, root / np.sqrt(safe), np.float32(0))
        factor = np.where(np.isfinite(norm2), factor, np.float32(np.nan))
        u = y * factor[..., None]
        bounds = np.float32(0.5) * (levels[:-1] + levels[1:])
        index = (u[..., None] > bounds).sum(-1)
        c = levels[index]
        dot, square = dot32(y, c), dot32(c, c)
        over, under = {
            "mse": (dot, square),
            "norm": (np.sqrt(norm2), np.broadcast_to(root, norm2.shape)),
            "unbiased": (norm2, dot),
            "matched": (np.sqrt(norm2), np.sqrt(square)),
        }[scale]
        useful = (norm2 > 0) & (under > 0)
        row = np.where(useful, over / np.where(useful, under, np.float32(1)), np.float32(0))
        row = row * unit_of_rows
        row = np.where(np.isfinite(norm2), row, np.float32(np.nan))
    assert u.dtype == row.dtype == np.float32
    return index, bf16(row), steps, units


def check_codes(x, signs, levels, bits, scale="mse", block=None, centres=None, poison=None):
    if poison:
        poison(x.size)
    out = ops.hadamard_quantize(
        x, signs, mx.array(levels), bits, scale=scale, block=block, centres=centres
    )
    s = np.array(signs)
    if s.ndim == 2:
        s = s[:, None]
    given = (np.array(centres[0]), np.array(centres[1].astype(mx.float32))) if centres else None
    wide = np.array(x.astype(mx.float32))
    index, row, steps, units = quantize32(wide, s, levels, bits, scale, block, given)
    *lead, width = x.shape
    assert len(out) == (4 if block else 2)
    assert out[0].dtype == mx.uint8 and out[0].shape == (*lead, -(-width * bits // 8))
    assert out[1].dtype == mx.bfloat16 and out[1].shape == tuple(lead)
    if block:
        assert out[2].dtype == mx.int8 and out[3].dtype == mx.bfloat16
        assert np.array_equal(np.array(out[2]), steps)
        assert np.array_equal(np.array(out[3].astype(mx.float32)), units)
    stream = (index[..., None] >> np.arange(bits)) & 1
    stream = np.packbits(stream.reshape(*lead, -1).astype(np.uint8), axis=-1, bitorder="little")
    assert np.array_equal(np.array(out[0]), stream)
    assert np.array_equal(np.array(out[1].astype(mx.float32)), row, equal_nan=True)
    return out


def decoded(out, levels, bits, width):
    index = unpack(np.array(out[0]), bits, bits, width)
    return levels.astype(np.float64)[index] * f64(out[1])[..., None]
