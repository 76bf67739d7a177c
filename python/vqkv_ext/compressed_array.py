"""What a compressed cache returns in place of keys and values."""

from __future__ import annotations

import logging
from functools import cached_property
from typing import Any

import mlx.core as mx

from .packed import Layout, PackedKV
from .reader import Reader

_log = logging.getLogger("vqkv_ext")

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


class Fetched:
    """What one call of ``update_and_fetch`` gives: keys and values share it.

    Attributes:
        reader: The codes.
        tails: Uncompressed keys and values.
        rows: As in :class:`vqkv_ext.packed.Layout`.
        tokens: Of the arrays that keys and values stand for, padding included.
        left_padding: See :class:`CompressedArray`.
    """

    def __init__(
        self,
        reader: Reader,
        tails: tuple[mx.array, mx.array],
        rows: tuple[int, int, int] | mx.array,
        tokens: int,
        left_padding: list[int] | None = None,
    ):
        self.reader = reader
        self.tails = tails
        self.rows = rows
        self.tokens = tokens
        self.left_padding = left_padding

    @cached_property
    def layout(self) -> Layout:
        config = self.reader.config
        return Layout(self.rows, config.sink_tokens, config.window, config.block)

    def arrays(self) -> tuple[CompressedArray, CompressedArray]:
        """The keys and the values."""
        return CompressedArray(self, 0), CompressedArray(self, 1)

    def attend(
        self, q: mx.array, values: Fetched, scale: float, mask: str | mx.array | None
    ) -> mx.array | None:
        """Attention without a check that the arrays do not need, or None where more is to do."""
        plan = self.reader.plan
        if (
            plan is None
            or values is not self
            or self.left_padding is not None
            or not (mask is None or (type(mask) is str and mask == "causal"))
            or q.dtype != self.tails[0].dtype
            or _log.isEnabledFor(logging.DEBUG)
        ):
            return None
        k, v = self.tails
        return plan(q, self.rows, k, v, scale, mask is not None)


class CompressedArray:
    """Keys or values in a cache, as a model's attention receives them. It has the shape and dtype
    of the array it stands for, but only :func:`vqkv_ext.ops.attention` can read it.

    Args:
        fetched: What is read.
        side: 0 for keys, 1 for values.

    Attributes:
        left_padding: Of each row of a batch, how many of those tokens are padding at the left, not
            held by a compressed cache; None for none.
        use_metal_kernels: See :func:`vqkv_ext.ops.native`.
    """

    ndim = 4

    def __init__(self, fetched: Fetched, side: int):
        self.fetched = fetched
        self._side = side

    @cached_property
    def packed(self) -> PackedKV:
        """What :func:`vqkv_ext.ops.attention` takes."""
        f, i = self.fetched, self._side
        return PackedKV(f.reader.bodies[i], f.tails[i], f.layout)

    @property
    def dtype(self) -> mx.Dtype:
        return self.fetched.tails[self._side].dtype

    @property
    def shape(self) -> tuple[int, int, int, int]:
        batch, heads, _, width = self.fetched.tails[self._side].shape
        return batch, heads, self.fetched.tokens, width

    @property
    def use_metal_kernels(self) -> bool | None:
        return self.fetched.reader.config.use_metal_kernels

    @property
    def left_padding(self) -> list[int] | None:
        return self.fetched.left_padding

    def astype(self, dtype: mx.Dtype) -> CompressedArray:
        """The same with uncompressed tokens, and results of attention, in another dtype."""
        if dtype == self.dtype:
            return self
        f = self.fetched
        k, v = (t.astype(dtype) for t in f.tails)
        cast = Fetched(f.reader, (k, v), f.rows, f.tokens, f.left_padding)
        cast.layout = f.layout
        other = object.__new__(type(self))
        vars(other).update(vars(self), fetched=cast)
        vars(other).pop("packed", None)
        return other

    def _refuse(self, *args: Any, **kwargs: Any) -> Any:
        raise ForeignUse(self)

    def __getattr__(self, name: str) -> Any:
        if hasattr(mx.array, name):
            self._refuse()
        raise AttributeError(name)


for _name in _FOREIGN:
    setattr(CompressedArray, f"__{_name}__", CompressedArray._refuse)
