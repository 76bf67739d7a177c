"""QJL sign codes in plain mlx."""

from __future__ import annotations

import math

import mlx.core as mx


def qjl_encode(x: mx.array, sketch: mx.array) -> tuple[mx.array, mx.array]:
    """Signs of the sketch and norms; see :func:`vqkv_ext.ops.qjl_encode`."""
    x = x.astype(mx.float32)
    positive = (x @ sketch.astype(mx.float32).T >= 0).astype(mx.uint8)  # NaN is not
    octets = positive.reshape(*positive.shape[:-1], sketch.shape[0] // 8, 8)
    signs = (octets << mx.arange(8, dtype=mx.uint8)).sum(-1).astype(mx.uint8)
    squares = x.square().sum(-1)
    zero = squares == 0
    norms = mx.where(zero, 0.0, mx.sqrt(mx.where(zero, 1.0, squares)))  # gradient 0 at zero
    return signs, norms.astype(mx.bfloat16)


def qjl_inner_product(q: mx.array, sketch: mx.array, signs: mx.array, norms: mx.array) -> mx.array:
    """Estimated inner products; see :func:`vqkv_ext.ops.qjl_inner_product`."""
    m = sketch.shape[0]
    if q.size == 0 or signs.size == 0:
        return mx.zeros((*q.shape[:-1], signs.shape[-2]))
    bits = (signs[..., None] >> mx.arange(8, dtype=mx.uint8)) & 1
    keys = 2.0 * bits.reshape(*signs.shape[:-1], m).astype(mx.float32) - 1.0
    unit = math.sqrt(math.pi / 2) / m
    keys = mx.stop_gradient(keys).swapaxes(-1, -2)
    scale = unit * norms.astype(mx.float32)[..., None, :]
    queries = q.astype(mx.float32) @ sketch.astype(mx.float32).T
    if q.ndim == 2:
        return (queries @ keys) * scale
    heads = signs.shape[-3]
    grouped = queries.reshape(*q.shape[:-3], heads, -1, m)  # query heads of a key head in a row
    return ((grouped @ keys) * scale).reshape(*q.shape[:-1], signs.shape[-2])


def qjl_inner_product_primitive(*inputs: mx.array) -> list[mx.array]:
    """The native primitive's inputs, as csrc/qjl/primitive.h orders them."""
    return [qjl_inner_product(*inputs)]
