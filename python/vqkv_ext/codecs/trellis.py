"""Trellis codes of rotated vectors (Marcellin and Fischer 1990; QTIP, arXiv 2406.11235).

Neighbouring values share bits of one stream, and the encoder looks for the best stream as a whole
(Viterbi): at b bits per value the error is that of a scalar code of about b + 0.35 bits, for a
slower encoder. Reading a value stays one look-up, in a table of 256 that was trained for Gaussian
values (``tools/train_trellis.py``), so nothing has to be calibrated.
"""

from __future__ import annotations

import functools
from importlib import resources

import mlx.core as mx
import numpy as np

from .. import ops
from ..packed import TableCode
from .base import CodedArrays
from .rotated import RotatedCodec
from .rotations import rotation
from .scalar import Scale
from .transforms import SmoothedHadamard

BITS = (1, 2, 3, 4)


@functools.cache
def _tables() -> np.ndarray:
    with resources.as_file(resources.files("vqkv_ext") / "data" / "trellis.npy") as path:
        return np.load(path)


def trained_table(bits: int) -> mx.array:
    """The values of the 256 states for Gaussian values of variance 1, float32 that float16 holds.

    Raises:
        ValueError: Bits that have no table.
    """
    if bits not in BITS:
        raise ValueError(f"[trained_table] bits must be one of {BITS}, but got {bits!r}.")
    return mx.array(_tables()[bits - 1].astype(np.float32))


class TrellisCodec(RotatedCodec):
    """b bits per value of the rotated vector, 8 - b more per token, and one scale per token.

    Args:
        name: See :class:`Codec`.
        width: Values per vector.
        bits: 1, 2, 3 or 4 per value.
        scale: See :func:`vqkv_ext.ops.hadamard_quantize`.
        centred: Code the difference to the mean of the token's block, kept as 8 bits per channel
            and block.
        seed: Of the rotation.
        basis: In place of the rotation, fitted to keys.
        heads: KV heads that ``basis`` is for, or None when it serves any number.
    """

    def __init__(
        self,
        name: str,
        width: int,
        bits: int,
        *,
        scale: Scale = "matched",
        centred: bool = False,
        seed: int = 0,
        basis: SmoothedHadamard | None = None,
        heads: int | None = None,
    ):
        if bits not in BITS:
            raise ValueError(f"[{name}] bits must be one of {BITS}, but got {bits!r}.")
        self.name = name
        self.width = width
        self.heads = heads
        self.bits = bits
        self.scale = scale
        self.centred = centred
        self.table = trained_table(bits)
        self.transform = self.rotation = rotation(width, seed) if basis is None else basis
        self.code = TableCode(self.table[None, None, :, None], stride=bits)

    def encode(
        self,
        x: mx.array,
        *,
        block: int = 64,
        frozen: CodedArrays | None = None,
        use_metal_kernels: bool | None = None,
    ) -> CodedArrays:
        y, centres = self._rotated(x, block, frozen)
        codes, scales = ops.trellis_encode(
            y, self.table, self.bits, scale=self.scale, use_metal_kernels=use_metal_kernels
        )
        return {"codes": codes, "scales": scales, **centres}
