"""Masks of batches with padding, between mlx_lm's batch caches and compressed ones.

A model makes one mask and gives it to all layers that share a kind of attention. In a mixed list
some of them have mlx_lm's BatchKVCache, which holds padding at the left and needs it masked, and
some a compressed cache, which holds none.
"""

from __future__ import annotations

from typing import Any

import mlx.core as mx
from mlx_lm.models import cache as stock
from mlx_lm.models.base import create_causal_mask

from ..compressed_array import CompressedArray

Mask = str | mx.array | None


def logical_mask(mask: Mask, keys: CompressedArray) -> Mask:
    """A mask whose columns count padding, for keys that hold none.

    Args:
        mask: None, ``"causal"``, or an array ``[..., L, columns]`` broadcastable to
            ``[B, H, L, columns]``, as mlx_lm's BatchKVCache makes it.
        keys: What a cache returned.

    Returns:
        The mask with the columns that a row has as padding at the left taken out.

    Raises:
        ValueError: The mask does not have a column for each token.
    """
    if not isinstance(mask, mx.array) or mask.shape[-1] == 1:
        return mask
    columns = keys.shape[2]
    if mask.shape[-1] != columns:
        raise ValueError(
            f"[attention] mask must have a column for each of the {columns} tokens, but got shape "
            f"{mask.shape}."
        )
    if not any(keys.left_padding or ()):
        return mask
    mask = mask.reshape(*(1,) * (4 - mask.ndim), *mask.shape)
    padding = mx.array(keys.left_padding)
    # columns beyond a row's last token are never read
    at = mx.minimum(mx.arange(columns) + padding[:, None], columns - 1)
    mask = mx.broadcast_to(mask, (keys.shape[0], *mask.shape[1:]))
    return mx.take_along_axis(mask, at[:, None, None], axis=-1)


def padded_mask(mask: Mask, queries: mx.array, cache: Any) -> Mask:
    """The mask for a stock layer, where a compressed cache of the same list made it: that says
    None or ``"causal"`` although mlx_lm's BatchKVCache holds padding."""
    if isinstance(mask, mx.array) or not isinstance(cache, stock.BatchKVCache):
        return mask
    n = queries.shape[2]
    return create_causal_mask(n, offset=cache.size() - n, left_padding=cache.left_padding)
