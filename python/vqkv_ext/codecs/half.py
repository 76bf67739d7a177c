"""No compression: 16-bit values, read by attention as codes of one value each."""

from __future__ import annotations

import functools

import mlx.core as mx
import numpy as np

from ..packed import TableCode
from .base import Codec, CodedArrays


@functools.cache
def _table() -> mx.array:
    """All 65,536 float16 values by bit pattern, shared by every codec; those that are not finite
    read as zero, which no finite vector contains."""
    values = np.arange(65536, dtype=np.uint16).view(np.float16).astype(np.float32)
    return mx.array(np.where(np.isfinite(values), values, 0.0)).reshape(1, 1, 65536, 1)


class HalfCodec(Codec):
    """The ``none`` preset: float16, for one side of a cache whose other side is compressed.

    Values beyond 65504 are clamped to it.
    """

    def __init__(self, width: int):
        self.name = "none"
        self.width = width
        self.heads = None
        self.transform = None
        self.code = TableCode(_table(), stride=16)

    def encode(
        self,
        x: mx.array,
        *,
        block: int = 64,
        frozen: CodedArrays | None = None,
        use_metal_kernels: bool | None = None,
    ) -> CodedArrays:
        half = mx.clip(x.astype(mx.float32), -65504.0, 65504.0).astype(mx.float16)
        return {"codes": mx.contiguous(half).view(mx.uint8)}
