"""The compressed KV cache: fp16 sink tokens, a coded body, fp16 recent tokens.

Logical positions of a row::

    [ sink tokens | body: codes, whole blocks | recent tokens ]

A query that sees N tokens reads ``coded_tokens(N)`` tokens after the sinks as codes, and the rest
uncompressed, whatever chunk it arrives in; so the same tokens give the same codes and the same
split for any chunking of the prompt. The uncompressed copy of the last coded block stays one block
longer (grace), so trimming up to one block is exact.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import mlx.core as mx

from . import _ext
from .cache_base import CompressedCache, integer
from .cache_config import CacheConfig
from .codecs.base import Codec
from .coded_body import CodedSpan, centre_of, encode_span, store_span
from .compressed_array import CompressedArray

if TYPE_CHECKING:
    from .batch_cache import BatchCompressedKVCache

__all__ = ["CacheConfig", "CompressedArray", "CompressedKVCache"]


class CompressedKVCache(CompressedCache):
    """The compressed counterpart of ``mlx_lm.models.cache.KVCache`` for one layer.

    Args:
        key_codec, value_codec: How the body's keys and values are coded.
        config: Which tokens stay uncompressed.

    Raises:
        ValueError: A codec is wider than attention can read.
        RuntimeError: ``use_metal_kernels`` is True where there are none.
    """

    def __init__(self, key_codec: Codec, value_codec: Codec, config: CacheConfig | None = None):
        super().__init__(key_codec, value_codec, config)
        self.offset = 0
        self._coded = 0
        self._tail_start = self.config.sink_tokens

    # ---- growing ----

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[CompressedArray, CompressedArray]:
        """Append tokens; returns what attention reads.

        Args:
            keys: ``[B, Hkv, L, D]``, after RoPE.
            values: ``[B, Hkv, L, Dv]``.

        Raises:
            ValueError: Arrays that do not fit the codecs or the tokens held; nothing is appended.
        """
        appended = self._append_only(keys, values)
        if appended is not None:
            return appended
        self._check(keys, values)
        config, queries = self.config, keys.shape[2]
        total = self.offset + queries
        tails = self._append(keys, values)
        due = config.due(total)
        dense = (config.prefill == "dense" and queries > 1) or self.offset < config.start
        coded, start = self._coded, self._tail_start
        if due > self._coded:
            self._encode(tails, due)
        self.offset = total
        self._retire(tails)
        # a chunk that reads all of itself uncompressed sees only what was coded before it
        return self._handles(tails, coded if dense else self._coded, start)

    def _append_only(
        self, keys: mx.array, values: mx.array
    ) -> tuple[CompressedArray, CompressedArray] | None:
        """What :meth:`update_and_fetch` does where nothing is due and there is room, and None, with
        nothing done, elsewhere. Most tokens that are generated take this way: it is short."""
        tails, config = self._tails, self.config
        if tails is None or config.use_metal_kernels is not None or not _ext.has_kernels():
            return None
        try:
            total = self.offset + keys.shape[2]
            if config.due(total) > self._coded:
                return None
            k, v = _ext.append_tokens(*tails, keys, values, self._slot(self.offset))
        except (AttributeError, IndexError, TypeError, ValueError):
            return None  # no room, or arguments that the other way refuses
        self._tails = k, v
        self.offset = total
        return self._handles(self._tails, self._coded, self._tail_start)

    def _slot(self, position: int) -> int:
        return self.config.slot(position, self._tail_start)

    def _append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The tails with the new tokens in their slots; in place while there is room."""
        at, n = self._slot(self.offset), keys.shape[2]
        if self._tails is None and at == 0 and n > self._tail_capacity:
            return mx.array(keys), mx.array(values)
        tails = self._tails or self._zero_tails(keys, values, self._tail_capacity)
        if at + n > tails[0].shape[2]:
            k, v = (
                mx.concatenate([t[:, :, :at], x], axis=2)
                for t, x in zip(tails, (keys, values), strict=True)
            )
            return k, v
        k, v = _ext.append_tokens(*tails, keys, values, at)
        tails = k, v
        if self._tails is not None:
            self._tails = tails
        return tails

    def _encode(self, tails: tuple[mx.array, mx.array], due: int) -> None:
        """Code tokens up to the body's ``due``-th, all rows and blocks in one go."""
        bodies = self._bodies or ({}, {})
        block, batch = self.config.block, tails[0].shape[0]
        # all that can fail comes first
        coded = [self._codes(*x, due) for x in zip(self._codecs, bodies, tails, strict=True)]
        self._bodies = None
        for body, spans in zip(bodies, coded, strict=True):
            for span in spans:
                store_span(body, span, block=block, batch=batch)
        self._bodies = bodies
        self._coded = due

    def _codes(
        self, codec: Codec, body: dict[str, mx.array], tail: mx.array, due: int
    ) -> list[CodedSpan]:
        sinks = self.config.sink_tokens
        return encode_span(
            codec,
            lambda a, b: tail[:, :, self._slot(sinks + a) : self._slot(sinks + b)],
            self._coded,
            due,
            block=self.config.block,
            use_metal_kernels=self.config.use_metal_kernels,
            frozen=lambda at: centre_of(body, at),
        )

    def _retire(self, tails: tuple[mx.array, mx.array]) -> None:
        """Keep the sinks and what is not coded, plus one block of grace."""
        config = self.config
        start = max(self._tail_start, config.sink_tokens + self._coded - config.block)
        used, begin = self._slot(self.offset), self._slot(start)
        fits = tails is self._tails or tails[0].shape[2] == self._tail_room(used)
        if start == self._tail_start and fits:
            self._tails = tails
            return
        kept = []
        for t in tails:
            sinks = min(config.sink_tokens, used)
            recent = t[:, :, max(begin, sinks) : used]
            last = sinks + recent.shape[2]
            moved = mx.zeros((*t.shape[:2], self._tail_room(last), t.shape[3]), t.dtype)
            moved[:, :, :sinks] = t[:, :, :sinks]
            moved[:, :, sinks:last] = recent
            kept.append(moved)
        self._tails = (kept[0], kept[1])
        self._tail_start = start

    def _handles(
        self, tails: tuple[mx.array, mx.array], coded: int, start: int
    ) -> tuple[CompressedArray, CompressedArray]:
        """What attention reads: so many tokens as codes, the rest from tails beginning there."""
        return self._handles_of(tails, (self.offset, coded, start), self.offset)

    def keys_and_values(self) -> tuple[CompressedArray, CompressedArray]:
        """What attention reads, without appending; for layers that share another layer's cache."""
        if self._tails is None:
            raise RuntimeError(f"[{self._op}] keys_and_values must follow tokens, but got none.")
        return self._handles(self._tails, self._coded, self._tail_start)

    # ---- shrinking ----

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens (fewer where there are fewer; none if negative).

        Up to one block below the highest position ever held, the cache then equals one that never
        saw them. Beyond, kept tokens decode bitwise as before.

        Returns:
            The number of tokens forgotten.

        Raises:
            TypeError: ``n`` is no integer.
        """
        n = max(0, min(integer(self._op, "n", n), self.offset))
        self.offset -= n
        self._coded, self._tail_start = self.config.trimmed(
            self.offset, self._coded, self._tail_start
        )
        return n

    # ---- the rest of the contract ----

    def size(self) -> int:
        return self.offset

    @property
    def coded_tokens(self) -> int:
        """Tokens held as codes."""
        return self._coded

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> str | mx.array | None:
        """The mask of N new tokens over all, as ``mlx_lm`` caches give it."""
        if window_size is None and not return_array:
            return None if N == 1 else "causal"
        rows = mx.arange(self.offset, self.offset + N)[:, None]
        columns = mx.arange(self.offset + N)[None]
        mask = rows >= columns
        return mask if window_size is None else mask & (rows < columns + window_size)

    @classmethod
    def merge(cls, caches: Sequence[CompressedKVCache]) -> BatchCompressedKVCache:
        """One cache with a row for each of these; see :meth:`BatchCompressedKVCache.merge`."""
        from .batch_cache import BatchCompressedKVCache

        return BatchCompressedKVCache.merge(caches)

    def _rows(self) -> list[tuple[int, int, int]]:
        return [self._counts()]

    def _counts(self) -> tuple[int, int, int]:
        return self.offset, self._coded, self._tail_start

    def _set_counts(self, counts: tuple[Any, ...]) -> None:
        offset, coded, start = counts
        self.offset, self._coded, self._tail_start = int(offset), int(coded), int(start)
