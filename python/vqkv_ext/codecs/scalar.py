"""Scalar codes of rotated vectors: TurboQuant (arXiv 2504.19874) and its relatives.

After a random rotation the channels of a vector are close to independent Gaussians, whatever the
vector, so one table of Lloyd-Max levels serves all of them and nothing has to be calibrated.
"""

from __future__ import annotations

import math
from typing import Literal

import mlx.core as mx

from .. import ops
from ..packed import MAX_CHANNELS, CodedBody, TableCode
from .base import Codec, CodedArrays
from .rotated import RotatedCodec
from .rotations import RandomHadamard, Rotation, rotation
from .tables import scalar_table

Scale = Literal["mse", "norm", "unbiased", "matched"]
BITS = (1, 2, 3, 4, 8)


def row_scale(y: mx.array, levels: mx.array, scale: Scale) -> mx.array:
    """The factor of each row ``[..., D]`` such that factor * levels stands for the row.

    ``mse``: least squares. ``norm``: that of the paper, the row's norm. ``unbiased``: inner
    products with the row are right on average (EDEN, arXiv 2108.08842). ``matched``: equal norms.
    """
    norm = mx.sqrt(y.square().sum(-1))
    if scale == "norm":
        factor = norm / math.sqrt(y.shape[-1])
    else:
        dot, square = (y * levels).sum(-1), levels.square().sum(-1)
        if scale == "mse":
            factor = dot / square
        elif scale == "unbiased":
            factor = norm.square() / dot
        else:
            factor = norm / mx.sqrt(square)
    return mx.where(norm > 0, factor, 0.0).astype(mx.bfloat16)


class ScalarCodec(RotatedCodec):
    """b bits per value of the rotated vector and one scale per token.

    Args:
        name: See :class:`Codec`.
        width: Values per vector.
        bits: 1, 2, 3, 4 or 8 per value.
        centroids: ``[2**bits]`` ascending levels for values of variance 1.
        scale: See :func:`row_scale`.
        centred: Code the difference to the mean of the token's block, kept as 8 bits per channel
            and block.
        seed: Of the rotation.
    """

    def __init__(
        self,
        name: str,
        width: int,
        bits: int,
        centroids: mx.array,
        *,
        scale: Scale = "mse",
        centred: bool = False,
        seed: int = 0,
    ):
        if bits not in BITS:
            raise ValueError(f"[{name}] bits must be one of {BITS}, but got {bits!r}.")
        self.name = name
        self.width = width
        self.heads = None
        self.bits = bits
        self.scale = scale
        self.centred = centred
        self.centroids = centroids.astype(mx.float16).astype(mx.float32)
        self.rotation: Rotation = rotation(width, seed)
        self.transform = self.rotation
        table = scalar_table(self.centroids, bits)
        if width % table.shape[-1]:
            raise ValueError(
                f"[{name}] head_dim must be a multiple of {table.shape[-1]}, but got {width}."
            )
        self.code = TableCode(table, stride=table.shape[-2].bit_length() - 1)

    def encode(
        self,
        x: mx.array,
        *,
        block: int = 64,
        frozen: CodedArrays | None = None,
        use_metal_kernels: bool | None = None,
    ) -> CodedArrays:
        if isinstance(self.rotation, RandomHadamard):
            given = frozen if self.centred else None
            out = ops.hadamard_quantize(
                x,
                self.rotation.signs,
                self.centroids,
                self.bits,
                scale=self.scale,
                block=block if self.centred and frozen is None else None,
                centres=(given["centres"], given["centre_scales"]) if given else None,
                use_metal_kernels=use_metal_kernels,
            )
            return dict(zip(("codes", "scales", "centres", "centre_scales"), out, strict=False))
        y, out = self._rotated(x, block, frozen)
        norm = mx.sqrt(y.square().sum(-1, keepdims=True))
        u = y * (math.sqrt(self.width) / mx.where(norm > 0, norm, 1.0))
        codes = ops.quantize_scalar(
            u, self.centroids, self.bits, use_metal_kernels=use_metal_kernels
        )
        levels = ops.dequantize_scalar(
            codes,
            self.centroids,
            self.bits,
            self.width,
            mx.float32,
            use_metal_kernels=use_metal_kernels,
        )
        return {"codes": codes, "scales": row_scale(y, levels, self.scale), **out}


class PairCodec(Codec):
    """TurboQuant-Prod (arXiv 2504.19874, algorithm 2): b - 1 bits as :class:`ScalarCodec`, and the
    signs of the residual in an independent orthonormal basis with the residual's norm, which makes
    inner products unbiased, up to a term of order 1 / D. Keys only.

    Args:
        first: The code of b - 1 bits.
        seed: Of the residual's basis.

    Raises:
        ValueError: Widths that are not a multiple of 8, or whose two bases together have more
            channels than attention holds.
    """

    def __init__(self, name: str, first: ScalarCodec, *, seed: int = 1):
        self.name = name
        self.width = first.width
        self.heads = None
        self.first = first
        self.second = rotation(first.width, seed)
        self.code = first.code
        self.signs = mx.array([-1.0, 1.0])
        table = scalar_table(self.signs, 1)
        if first.width % 8 or 2 * first.width > MAX_CHANNELS:
            raise ValueError(
                f"[{name}] head_dim must be a multiple of 8 up to {MAX_CHANNELS // 2}, but got "
                f"{first.width}."
            )
        self.pair_code = TableCode(table, stride=8)
        self.transform = _PairBasis(first.rotation, self.second)

    def encode(
        self,
        x: mx.array,
        *,
        block: int = 64,
        frozen: CodedArrays | None = None,
        use_metal_kernels: bool | None = None,
    ) -> CodedArrays:
        out = self.first.encode(x, use_metal_kernels=use_metal_kernels)
        y = self.first.rotation.forward(x)
        rest = self.second.forward(y - self.first._decode(out, block))
        norm = mx.sqrt(rest.square().sum(-1))
        out["pair_codes"] = ops.quantize_scalar(
            rest, self.signs, 1, use_metal_kernels=use_metal_kernels
        )
        unit = math.sqrt(math.pi / 2) / math.sqrt(self.width)
        out["pair_scales"] = (unit * norm).astype(mx.bfloat16)
        return out

    def body(self, arrays: CodedArrays) -> CodedBody:
        arrays = dict(arrays)
        pair = CodedBody(arrays.pop("pair_codes"), self.pair_code, arrays.pop("pair_scales"))
        return CodedBody(code=self.code, transform=self.transform, pair=pair, **arrays)

    def decode(self, arrays: CodedArrays, block: int = 64) -> mx.array:
        own = {n: a for n, a in arrays.items() if not n.startswith("pair_")}
        y = self.first._decode(own, block)
        signs = ops.dequantize_scalar(arrays["pair_codes"], self.signs, 1, self.width, mx.float32)
        rest = signs * arrays["pair_scales"].astype(mx.float32)[..., None]
        return self.first.rotation.inverse(y + self.second.inverse(rest))

    def empty(self, batch: int, heads: int) -> CodedArrays:
        out = self.first.empty(batch, heads)
        n = self.pair_code.bytes_per_token(self.width)
        out["pair_codes"] = mx.zeros((batch, heads, 0, n), mx.uint8)
        out["pair_scales"] = mx.zeros((batch, heads, 0), mx.bfloat16)
        return out

    def bytes_per_token_in(self, block: int) -> float:
        return self.first.bytes_per_token_in(block) + self.width / 8 + 2

    def arrays(self) -> list[mx.array]:
        return [*self.first.arrays(), *self.second.arrays(), self.pair_code.table]


class _PairBasis:
    """Both bases side by side, for queries."""

    def __init__(self, first: Rotation, second: Rotation):
        self.first = first
        self.second = second

    def forward(self, x: mx.array) -> mx.array:
        y = self.first.forward(x)
        return mx.concatenate([y, self.second.forward(y)], axis=-1)

    query = forward

    def inverse(self, y: mx.array) -> mx.array:
        raise TypeError("[PairCodec] a pair must code keys, but got used for values.")
