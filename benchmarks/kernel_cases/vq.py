"""Product quantisation with one codebook of 256 rows of 4 numbers."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

from vqkv_ext import ops

from .registry import Calls, blocks, op

ROWS, DIMS = 256, 4
BLOCK = 4096  # vectors whose distances are held at a time
GPU_BLOCK = 1 << 20  # the same on a GPU: a gigabyte


class _Vectors:
    """About n values and a codebook. The nearest row has the least `|c|^2 / 2 - x . c`."""

    def __init__(self, n: int):
        rng = np.random.default_rng(0)
        self.x = rng.standard_normal((-(-n // DIMS), DIMS), np.float32)
        self.book = rng.standard_normal((ROWS, DIMS), np.float32)
        self.half = 0.5 * (self.book * self.book).sum(-1, keepdims=True)
        # with a 1 after each vector the product has the constant in it
        self.extended = np.concatenate([-self.book, self.half], axis=-1).T
        self.items = self.book.view(np.complex128)[:, 0].copy()  # a row as one item of 16 bytes
        self.a, self.mx_book, self.mx_half = map(mx.array, (self.x, self.book, self.half[:, 0]))
        gpu = mx.default_device().type == mx.DeviceType.gpu
        self.parts = blocks(len(self.x), GPU_BLOCK if gpu else BLOCK)

    def np_codes(self) -> np.ndarray:
        x = np.pad(self.x, [(0, 0), (0, 1)], constant_values=1)
        parts = [(x[s] @ self.extended).argmin(-1) for s in blocks(len(x), BLOCK)]
        return np.concatenate(parts).astype(np.uint8)

    def mx_matmul(self) -> mx.array:
        parts = [
            mx.argmin(self.mx_half - self.a[s] @ self.mx_book.T, axis=-1).astype(mx.uint8)
            for s in self.parts
        ]
        return mx.concatenate(parts)

    def mx_addmm(self) -> mx.array:
        parts = [
            mx.argmin(mx.addmm(self.mx_half, self.a[s], self.mx_book.T, alpha=-1), axis=-1)
            for s in self.parts
        ]
        return mx.concatenate(parts).astype(mx.uint8)


@op("quantize_vq, 256 x 4")
def quantize_vq(n: int) -> Calls:
    v = _Vectors(n)
    flat = v.a.reshape(-1)  # as one row, whose codes have the shape of the others' results
    mx.eval(flat)
    return Calls(
        lambda: ops.quantize_vq(flat, v.mx_book),
        [v.np_codes],
        [v.mx_matmul, v.mx_addmm],
        agree=0.999,
        reads=(v.a, v.mx_book),
    )


@op("fake_quantize_vq, 256 x 4")
def fake_quantize_vq(n: int) -> Calls:
    v = _Vectors(n)

    def np_rows() -> np.ndarray:
        return v.items[v.np_codes()].view(np.float32).reshape(-1, DIMS)

    def mx_matmul_take() -> mx.array:
        return mx.take(v.mx_book, v.mx_matmul(), axis=0)

    def mx_addmm_take() -> mx.array:
        return mx.take(v.mx_book, v.mx_addmm(), axis=0)

    return Calls(
        lambda: ops.fake_quantize_vq(v.a, v.mx_book),
        [np_rows],
        [mx_matmul_take, mx_addmm_take],
        agree=0.999,
        reads=(v.a, v.mx_book),
    )


@op("dequantize_vq, 256 x 4")
def dequantize_vq(n: int) -> Calls:
    v = _Vectors(n)
    codes = np.random.default_rng(0).integers(0, ROWS, len(v.x), np.uint8)
    a = mx.array(codes)
    pairs = mx.array(v.book.view(np.uint64))

    def np_items() -> np.ndarray:
        return v.items[codes].view(np.float32).reshape(-1, DIMS)

    def np_take() -> np.ndarray:
        return np.take(v.book, codes, axis=0)

    def mx_take() -> mx.array:
        return mx.take(v.mx_book, a, axis=0)

    def mx_take_pairs() -> mx.array:
        return mx.take(pairs, a, axis=0).view(mx.float32)

    return Calls(
        lambda: ops.dequantize_vq(a[:, None], v.mx_book),
        [np_items, np_take],
        [mx_take, mx_take_pairs],
        reads=(a, v.mx_book),
    )
