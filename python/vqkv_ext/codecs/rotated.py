"""What codes of rotated vectors share: a scale per token and, for keys, a centre per block."""

from __future__ import annotations

import mlx.core as mx

from .base import Codec, CodedArrays
from .rotations import Rotation
from .transforms import SmoothedHadamard


class RotatedCodec(Codec):
    """A rotation of the vectors, and a code of the result, or of its difference to the centre of
    the block, with one scale per token.

    Attributes:
        rotation: Basis of the codes.
    """

    rotation: Rotation | SmoothedHadamard

    def _rotated(
        self, x: mx.array, block: int, frozen: CodedArrays | None
    ) -> tuple[mx.array, CodedArrays]:
        """What is left to code of the rotated vectors ``[B, H, S, D]``, and their new centres."""
        y, out = self.rotation.forward(x), {}
        if self.centred and frozen is None:
            out["centres"], out["centre_scales"] = block_centres(y, block)
            y = y - mx.repeat(_value(out), block, axis=2)
        elif self.centred:
            y = y - _value(frozen)
        return y, out

    def empty(self, batch: int, heads: int) -> CodedArrays:
        out = super().empty(batch, heads)
        out["scales"] = mx.zeros((batch, heads, 0), mx.bfloat16)
        if self.centred:
            out["centres"] = mx.zeros((batch, heads, 0, self.width), mx.int8)
            out["centre_scales"] = mx.zeros((batch, heads, 0), mx.bfloat16)
        return out

    def bytes_per_token_in(self, block: int) -> float:
        centre = (self.width + 2) / block if self.centred else 0.0
        return self.code.bytes_per_token(self.width) + 2 + centre


def block_centres(y: mx.array, block: int) -> tuple[mx.array, mx.array]:
    """Mean of every block of tokens per channel as symmetric int8. The sum has a fixed order, so
    that the number of blocks does not matter; where it is not finite the mean counts as zero.

    Args:
        y: ``[B, H, S, D]`` float32, S a multiple of ``block``.

    Returns:
        ``(centres [B, H, S / block, D] int8, units [B, H, S / block] bfloat16)``.
    """
    parts = y.reshape(*y.shape[:2], -1, block, y.shape[-1])
    while (n := parts.shape[3]) > 1:
        half = n // 2
        pairs = parts[:, :, :, :half] + parts[:, :, :, half : 2 * half]
        parts = mx.concatenate([pairs, parts[:, :, :, 2 * half :]], axis=3) if n % 2 else pairs
    mean = parts[:, :, :, 0] * (1 / block)
    mean = mx.where(mx.isfinite(mean), mean, 0.0)
    unit = (mx.abs(mean).max(axis=-1) / 127).astype(mx.bfloat16)
    wide = unit.astype(mx.float32)[..., None]
    centre = mx.where(wide > 0, mean / mx.where(wide > 0, wide, 1.0), 0.0)
    return mx.clip(mx.round(centre), -127, 127).astype(mx.int8), unit


def _value(arrays: CodedArrays) -> mx.array:
    """Centres as vectors."""
    unit = arrays["centre_scales"].astype(mx.float32)[..., None]
    return arrays["centres"].astype(mx.float32) * unit
