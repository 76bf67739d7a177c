"""What a compressed cache returns in place of keys and values."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import mlx.core as mx

from .packed import PackedKV

_ARITHMETIC = "add sub mul truediv floordiv mod pow matmul".split()
_FOREIGN = (
    *(side + name for name in _ARITHMETIC for side in ("", "r", "i")),
    *"neg abs invert lt le gt ge getitem setitem iter len array".split(),
    *("mlx_array", "mlx__array"),
)


class ForeignUse(TypeError):
    """Compressed keys or values were used as an array.

    Attributes:
        array: Them.
    """

    def __init__(self, array: CompressedArray):
        super().__init__(
            "[CompressedArray] compressed keys and values must be read by vqkv_ext.ops.attention, "
            "but got used as an array; does this model compute attention by other means than "
            "mlx_lm's scaled_dot_product_attention?"
        )
        self.array = array


class CompressedArray:
    """Keys or values in a cache, as a model's attention receives them. It has the shape and dtype
    of the array it stands for, but only :func:`vqkv_ext.ops.attention` can read it.

    Args:
        packed: What is read.
        tokens: Of the array it stands for, padding included.
        use_metal_kernels: See :func:`vqkv_ext.ops.native`.
        left_padding: Of each row of a batch, how many of those tokens are padding at the left, not
            held by a compressed cache; None for none.
    """

    def __init__(
        self,
        packed: PackedKV,
        tokens: int,
        use_metal_kernels: bool | None,
        left_padding: list[int] | None = None,
    ):
        batch, heads, _, width = packed.tail.shape
        self.packed = packed
        self.shape = (batch, heads, tokens, width)
        self.ndim = 4
        self.dtype = packed.tail.dtype
        self.use_metal_kernels = use_metal_kernels
        self.left_padding = left_padding

    def astype(self, dtype: mx.Dtype) -> CompressedArray:
        """The same with uncompressed tokens, and results of attention, in another dtype."""
        if dtype == self.dtype:
            return self
        packed = vars(self)["packed"]
        other = object.__new__(type(self))
        tail = packed.tail.astype(dtype)
        vars(other).update(vars(self), packed=replace(packed, tail=tail), dtype=dtype)
        return other

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise ForeignUse(self)

    def __getattr__(self, name: str) -> Any:
        if hasattr(mx.array, name):
            self._refuse()
        raise AttributeError(name)


for _name in _FOREIGN:
    setattr(CompressedArray, f"__{_name}__", CompressedArray._refuse)
