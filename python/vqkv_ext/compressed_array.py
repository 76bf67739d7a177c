"""What a compressed cache returns in place of keys and values."""

from __future__ import annotations

from typing import Any

import mlx.core as mx

from .packed import PackedKV


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

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise TypeError(
            "[CompressedArray] compressed keys and values must be read by vqkv_ext.ops.attention, "
            "but got used as an array; does this model compute attention by other means than "
            "mlx_lm's scaled_dot_product_attention?"
        )

    __getitem__ = __array__ = __matmul__ = __rmatmul__ = __add__ = __mul__ = _refuse
    __iter__ = __len__ = __mlx__array__ = __mlx_array__ = _refuse

    def __getattr__(self, name: str) -> Any:
        if hasattr(mx.array, name):
            self._refuse()
        raise AttributeError(name)
