"""The codes of a cache as attention reads them, made once for all calls between two changes."""

from __future__ import annotations

from functools import cached_property

from . import _ext
from .cache_config import CacheConfig
from .codecs.base import Codec, CodedArrays
from .ops.attention import coded, diagonal
from .packed import CodedBody


class Reader:
    """Bodies of keys and values, and what the native attention makes of them.

    Attributes:
        bodies: Keys and values; they keep what was coded when the reader was made.
        config: Of the cache.
    """

    def __init__(
        self,
        codecs: tuple[Codec, Codec],
        arrays: tuple[CodedArrays, CodedArrays],
        config: CacheConfig,
    ):
        # a cache updates its own array objects in place
        keys, values = (
            codec.body({n: a[...] for n, a in held.items()})
            for codec, held in zip(codecs, arrays, strict=True)
        )
        self.bodies: tuple[CodedBody, CodedBody] = (keys, values)
        self.config = config

    @cached_property
    def plan(self) -> _ext.AttentionPlan | None:
        """Attention with all that its calls have in common; None where kernels were chosen, or
        queries or outputs need more than the kernel does."""
        keys, values = self.bodies
        diagonals = diagonal(keys), diagonal(values)
        for body, own in zip(self.bodies, diagonals, strict=True):
            if body.transform is not None and own is None:
                return None
        if self.config.use_metal_kernels is not None:
            return None
        c = self.config
        return _ext.AttentionPlan(
            coded(keys), coded(values), c.sink_tokens, c.window, c.block, *diagonals
        )
