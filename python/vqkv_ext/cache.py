"""The compressed KV cache: fp16 sink tokens, a coded body, fp16 recent tokens.

Logical positions of a row::

    [ sink tokens | body: codes, whole blocks | recent tokens ]

A query that sees N tokens reads ``coded_tokens(N)`` tokens after the sinks as codes, and the rest
uncompressed, whatever chunk it arrives in; so the same tokens give the same codes and the same
split for any chunking of the prompt. The uncompressed copy of the last coded block stays one block
longer (grace), so trimming up to one block is exact.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass
from typing import Any, Literal

import mlx.core as mx

from . import ops
from .codecs.base import Codec, CodedArrays
from .compressed_array import CompressedArray
from .packed import MAX_CHANNELS, Layout, PackedKV, coded_tokens

_GROWTH = 4  # blocks by which the body grows
_PER_BLOCK = ("centres", "centre_scales")  # one entry per block; the other arrays: per token
_ARRAYS = ("codes", "scales", *_PER_BLOCK, "pair_codes", "pair_scales")
_STEP = 8  # query tokens that fit the tail without moving it


@dataclass(frozen=True)
class CacheConfig:
    """Which tokens stay uncompressed.

    Attributes:
        sink_tokens: First tokens, kept for good (attention sinks, arXiv 2309.17453).
        window: Each query reads at least this many last tokens uncompressed.
        block: Tokens are coded in blocks of this many.
        use_metal_kernels: See :func:`vqkv_ext.ops.native`.
        prefill: What a chunk of several tokens reads of its own tokens. ``"coded"``: what each of
            them would read if they came one by one, so that no chunking changes a result.
            ``"dense"``: all of them uncompressed, which is nearer to an uncompressed cache.
    """

    sink_tokens: int = 4
    window: int = 64
    block: int = 64
    use_metal_kernels: bool | None = None
    prefill: Literal["coded", "dense"] = "coded"

    def __post_init__(self) -> None:
        if self.prefill not in ("coded", "dense"):
            raise ValueError(
                f"[CacheConfig] prefill must be 'coded' or 'dense', but got {self.prefill!r}."
            )
        for name, least in (("sink_tokens", 0), ("window", 0), ("block", 1)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < least:
                raise ValueError(
                    f"[CacheConfig] {name} must be an integer >= {least}, but got {value!r}."
                )


class CompressedKVCache:
    """The compressed counterpart of ``mlx_lm.models.cache.KVCache`` for one layer.

    Args:
        key_codec, value_codec: How the body's keys and values are coded.
        config: Which tokens stay uncompressed.

    Raises:
        ValueError: A codec is wider than attention can read.
        RuntimeError: ``use_metal_kernels`` is True where there are none.
    """

    def __init__(self, key_codec: Codec, value_codec: Codec, config: CacheConfig | None = None):
        for codec in (key_codec, value_codec):
            if codec.width > MAX_CHANNELS:
                raise ValueError(
                    f"[CompressedKVCache] head_dim must be at most {MAX_CHANNELS}, but got "
                    f"{codec.width} of {codec.name}."
                )
        self.config = config or CacheConfig()
        ops.native(self.config.use_metal_kernels, "CompressedKVCache")
        self.key_codec = key_codec
        self.value_codec = value_codec
        self.offset = 0
        self._coded = 0
        self._tail_start = self.config.sink_tokens
        self._tails: tuple[mx.array, mx.array] | None = None
        self._bodies: tuple[CodedArrays, CodedArrays] | None = None

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
        self._check(keys, values)
        config, queries = self.config, keys.shape[2]
        total = self.offset + queries
        tails = self._append(keys, values)
        due = coded_tokens(total, config.sink_tokens, config.window, config.block)
        dense = config.prefill == "dense" and queries > 1
        if dense:
            handles = self._handles(tails, total)
        if due > self._coded:
            self._encode(tails, due)
        if not dense:
            handles = self._handles(tails, total)
        self.offset = total
        self._retire(tails)
        return handles

    def _check(self, keys: mx.array, values: mx.array) -> None:
        op = "CompressedKVCache"
        if keys.ndim != 4 or values.ndim != 4 or keys.shape[:3] != values.shape[:3]:
            raise ValueError(
                f"[{op}] keys and values must be [B, H, L, D] and [B, H, L, Dv], but got "
                f"{keys.shape} and {values.shape}."
            )
        if keys.size == 0 or values.size == 0:
            raise ValueError(
                f"[{op}] keys must have at least one row, head and token, but got {keys.shape}."
            )
        for what, x, codec in (
            ("keys", keys, self.key_codec),
            ("values", values, self.value_codec),
        ):
            if x.shape[-1] != codec.width:
                raise ValueError(
                    f"[{op}] {what} must have the codec's head_dim {codec.width}, but got "
                    f"{x.shape[-1]}."
                )
            if codec.heads not in (None, x.shape[1]):
                raise ValueError(
                    f"[{op}] {what} must have the codec's {codec.heads} heads, but got "
                    f"{x.shape[1]}."
                )
        if keys.dtype != values.dtype or keys.dtype not in (mx.float32, mx.float16, mx.bfloat16):
            raise ValueError(
                f"[{op}] keys and values must share a floating dtype, but got {keys.dtype} and "
                f"{values.dtype}."
            )
        if self._tails is not None:
            held = self._tails[0]
            if held.shape[:2] != keys.shape[:2] or held.dtype != keys.dtype:
                raise ValueError(
                    f"[{op}] keys must have batch, heads and dtype {held.shape[:2]} {held.dtype} "
                    f"like those held, but got {keys.shape[:2]} {keys.dtype}."
                )

    def _slot(self, position: int) -> int:
        sinks = self.config.sink_tokens
        return position if position < sinks else position - self._tail_start + sinks

    @property
    def _tail_capacity(self) -> int:
        c = self.config
        return c.sink_tokens + c.window + 2 * c.block + _STEP

    def _append(self, keys: mx.array, values: mx.array) -> tuple[mx.array, mx.array]:
        """The tails with the new tokens in their slots; in place while there is room."""
        at, n = self._slot(self.offset), keys.shape[2]
        if self._tails is None and at == 0 and n > self._tail_capacity:
            return mx.array(keys), mx.array(values)
        if self._tails is None:
            self._tails = tuple(
                mx.zeros((*x.shape[:2], self._tail_capacity, x.shape[3]), x.dtype)
                for x in (keys, values)
            )
        tails = self._tails
        if at + n > tails[0].shape[2]:
            return tuple(
                mx.concatenate([t[:, :, :at], x], axis=2)
                for t, x in zip(tails, (keys, values), strict=True)
            )
        # drop the attribute first: an array with one owner is updated in place
        self._tails = None
        k, v = tails
        del tails
        k[:, :, at : at + n] = keys
        v[:, :, at : at + n] = values
        self._tails = (k, v)
        return self._tails

    def _encode(self, tails: tuple[mx.array, mx.array], due: int) -> None:
        """Code tokens up to the body's ``due``-th, all rows and blocks in one go."""
        bodies = self._bodies or ({}, {})
        codecs = (self.key_codec, self.value_codec)
        # all that can fail comes first
        coded = [self._codes(*x, due) for x in zip(codecs, bodies, tails, strict=True)]
        self._bodies = None
        for body, parts in zip(bodies, coded, strict=True):
            for first, last, arrays in parts:
                self._store(body, arrays, first, last)
        self._bodies = bodies
        self._coded = due

    def _codes(
        self, codec: Codec, body: CodedArrays, tail: mx.array, due: int
    ) -> list[tuple[int, int, CodedArrays]]:
        """Codes of the body's tokens up to ``due``, as (first, last, arrays)."""
        first, block, sinks = self._coded, self.config.block, self.config.sink_tokens
        parts: list[tuple[int, int, CodedArrays | None]] = []
        if codec.centred and first % block:  # a trim left this block partial
            last, at = min(due, first - first % block + block), first // block
            parts.append((first, last, {n: body[n][:, :, at : at + 1] for n in _PER_BLOCK}))
            first = last
        if first < due:
            parts.append((first, due, None))
        coded = []
        for first, last, frozen in parts:
            tokens = tail[:, :, self._slot(sinks + first) : self._slot(sinks + last)]
            arrays = codec.encode(
                tokens,
                block=block,
                frozen=frozen,
                use_metal_kernels=self.config.use_metal_kernels,
            )
            coded.append((first, last, arrays))
        return coded

    def _store(self, body: CodedArrays, coded: CodedArrays, first: int, last: int) -> None:
        """Put codes of body tokens [first, last) into the arrays of ``body``, in place."""
        block = self.config.block
        step = _GROWTH * block
        capacity = (last + step - 1) // step * step
        for name, x in coded.items():
            each = block if name in _PER_BLOCK else 1
            held = body.pop(name, None)
            room = held.shape[2] if held is not None else 0
            if room * each < last:
                more = mx.zeros((*x.shape[:2], capacity // each - room, *x.shape[3:]), x.dtype)
                held = more if held is None else mx.concatenate([held, more], axis=2)
            held[:, :, first // each : -(-last // each)] = x
            body[name] = held

    def _retire(self, tails: tuple[mx.array, mx.array]) -> None:
        """Keep the sinks and what is not coded, plus one block of grace."""
        config = self.config
        start = max(self._tail_start, config.sink_tokens + self._coded - config.block)
        if start == self._tail_start and tails is self._tails:
            return
        used, begin = self._slot(self.offset), self._slot(start)
        room = self._tail_capacity
        kept = []
        for t in tails:
            sinks = min(config.sink_tokens, used)
            recent = t[:, :, max(begin, sinks) : used]
            free = max(0, room - sinks - recent.shape[2])
            zeros = mx.zeros((*t.shape[:2], free, t.shape[3]), t.dtype)
            kept.append(mx.concatenate([t[:, :, :sinks], recent, zeros], axis=2))
        self._tails = (kept[0], kept[1])
        self._tail_start = start

    def _handles(
        self, tails: tuple[mx.array, mx.array], tokens: int
    ) -> tuple[CompressedArray, CompressedArray]:
        """What attention reads of ``tokens`` tokens."""
        c = self.config
        row = [tokens, self._coded, self._tail_start]
        rows = mx.array([row] * tails[0].shape[0], dtype=mx.int32)
        layout = Layout(rows, c.sink_tokens, c.window, c.block)
        handles = []
        for i, (codec, tail) in enumerate(
            zip((self.key_codec, self.value_codec), tails, strict=True)
        ):
            if self._bodies is not None:
                arrays = self._bodies[i]
            else:  # nothing coded yet
                arrays = codec.empty(*tail.shape[:2])
            # appending updates the cache's own array objects in place: hand out others
            arrays = {n: a[...] for n, a in arrays.items()}
            packed = PackedKV(codec.body(arrays), tail[...], layout)
            handles.append(CompressedArray(packed, tokens, c.use_metal_kernels))
        return handles[0], handles[1]

    def keys_and_values(self) -> tuple[CompressedArray, CompressedArray]:
        """What attention reads, without appending; for layers that share another layer's cache."""
        if self._tails is None:
            raise RuntimeError("[CompressedKVCache] keys_and_values needs tokens, but got none.")
        return self._handles(self._tails, self.offset)

    # ---- shrinking ----

    def is_trimmable(self) -> bool:
        return True

    def trim(self, n: int) -> int:
        """Forget the last ``n`` tokens (fewer where there are fewer; none if negative).

        Up to one block below the highest position ever held, the cache then equals one that never
        saw them. Beyond, kept tokens decode bitwise as before.

        Returns:
            The number of tokens forgotten.

        Raises:
            TypeError: ``n`` is no integer.
        """
        n = max(0, min(operator.index(n), self.offset))
        c = self.config
        self.offset -= n
        sinks = c.sink_tokens
        self._tail_start = max(sinks, min(self._tail_start, self.offset))
        exact = coded_tokens(self.offset, sinks, c.window, c.block)
        self._coded = min(self._coded, max(exact, self._tail_start - sinks))
        return n

    # ---- the rest of the contract ----

    def size(self) -> int:
        return self.offset

    def empty(self) -> bool:
        return self._tails is None

    @property
    def coded_tokens(self) -> int:
        """Tokens held as codes."""
        return self._coded

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held, unused capacity included; codecs are shared and not counted."""
        return sum(a.nbytes for a in self._arrays())

    @property
    def bytes_per_token(self) -> float:
        """Bytes one more coded token takes, over all heads of one batch row."""
        heads = self._tails[0].shape[1] if self._tails is not None else 1
        block = self.config.block
        codecs = (self.key_codec, self.value_codec)
        return heads * sum(c.bytes_per_token_in(block) for c in codecs)

    def _arrays(self) -> list[mx.array]:
        held = list(self._tails or ())
        for body in self._bodies or ():
            held += body.values()
        return held

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

    @property
    def fingerprint(self) -> str:
        """Names the codecs a state belongs to."""
        return f"{self.key_codec.fingerprint}/{self.value_codec.fingerprint}"

    @property
    def state(self) -> tuple[Any, ...]:
        """Arrays, plain scalars and the fingerprint; see :meth:`from_state`."""
        c = self.config
        bodies = self._bodies or ({}, {})
        return (
            tuple(_own(t) for t in self._tails or (None, None)),
            tuple(tuple(_own(b.get(name)) for name in _ARRAYS) for b in bodies),
            (self.offset, self._coded, self._tail_start),
            (c.sink_tokens, c.window, c.block, c.prefill),
            self.fingerprint,
        )

    @state.setter
    def state(self, v: tuple[Any, ...]) -> None:
        tails, bodies, counts, spans, fingerprint = v
        if fingerprint != self.fingerprint:
            raise ValueError(
                f"[CompressedKVCache] the state must be of codec {self.fingerprint!r}, but got one "
                f"of {fingerprint!r}."
            )
        present = [
            {n: _own(a) for n, a in zip(_ARRAYS, b, strict=True) if _given(a)} for b in bodies
        ]
        sinks, window, block = (int(x) for x in spans[:3])
        self.config = CacheConfig(sinks, window, block, self.config.use_metal_kernels, spans[3])
        self._tails = (_own(tails[0]), _own(tails[1])) if _given(tails[0]) else None
        self._bodies = (present[0], present[1]) if present[0] else None
        self.offset, self._coded, self._tail_start = (int(x) for x in counts)

    @classmethod
    def from_state(
        cls,
        state: tuple[Any, ...],
        key_codec: Codec,
        value_codec: Codec,
        *,
        use_metal_kernels: bool | None = None,
    ) -> CompressedKVCache:
        """A cache with the contents of ``state``.

        Raises:
            ValueError: The state was made with other codecs.
        """
        cache = cls(key_codec, value_codec, CacheConfig(use_metal_kernels=use_metal_kernels))
        cache.state = state
        return cache

    def __deepcopy__(self, memo: dict) -> CompressedKVCache:
        new = type(self)(self.key_codec, self.value_codec, self.config)
        new.offset, new._coded, new._tail_start = self.offset, self._coded, self._tail_start
        if self._tails is not None:
            new._tails = tuple(_own(t) for t in self._tails)
        if self._bodies is not None:
            new._bodies = tuple({n: _own(a) for n, a in b.items()} for b in self._bodies)
        return new


def _own(a: mx.array | None) -> mx.array | None:
    """The same contents as an object that no one else updates in place, without a copy."""
    return None if a is None else a[...]


def _given(a: mx.array | None) -> bool:
    return a is not None and a.size > 0
