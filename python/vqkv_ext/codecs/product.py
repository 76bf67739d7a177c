"""Product quantisation: the vector in pieces of d values, each an index into a codebook."""

from __future__ import annotations

import mlx.core as mx

from .. import ops
from ..packed import TableCode, Transform
from .base import Codec, CodedArrays


class ProductCodec(Codec):
    """Codes of one byte per ``d`` values.

    Args:
        name: See :class:`Codec`.
        width: Values per vector.
        codebook: ``[1 or H, 1 or width/d, 256, d]``. Rounded to float16, so that a kernel may keep
            it in half precision without changing what a code means.
        transform: Basis of the codes, or None.
    """

    def __init__(
        self, name: str, width: int, codebook: mx.array, transform: Transform | None = None
    ):
        if codebook.ndim != 4 or codebook.shape[2] != 256:
            raise ValueError(
                f"[{name}] codebook must be [1 or H, 1 or G, 256, d], but got shape "
                f"{codebook.shape}."
            )
        heads, groups, _, dims = codebook.shape
        if width % dims or groups not in (1, width // dims):
            raise ValueError(
                f"[{name}] codebook must split head_dim {width} evenly, but got shape "
                f"{codebook.shape}."
            )
        self.name = name
        self.width = width
        self.heads = heads if heads > 1 else None
        self.transform = transform
        self.code = TableCode(codebook.astype(mx.float16).astype(mx.float32), stride=8)

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
        return {"codes": ops.quantize_vq(basis, table, use_metal_kernels=use_metal_kernels)}
