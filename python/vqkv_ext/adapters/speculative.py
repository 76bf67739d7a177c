"""Caches for speculative decoding, which takes back the draft tokens that were wrong."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from mlx_lm.models import cache as stock

from ..cache_base import CompressedCache

_TRIMMABLE = (CompressedCache, stock.KVCache, stock.QuantizedKVCache)


def speculative_prompt_cache(target: Sequence[Any], draft: Sequence[Any]) -> list[Any]:
    """The ``prompt_cache`` of mlx_lm's ``speculative_generate_step``.

    Args:
        target, draft: The caches of the two models, compressed or mlx_lm's own.

    Returns:
        Both, the target's first.

    Raises:
        ValueError: A layer's cache cannot be trimmed at every length, as that of sliding-window
            and recurrent layers: mlx_lm would go on with the wrong tokens in it.
    """
    for name, caches in (("target", target), ("draft", draft)):
        for i, c in enumerate(caches):
            if not isinstance(c, _TRIMMABLE):
                raise ValueError(
                    "[speculative_prompt_cache] every layer's cache must be trimmable at any "
                    f"length, but layer {i} of the {name} has {type(c).__name__}."
                )
    return [*target, *draft]
