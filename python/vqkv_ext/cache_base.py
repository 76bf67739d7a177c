"""What the cache of one sequence and that of a batch have in common: arrays, checks, state."""

from __future__ import annotations

import operator
from typing import Any, Self

import mlx.core as mx

from . import ops
from .cache_config import CacheConfig
from .codecs import recipe
from .codecs.base import Codec, CodedArrays
from .coded_body import ARRAYS
from .compressed_array import CompressedArray, Fetched
from .layout_rows import layout_rows
from .packed import MAX_CHANNELS
from .reader import Reader

_STEP = 8  # query tokens that fit the tail without moving it
_DENSE_GROWTH = 256  # tokens by which a tail grows while nothing is coded yet


class CompressedCache:
    """Codecs, windows, and the arrays held: a tail and a coded body for keys and for values.

    Args:
        key_codec, value_codec: How the body's keys and values are coded.
        config: Which tokens stay uncompressed.

    Raises:
        TypeError: No codecs.
        ValueError: A codec is wider than attention can read.
        RuntimeError: ``use_metal_kernels`` is True where there are none.
    """

    def __init__(self, key_codec: Codec, value_codec: Codec, config: CacheConfig | None = None):
        for codec in (key_codec, value_codec):
            if not hasattr(codec, "fingerprint"):
                raise TypeError(
                    f"[{self._op}] key_codec and value_codec must be codecs, but got "
                    f"{type(codec).__name__}."
                )
            if codec.width > MAX_CHANNELS:
                raise ValueError(
                    f"[{self._op}] head_dim must be at most {MAX_CHANNELS}, but got "
                    f"{codec.width} of {codec.name}."
                )
        self.config = config or CacheConfig()
        ops.native(self.config.use_metal_kernels, self._op)
        self.key_codec = key_codec
        self.value_codec = value_codec
        # tables left lazy could only be evaluated on this thread
        mx.eval([a for codec in self._codecs for a in codec.arrays()])
        self._tails: tuple[mx.array, mx.array] | None = None
        self._reader: Reader | None = None
        self._bodies = None

    @property
    def _bodies(self) -> tuple[CodedArrays, CodedArrays] | None:
        """Coded keys and values. Set anew for every change, and to None before one in place: a
        reader holds the arrays."""
        return self._coded_arrays

    @_bodies.setter
    def _bodies(self, bodies: tuple[CodedArrays, CodedArrays] | None) -> None:
        self._coded_arrays = bodies
        self._reader = None

    @property
    def _op(self) -> str:
        return type(self).__name__

    @property
    def _codecs(self) -> tuple[Codec, Codec]:
        return self.key_codec, self.value_codec

    def _check(self, keys: mx.array, values: mx.array) -> None:
        op = self._op
        if not isinstance(keys, mx.array) or not isinstance(values, mx.array):
            raise TypeError(
                f"[{op}] keys and values must be MLX arrays, but got {type(keys).__name__} and "
                f"{type(values).__name__}."
            )
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

    @property
    def _tail_capacity(self) -> int:
        c = self.config
        return c.sink_tokens + c.window + 2 * c.block + _STEP

    def _tail_room(self, kept: int) -> int:
        """Slots of a tail in which ``kept`` are used; more than usual only before ``start``."""
        if kept <= self._tail_capacity:
            return self._tail_capacity
        return (kept // _DENSE_GROWTH + 1) * _DENSE_GROWTH

    def _zero_tails(self, keys: mx.array, values: mx.array, room: int) -> tuple[mx.array, mx.array]:
        k, v = (mx.zeros((*x.shape[:2], room, x.shape[3]), x.dtype) for x in (keys, values))
        return k, v

    def _handles_of(
        self,
        tails: tuple[mx.array, mx.array],
        rows: list[list[int]] | tuple[int, int, int],
        tokens: int,
        left_padding: list[int] | None = None,
    ) -> tuple[CompressedArray, CompressedArray]:
        """What attention reads; ``rows`` as in :class:`vqkv_ext.packed.Layout`, or one for all."""
        if self._tails is not None and tails is not self._tails:
            # who evaluates the output has evaluated the cache too, and may go on in another thread
            k, v = mx.depends(list(tails), list(self._tails))
            tails = (k, v)
        reader = self._reader
        if reader is None:
            # nothing coded yet
            arrays = self._bodies or tuple(c.empty(*tails[0].shape[:2]) for c in self._codecs)
            reader = self._reader = Reader(self._codecs, arrays, self.config)
        counts = rows if isinstance(rows, tuple) else layout_rows(rows)
        return Fetched(reader, tails, counts, tokens, left_padding).arrays()

    # ---- the contract of mlx_lm's caches ----

    def is_trimmable(self) -> bool:
        return True

    def empty(self) -> bool:
        return self._tails is None

    @property
    def keys(self) -> mx.array | None:
        """The uncompressed keys. For mlx_lm's pipelined models, which let them depend on what a
        stage sends (``cache.keys = mx.depends(cache.keys, sent)``), so that evaluating the cache
        sends it."""
        return None if self._tails is None else self._tails[0]

    @keys.setter
    def keys(self, keys: mx.array) -> None:
        if self._tails is None:
            raise RuntimeError(f"[{self._op}] keys must be held to be set, but got none.")
        self._tails = (keys, self._tails[1])

    @property
    def values(self) -> mx.array:
        """Not offered: code that expects a stock cache is told so."""
        raise AttributeError(
            f"[{self._op}] a stock cache must not be merged or extended with a compressed one, "
            "which holds no `values`: make all caches of a batch alike."
        )

    @property
    def nbytes(self) -> int:
        """Bytes of all arrays held, unused capacity included; codecs are shared and not counted."""
        return sum(a.nbytes for a in self._arrays())

    @property
    def bytes_per_token(self) -> float:
        """Bytes one more coded token takes, over all heads of one batch row."""
        heads = self._tails[0].shape[1] if self._tails is not None else 1
        return heads * sum(c.bytes_per_token_in(self.config.block) for c in self._codecs)

    def _arrays(self) -> list[mx.array]:
        held = list(self._tails or ())
        for body in self._bodies or ():
            held += body.values()
        return held

    @property
    def fingerprint(self) -> str:
        """Names the codecs a state belongs to."""
        return "/".join(c.fingerprint for c in self._codecs)

    @property
    def windows(self) -> tuple[int, int, int, str, int]:
        """What of ``config`` belongs to a state: all but how it is computed."""
        c = self.config
        return c.sink_tokens, c.window, c.block, c.prefill, c.start

    def _counts(self) -> tuple[Any, ...]:
        """How many tokens are where: plain integers and integer arrays."""
        raise NotImplementedError

    def _set_counts(self, counts: tuple[Any, ...]) -> None:
        raise NotImplementedError

    @property
    def state(self) -> tuple[Any, ...]:
        """Arrays, counts, windows and what the codecs are; see :meth:`from_state`."""
        bodies = self._bodies or ({}, {})
        return (
            tuple(own(t) for t in self._tails or (None, None)),
            tuple(tuple(own(b.get(name)) for name in ARRAYS) for b in bodies),
            self._counts(),
            self.windows,
            tuple(recipe.describe(c) for c in self._codecs),
        )

    @state.setter
    def state(self, v: tuple[Any, ...]) -> None:
        before = dict(vars(self))
        try:
            self._take(v)
        except Exception:
            vars(self).update(before)
            raise

    def _take(self, state: tuple[Any, ...]) -> None:
        op = self._op
        if not isinstance(state, tuple | list) or len(state) != 5:
            raise ValueError(f"[{op}] the state must be that of a {op}, but got {type(state)}.")
        tails, bodies, counts, spans, recipes = state
        fingerprint = "/".join(r[0] for r in recipes)
        if fingerprint != self.fingerprint:
            raise ValueError(
                f"[{op}] the state must be of codec {self.fingerprint!r}, but got one of "
                f"{fingerprint!r}."
            )
        present = [{n: own(a) for n, a in zip(ARRAYS, b, strict=True) if _given(a)} for b in bodies]
        sinks, window, block, prefill, start = spans
        metal = self.config.use_metal_kernels
        self.config = CacheConfig(int(sinks), int(window), int(block), metal, prefill, int(start))
        self._tails = (own(tails[0]), own(tails[1])) if _given(tails[0]) else None
        self._bodies = (present[0], present[1]) if present[0] else None
        try:
            self._set_counts(counts)
        except (TypeError, ValueError, AttributeError) as e:
            raise ValueError(
                f"[{op}] the state must be that of a {op}, but got counts {counts}."
            ) from e
        if not all(self._holds(*row) for row in self._rows()):
            raise ValueError(
                f"[{op}] the state must hold the tokens it counts, but got counts {counts}."
            )

    def _rows(self) -> list[tuple[int, int, int]]:
        """Of each row: offset, coded tokens, first tail token."""
        raise NotImplementedError

    def _holds(self, offset: int, coded: int, start: int) -> bool:
        """Whether there is room in the arrays for a row with such counts."""
        sinks, held = self.config.sink_tokens, max(0, offset)
        tail = self._tails[0].shape[2] if self._tails is not None else 0
        body = min((b["codes"].shape[2] for b in self._bodies or ()), default=0)
        return (
            0 <= coded <= min(body, max(0, held - sinks))
            and sinks <= start <= sinks + coded
            and self.config.slot(held, start) <= tail
        )

    @classmethod
    def from_state(
        cls,
        state: tuple[Any, ...],
        key_codec: Codec | None = None,
        value_codec: Codec | None = None,
        *,
        use_metal_kernels: bool | None = None,
    ) -> Self:
        """A cache with the contents of ``state``.

        Args:
            state: Of another cache, or read from a file.
            key_codec, value_codec: The codecs it was made with; by default they are built from what
                the state says of them.
            use_metal_kernels: See :func:`vqkv_ext.ops.native`.

        Raises:
            ValueError: The state was made with other codecs, or says too little to build them.
        """
        recipes = state[4]
        key = recipe.build(recipes[0]) if key_codec is None else key_codec
        value = recipe.build(recipes[1]) if value_codec is None else value_codec
        cache = cls(key, value, CacheConfig(use_metal_kernels=use_metal_kernels))
        cache.state = state
        return cache

    def __deepcopy__(self, memo: dict) -> Self:
        new = type(self)(self.key_codec, self.value_codec, self.config)
        new._set_counts(self._counts())
        if self._tails is not None:
            new._tails = (own(self._tails[0]), own(self._tails[1]))
        if self._bodies is not None:
            keys, values = ({n: own(a) for n, a in b.items()} for b in self._bodies)
            new._bodies = (keys, values)
        return new


def integer(op: str, name: str, value: Any) -> int:
    """``value``, if it is an integer; a truth value is none.

    Raises:
        TypeError: It is not.
    """
    try:
        if isinstance(value, bool):
            raise TypeError
        return operator.index(value)
    except TypeError:
        raise TypeError(f"[{op}] {name} must be an integer, but got {value!r}.") from None


def own(a: mx.array | None) -> mx.array | None:
    """The same contents as an object that no one else updates in place, without a copy."""
    return None if a is None else a[...]


def _given(a: mx.array | None) -> bool:
    return a is not None and a.size > 0
