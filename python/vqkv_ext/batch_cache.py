"""The compressed cache of a batch whose rows have different lengths.

Padding is never held: a row keeps its own tokens at its own logical positions, so its codes are
those of a run alone. Towards mlx_lm the batch looks like its BatchKVCache, with all rows ending at
the same column of a width that includes the padding at the left.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .batch_rows import (
    Pair,
    check_alike,
    join_bodies,
    join_tails,
    numbers,
    row_index,
    shift_tails,
    take_coded,
    take_rows,
    write_tails,
)
from .cache import CompressedKVCache
from .cache_base import CompressedCache, integer, own
from .cache_config import CacheConfig
from .codecs.base import Codec, CodedArrays
from .coded_body import centre_of, encode_span, fit, store_span
from .compressed_array import CompressedArray


class BatchCompressedKVCache(CompressedCache):
    """The compressed counterpart of ``mlx_lm.models.cache.BatchKVCache`` for one layer.

    Args:
        key_codec, value_codec: How the body's keys and values are coded.
        config: Which tokens stay uncompressed.
        left_padding: One entry per row: so many of the first tokens appended are padding.

    Raises:
        ValueError: A codec is wider than attention can read, or negative padding.
        RuntimeError: ``use_metal_kernels`` is True where there are none.
    """

    def __init__(
        self,
        key_codec: Codec,
        value_codec: Codec,
        config: CacheConfig | None = None,
        left_padding: Sequence[int] = (0,),
    ):
        super().__init__(key_codec, value_codec, config)
        self._width = 0  # columns so far, padding included
        self._left = numbers("left_padding", left_padding)
        self._offsets = [-n for n in self._left]
        self._coded = [0] * len(self._left)
        self._starts = [self.config.sink_tokens] * len(self._left)
        self._right: list[int] | None = None  # padding that `finalize` drops
        self._remaining: list[int] | None = None  # tokens to come before that padding

    # ---- growing ----

    def prepare(
        self,
        *,
        left_padding: Sequence[int] | None = None,
        lengths: Sequence[int] | None = None,
        right_padding: Sequence[int] | None = None,
    ) -> None:
        """Say which of the tokens to come are padding; each argument has one entry per row.

        Args:
            left_padding: So many of the first, beside those already said; only while empty.
            lengths: So many are not padding at the right; needed with ``right_padding``.
            right_padding: So many of the last; :meth:`finalize` follows when they have come.

        Raises:
            ValueError: Padding at the left of a cache with tokens, or at the right without lengths;
                or other than a number >= 0 for each row.
        """
        rows = len(self._left)
        left = None if left_padding is None else numbers("left_padding", left_padding, rows)
        right = None if right_padding is None else numbers("right_padding", right_padding, rows)
        if left is not None and not self.empty():
            raise ValueError(
                f"[{self._op}] left_padding must come before any token, but got it after "
                f"{self._width} columns."
            )
        if right is not None and any(right):
            if lengths is None:
                raise ValueError(
                    f"[{self._op}] right_padding must come with a length for each of the "
                    f"{rows} rows, but got {lengths!r}."
                )
            self._right, self._remaining = right, numbers("lengths", lengths, rows)
        if left is not None:
            self._left = [a + b for a, b in zip(self._left, left, strict=True)]
            self._offsets = [a - b for a, b in zip(self._offsets, left, strict=True)]

    def finalize(self) -> None:
        """The padding that :meth:`prepare` announced at the right counts as padding at the left
        from now on."""
        if self._right is not None:
            self._left = [a + b for a, b in zip(self._left, self._right, strict=True)]
            self._right = self._remaining = None

    def update_and_fetch(
        self, keys: mx.array, values: mx.array
    ) -> tuple[CompressedArray, CompressedArray]:
        """Append tokens; returns what attention reads.

        Args:
            keys: ``[B, Hkv, L, D]``, after RoPE; padding among them is dropped.
            values: ``[B, Hkv, L, Dv]``.

        Raises:
            ValueError: Arrays that do not fit the codecs or the rows held; nothing is appended.
        """
        self._check(keys, values)
        if keys.shape[0] != len(self._left):
            raise ValueError(
                f"[{self._op}] keys must have a row for each of the {len(self._left)} sequences, "
                f"but got {keys.shape}."
            )
        config, queries = self.config, keys.shape[2]
        # per row: tokens to skip, tokens to take
        skip = [max(0, min(queries, -n)) for n in self._offsets]
        take = [queries - n for n in skip]
        if self._remaining is not None:
            take = [min(a, b) for a, b in zip(take, self._remaining, strict=True)]
        before = self._offsets
        after = [sum(x) for x in zip(before, skip, take, strict=True)]
        tails = self._append(keys, values, skip, take)
        # a chunk that reads all of itself uncompressed sees only what was coded before it
        dense = config.prefill == "dense" and queries > 1
        old = self._coded
        self._encode(tails, [config.due(max(0, n)) for n in after])
        reads = [
            a if dense or max(0, n) < config.start else b
            for a, b, n in zip(old, self._coded, before, strict=True)
        ]
        self._width += queries
        self._offsets = after
        if self._remaining is not None:
            self._remaining = [a - b for a, b in zip(self._remaining, take, strict=True)]
        starts = self._starts
        self._retire(tails)
        return self._handles(tails, reads, starts)

    def _slot(self, row: int, position: int) -> int:
        return self.config.slot(position, self._starts[row])

    def _append(self, keys: mx.array, values: mx.array, skip: list[int], take: list[int]) -> Pair:
        """The tails with the new tokens in their slots; in place while there is room."""
        slots = [self._slot(b, max(0, n)) for b, n in enumerate(self._offsets)]
        need = max(at + max(n, keys.shape[2] == 1) for at, n in zip(slots, take, strict=True))
        tails = self._tails or self._zero_tails(keys, values, max(need, self._tail_capacity))
        if need > tails[0].shape[2]:
            tails = (fit(tails[0], need), fit(tails[1], need))
        elif self._tails is not None:
            # those handed out keep what they are; with no other owner the update is in place
            tails = self._tails = (own(tails[0]), own(tails[1]))
        write_tails(tails, (keys, values), slots, skip, take)
        return tails

    def _encode(self, tails: Pair, due: list[int]) -> None:
        """Code the tokens of each row up to its ``due``-th; rows at the same place in one go."""
        spans = [(c, d) if d > c else None for c, d in zip(self._coded, due, strict=True)]
        if not any(spans):
            return
        alike = len(set(spans)) == 1 and len(set(self._starts)) == 1
        rows = [None] if alike else [b for b, span in enumerate(spans) if span]
        block, bodies = self.config.block, self._bodies or ({}, {})
        # all that can fail comes first
        coded = [
            [(row, self._codes(*x, row, due[row or 0])) for row in rows]
            for x in zip(self._codecs, bodies, tails, strict=True)
        ]
        self._bodies = None
        for body, parts in zip(bodies, coded, strict=True):
            for row, found in parts:
                for span in found:
                    store_span(body, span, block=block, batch=len(due), row=row)
        self._bodies = bodies
        self._coded = [max(c, d) for c, d in zip(self._coded, due, strict=True)]

    def _codes(
        self, codec: Codec, body: CodedArrays, tail: mx.array, row: int | None, due: int
    ) -> list[tuple[int, int, CodedArrays]]:
        """Codes of one row, or of all where they are alike."""
        any_row, sinks = row or 0, self.config.sink_tokens
        rows = slice(None) if row is None else slice(row, row + 1)

        def tokens(a: int, b: int) -> mx.array:
            return tail[rows, :, self._slot(any_row, sinks + a) : self._slot(any_row, sinks + b)]

        return encode_span(
            codec,
            tokens,
            self._coded[any_row],
            due,
            block=self.config.block,
            use_metal_kernels=self.config.use_metal_kernels,
            frozen=lambda at: centre_of(body, at, row),
        )

    def _retire(self, tails: Pair) -> None:
        """Keep of each row the sinks and what is not coded, plus one block of grace."""
        c = self.config
        starts = [
            max(start, c.sink_tokens + coded - c.block)
            for start, coded in zip(self._starts, self._coded, strict=True)
        ]
        moved = [a - b for a, b in zip(starts, self._starts, strict=True)]
        fresh = self._tails is None
        if not any(moved) and (fresh or tails is self._tails):
            self._tails = tails
            return
        self._starts = starts
        kept = max(self._slot(b, max(0, n)) for b, n in enumerate(self._offsets))
        self._tails = shift_tails(tails, c.sink_tokens, moved, self._tail_room(kept))

    def _handles(
        self, tails: Pair, coded: list[int], starts: list[int]
    ) -> tuple[CompressedArray, CompressedArray]:
        """What attention reads; padding at the right counts as tokens, which only it sees."""
        rows = [
            [self._width - left, *row] for left, *row in zip(self._left, coded, starts, strict=True)
        ]
        left = list(self._left) if any(self._left) else None
        alike = all(row == rows[0] for row in rows)
        return self._handles_of(tails, tuple(rows[0]) if alike else rows, self._width, left)

    def keys_and_values(self) -> tuple[CompressedArray, CompressedArray]:
        """What attention reads, without appending; for layers that share another layer's cache."""
        if self._tails is None:
            raise RuntimeError(f"[{self._op}] keys_and_values must follow tokens, but got none.")
        return self._handles(self._tails, self._coded, self._starts)

    # ---- shrinking ----

    def trim(self, n: int) -> int:
        """Forget the last ``n`` columns, as :meth:`CompressedKVCache.trim` does in each row. A row
        with fewer tokens takes the next ones for padding until it is where it would have begun.

        Returns:
            The number of columns forgotten.

        Raises:
            TypeError: ``n`` is no integer.
        """
        n = max(0, min(integer(self._op, "n", n), self._width))
        self._width -= n
        self._offsets = [x - n for x in self._offsets]
        for b, offset in enumerate(self._offsets):
            self._coded[b], self._starts[b] = self.config.trimmed(
                max(0, offset), self._coded[b], self._starts[b]
            )
        return n

    # ---- rows ----

    def filter(self, batch_indices: Sequence[int] | mx.array) -> None:
        """Keep these rows, in this order.

        Raises:
            TypeError: Not integers, but a mask of rows, say.
            ValueError: No rows.
            IndexError: A row that there is not.
        """
        given = batch_indices.tolist() if isinstance(batch_indices, mx.array) else batch_indices
        keep = [row_index("batch_indices", i, len(self._left)) for i in given]
        if not keep:
            raise ValueError(f"[{self._op}] filter must keep at least one row, but got none.")
        for name in ("_left", "_offsets", "_coded", "_starts", "_right", "_remaining"):
            held = getattr(self, name)
            if held is not None:
                setattr(self, name, [held[i] for i in keep])
        spare = min(self._left)
        self._width -= spare
        self._left = [n - spare for n in self._left]
        rows = mx.array(keep)
        self._tails = take_rows(self._tails, rows)
        self._bodies = take_coded(self._bodies, rows, max(self._coded), self.config.block)

    def extend(self, other: BatchCompressedKVCache) -> None:
        """Append the rows of another cache.

        Raises:
            ValueError: Another kind of cache, other codecs or windows, or padding at the right that
                is not finalized.
        """
        if self._right is not None or getattr(other, "_right", None) is not None:
            raise ValueError(
                f"[{self._op}] extend must come after finalize, but got padding at the right."
            )
        joined = self._joined([self, other])
        self.__dict__.update(joined.__dict__)

    @classmethod
    def merge(cls, caches: Sequence[CompressedKVCache]) -> BatchCompressedKVCache:
        """One cache with a row for each of these.

        Args:
            caches: Of one row each, with equal codecs, windows, heads and dtype; some may be empty.

        Raises:
            ValueError: Caches that do not fit together.
        """
        return cls._joined(caches)

    @classmethod
    def _joined(cls, parts: Sequence[CompressedCache]) -> BatchCompressedKVCache:
        if not parts:
            raise ValueError("[BatchCompressedKVCache] caches must be one or more, but got none.")
        first = parts[0]
        for part in parts:
            check_alike(first, part)
        rows = [part._rows() for part in parts]
        counts = [len(r) for r in rows]
        new = cls(first.key_codec, first.value_codec, first.config, [0] * sum(counts))
        new._offsets, new._coded, new._starts = (list(x) for x in zip(*sum(rows, []), strict=True))
        new._width = max(part.size() for part in parts)
        new._left = [new._width - n for n in new._offsets]
        new._tails = join_tails([p._tails for p in parts], counts)
        coded = max(new._coded)
        new._bodies = join_bodies([p._bodies for p in parts], counts, coded, new.config.block)
        return new

    def extract(self, idx: int) -> CompressedKVCache:
        """A cache of its own with the contents of one row.

        Raises:
            TypeError: ``idx`` is no integer.
            IndexError: There is no such row.
        """
        idx = row_index("idx", idx, len(self._left))
        cache = CompressedKVCache(self.key_codec, self.value_codec, self.config)
        offset, coded, start = self._offsets[idx], self._coded[idx], self._starts[idx]
        if offset <= 0 or self._tails is None:
            return cache
        row = mx.array([idx])
        cache._set_counts((offset, coded, start))
        room = cache._tail_room(cache._slot(offset))
        k, v = (fit(t[row], room) for t in self._tails)
        cache._tails = (k, v)
        cache._bodies = take_coded(self._bodies, row, coded, self.config.block)
        return cache

    # ---- the rest of the contract ----

    @property
    def offset(self) -> mx.array:
        """``[B]`` int32: tokens of each row; negative while its padding is still to come."""
        return mx.array(self._offsets, dtype=mx.int32)

    @property
    def left_padding(self) -> mx.array:
        """``[B]`` int32: of each row, columns at the left that are padding."""
        return mx.array(self._left, dtype=mx.int32)

    @property
    def coded_tokens(self) -> list[int]:
        """Tokens held as codes, by row."""
        return list(self._coded)

    def size(self) -> int:
        """Columns, padding included."""
        return self._width

    def make_mask(
        self, N: int, return_array: bool = False, window_size: int | None = None
    ) -> str | mx.array | None:
        """The mask of N new tokens over all. An array, ``[B, 1, N, columns]``, counts padding among
        its columns, as that of mlx_lm's BatchKVCache does; see
        :func:`vqkv_ext.adapters.batching.logical_mask`."""
        if window_size is None and not return_array:
            return None if N == 1 else "causal"
        rows = mx.arange(self._width, self._width + N)[:, None]
        columns = mx.arange(self._width + N)[None]
        mask = (rows >= columns) & (columns >= self.left_padding[:, None, None, None])
        return mask if window_size is None else mask & (rows < columns + window_size)

    def _rows(self) -> list[tuple[int, int, int]]:
        return list(zip(self._offsets, self._coded, self._starts, strict=True))

    def _counts(self) -> tuple[Any, ...]:
        rows = (self._left, self._offsets, self._coded, self._starts)
        pending = [self._right, self._remaining] if self._right is not None else []
        return self._width, mx.array([*rows, *pending], dtype=mx.int32)

    def _set_counts(self, counts: tuple[Any, ...]) -> None:
        width, rows = counts
        left, offsets, coded, starts, *pending = rows.tolist()
        self._width = int(width)
        self._left, self._offsets, self._coded, self._starts = left, offsets, coded, starts
        self._right, self._remaining = pending or (None, None)
