"""The numbers of a layout as an array."""

from __future__ import annotations

from functools import lru_cache
from threading import get_ident

import mlx.core as mx

from .ops.native import executor


def layout_rows(rows: list[list[int]]) -> mx.array:
    """:attr:`vqkv_ext.packed.Layout.rows` of these numbers, one array for all layers that hold
    equal ones."""
    return _made(tuple(map(tuple, rows)), executor(), get_ident())


@lru_cache(maxsize=16)
def _made(rows: tuple[tuple[int, ...], ...], executor: str, thread: int) -> mx.array:
    if executor != "cuda":
        return mx.array(rows, dtype=mx.int32)
    # MLX's CUDA backend has a pool for what the host writes only up to 8 bytes; getting memory for
    # more takes longer than the attention of many layers
    numbers = [n for row in rows for n in row]
    pieces = [mx.array(numbers[i : i + 2], dtype=mx.int32) for i in range(0, len(numbers), 2)]
    made = mx.concatenate(pieces).reshape(-1, 3)
    mx.async_eval(made)
    return made
