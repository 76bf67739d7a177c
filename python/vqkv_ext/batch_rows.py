"""Rows of a batch whose lengths differ: what must agree, and what is done to their arrays."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import mlx.core as mx

from .cache import CompressedKVCache
from .cache_base import CompressedCache, integer
from .codecs.base import CodedArrays
from .coded_body import body_capacity, fit, resized

Pair = tuple[mx.array, mx.array]
Bodies = tuple[CodedArrays, CodedArrays]

_OP = "BatchCompressedKVCache"


def numbers(name: str, given: Any, rows: int | None = None) -> list[int]:
    """One number for each row; of as many rows as are given without ``rows``.

    Raises:
        ValueError: Other than that.
    """
    try:
        held = given.tolist() if isinstance(given, mx.array) else given
        found = [integer(_OP, name, n) for n in held]
    except TypeError:
        found = []
    if not found or min(found) < 0 or rows not in (None, len(found)):
        each = "each row" if rows is None else f"each of the {rows} rows"
        raise ValueError(f"[{_OP}] {name} must be one number >= 0 for {each}, but got {given!r}.")
    return found


def row_index(name: str, index: Any, rows: int) -> int:
    """The index of a row; negative ones count from the end.

    Raises:
        TypeError: No integer.
        IndexError: There is no such row.
    """
    i = integer(_OP, name, index)
    if not -rows <= i < rows:
        raise IndexError(f"[{_OP}] {name} must be among {rows} rows, but got {i}.")
    return i % rows


def check_alike(first: CompressedCache, other: Any) -> None:
    """Refuse a cache that cannot be in one batch with ``first``.

    Raises:
        ValueError: Another kind of cache, more than one row, or other codecs, windows, heads or
            dtype.
    """
    for cache in (first, other):
        if not isinstance(cache, CompressedCache):
            raise ValueError(
                f"[{_OP}] all caches of a batch must be compressed, but got {type(cache).__name__}."
            )
        if isinstance(cache, CompressedKVCache) and cache._tails is not None:
            batch = cache._tails[0].shape[0]
            if batch != 1:
                raise ValueError(
                    f"[{_OP}] caches to merge must have one row each, but got {batch}."
                )
    if other.fingerprint != first.fingerprint:
        raise ValueError(
            f"[{_OP}] all caches of a batch must be of codec {first.fingerprint!r}, but got "
            f"{other.fingerprint!r}."
        )
    if other.config != first.config:
        raise ValueError(
            f"[{_OP}] all caches of a batch must have {first.config}, but got {other.config}."
        )
    if first._tails is not None and other._tails is not None:
        a, b = first._tails[0], other._tails[0]
        if (a.shape[1], a.dtype) != (b.shape[1], b.dtype):
            raise ValueError(
                f"[{_OP}] all caches of a batch must have {a.shape[1]} heads of {a.dtype}, but got "
                f"{b.shape[1]} of {b.dtype}."
            )


def write_tails(
    tails: Pair, new: Pair, slots: Sequence[int], skip: Sequence[int], take: Sequence[int]
) -> None:
    """Of each row's new tokens leave out ``skip`` and write ``take`` from a slot on, in place.

    Where there is one token, rows that take none still write it: to a slot they have not come to.
    """
    uniform = all(len(set(x)) == 1 for x in (slots, skip, take))
    for tail, x in zip(tails, new, strict=True):
        if uniform and take[0]:
            at, a, n = slots[0], skip[0], take[0]
            tail[:, :, at : at + n] = x[:, :, a : a + n]
        elif x.shape[2] == 1:
            tail[mx.arange(len(slots)), :, mx.array(slots)] = x[:, :, 0]
        else:
            for b, (at, a, n) in enumerate(zip(slots, skip, take, strict=True)):
                if n:
                    tail[b : b + 1, :, at : at + n] = x[b : b + 1, :, a : a + n]


def shift_tails(tails: Pair, sinks: int, moved: Sequence[int], room: int) -> Pair:
    """Tails with ``room`` slots, without the first ``moved`` tokens of each row after the sinks."""
    slots = mx.arange(room)
    shift = mx.where(slots < sinks, 0, mx.array(moved)[:, None])
    at = mx.minimum(slots + shift, tails[0].shape[2] - 1)[:, None, :, None]
    k, v = (mx.take_along_axis(t, at, axis=2) for t in tails)
    return k, v


def join_tails(held: Sequence[Pair | None], rows: Sequence[int]) -> Pair | None:
    """Tails of several caches with so many rows each, one after the other."""
    like = next((t for t in held if t is not None), None)
    if like is None:
        return None
    room = max(t[0].shape[2] for t in held if t is not None)
    sides = []
    for i, x in enumerate(like):
        each = [
            fit(t[i] if t is not None else _blank(x, n), room)
            for t, n in zip(held, rows, strict=True)
        ]
        sides.append(mx.concatenate(each))
    return sides[0], sides[1]


def join_bodies(
    held: Sequence[Bodies | None], rows: Sequence[int], coded: int, block: int
) -> Bodies | None:
    """Bodies likewise, with room for ``coded`` tokens."""
    like = next((b for b in held if b is not None), None)
    if like is None or coded == 0:
        return None
    room = body_capacity(coded, block)
    sides: list[CodedArrays] = []
    for i, names in enumerate(like):
        each = [
            b[i] if b is not None else {n: _blank(a, k) for n, a in names.items()}
            for b, k in zip(held, rows, strict=True)
        ]
        each = [resized(b, room, block) for b in each]
        sides.append({n: mx.concatenate([b[n] for b in each]) for n in names})
    return sides[0], sides[1]


def take_rows(tails: Pair | None, rows: mx.array) -> Pair | None:
    """These rows of tails."""
    return None if tails is None else (tails[0][rows], tails[1][rows])


def take_coded(bodies: Bodies | None, rows: mx.array, coded: int, block: int) -> Bodies | None:
    """These rows of bodies, with room for ``coded`` tokens."""
    if bodies is None or coded == 0:
        return None
    room = body_capacity(coded, block)
    keys, values = (resized({n: a[rows] for n, a in b.items()}, room, block) for b in bodies)
    return keys, values


def _blank(like: mx.array, rows: int) -> mx.array:
    return mx.zeros((rows, like.shape[1], 0, *like.shape[3:]), like.dtype)
