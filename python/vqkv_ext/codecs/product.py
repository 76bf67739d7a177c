"""Product quantisation: the vector in pieces of d values, each an index into a codebook."""

from __future__ import annotations

import mlx.core as mx

from .. import ops
from ..packed import TableCode, Transform
from .base import Codec, CodedArrays

_ROWS = (256, 4096)


class ProductCodec(Codec):
    """Codes of 8 or 12 bits per ``d`` values.

    Args:
        name: See :class:`Codec`.
        width: Values per vector.
        codebook: ``[1 or H, 1 or width/d, 256 or 4096, d]``. Rounded to float16, so that a kernel
            may keep it in half precision without changing what a code means.
        transform: Basis of the codes, or None.
    """

    def __init__(
        self, name: str, width: int, codebook: mx.array, transform: Transform | None = None
    ):
        if codebook.ndim != 4 or codebook.shape[2] not in _ROWS:
            raise ValueError(
                f"[{name}] codebook must be [1 or H, 1 or G, 256 or 4096, d], but got shape "
                f"{codebook.shape}."
            )
        heads, groups, rows, dims = codebook.shape
        if width % dims or groups not in (1, width // dims):
            raise ValueError(
                f"[{name}] codebook must split head_dim {width} evenly, but got shape "
                f"{codebook.shape}."
            )
        self.name = name
        self.width = width
        self.heads = heads if heads > 1 else None
        self.transform = transform
        table = codebook.astype(mx.float16).astype(mx.float32)
        self.code = TableCode(table, stride=8 if rows == 256 else 12)

    def encode(
        self,
        x: mx.array,
        *,
        block: int = 64,
        frozen: CodedArrays | None = None,
        use_metal_kernels: bool | None = None,
    ) -> CodedArrays:
        basis = x if self.transform is None else self.transform.forward(x)
        table = self.code.table
        if table.shape[:2] == (1, 1):
            table = table[0, 0]
        elif table.shape[0] == 1:
            table = table[0]
        index = ops.quantize_vq(basis, table, use_metal_kernels=use_metal_kernels)
        return {"codes": index if self.code.stride == 8 else _pack_12(index)}


def _pack_12(index: mx.array) -> mx.array:
    """Numbers below 4096 ``[..., G]`` as 12 bits each, low bits first: ``[..., ceil(1.5 G)]``."""
    groups = index.shape[-1]
    if groups % 2:
        index = mx.pad(index, [(0, 0)] * (index.ndim - 1) + [(0, 1)])
    low, high = index[..., 0::2], index[..., 1::2]
    pairs = low.astype(mx.uint32) | (high.astype(mx.uint32) << 12)
    octets = mx.contiguous(pairs[..., None]).view(mx.uint8)[..., :3]
    return octets.flatten(-2)[..., : (3 * groups + 1) // 2]
