"""The randomized Hadamard transform, alone and with codes of its result."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from vqkv_ext import ops
from vqkv_ext.codecs import lloyd_max, rotations

from .bits import mx_pack, np_pack
from .registry import WIDTH, Calls, blocks, compiled, op, rows
from .scalar import level_pairs, level_quads, mx_bisect, mx_nearest, np_nearest

UNIT = 1 / math.sqrt(WIDTH)
BLOCK = 1024  # rows


class _Vectors:
    """About n values of a dtype, and the transform as a matrix that multiplies with the signs
    too. NumPy has the same values in float32."""

    def __init__(self, n: int, dtype: mx.Dtype = mx.float32):
        x = np.random.default_rng(0).standard_normal((rows(n), WIDTH), np.float32)
        self.a, self.signs = mx.array(x).astype(dtype), rotations.random_signs(WIDTH, seed=0)
        self.x = np.array(self.a.astype(mx.float32))
        self.mx_matrix = self.signs[:, None] * mx.hadamard_transform(mx.eye(WIDTH), scale=UNIT)
        self.matrix = np.array(self.mx_matrix)

    def mx_transform(self) -> mx.array:
        return mx.hadamard_transform(self.a * self.signs, scale=UNIT)

    def mx_matmul(self) -> mx.array:
        return self.a @ self.mx_matrix


@op("hadamard, D=128")
def hadamard(n: int) -> Calls:
    v = _Vectors(n)

    def np_matmul() -> np.ndarray:
        return v.x @ v.matrix

    return Calls(
        lambda: ops.hadamard(v.a, v.signs),
        [np_matmul],
        [v.mx_transform, compiled(v.mx_transform), v.mx_matmul],
        tolerance=2e-6,
        reads=(v.a, v.signs),
    )


@op("hadamard_quantize, 4 bits")
def hadamard_quantize(n: int, bits: int = 4, dtype: mx.Dtype = mx.float32) -> Calls:
    """With the scale of least squares. NumPy has no bfloat16 and keeps the scales in float32."""
    v = _Vectors(n, dtype)
    c = lloyd_max.sphere(bits, WIDTH).astype(np.float32)
    bounds = np.float32(0.5) * (c[:-1] + c[1:])
    quads = level_quads(c) if bits == 4 else None
    book, mx_bounds = mx.array(c), mx.array(bounds)
    mx_pairs = mx.array(level_pairs(c).view(np.uint64)[:, 0].copy()) if bits == 4 else None

    def np_count() -> tuple[np.ndarray, np.ndarray]:
        packed = np.empty((len(v.x), WIDTH * bits // 8), np.uint8)
        scales = np.empty(len(v.x), np.float32)
        for s in blocks(len(v.x), BLOCK):
            y = v.x[s] @ v.matrix
            u = y / (np.sqrt(np.einsum("ij,ij->i", y, y)) * np.float32(UNIT))[:, None]
            index = np_nearest(u, bounds)
            packed[s] = np_pack(index, bits).reshape(len(y), -1)
            if quads is None:
                level = c[index]
            else:
                level = quads[packed[s].view(np.uint16)].view(np.float32)
            scales[s] = np.einsum("ij,ij->i", y, level) / np.einsum("ij,ij->i", level, level)
        return packed, scales

    def mx_codes(y: mx.array, halve: bool = False) -> tuple[mx.array, mx.array]:
        u = y * (mx.rsqrt(y.square().sum(-1, keepdims=True)) / UNIT)
        index = mx_bisect(u, mx_bounds, bits) if halve else mx_nearest(u, bounds.tolist())
        packed = mx_pack(index, bits).reshape(len(v.x), -1)
        if mx_pairs is None:
            level = mx.take(book, index)
        else:
            level = mx.take(mx_pairs, packed).view(mx.float32)
        scales = (y * level).sum(-1) / level.square().sum(-1)
        return packed, scales.astype(mx.bfloat16)

    def mx_count() -> tuple[mx.array, mx.array]:
        return mx_codes(v.mx_transform())

    def mx_halve() -> tuple[mx.array, mx.array]:
        return mx_codes(v.mx_transform(), halve=True)

    def mx_matmul_count() -> tuple[mx.array, mx.array]:
        return mx_codes(v.mx_matmul())

    return Calls(
        lambda: ops.hadamard_quantize(v.a, v.signs, book, bits),
        [np_count],
        [mx_count, compiled(mx_count), mx_halve, mx_matmul_count],
        agree=0.999,
        tolerance=2**-7,
        reads=(v.a, v.signs, book),
    )
