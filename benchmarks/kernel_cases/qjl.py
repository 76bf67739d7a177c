"""Sign codes of a random sketch, and inner products with them."""

from __future__ import annotations

import math

import mlx.core as mx
import numpy as np

from vqkv_ext import ops
from vqkv_ext.codecs.sketch import make_sketch, sign_table

from .registry import WIDTH, Calls, blocks, compiled, op, rows

SKETCH = 128  # rows of it
KEY_HEADS, QUERY_HEADS = 8, 32
BLOCK = 1024  # tokens


@op("qjl_encode, m=128")
def qjl_encode(n: int) -> Calls:
    """NumPy has no bfloat16 and keeps the norms in float32."""
    x = np.random.default_rng(0).standard_normal((rows(n), WIDTH), np.float32)
    a, mx_sketch = mx.array(x), make_sketch(SKETCH, WIDTH)
    sketch = np.array(mx_sketch)

    def np_packbits() -> tuple[np.ndarray, np.ndarray]:
        positive = (x @ sketch.T >= 0).reshape(-1)  # faster than packing along an axis
        signs = np.packbits(positive, bitorder="little").reshape(len(x), -1)
        return signs, np.sqrt(np.einsum("ij,ij->i", x, x))

    def mx_norms() -> mx.array:
        return mx.sqrt(a.square().sum(-1)).astype(mx.bfloat16)

    def mx_multiply() -> tuple[mx.array, mx.array]:
        """The first bits of eight bytes meet in the highest byte of a product."""
        octets = (a @ mx_sketch.T >= 0).view(mx.uint64)
        product = octets * mx.array(0x0102040810204080, mx.uint64)
        return (product >> mx.array(56, mx.uint64)).astype(mx.uint8), mx_norms()

    def mx_shift_sum() -> tuple[mx.array, mx.array]:
        octets = (a @ mx_sketch.T >= 0).astype(mx.uint8).reshape(len(x), -1, 8)
        return (octets << mx.arange(8, dtype=mx.uint8)).sum(-1).astype(mx.uint8), mx_norms()

    return Calls(
        lambda: ops.qjl_encode(a, mx_sketch),
        [np_packbits],
        [mx_multiply, compiled(mx_multiply), mx_shift_sum],
        agree=0.999,
        tolerance=2**-7,
        reads=(a, mx_sketch),
    )


@op("qjl_inner_product, m=128")
def qjl_inner_product(n: int) -> Calls:
    """One token of 32 query heads with keys of 8 heads; n counts the signs."""
    rng = np.random.default_rng(0)
    tokens = -(-n // (KEY_HEADS * SKETCH))
    q = rng.standard_normal((QUERY_HEADS, 1, WIDTH), np.float32)
    signs = rng.integers(0, 256, (KEY_HEADS, tokens, SKETCH // 8), np.uint8)
    norms = rng.random((KEY_HEADS, tokens), np.float32)
    mx_q, mx_signs, mx_norms = mx.array(q), mx.array(signs), mx.array(norms)
    mx_sketch = make_sketch(SKETCH, WIDTH)
    sketch, unit = np.array(mx_sketch), math.sqrt(math.pi / 2) / SKETCH
    octets = np.array(sign_table())[0, 0]  # eight signs by byte
    mx_octets = mx.array(octets)

    def np_decode() -> np.ndarray:
        queries = (q[:, 0] @ sketch.T).reshape(KEY_HEADS, -1, SKETCH)
        out = np.empty((*queries.shape[:2], tokens), np.float32)
        for h in range(KEY_HEADS):
            for s in blocks(tokens, BLOCK):
                keys = np.take(octets, signs[h, s], axis=0).reshape(-1, SKETCH)
                out[h, :, s] = queries[h] @ keys.T
        return (out * (np.float32(unit) * norms[:, None])).reshape(QUERY_HEADS, 1, tokens)

    def mx_queries() -> mx.array:
        return (mx_q @ mx_sketch.T).reshape(KEY_HEADS, -1, SKETCH)

    def mx_scaled(products: mx.array) -> mx.array:
        return (products * (unit * mx_norms[:, None])).reshape(QUERY_HEADS, 1, tokens)

    def mx_decode() -> mx.array:
        keys = mx.take(mx_octets, mx_signs, axis=0).reshape(KEY_HEADS, tokens, SKETCH)
        return mx_scaled(mx_queries() @ keys.swapaxes(-1, -2))

    def mx_shift() -> mx.array:
        bits = (mx_signs[..., None] >> mx.arange(8, dtype=mx.uint8)) & mx.array(1, mx.uint8)
        bits = bits.reshape(KEY_HEADS, tokens, SKETCH).astype(mx.float32)
        queries = mx_queries()
        products = 2 * (queries @ bits.swapaxes(-1, -2)) - queries.sum(-1, keepdims=True)
        return mx_scaled(products)

    def mx_quantized_matmul() -> mx.array:
        """MLX's own product with weights of one bit, 2 b - 1."""
        one = mx.ones((KEY_HEADS, tokens, 1))
        return mx_scaled(
            mx.quantized_matmul(
                mx_queries(), mx_signs.view(mx.uint32), 2 * one, -one, group_size=128, bits=1
            )
        )

    def mx_table() -> mx.array:
        """Sums of products of the query with eight signs, by byte of the keys."""
        table = mx_queries().reshape(KEY_HEADS, -1, SKETCH // 8, 8) @ mx_octets.T
        table = table.transpose(0, 2, 3, 1).reshape(KEY_HEADS, SKETCH // 8 * 256, -1)
        at = mx_signs.astype(mx.uint32) + mx.arange(0, SKETCH // 8 * 256, 256, dtype=mx.uint32)
        sums = [mx.take(t, i, axis=0).sum(-2).T for t, i in zip(table, at, strict=True)]
        return mx_scaled(mx.stack(sums))

    return Calls(
        lambda: ops.qjl_inner_product(mx_q, mx_sketch, mx_signs, mx_norms),
        [np_decode],
        [mx_decode, mx_shift, compiled(mx_shift), mx_quantized_matmul, mx_table],
        tolerance=2e-6,
        reads=(mx_q, mx_sketch, mx_signs, mx_norms),
    )
