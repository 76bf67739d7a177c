"""QJL (arXiv 2406.03482): keys as the signs of a random sketch, and their norm."""

from __future__ import annotations

import math

import mlx.core as mx

from .. import ops
from ..packed import MAX_CHANNELS, TableCode
from .base import Codec, CodedArrays
from .sketch import make_sketch, sign_table


class _Sketch:
    """Queries in the sketch's channels. Keys have no inverse: only their products are estimated."""

    def __init__(self, sketch: mx.array):
        self.sketch = sketch

    def forward(self, x: mx.array) -> mx.array:
        return x.astype(mx.float32) @ self.sketch.T

    query = forward

    def inverse(self, y: mx.array) -> mx.array:
        return y @ self.sketch

    def arrays(self) -> list[mx.array]:
        return [self.sketch]


class QJLCodec(Codec):
    """``channels`` sign bits and a norm per key. Keys only.

    Args:
        name: See :class:`Codec`.
        width: Values per key.
        channels: Rows of the sketch, a multiple of 8; ``b * width`` for b bits per value.
        seed: Of the sketch.
    """

    def __init__(self, name: str, width: int, channels: int, *, seed: int = 0):
        if channels % 8 or not 8 <= channels <= MAX_CHANNELS:
            raise ValueError(
                f"[{name}] head_dim times bits must be a multiple of 8 up to {MAX_CHANNELS}, but "
                f"got {channels} for head_dim {width}."
            )
        self.name = name
        self.width = width
        self.heads = None
        self.channels = channels
        self.sketch = make_sketch(channels, width, seed)
        self.transform = _Sketch(self.sketch)
        self.code = TableCode(sign_table(), stride=8)

    def encode(
        self,
        x: mx.array,
        *,
        block: int = 64,
        frozen: CodedArrays | None = None,
        use_metal_kernels: bool | None = None,
    ) -> CodedArrays:
        signs, norms = ops.qjl_encode(x, self.sketch, use_metal_kernels=use_metal_kernels)
        unit = math.sqrt(math.pi / 2) / self.channels
        return {"codes": signs, "scales": (unit * norms.astype(mx.float32)).astype(mx.bfloat16)}

    def _decode(self, arrays: CodedArrays, block: int) -> mx.array:
        signs = 2.0 * ops.unpack_bits(arrays["codes"], 1, self.channels).astype(mx.float32) - 1.0
        return signs * arrays["scales"].astype(mx.float32)[..., None]

    def decode(self, arrays: CodedArrays, block: int = 64) -> mx.array:
        # <S q, y> estimates <q, k>, so the key is S^T y
        return self._decode(arrays, block) @ self.sketch

    def empty(self, batch: int, heads: int) -> CodedArrays:
        return {
            "codes": mx.zeros((batch, heads, 0, self.channels // 8), mx.uint8),
            "scales": mx.zeros((batch, heads, 0), mx.bfloat16),
        }

    def bytes_per_token_in(self, block: int) -> float:
        return self.channels / 8 + 2
