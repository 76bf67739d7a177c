"""Table rows of codes that attention reads by table look-up."""

from __future__ import annotations

import mlx.core as mx
import numpy as np

_VALUES = {1: 8, 2: 4, 3: 2, 4: 2, 8: 1}  # per entry: those of a byte, or of 6 bits


def scalar_table(centroids: mx.array, bits: int) -> mx.array:
    """The table of a scalar code: all combinations of the centroids of one entry of the stream.

    A :class:`vqkv_ext.packed.TableCode` of it has ``window = stride`` of 8 bits (1, 2, 4 or 8 bits
    per value) or 6 (3 bits).

    Args:
        centroids: ``[2**bits]``, floating.
        bits: 1, 2, 3, 4 or 8.

    Returns:
        ``[1, 1, 256 or 64, 8 / 4 / 2 / 2 / 1]`` float32.

    Raises:
        ValueError: Other bits, or another number of centroids.
    """
    if bits not in _VALUES:
        raise ValueError(f"[scalar_table] bits must be 1, 2, 3, 4 or 8, but got {bits!r}.")
    if centroids.shape != (1 << bits,):
        raise ValueError(
            f"[scalar_table] centroids must have shape ({1 << bits},), but got {centroids.shape}."
        )
    dims = _VALUES[bits]
    rows = np.arange(1 << (bits * dims))[:, None]
    index = (rows >> (bits * np.arange(dims))) & ((1 << bits) - 1)  # the first value is lowest
    return mx.take(centroids.astype(mx.float32), mx.array(index))[None, None]
