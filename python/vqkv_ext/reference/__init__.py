"""Every op in plain mlx: the fallback, the gradient and vmap of ops without rules of their own,
and the oracle of the tests. Nothing here is fast or small."""

from __future__ import annotations

from collections.abc import Callable

import mlx.core as mx

from .attention import attention, attention_primitive, decode, visible_tokens
from .hadamard import hadamard, hadamard_quantize
from .qjl import qjl_encode, qjl_inner_product, qjl_inner_product_primitive
from .scalar import dequantize_scalar, pack_bits, quantize_scalar, unpack_bits
from .trellis import trellis_encode
from .vq import dequantize_vq, fake_quantize_vq, quantize_vq

__all__ = [
    "PRIMITIVES",
    "attention",
    "decode",
    "dequantize_scalar",
    "dequantize_vq",
    "fake_quantize_vq",
    "hadamard",
    "hadamard_quantize",
    "pack_bits",
    "qjl_encode",
    "qjl_inner_product",
    "quantize_scalar",
    "quantize_vq",
    "trellis_encode",
    "unpack_bits",
    "visible_tokens",
]

PRIMITIVES: dict[str, Callable[..., list[mx.array]]] = {
    "attention": attention_primitive,
    "qjl_inner_product": qjl_inner_product_primitive,
}
"""What the native module calls for gradients and vmap."""
